"""Cases of ``kv_scatter``."""

from __future__ import annotations

import dataclasses

import torch

from sglang_k3.kernels.case_kit import BaseCase, Cost, Draw, Inputs

TOLERANCE = "bitwise"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(BaseCase):
    """``dtype`` is that of the pool; ``skipped`` names the rows whose slot is -1; ``owners`` counts the DCP ranks."""

    tokens: int
    width: int
    rows_dtype: torch.dtype = torch.float32
    skipped: tuple[int, ...] = ()
    owners: int = 1


BF16 = torch.bfloat16

CASES = (
    Case(tokens=0, width=16, seed=1),
    Case(tokens=1, width=1, seed=2),
    Case(tokens=5, width=17, skipped=(0, 3), seed=3),
    Case(tokens=7, width=24, owners=2, skipped=(6,), seed=4),
    Case(tokens=3, width=24, skipped=(0, 1, 2), seed=5),
    Case(tokens=5, width=576, dtype=BF16, rows_dtype=BF16, skipped=(2,), seed=6),
    Case(tokens=5, width=576, dtype=BF16, owners=3, seed=7),
)


def make_inputs(case: Case, device: torch.device | str) -> Inputs:
    draw = Draw(case, device)
    loc = draw.distinct(case.tokens, below=case.tokens + 3)
    loc[list(case.skipped)] = -1
    owned = torch.arange(case.tokens, device=draw.device) % case.owners == 0
    kv_pool = draw.pool(case.tokens + 3, case.width, used=loc[:0])
    rows = draw.normal(case.tokens, case.width, dtype=case.rows_dtype)
    return Inputs((rows, kv_pool), {"loc": loc, "owner_mask": None if case.owners == 1 else owned})


def cost(case: Case) -> Cost:
    num_elements = case.tokens * case.width
    return Cost(num_elements * (case.rows_dtype.itemsize + case.dtype.itemsize) + 8 * case.tokens, 0)
