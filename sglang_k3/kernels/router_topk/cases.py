"""Cases of ``router_topk``."""

from __future__ import annotations

import dataclasses

import torch

from sglang_k3.kernels.case_kit import BaseCase, Cost, Draw, Inputs

TOLERANCE = "ratio"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(BaseCase):
    tokens: int
    width: int
    experts: int
    top_k: int
    renormalize: bool = True
    scaling_factor: float = 1.0
    groups: tuple[int, int] = (1, 1)
    weight_dtype: torch.dtype = torch.float32


BF16 = torch.bfloat16

CASES = (
    Case(tokens=0, width=16, experts=8, top_k=2, seed=1),
    Case(tokens=1, width=1, experts=1, top_k=1, seed=2),
    Case(tokens=5, width=33, experts=7, top_k=7, seed=3),
    Case(tokens=6, width=64, experts=8, top_k=2, renormalize=False, scaling_factor=2.5, seed=4),
    Case(tokens=9, width=64, experts=12, top_k=3, groups=(4, 2), scaling_factor=1.5, seed=5),
    Case(tokens=4, width=32, experts=6, top_k=2, groups=(6, 3), seed=6),
    Case(tokens=3, width=128, experts=896, top_k=16, seed=7),
    Case(tokens=5, width=64, experts=8, top_k=2, dtype=BF16, seed=8),
    Case(tokens=3, width=128, experts=896, top_k=16, dtype=BF16, seed=9),
    Case(tokens=19, width=1000, experts=70, top_k=5, dtype=BF16, weight_dtype=BF16, seed=10),
)


def make_inputs(case: Case, device: torch.device | str) -> Inputs:
    draw = Draw(case, device)
    kwargs = {
        "top_k": case.top_k,
        "renormalize": case.renormalize,
        "scaling_factor": case.scaling_factor,
        "num_expert_group": case.groups[0],
        "topk_group": case.groups[1],
    }
    x = draw.normal(case.tokens, case.width)
    weight = draw.normal(case.experts, case.width, dtype=case.weight_dtype, scale=case.width**-0.5)
    return Inputs((x, weight, draw.normal(case.experts, dtype=torch.float32, scale=0.1)), kwargs)


def cost(case: Case) -> Cost:
    num_bytes = case.tokens * case.width * case.dtype.itemsize
    num_bytes += case.experts * (case.width * case.weight_dtype.itemsize + 4)
    return Cost(num_bytes + 8 * case.tokens * case.top_k, 2 * case.tokens * case.width * case.experts)
