"""The installed SGLang has what this package touches, and other models do not notice that it is touched."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest

from sglang_k3.integration import compat
from sglang_k3.integration.seams import SEAMS
from sglang_k3.integration.verify import check_seams
from tests.kit.llama import write_llama

pytestmark = pytest.mark.sglang


def test_every_seam_fits() -> None:
    assert check_seams() == []


def test_a_target_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = dataclasses.replace(SEAMS[0], targets=("sglang.srt.no_such_module.thing",))
    monkeypatch.setattr("sglang_k3.integration.verify.SEAMS", (broken,))
    (problem,) = check_seams()
    assert "sglang.srt.no_such_module.thing" in problem


def test_the_ledger_is_complete() -> None:
    """Each module that installs a seam is in the ledger, and each entry says why and until when."""
    folder = Path(inspect.getfile(compat)).parent
    assert {path.stem for path in folder.glob("seam_*.py")} == {seam.module for seam in SEAMS}
    targets = [target for seam in SEAMS for target in seam.targets]
    assert len(targets) == len(set(targets)), "the host applies one hook of a target and drops the others"
    for seam in SEAMS:
        assert seam.targets and seam.why and seam.until
        assert callable(seam.install)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("sglang_k3.host.kda_backend.K3KDABackend.forward_extend", "KDAAttnBackend.forward_extend"),
        ("sglang_k3.host.kda_backend.K3KDABackend.forward_decode", "KDAAttnBackend.forward_decode"),
    ],
)
def test_an_override_takes_what_the_host_passes(ours: str, theirs: str) -> None:
    mine = inspect.signature(resolve_name(ours)).parameters
    host = inspect.signature(resolve_name(f"sglang.srt.layers.attention.linear.kda_backend.{theirs}")).parameters
    assert list(mine) == list(host)


def run(code: str, **env: str) -> str:
    """The output of a fresh interpreter, where the host loads its plugins as at a server start."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


ARGUMENTS_OF_A_LLAMA = """
import json, os, sys
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import prepare_server_args
args = prepare_server_args(["--model-path", {folder!r}, "--device", "cpu", "--random-seed", "1"])
own = {{"is_k3", "model_config"}}  # the config is an object whose repr is its address
fields = {{k: repr(v) for k, v in vars(args).items() if not k.startswith("k3_") and k not in own}}
ours = [k for k in os.environ if k.startswith(("SGLANG_", "OMP_")) and k != "SGLANG_PLUGINS"]
fields["environment"] = repr(sorted(ours))
print("ARGS", json.dumps(fields))
"""


def test_the_arguments_of_another_model_resolve_as_without_the_plugin(tmp_path: Path) -> None:
    code = ARGUMENTS_OF_A_LLAMA.format(folder=str(write_llama(tmp_path)))
    with_plugin, without = (
        json.loads(run(code, SGLANG_PLUGINS=plugins).partition("ARGS ")[2]) for plugins in ("k3", "none")
    )
    assert with_plugin == without


def test_another_sglang_is_refused_in_one_line(tmp_path: Path) -> None:
    """A newer host is named with the remedy, before anything is loaded."""
    info = tmp_path / "sglang-0.5.17.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.17\n")
    done = subprocess.run(
        [sys.executable, "-m", "sglang.launch_server", "--model", "kimi-k3-tiny"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode != 0
    assert done.stderr.splitlines()[-1] == (
        "sglang-k3: SGLang 0.5.17 is installed, but this sglang-k3 extends SGLang >=0.5.16,<0.5.17. "
        'Run: pip install "sglang==0.5.16"'
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("installed", "fits"), [("0.5.16", True), ("0.5.16.post1", True), ("0.5.17", False), ("0.5.15", False)]
)
def test_the_supported_window(monkeypatch: pytest.MonkeyPatch, installed: str, fits: bool) -> None:
    monkeypatch.setattr(compat, "host_version", lambda: installed)
    problem = compat.host_problem()
    assert (problem is None) is fits
    if problem:
        assert installed in problem and compat.REMEDY in problem
