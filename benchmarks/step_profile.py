"""What a decode step is spent on, from a trace of the host's own profiler (``/start_profile``).

A step lasts from one replay of a CUDA graph to the next. GPU time is the time in which any kernel or copy runs; the
rest of a step the GPU waits for the host. What the host does is told by the Python functions of the trace, which are
slower under the profiler than without it: their shares are meaningful, their sums are not.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
REPLAY = "cudaGraphLaunch"
PACKAGE = "sglang_k3"


@dataclasses.dataclass(frozen=True)
class StepProfile:
    """Attributes:
    steps: replays that the trace holds in full.
    step_ms: median time between two of them, under the profiler.
    gpu_ms: of it, in which the GPU works.
    launches: calls that start work on the GPU, the replay not counted, per step.
    functions: share of the step and name of the Python functions that take most, their callees left out.
    plugin: share of the time of all functions, waiting included, that functions of this package take, with what they
        call that is not Python.
    """

    steps: int
    step_ms: float
    gpu_ms: float
    launches: float
    functions: list[tuple[float, str]]
    plugin: float


def read_trace(path: Path) -> list[dict[str, Any]]:
    with gzip.open(path, "rt") as file:
        events: list[dict[str, Any]] = json.load(file)["traceEvents"]
    return [event for event in events if event.get("ph") == "X"]


def profile_of(events: list[dict[str, Any]], top: int = 15) -> StepProfile:
    """Raises ``ValueError`` if the trace holds fewer than three replays: no decode steps ran as CUDA graphs in it."""
    replays = sorted(event["ts"] for event in events if event["name"].startswith(REPLAY))
    if len(replays) < 3:
        raise ValueError(f"the trace holds {len(replays)} calls of {REPLAY}: no decode steps ran as CUDA graphs in it.")
    begin, end, steps = replays[0], replays[-1], len(replays) - 1
    inside = [event for event in events if begin <= event["ts"] < end]
    gpu = [event for event in inside if event.get("cat") in GPU_CATEGORIES]
    launches = [e for e in inside if e.get("cat") in ("cuda_runtime", "cuda_driver") and _starts_work(e["name"])]
    functions = [event for event in inside if event.get("cat") == "python_function"]
    # A wait may outlast the steps.
    own = _own_times([{**event, "dur": min(event["dur"], end - event["ts"])} for event in functions])
    of_functions: Counter[str] = Counter()
    for (_, name), time in own.items():
        of_functions[name] += time
    plugin = sum(time for (file, _), time in own.items() if f"{PACKAGE}/" in file)
    return StepProfile(
        steps=steps,
        step_ms=statistics.median(b - a for a, b in zip(replays, replays[1:], strict=False)) / 1000,
        gpu_ms=_covered(gpu) / steps / 1000,
        launches=len(launches) / steps,
        functions=[(time / (end - begin), name) for name, time in of_functions.most_common(top)],
        plugin=plugin / max(own.total(), 1.0),
    )


def _starts_work(name: str) -> bool:
    return not name.startswith(REPLAY) and ("Launch" in name or "Memcpy" in name or "Memset" in name)


def _covered(events: list[dict[str, Any]]) -> float:
    """Microseconds in which at least one of the events lasts."""
    total = reach = 0.0
    for event in sorted(events, key=lambda event: event["ts"]):
        first, last = max(event["ts"], reach), event["ts"] + event["dur"]
        if last > first:
            total += last - first
            reach = last
    return total


def _own_times(functions: list[dict[str, Any]]) -> Counter[tuple[str, str]]:
    """Microseconds of each function without what it calls, by the file it is of and its name; one thread at a time.

    What is not Python (``<built-in method copy_ ...>``) is of the file that calls it.
    """
    own: Counter[tuple[str, str]] = Counter()
    by_thread: dict[Any, list[dict[str, Any]]] = {}
    for event in functions:
        by_thread.setdefault(event["tid"], []).append(event)
    for events in by_thread.values():
        open_calls: list[tuple[float, tuple[str, str]]] = []
        for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
            while open_calls and open_calls[-1][0] <= event["ts"]:
                open_calls.pop()
            file, is_python, _ = event["name"].partition(".py(")
            if not is_python:
                file = open_calls[-1][1][0] if open_calls else ""
            if open_calls:
                own[open_calls[-1][1]] -= event["dur"]
            own[file, event["name"]] += event["dur"]
            open_calls.append((event["ts"] + event["dur"], (file, event["name"])))
    return own
