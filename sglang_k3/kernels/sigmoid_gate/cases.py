"""Cases of ``sigmoid_gate``."""

from __future__ import annotations

import dataclasses

import torch

from sglang_k3.kernels.case_kit import BaseCase, Cost, Draw, Inputs

TOLERANCE = "ulp"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(BaseCase):
    tokens: int
    width: int


CASES = tuple(
    Case(tokens=tokens, width=width, dtype=dtype, seed=seed)
    for dtype in (torch.float32, torch.bfloat16)
    for seed, (tokens, width) in enumerate([(0, 16), (1, 1), (3, 7), (5, 64), (7, 127), (2, 12288)])
)


def make_inputs(case: Case, device: torch.device | str) -> Inputs:
    draw = Draw(case, device)
    return Inputs((draw.normal(case.tokens, case.width), draw.normal(case.tokens, case.width, scale=3.0)), {})


def cost(case: Case) -> Cost:
    num_elements = case.tokens * case.width
    return Cost(3 * num_elements * case.dtype.itemsize, 5 * num_elements)
