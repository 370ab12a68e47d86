"""Cases of ``attn_merge``."""

from __future__ import annotations

import dataclasses

import torch

from sglang_k3.kernels.case_kit import BaseCase, Cost, Draw, Inputs

TOLERANCE = "ratio"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(BaseCase):
    """``empty_a`` and ``empty_b`` name the tokens for which that part saw no key."""

    tokens: int
    heads: int
    value_dim: int
    empty_a: tuple[int, ...] = ()
    empty_b: tuple[int, ...] = ()


CASES = (
    Case(tokens=0, heads=2, value_dim=16, seed=1),
    Case(tokens=1, heads=1, value_dim=1, seed=2),
    Case(tokens=5, heads=3, value_dim=17, seed=3),
    Case(tokens=7, heads=4, value_dim=63, empty_a=(0, 2), empty_b=(2, 3), seed=4),
    Case(tokens=3, heads=2, value_dim=512, empty_a=(0, 1, 2), seed=5),
)


def make_inputs(case: Case, device: torch.device | str) -> Inputs:
    """The output of an empty part is NaN here: nobody may look at it."""
    draw = Draw(case, device)
    args = []
    for empty in (case.empty_a, case.empty_b):
        out = draw.normal(case.tokens, case.heads, case.value_dim)
        lse = draw.normal(case.tokens, case.heads, scale=5.0)
        out[list(empty)], lse[list(empty)] = torch.nan, -torch.inf
        args += [out, lse]
    return Inputs(tuple(args), {})


def cost(case: Case) -> Cost:
    num_elements = case.tokens * case.heads * case.value_dim
    return Cost(4 * 3 * (num_elements + case.tokens * case.heads), 3 * num_elements)
