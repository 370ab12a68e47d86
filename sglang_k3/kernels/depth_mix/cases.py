"""Cases of ``depth_mix``."""

from __future__ import annotations

import dataclasses

import torch

from sglang_k3.kernels.case_kit import BaseCase, Cost, Draw, Inputs

TOLERANCE = "ratio"
EXACT_RESULTS = (1,)  # bit for bit, whatever the others are: the new prefix


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(BaseCase):
    rows: int
    tokens: int
    width: int
    normed: bool = False
    added: bool = False


CASES = tuple(
    Case(rows=rows, tokens=tokens, width=width, normed=normed, added=added, dtype=dtype, seed=seed)
    for dtype in (torch.float32, torch.bfloat16)
    for seed, (rows, tokens, width, normed, added) in enumerate(
        [
            (0, 3, 16, False, False),
            (0, 3, 17, True, True),
            (1, 0, 16, True, True),
            (1, 1, 1, False, False),
            (2, 5, 63, False, True),
            (3, 17, 64, True, False),
            (4, 3, 65, True, True),
            (7, 2, 129, False, True),
            (8, 2, 7168, True, True),
            (2, 515, 9, True, True),
        ]
    )
)


def make_inputs(case: Case, device: torch.device | str) -> Inputs:
    draw = Draw(case, device)
    # One buffer holds the rows of all depths, more of them than are filled; the rest is NaN.
    bank = draw.normal(case.tokens, case.rows + 2, case.width).transpose(0, 1)
    bank[case.rows :] = torch.nan
    prefix_sum = draw.normal(case.tokens, case.width, scale=2.0)
    folded_weight = draw.normal(case.width, dtype=torch.float32, scale=case.width**-0.5)
    norm_weight = draw.normal(case.width) if case.normed else None
    delta = None
    if case.timed and case.added:
        delta = draw.normal(case.tokens, case.width, scale=2.0)
    elif case.added:  # strided, with NaN between
        delta = draw.pool(case.tokens, case.width, used=torch.arange(case.tokens))
    kwargs = {"eps": 1e-5, "norm_weight": norm_weight, "delta": delta}
    return Inputs((bank[: case.rows], prefix_sum, folded_weight), kwargs)


def cost(case: Case) -> Cost:
    num_elements = case.tokens * case.width
    num_bytes = (case.rows + 2 + 2 * case.added) * num_elements * case.dtype.itemsize
    num_bytes += (4 + case.normed * case.dtype.itemsize) * case.width
    return Cost(num_bytes, (7 * (case.rows + 1) + case.added) * num_elements)
