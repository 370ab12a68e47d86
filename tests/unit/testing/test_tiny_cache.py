"""ensure_tiny: one folder per set of arguments, written once however many processes ask."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sglang_k3.testing import cache, tiny
from sglang_k3.testing.cache import ensure_tiny

ROOT = Path(__file__).resolve().parents[3]

# Counts its writes and makes each slow enough for the other process to arrive while it runs.
ASK = """
import sys, time
from sglang_k3.testing import cache

write = cache.write_tiny
def slow_write(*args, **kwargs):
    print("wrote", flush=True)
    time.sleep(1.0)
    return write(*args, **kwargs)
cache.write_tiny = slow_write

print("ready", flush=True)
sys.stdin.readline()
print(cache.ensure_tiny(sys.argv[1]), flush=True)
"""


def test_two_processes_at_once_write_once(tmp_path: Path) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ASK, str(tmp_path)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=60) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], answers
    lines = [line for out, _ in answers for line in out.splitlines()]
    assert lines.count("wrote") == 1
    folders = {line for line in lines if line != "wrote"}
    assert folders == {str(ensure_tiny(tmp_path))}


def test_a_second_call_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ensure_tiny(tmp_path)
    monkeypatch.setattr(cache, "write_tiny", None)
    assert ensure_tiny(tmp_path) == folder


def test_every_argument_and_the_version_have_their_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "write_tiny", lambda folder, *_args, **_kwargs: folder.mkdir())
    folders = [
        ensure_tiny(tmp_path),
        ensure_tiny(tmp_path, "odd"),
        ensure_tiny(tmp_path, seed=1),
        ensure_tiny(tmp_path, dtype="bfloat16"),
        ensure_tiny(tmp_path, experts="bf16"),
        ensure_tiny(tmp_path, vision=False),
    ]
    monkeypatch.setattr(cache, "GENERATOR_VERSION", tiny.GENERATOR_VERSION + 1)
    folders.append(ensure_tiny(tmp_path))
    assert len(set(folders)) == len(folders)


def test_arguments_reach_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, object] = {}
    monkeypatch.setattr(cache, "write_tiny", lambda folder, preset, **kwargs: seen.update(kwargs, preset=preset))
    ensure_tiny(tmp_path, "deep", seed=3, dtype="bfloat16", experts="bf16", vision=False)
    assert seen == {"preset": "deep", "seed": 3, "dtype": "bfloat16", "experts": "bf16", "vision": False}


def test_an_unknown_preset_leaves_no_trace(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="choose one of default, odd, deep"):
        ensure_tiny(tmp_path, "huge")
    assert list(tmp_path.iterdir()) == []
