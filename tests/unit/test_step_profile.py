"""The time of a decode step is told apart as the trace of a profiler has it."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

MODULE = runpy.run_path(str(Path(__file__).resolve().parents[2] / "benchmarks" / "step_profile.py"))
profile_of = MODULE["profile_of"]


def event(name: str, ts: float, dur: float, cat: str) -> dict[str, object]:
    return {"ph": "X", "name": name, "ts": ts, "dur": dur, "cat": cat, "tid": 1}


def step(at: float) -> list[dict[str, object]]:
    """1,000 us, of which the GPU works 650, 100 of them with two kernels at once."""
    return [
        event("cudaGraphLaunch", at, 20, "cuda_runtime"),
        event("cudaLaunchKernel", at + 30, 5, "cuda_runtime"),
        event("cudaMemcpyAsync", at + 40, 5, "cuda_runtime"),
        event("attend", at + 50, 400, "kernel"),
        event("experts", at + 350, 300, "kernel"),
        event("argmax", at + 700, 50, "kernel"),
        event("scheduler.py(1): run_batch", at, 800, "python_function"),
        event("sampler.py(2): forward", at + 100, 300, "python_function"),
        event("sglang_k3/host/broken_rows.py(3): disarm", at + 110, 60, "python_function"),
        event("<built-in method where>", at + 120, 40, "python_function"),
        event("<built-in method argmax>", at + 200, 100, "python_function"),
    ]


def test_a_step() -> None:
    profile = profile_of([e for n in range(4) for e in step(1000.0 * n)])
    assert profile.steps == 3
    assert (profile.step_ms, profile.gpu_ms) == (1.0, 0.65)
    assert profile.launches == 2
    assert profile.functions[:2] == [(0.5, "scheduler.py(1): run_batch"), (0.14, "sampler.py(2): forward")]
    assert profile.plugin == 60 / 800


def test_a_trace_without_graphs_is_refused() -> None:
    with pytest.raises(ValueError, match="0 calls of cudaGraphLaunch"):
        profile_of([event("argmax", 0, 1, "kernel")])
