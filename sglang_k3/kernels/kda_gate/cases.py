"""Cases of ``kda_gate``."""

from __future__ import annotations

import dataclasses

import torch

from sglang_k3.kernels.case_kit import BaseCase, Cost, Draw, Inputs

TOLERANCE = "ratio"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(BaseCase):
    tokens: int
    heads: int
    key_dim: int


CASES = tuple(
    Case(tokens=tokens, heads=heads, key_dim=key_dim, dtype=dtype, seed=seed)
    for dtype in (torch.float32, torch.bfloat16)
    for seed, (tokens, heads, key_dim) in enumerate([(0, 2, 16), (1, 1, 1), (5, 3, 17), (7, 4, 63), (3, 8, 128)])
)


def make_inputs(case: Case, device: torch.device | str) -> Inputs:
    draw = Draw(case, device)
    a = draw.normal(case.tokens, case.heads, case.key_dim, scale=2.0)
    b = draw.normal(case.tokens, case.heads, scale=2.0)
    A_log = draw.normal(case.heads, dtype=torch.float32, scale=0.5)
    dt_bias = draw.normal(case.heads, case.key_dim, dtype=torch.float32)
    return Inputs((a, b, A_log, dt_bias), {"lower_bound": -5.0})


def cost(case: Case) -> Cost:
    num_elements = case.tokens * case.heads * (case.key_dim + 1)
    return Cost(num_elements * (case.dtype.itemsize + 4) + 4 * case.heads * (case.key_dim + 1), 5 * num_elements)
