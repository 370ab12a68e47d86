"""Cases of ``latent_experts``."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from sglang_k3.kernels.case_kit import BaseCase, Cost, Draw, Inputs

TOLERANCE = "ratio"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(BaseCase):
    """``local`` is the half-open range of experts that this rank holds; ``strided`` inputs lie in larger tensors.

    ``skewed``: three of four tokens, each of which chooses one expert, choose the first.
    """

    tokens: int
    latent: int
    width: int
    experts: int
    top_k: int
    packed: bool = False
    strided: bool = False
    skewed: bool = False
    local: tuple[int, int] | None = None
    linear_beta: float | None = 25.0


BF16 = torch.bfloat16

CASES = (
    Case(tokens=0, latent=32, width=16, experts=4, top_k=2, seed=1),
    Case(tokens=1, latent=1, width=1, experts=1, top_k=1, seed=2),
    Case(tokens=5, latent=33, width=17, experts=7, top_k=3, seed=3),
    Case(tokens=40, latent=32, width=32, experts=8, top_k=2, packed=True, seed=4),
    Case(tokens=9, latent=32, width=16, experts=8, top_k=4, local=(2, 5), seed=5),
    Case(tokens=3, latent=32, width=16, experts=8, top_k=2, linear_beta=None, seed=6),
    Case(tokens=6, latent=48, width=24, experts=8, top_k=4, dtype=BF16, seed=7),
    Case(tokens=9, latent=64, width=32, experts=8, top_k=2, packed=True, local=(4, 8), dtype=BF16, seed=8),
    Case(tokens=70, latent=32, width=16, experts=3, top_k=2, local=(0, 2), seed=15),
    Case(tokens=170, latent=64, width=32, experts=1, top_k=1, packed=True, dtype=BF16, seed=16),
    Case(tokens=1, latent=96, width=32, experts=8, top_k=4, packed=True, local=(2, 7), dtype=BF16, seed=9),
    Case(tokens=0, latent=32, width=32, experts=2, top_k=1, packed=True, seed=17),
    Case(tokens=3, latent=64, width=96, experts=4, top_k=2, packed=True, strided=True, seed=18),
    Case(tokens=5, latent=96, width=32, experts=3, top_k=2, packed=True, strided=True, dtype=BF16, seed=19),
    # More rows and more words than a tile has, and a smaller one behind them.
    Case(tokens=5, latent=288, width=96, experts=3, top_k=2, packed=True, seed=20),
    Case(tokens=7, latent=160, width=288, experts=3, top_k=2, packed=True, dtype=BF16, seed=21),
    # Weight rows in two parts, the second of which may be smaller or missing.
    Case(tokens=9, latent=32, width=160, experts=1, top_k=1, packed=True, dtype=BF16, seed=24),
    # Blocks of 64, into which tokens are copied, and large ones among narrow ones.
    Case(tokens=70, latent=32, width=32, experts=2, top_k=1, packed=True, dtype=BF16, seed=25),
    Case(tokens=25, latent=64, width=32, experts=4, top_k=1, packed=True, skewed=True, dtype=BF16, seed=26),
    *(
        Case(
            tokens=tokens,
            latent=3584,
            width=width,
            experts=24,
            top_k=16,
            packed=packed,
            dtype=BF16,
            seed=seed,
            marks=("gpu",),
        )
        for seed, (tokens, width, packed) in enumerate(
            [(1, 3072, True), (7, 384, True), (64, 384, True), (200, 384, True), (200, 384, False), (24, 384, True)],
            start=10,
        )
    ),
)


def make_inputs(case: Case, device: torch.device | str) -> Inputs:
    draw = Draw(case, device)
    begin, end = case.local or (0, case.experts)
    z = draw.normal(case.tokens, case.latent)
    topk_weights = draw.uniform(case.tokens, case.top_k, low=0.0, high=1.0, dtype=torch.float32)
    choices = [draw.distinct(case.top_k, below=case.experts, dtype=torch.int32) for _ in range(case.tokens)]
    topk_ids = torch.stack(choices) if choices else torch.zeros(0, case.top_k, dtype=torch.int32, device=draw.device)
    if case.skewed:
        topk_ids[torch.arange(case.tokens) % 4 > 0] = 0
    kwargs: dict[str, Any] = {"beta": 4.0, "linear_beta": case.linear_beta, "expert_offset": begin}
    shapes = {"w13": (end - begin, 2 * case.width, case.latent), "w2": (end - begin, case.latent, case.width)}
    weights = {}
    for name, (experts, rows, columns) in shapes.items():
        if case.packed:
            weights[name] = draw.integers(experts, rows, columns // 2, low=0, high=256, dtype=torch.uint8)
            codes = draw.integers(experts, rows, columns // 32, low=122, high=126, dtype=torch.uint8)
            kwargs[f"{name}_scale"] = codes
        else:
            weights[name] = draw.normal(experts, rows, columns, scale=columns**-0.5)
    if case.strided:
        z, topk_weights, topk_ids = (_inside_a_larger(t) for t in (z, topk_weights, topk_ids))
        weights = {name: _inside_a_larger(weight) for name, weight in weights.items()}
        kwargs |= {name: _inside_a_larger(kwargs[name]) for name in ("w13_scale", "w2_scale") if name in kwargs}
    return Inputs((z, topk_weights, topk_ids, weights["w13"], weights["w2"]), kwargs)


def _inside_a_larger(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, the last dimension cut out of one that is 16 longer at either end."""
    return torch.nn.functional.pad(tensor, (16, 16))[..., 16:-16]


def cost(case: Case) -> Cost:
    """With every local expert hit and the choices spread evenly."""
    begin, end = case.local or (0, case.experts)
    expert_elements = 3 * case.latent * case.width
    weight_bytes = expert_elements * 17 // 32 if case.packed else expert_elements * case.dtype.itemsize
    pairs = case.tokens * case.top_k * (end - begin) // case.experts
    num_bytes = (end - begin) * weight_bytes + 2 * case.tokens * case.latent * case.dtype.itemsize
    return Cost(num_bytes + 8 * case.tokens * case.top_k, 2 * pairs * expert_elements)
