"""How long a step of K3 takes on one GPU, held against what its bytes and operations must take at least.

    python benchmarks/unit_slice.py                          # everything for full width and one rank of 8 (minutes)
    python benchmarks/unit_slice.py --tp 1 --only decode/tp1/bs1/
    python benchmarks/unit_slice.py --tp 1 --only decode/tp1/bs1/ctx1024/distinct --profile

Timed is the unit slice, four layers of real size with embedding and head (see ``slice_model``): decode as one CUDA
graph, prefill eagerly. `collapsed` sends every token to the same 16 experts, `distinct` sends neighbours to different
ones. The floor adds up, part by part, the larger of bytes / 4.21 TB/s and operations / 790 TFLOP/s, counting the
experts that are hit. Rows go to ``benchmarks/results/unit_slice.json``.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
import traceback
from collections.abc import Callable, Iterator

import torch
from kernels import floor_us, median_us
from rows import Row, save
from slice_model import DEVICE, Batch, Pools, UnitSlice, one_process
from torch import Tensor

from sglang_k3.kernels.case_kit import Cost

BATCHES, CONTEXTS = (1, 4, 16, 64, 256), (1024, 32768, 131072)
PROMPTS = ((1, 1024), (16, 1024), (1, 8192), (1, 32768))
ROUTINGS = ("distinct", "collapsed")
REPEATS = 15


@dataclasses.dataclass(frozen=True)
class Shape:
    """``num_requests`` decode one token behind ``length`` of them, or read prompts of ``length``."""

    is_decode: bool
    num_requests: int
    length: int

    def case(self, tp_size: int, routing: str) -> str:
        if self.is_decode:
            return f"decode/tp{tp_size}/bs{self.num_requests}/ctx{self.length}/{routing}"
        return f"prefill/tp{tp_size}/{self.num_requests}x{self.length}/{routing}"

    @property
    def new_tokens(self) -> int:
        return self.num_requests * (1 if self.is_decode else self.length)


SHAPES = [Shape(True, batch, context) for context in CONTEXTS for batch in BATCHES]
SHAPES += [Shape(False, *prompts) for prompts in PROMPTS]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 8], help="widths: one rank of so many (default: 1 8)")
    parser.add_argument("--only", nargs="+", default=[""], help="cases whose name begins so")
    parser.add_argument("--profile", action="store_true", help="print the kernels of each case, save no rows")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device, found none")
    command = " ".join(["python benchmarks/unit_slice.py", *sys.argv[1:]])
    failed = []
    with one_process():
        for tp_size in args.tp:
            unit = UnitSlice(tp_size)
            print(f"{'case':<44} {'ms':>9} {'floor':>9} {'ratio':>7}", flush=True)
            for shape in SHAPES:
                cases = {shape.case(tp_size, routing): routing for routing in ROUTINGS}
                cases = {case: how for case, how in cases.items() if case.startswith(tuple(args.only))}
                try:
                    rows = [as_row(*figure, command) for figure in figures(unit, shape, cases, profile=args.profile)]
                except Exception:  # the other shapes are worth having
                    traceback.print_exc()
                    failed += cases
                    torch.cuda.synchronize()  # raises if the device is lost
                    continue
                finally:
                    gc.collect()
                    torch.cuda.empty_cache()
                if rows and not args.profile:
                    save("unit_slice", rows)
            del unit
    if failed:
        sys.exit(f"FAILED: {', '.join(failed)}")


def figures(
    unit: UnitSlice, shape: Shape, cases: dict[str, str], *, profile: bool
) -> Iterator[tuple[str, float, float]]:
    """Case, milliseconds and floor of each routing."""
    if not cases:
        return
    pools = Pools(unit, shape.num_requests, shape.length)
    batch = pools.decode() if shape.is_decode else pools.prefill()
    for case, routing in cases.items():
        topk_ids = routes(unit, shape.new_tokens, routing)
        unit.route(topk_ids)
        step = captured(unit, batch) if shape.is_decode else (lambda: unit.forward(batch))
        value, floor = median_ms(step), floor_ms(unit, shape, topk_ids)
        print(f"{case:<44} {value:>9.3f} {floor:>9.3f} {value / floor:>7.2f}", flush=True)
        if profile:
            print_profile(step)
        yield case, value, floor


def routes(unit: UnitSlice, num_tokens: int, routing: str) -> Tensor:
    moe = unit.config.moe
    first = torch.arange(num_tokens, device=DEVICE) * (moe.top_k if routing == "distinct" else 0)
    # In steps, so that the experts of one token are spread over all ranks.
    choices = first[:, None] + torch.arange(moe.top_k, device=DEVICE)
    stride = moe.num_experts // moe.top_k
    return (choices % moe.top_k * stride + choices // moe.top_k % stride).int()


def captured(unit: UnitSlice, batch: Batch) -> Callable[[], object]:
    unit.forward(batch)  # compiles
    unit.forward(batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        unit.forward(batch)
    return graph.replay


def median_ms(step: Callable[[], object]) -> float:
    for _ in range(2):
        step()
    return median_us(step, REPEATS) / 1000


def print_profile(step: Callable[[], object]) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            step()
        torch.cuda.synchronize()
    print(profile.key_averages().table(sort_by="cuda_time_total", row_limit=40, max_name_column_width=70))


def floor_ms(unit: UnitSlice, shape: Shape, topk_ids: Tensor) -> float:
    """The sum over the parts of a step of the time that its bytes or its operations need, whichever is longer."""
    mla, kda = unit.config.mla, unit.config.kda
    tokens, requests, length = shape.new_tokens, shape.num_requests, shape.length
    linears = experts = head = 0
    for name, tensor in (*unit.model.named_parameters(), *unit.model.named_buffers()):
        if ".experts." in name:
            experts += tensor.nbytes
        elif name.startswith("lm_head"):
            head += tensor.nbytes
        elif "embed_tokens" not in name:
            linears += tensor.nbytes
    local = topk_ids[topk_ids < unit.config.moe.num_experts // unit.tp_size]
    share = local.unique().numel() / (unit.config.moe.num_experts // unit.tp_size)
    expert_operations = 6 * unit.config.moe.latent_size * unit.config.moe.intermediate_size
    parts = [
        (linears, linears * tokens),  # two operations a weight, two bytes a weight
        (head, head * requests),
        (experts * share, local.numel() * expert_operations * len(unit.mixtures)),
    ]
    heads = mla.num_heads // unit.tp_size
    if shape.is_decode:
        rows = requests * length
        parts.append((rows * mla.latent_dim * 2, 2 * rows * heads * (mla.latent_dim + mla.kv_lora_rank)))
    else:
        pairs = requests * length * (length + 1) // 2
        parts.append((tokens * mla.latent_dim * 2, 2 * pairs * heads * (mla.qk_head_dim + mla.v_head_dim)))
    state = kda.num_heads // unit.tp_size * kda.head_dim**2
    layers = len(unit.config.kda_layers)
    reads = 2 if shape.is_decode else 1  # a prompt starts from nothing
    parts.append((requests * state * 4 * reads * layers, 6 * tokens * state * layers))
    return sum(floor_us(Cost(*part)) for part in parts) / 1000


def as_row(case: str, value: float, floor: float, command: str) -> Row:
    return Row(case=case, metric="step_ms", value=round(value, 4), unit="ms", baseline=round(floor, 4), command=command)


if __name__ == "__main__":
    main()
