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

pytestmark = pytest.mark.server
SEQUENCES = SequenceSet(count=4, written=192)


# K3's own prefix cache, and the host's tree with each of its strategies.
STRATEGIES = ("auto", *(pytest.param(name, marks=pytest.mark.full) for name in ("extra_buffer", "extra_buffer_lazy")))


@pytest.fixture(scope="module", params=STRATEGIES)
def server(request: pytest.FixtureRequest, tiny_cache: Path) -> Iterator[ServerProcess]:
    flags = (*SMALL_POOLS, "--mamba-radix-cache-strategy", request.param, *DEVICE_FLAGS)
    command = sglang_command(str(ensure_tiny(tiny_cache)), *flags)
    log = tiny_cache / "logs" / f"soak-{request.param}.log"
    with ServerProcess(command, log_path=log, env=os.environ | EAGER) as server:
        yield server
        server.check_alive()


@pytest.mark.parametrize("count", [150, pytest.param(1000, marks=pytest.mark.full)])
def test_every_answer_is_right_and_nothing_is_left(server: ServerProcess, tiny_cache: Path, count: int) -> None:
    sequences = ensure_continuations(ensure_tiny(tiny_cache), SEQUENCES, tiny_cache)
    report = soak(server, server.log_path, plan(sequences, count, seed=count), concurrency=24)
    assert report.faults == ()
    assert report.finished > 0.8 * count
    assert report.retracted_answers > 0, "nothing was retracted: the pools are too large for this to try anything"
