"""`sglang-k3` teaches, writes checkpoints, and says what is wrong in one line."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
import torch

import sglang_k3
from sglang_k3 import cli, doctor
from sglang_k3.integration import compat, verify
from sglang_k3.kernels import OPS, rms_norm
from sglang_k3.kernels.dispatch import Impl
from sglang_k3.testing.presets import GPU_PRESETS, PRESETS

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def sound_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host without problems, so that a test plants its own; importing the real one takes many seconds."""
    monkeypatch.setattr(verify, "check_seams", lambda: [])
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = cli.main(argv)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    "argv", [["--help"], ["tiny", "--help"], ["doctor", "--help"], ["cache-report", "--help"]], ids=" ".join
)
def test_help_shows_commands_to_copy(capsys: pytest.CaptureFixture[str], argv: list[str]):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert re.search(r"^  (python -m sglang\.launch_server|sglang-k3 \w+)", text, re.MULTILINE)
    assert max(map(len, text.splitlines())) <= 120


def test_help_lists_every_preset():
    assert list(cli.PRESETS) == [*PRESETS, *GPU_PRESETS]


def test_version(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"sglang-k3 {sglang_k3.__version__}\n"


def test_tiny_writes_what_the_options_say(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    folder = tmp_path / "k3"
    options = ["--preset", "odd", "--dtype", "bfloat16", "--experts", "bf16", "--seed", "3", "--text-only"]
    code, out, _ = run(capsys, "tiny", str(folder), *options)
    assert code == 0
    assert f"python -m sglang.launch_server --model {folder}" in out
    config = json.loads((folder / "config.json").read_text())
    assert "bfloat16" in json.dumps(config)
    assert config["text_config"]["num_hidden_layers"] == PRESETS["odd"].num_layers
    names = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    assert not any("weight_packed" in name or "vision" in name for name in names)


def test_tiny_seed_changes_the_weights(tmp_path: Path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        assert cli.main(["tiny", str(tmp_path / name), "--seed", str(seed), "--text-only"]) == 0
    weights = {
        name: b"".join(f.read_bytes() for f in sorted((tmp_path / name).glob("*.safetensors"))) for name in "abc"
    }
    assert weights["a"] == weights["b"] != weights["c"]


@pytest.mark.parametrize(
    ("preset", "folder", "message"),
    [
        ("huge", "new", "unknown tiny preset 'huge': choose one of default"),
        ("default", "used", "is not empty.*name a new"),
    ],
)
def test_tiny_refuses_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, preset: str, folder: str, message: str
):
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    code, out, err = run(capsys, "tiny", str(tmp_path / folder), "--preset", preset)
    assert (code, out) == (1, "")
    assert re.fullmatch(f"error: .*{message}.*\n", err)
    assert sorted(f.name for f in tmp_path.rglob("*")) == ["notes.txt", "used"], "nothing else was written"


def test_doctor_finds_nothing_wrong_here(capsys: pytest.CaptureFixture[str], sound_host: None):
    code, out, _ = run(capsys, "doctor")
    assert code == 0, out
    assert f"sglang    {compat.host_version()} (supported: {compat.SUPPORTED})" in out
    for op in OPS:
        assert re.search(rf"^  {op} +(reference|triton)", out, re.MULTILINE)
    assert "seams     all in place: " in out
    assert "No problem found" in out


@pytest.mark.parametrize("installed", ["0.5.17", "0.5.15.post1", "0.6.0rc1", None])
def test_doctor_refuses_another_host(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, sound_host: None, installed: str | None
):
    monkeypatch.setattr(compat, "host_version", lambda: installed)
    code, out, _ = run(capsys, "doctor")
    assert code == 1
    assert re.search(
        rf"^PROBLEM   SGLang {installed or 'is not installed'}.*pip install \"sglang==0\.5\.16\"", out, re.MULTILINE
    )
    assert "seams     not checked" in out


def test_doctor_reports_a_broken_seam(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, sound_host: None
):
    monkeypatch.setattr(verify, "check_seams", lambda: ["seam 'CPU': sglang.x is not there."])
    code, out, _ = run(capsys, "doctor")
    assert code == 1 and "seams     not all in place, see the end: " in out
    assert re.search(
        r"^PROBLEM   seam 'CPU': sglang\.x is not there\. .*pip install --force-reinstall", out, re.MULTILINE
    )


@pytest.mark.parametrize(("value", "problem"), [("other", True), ("other, k3", False), ("", False)])
def test_doctor_sees_a_filter_that_leaves_the_plugin_out(
    monkeypatch: pytest.MonkeyPatch, sound_host: None, value: str, problem: bool
):
    monkeypatch.setenv("SGLANG_PLUGINS", value)
    problems = doctor.check_entry_point(lambda line: None)
    assert len(problems) == problem
    assert all(f"SGLANG_PLUGINS={value},k3" in text for text in problems)


def test_doctor_sees_that_the_package_is_not_installed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor, "ENTRY_POINT", "k3-under-another-name")
    (problem,) = doctor.check_entry_point(lambda line: None)
    assert "pip install -e ." in problem


def test_doctor_reports_a_bad_kernel_mode(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("K3PLUGIN_KERNELS", "fast")
    (problem,) = doctor.check_kernels(lambda line: None)
    assert "K3PLUGIN_KERNELS='fast'" in problem and "unset" in problem


def test_doctor_says_why_a_faster_kernel_was_passed_over(monkeypatch: pytest.MonkeyPatch):
    refusing = Impl("triton", torch.nn.functional.rms_norm, lambda ctx: f"needs CUDA, got {ctx.device.type}")
    monkeypatch.setattr(rms_norm, "IMPLS", (refusing, rms_norm.IMPLS[-1]))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    lines: list[str] = []
    assert doctor.check_kernels(lines.append) == []
    assert "  rms_norm             reference    triton: needs CUDA, got cpu" in lines


def test_doctor_reports_an_op_that_cannot_run_as_asked(monkeypatch: pytest.MonkeyPatch):
    refusing = Impl("triton", torch.nn.functional.rms_norm, lambda ctx: "no GPU")
    monkeypatch.setattr(rms_norm, "IMPLS", (refusing,))
    (problem,) = doctor.check_kernels(lambda line: None)
    assert problem.startswith("rms_norm: No implementation") and "triton: no GPU" in problem
