"""How long the routed experts of one K3 layer take: our kernels and the host's runners on 4-bit weights, cuBLAS on bf16
ones, the floor.

    python benchmarks/moe_side_by_side.py --who triton dense-bf16    # one GPU of 141 GB, a few minutes
    python benchmarks/moe_side_by_side.py --who triton host-marlin   # six minutes more, the first time
    python benchmarks/moe_side_by_side.py --who triton --tokens 1 16 --routing collapsed
    python benchmarks/moe_side_by_side.py --who triton --tile 16 256 64 4 4   # try another tile; no row is saved

All 896 experts at full size. ``collapsed``: every token chooses the same 16 experts; ``distinct``: the choices go round
all experts, so that as many as possible are hit. Timed as in ``kernels.py``. The dense line is two batched products
and the activation on bf16 weights of the experts that are hit, with the tokens already sorted: what a layer costs
without 4-bit weights, without counting how tokens get to their experts and back. ``host-marlin`` is what SGLang runs
with ``--moe-runner-backend marlin`` where it has MXFP4 experts, from the choices to the sum. nvcc compiles it when it
is first called, which takes more than six minutes, and ``TVM_FFI_CACHE_DIR`` keeps it. ``host-triton-kernels`` is
SGLang's ``triton_kernel`` runner, with the choices sorted beforehand. Both have SwiGLU in place of SiTU, and random
weights.

The floor is the larger of the bytes of the experts that are hit (4.25 bits a weight), with input and output, over
bandwidth, and operations over peak. Rows go to ``benchmarks/results/moe.json``.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable
from functools import partial

import torch
from kernel_sizes import EXPERT_WIDTH, EXPERTS, LATENT, TOP_K
from kernels import floor_us, time_call
from rows import Row, save
from torch import Tensor

from sglang_k3.kernels import OpContext, bind
from sglang_k3.kernels.case_kit import Cost

BF16 = torch.bfloat16
ACTIVATION = {"beta": 4.0, "linear_beta": 25.0}
EXPERT_ELEMENTS = 3 * LATENT * EXPERT_WIDTH


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 256, 1024, 8192])
    parser.add_argument("--routing", nargs="+", choices=("collapsed", "distinct"), default=["collapsed", "distinct"])
    parser.add_argument("--who", nargs="+", choices=WHO, default=list(WHO))
    parser.add_argument("--tile", type=int, nargs=5, metavar=("M", "N", "K", "WARPS", "STAGES"), help="of our kernels")
    args = parser.parse_args()
    if args.tile is not None:
        if args.who != ["triton"]:
            parser.error("--tile is of our kernels: give --who triton")
        triton_impl = importlib.import_module("sglang_k3.kernels.latent_experts.triton_impl")
        triton_impl._tiles = lambda *_, **__: (triton_impl.Tile(*args.tile),)
    torch.manual_seed(0)
    weights = packed_experts()
    hosts = {name: HOSTS[name]() for name in args.who if name in HOSTS}
    command = " ".join(["python benchmarks/moe_side_by_side.py", *sys.argv[1:]])
    print(f"{'case':<36} {'us':>10} {'floor':>10} {'ratio':>7}", flush=True)
    for routing in args.routing:
        for tokens in args.tokens:
            ids = choices(routing, tokens)
            hit = ids.unique().numel()
            floor = floor_us(cost(tokens, hit))
            calls = {"triton": partial(ours, weights, ids), "dense-bf16": partial(dense, tokens, hit)}
            calls |= {name: partial(prepare, ids) for name, prepare in hosts.items()}
            for name in args.who:
                metric, us = time_call(calls[name]())
                row = Row(
                    case=f"latent_experts/{routing}-{tokens}/{name}",
                    metric=metric,
                    value=round(us, 2),
                    unit="us",
                    baseline=round(floor, 2),
                    command=command,
                )
                print(f"{row.case:<36} {row.value:>10.2f} {floor:>10.2f} {row.value / floor:>7.2f}", flush=True)
                if args.tile is None:
                    save("moe", [row])
                torch.cuda.empty_cache()


def packed_experts() -> dict[str, Tensor]:
    def draw(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device="cuda")

    return {  # random bytes are random weights in any layout
        "w13": draw(0, 256, EXPERTS, 2 * EXPERT_WIDTH, LATENT // 2),
        "w2": draw(0, 256, EXPERTS, LATENT, EXPERT_WIDTH // 2),
        "w13_scale": draw(116, 121, EXPERTS, 2 * EXPERT_WIDTH, LATENT // 32),
        "w2_scale": draw(116, 121, EXPERTS, LATENT, EXPERT_WIDTH // 32),
    }


def choices(routing: str, tokens: int) -> Tensor:
    """Expert ids ``[T, k]``."""
    order = torch.randperm(EXPERTS, device="cuda", dtype=torch.int32)
    if routing == "collapsed":
        return order[:TOP_K].repeat(tokens, 1)
    return order[torch.arange(tokens * TOP_K, device="cuda") % EXPERTS].view(tokens, TOP_K)


def cost(tokens: int, hit: int) -> Cost:
    num_bytes = hit * EXPERT_ELEMENTS * 17 // 32 + 2 * tokens * LATENT * BF16.itemsize
    return Cost(num_bytes, 2 * tokens * TOP_K * EXPERT_ELEMENTS)


def ours(weights: dict[str, Tensor], ids: Tensor) -> Callable[[], Tensor]:
    z = torch.randn(len(ids), LATENT, dtype=BF16, device="cuda")
    topk_weights = torch.rand(ids.shape, device="cuda") / TOP_K
    fn = bind("latent_experts", OpContext.of(z))
    scales = {name: weights[name] for name in ("w13_scale", "w2_scale")}
    return lambda: fn(z, topk_weights, ids, weights["w13"], weights["w2"], **scales, **ACTIVATION)


def dense(tokens: int, hit: int) -> Callable[[], Tensor]:
    """As many rows for each expert that is hit, rounded up."""

    def draw(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=BF16, device="cuda").normal_(std=shape[-1] ** -0.5)

    rows = draw(hit, -(-tokens * TOP_K // hit), LATENT)
    w13, w2 = draw(hit, 2 * EXPERT_WIDTH, LATENT), draw(hit, LATENT, EXPERT_WIDTH)
    situ_and_mul = bind("situ_and_mul", OpContext.of(rows))

    def call() -> Tensor:
        gate_up = torch.bmm(rows, w13.transpose(1, 2))
        hidden = situ_and_mul(gate_up.flatten(0, 1), **ACTIVATION)
        return torch.bmm(hidden.view(hit, -1, EXPERT_WIDTH), w2.transpose(1, 2))

    return call


def host_marlin() -> Callable[[Tensor], Callable[[], Tensor]]:
    """Makes a call of it for some choices; its weights are in an order of its own."""
    from sglang.srt.layers.moe.fused_moe_triton.fused_marlin_moe import fused_marlin_moe

    def matrix(rows: int, columns: int) -> tuple[Tensor, Tensor]:
        words = torch.randint(-(2**31), 2**31, (EXPERTS, columns // 16, 2 * rows), dtype=torch.int32, device="cuda")
        codes = torch.randint(116, 121, (EXPERTS, columns // 32, rows), dtype=torch.uint8, device="cuda")
        return words, codes.view(torch.float8_e8m0fnu)

    (w13, w13_scale), (w2, w2_scale) = matrix(2 * EXPERT_WIDTH, LATENT), matrix(LATENT, EXPERT_WIDTH)

    def prepare(ids: Tensor) -> Callable[[], Tensor]:
        z = torch.randn(len(ids), LATENT, dtype=BF16, device="cuda")
        topk_weights = torch.rand(ids.shape, device="cuda") / TOP_K
        arguments = (z, w13, w2, w13_scale, w2_scale, z, topk_weights, ids)
        return lambda: fused_marlin_moe(*arguments, num_bits=4)

    return prepare


def host_triton_kernels() -> Callable[[Tensor], Callable[[], Tensor]]:
    """The host's runner of the ``triton_kernels`` package, with the choices listed beforehand."""
    from sglang.srt.layers.moe.fused_moe_triton.triton_kernels_moe import triton_kernel_fused_experts_with_bias
    from sglang.srt.layers.moe.topk import routing
    from sglang.srt.layers.quantization.mxfp4 import _swizzle_mxfp4
    from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig

    packed, experts = packed_experts(), {}
    for name in ("w13", "w2"):
        weight, flex, scale = _swizzle_mxfp4(packed.pop(name), packed.pop(f"{name}_scale"), 8)
        experts[name.replace("w13", "w1")] = weight
        config = PrecisionConfig(weight_scale=scale, flex_ctx=FlexCtx(rhs_data=flex))
        experts[name.replace("w13", "w1") + "_pcg"] = config
    biases = {
        "b1": torch.zeros(EXPERTS, 2 * EXPERT_WIDTH, device="cuda"),
        "b2": torch.zeros(EXPERTS, LATENT, device="cuda"),
    }

    def prepare(ids: Tensor) -> Callable[[], Tensor]:
        z = torch.randn(len(ids), LATENT, dtype=BF16, device="cuda")
        chosen = torch.zeros(len(ids), EXPERTS, device="cuda").scatter_(1, ids.long(), 1.0)
        where = dict(zip(("routing_data", "gather_indx", "scatter_indx"), routing(chosen, TOP_K), strict=True))
        activation = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0}
        return lambda: triton_kernel_fused_experts_with_bias(z, **experts, **biases, **where, **activation)

    return prepare


HOSTS = {"host-marlin": host_marlin, "host-triton-kernels": host_triton_kernels}
WHO = ("triton", "dense-bf16", *HOSTS)

if __name__ == "__main__":
    main()
