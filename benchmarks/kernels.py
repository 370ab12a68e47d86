"""How long each implementation of each op takes at the sizes of K3, against the floor that the device sets.

    python benchmarks/kernels.py                              # every op and implementation, on one GPU (minutes)
    python benchmarks/kernels.py rms_norm kda_decode          # these ops
    python benchmarks/kernels.py --impl triton --size decode  # one implementation, sizes whose name holds the word

A figure is the time of one call with a cold L2 cache: 20 times a read that flushes the cache and the call in one CUDA
graph, less the same graph without the calls, by 20; the median of 21 replays. Launches of the host do not count, gaps
between the kernels of a call do. What cannot be captured, because it waits for the device, is timed with CUDA events
around single calls (metric ``us_eager``), 20 of them unless they take longer than a second together; so is what takes
20 ms or more.

The floor is the larger of bytes over bandwidth and operations over peak, both as measured on an H200. Rows go to
``benchmarks/results/kernels.json``, one op at a time; an op that fails is reported and the next one is timed.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import importlib
import statistics
import sys
import traceback
from collections.abc import Callable, Iterator

import torch
from kernel_sizes import SIZES
from rows import Row, save

from sglang_k3.kernels import OPS, OpContext
from sglang_k3.kernels.case_kit import Cost, Inputs
from sglang_k3.kernels.dispatch import Impl

BYTES_PER_US = 4.21e6
OPERATIONS_PER_US = 790e6
CALLS, REPLAYS = 20, 21
CAPTURE_LIMIT_US, EAGER_LIMIT_US = 20e3, 1e6
FLUSH_BYTES = 256 * 2**20  # several times the L2 of any GPU so far


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    case: str
    metric: str
    us: float
    floor_us: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", metavar="op", help="ops to time; all by default")
    parser.add_argument("--impl", help="time this implementation only, such as triton")
    parser.add_argument("--size", default="", help="time sizes whose name holds this, such as decode")
    args = parser.parse_args()
    unknown = set(args.ops) - set(SIZES)
    if unknown:
        parser.error(f"no sizes for {', '.join(sorted(unknown))}. Known: {', '.join(SIZES)}")
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device, found none")
    failed: list[tuple[str, str]] = []
    print(f"{'case':<48} {'metric':<9} {'us':>10} {'floor':>9} {'ratio':>7}", flush=True)
    for op in args.ops or SIZES:
        results = list(time_op(op, args.impl, args.size, failed))
        command = " ".join(["python benchmarks/kernels.py", *sys.argv[1:]])
        if results:
            save("kernels", [as_row(result, command) for result in results])
    for case, error in failed:
        print(f"FAILED {case}: {error}")
    sys.exit(1 if failed else 0)


def time_op(op: str, only: str | None, size_part: str, failed: list[tuple[str, str]]) -> Iterator[Result]:
    module, cases = importlib.import_module(OPS[op]), importlib.import_module(f"{OPS[op]}.cases")
    for size, arguments in SIZES[op].items():
        if size_part not in size:
            continue
        inputs = None
        for impl in module.IMPLS:
            if only not in (None, impl.name):
                continue
            name = f"{op}/{size}/{impl.name}"
            case = cases.Case(**{"dtype": torch.bfloat16, "timed": True, **arguments})
            sizes = cases.sizes(case) if hasattr(cases, "sizes") else {}
            reason = impl.supports(OpContext(torch.device("cuda"), case.dtype, sizes))
            if reason is not None:
                print(f"{name:<48} {reason}")
                continue
            try:
                inputs = inputs or cases.make_inputs(case, "cuda")
                metric, us = time_case(impl, inputs)
            except Exception as error:  # a table with one hole is worth more than none
                traceback.print_exc()
                failed.append((name, repr(error)[:200]))
                torch.cuda.synchronize()  # raises if the device is lost: nothing after it would run
                continue
            finally:
                gc.collect()
                torch.cuda.empty_cache()
            floor = floor_us(cases.cost(case))
            print(f"{name:<48} {metric:<9} {us:>10.2f} {floor:>9.2f} {us / floor:>7.2f}", flush=True)
            yield Result(case=name, metric=metric, us=us, floor_us=floor)


def floor_us(cost: Cost) -> float:
    return max(cost.num_bytes / BYTES_PER_US, cost.num_flops / OPERATIONS_PER_US)


def as_row(result: Result, command: str) -> Row:
    return Row(
        case=result.case,
        metric=result.metric,
        value=float(f"{result.us:.4g}"),
        unit="us",
        baseline=float(f"{result.floor_us:.4g}"),
        command=command,
    )


def time_case(impl: Impl, inputs: Inputs) -> tuple[str, float]:
    """Metric and microseconds of one call. Weights are random bytes, which are random weights in any layout."""
    return time_call(lambda: impl.fn(*inputs.args, **inputs.kwargs))


def time_call(call: Callable[[], object]) -> tuple[str, float]:
    """Metric and microseconds of a call, with a cold L2 cache."""
    flushed = torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")

    def flush() -> None:
        flushed.amax()

    flush()
    first_us = time_once(call)  # compiles
    us = min(first_us, time_once(call))
    if us < CAPTURE_LIMIT_US:
        with_calls = captured(lambda: (flush(), call()))
        if with_calls is not None:
            without = captured(flush)
            assert without is not None
            return "us", (median_us(with_calls.replay, REPLAYS) - median_us(without.replay, REPLAYS)) / CALLS
    repeats = max(min(CALLS, int(EAGER_LIMIT_US / us)), 1)
    return "us_eager", median_us(call, repeats, flush)


def captured(fn: Callable[[], object]) -> torch.cuda.CUDAGraph | None:
    """A graph of ``CALLS`` times ``fn``, or ``None`` if it waits for the device."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
    try:
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                fn()
    except RuntimeError as error:
        if "captur" not in str(error):
            raise
        torch.cuda.set_stream(stream)
        torch.cuda.synchronize()
        return None
    return graph


def median_us(fn: Callable[[], object], repeats: int, before: Callable[[], object] | None = None) -> float:
    times = []
    for _ in range(repeats):
        if before is not None:
            before()
        times.append(time_once(fn))
    return statistics.median(times)


def time_once(fn: Callable[[], object]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    fn()
    end.record()
    end.synchronize()
    return 1000.0 * start.elapsed_time(end)


if __name__ == "__main__":
    main()
