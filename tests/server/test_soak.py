"""Retracted, aborted, chunked and cached together: every answer is the reference's, and nothing is left behind."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_k3.testing.cache import ensure_tiny
from sglang_k3.testing.continuations import SequenceSet, ensure_continuations
from sglang_k3.testing.server import ServerProcess, sglang_command
from sglang_k3.testing.soak import EAGER, SMALL_POOLS, plan, soak
from tests.kit.configurations import DEVICE_FLAGS
from tests.kit.host_plugin import install_into

pytestmark = pytest.mark.server
SEQUENCES = SequenceSet(count=4, written=192)


# K3's own prefix cache, and the host's tree with each of its strategies.
STRATEGIES = (
    pytest.param("auto", marks=pytest.mark.covers("k3")),
    *(
        pytest.param(name, marks=[pytest.mark.full, pytest.mark.covers("host")])
        for name in ("extra_buffer", "extra_buffer_lazy")
    ),
)
# Two hundred at once, each batch size under the next larger CUDA graph.
WIDE_POOLS = ("--max-running-requests", "200", "--max-total-tokens", "131072", "--max-mamba-cache-size", "1000")


@pytest.fixture(scope="module", params=STRATEGIES)
def server(
    request: pytest.FixtureRequest, tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    flags = (*SMALL_POOLS, "--mamba-radix-cache-strategy", request.param, *DEVICE_FLAGS)
    command = sglang_command(str(ensure_tiny(tiny_cache)), *flags)
    log = tiny_cache / "logs" / f"soak-{request.param}.log"
    ledger = install_into(tmp_path_factory.mktemp("plugin") / "site", "tests.kit.step_ledger")
    with ServerProcess(command, log_path=log, env=os.environ | EAGER | ledger) as server:
        yield server
        server.check_alive()


@pytest.mark.covers("overlap", "chunks", "retract", "abort", "stream")
@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.full)])
def test_every_answer_is_right_and_nothing_is_left(
    server: ServerProcess, tiny_cache: Path, count: int, request: pytest.FixtureRequest
) -> None:
    """With K3's own cache, every slot and page is recounted after every step of the scheduler."""
    sequences = ensure_continuations(ensure_tiny(tiny_cache), SEQUENCES, tiny_cache)
    report = soak(server, server.log_path, plan(sequences, count, seed=count), concurrency=24)
    assert report.faults == ()
    assert report.finished > 0.8 * count
    assert report.retracted_answers > 0, "nothing was retracted: the pools are too large for this to try anything"
    is_checked = "ledger: 100 checks" in server.log_path.read_text()
    assert is_checked == (request.node.callspec.params["server"] == "auto")


@pytest.mark.gpu
@pytest.mark.covers("overlap", "graphs", "k3", "abort", "stream")
@pytest.mark.parametrize(
    ("flags", "env", "count", "concurrency"),
    [
        pytest.param(WIDE_POOLS, {}, 600, 200, id="two hundred at once", marks=pytest.mark.covers("pages")),
        pytest.param(
            (*SMALL_POOLS, "--page-size", "1"),
            EAGER,
            300,
            24,
            id="retracted",
            marks=pytest.mark.covers("chunks", "retract"),
        ),
    ],
)
def test_under_cuda_graphs(
    tiny_cache: Path, flags: tuple[str, ...], env: dict[str, str], count: int, concurrency: int
) -> None:
    """Every answer as alone, that of a request beside which others are given up or taken back included."""
    folder = ensure_tiny(tiny_cache)
    sequences = ensure_continuations(folder, SEQUENCES, tiny_cache)
    log = tiny_cache / "logs" / f"soak-gpu-{concurrency}.log"
    command = sglang_command(str(folder), *flags, *DEVICE_FLAGS)
    with ServerProcess(command, log_path=log, env=os.environ | env) as server:
        report = soak(server, log, plan(sequences, count, seed=1), concurrency=concurrency)
        server.check_alive()
    assert report.faults == ()
    assert report.finished > 0.8 * count and report.aborted > 0
    assert (report.retracted_answers > 0) == bool(env)
    assert "cuda graph: True" in log.read_text(), "no step ran as a CUDA graph"
