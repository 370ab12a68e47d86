"""Cases of ``kv_gather``."""

from __future__ import annotations

import dataclasses

import torch

from sglang_k3.kernels.case_kit import BaseCase, Cost, Draw, Inputs

TOLERANCE = "bitwise"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(BaseCase):
    """``skipped`` names the entries whose slot is -1; ``owners`` counts the DCP ranks."""

    rows: int
    width: int
    skipped: tuple[int, ...] = ()
    owners: int = 1


BF16 = torch.bfloat16

CASES = (
    Case(rows=0, width=16, seed=1),
    Case(rows=1, width=1, seed=2),
    Case(rows=5, width=17, skipped=(0, 3), seed=3),
    Case(rows=7, width=24, owners=2, skipped=(6,), seed=4),
    Case(rows=3, width=24, skipped=(0, 1, 2), seed=5),
    Case(rows=5, width=576, dtype=BF16, owners=3, seed=6),
)


def make_inputs(case: Case, device: torch.device | str) -> Inputs:
    draw = Draw(case, device)
    loc = draw.distinct(case.rows, below=case.rows + 3)
    owned = torch.arange(case.rows, device=draw.device) % case.owners == 0
    loc[list(case.skipped)] = -1
    kv_pool = draw.pool(case.rows + 3, case.width, used=loc[owned & (loc >= 0)])
    return Inputs((kv_pool,), {"loc": loc, "owner_mask": None if case.owners == 1 else owned})


def cost(case: Case) -> Cost:
    return Cost(2 * case.rows * case.width * case.dtype.itemsize + 8 * case.rows, 0)
