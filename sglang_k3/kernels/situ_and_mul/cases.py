"""Cases of ``situ_and_mul``."""

from __future__ import annotations

import dataclasses

import torch

from sglang_k3.kernels.case_kit import BaseCase, Cost, Draw, Inputs

TOLERANCE = "ulp"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(BaseCase):
    tokens: int
    width: int
    linear_beta: float | None = 25.0


CASES = tuple(
    Case(tokens=tokens, width=width, linear_beta=linear_beta, dtype=dtype, seed=seed)
    for dtype in (torch.float32, torch.bfloat16)
    for seed, (tokens, width, linear_beta) in enumerate(
        [(0, 16, 25.0), (1, 1, 25.0), (3, 7, None), (5, 64, 25.0), (7, 127, 3.0), (2, 3072, 25.0)]
    )
)


def make_inputs(case: Case, device: torch.device | str) -> Inputs:
    gate_up = Draw(case, device).normal(case.tokens, 2 * case.width, scale=6.0)  # wide enough to meet both caps
    return Inputs((gate_up,), {"beta": 4.0, "linear_beta": case.linear_beta})


def cost(case: Case) -> Cost:
    num_elements = case.tokens * case.width
    return Cost(3 * num_elements * case.dtype.itemsize, 10 * num_elements)
