"""Cases of ``state_copy``."""

from __future__ import annotations

import dataclasses

import torch

from sglang_k3.kernels.case_kit import BaseCase, Cost, Draw, Inputs

TOLERANCE = "bitwise"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(BaseCase):
    """``skipped_src`` and ``skipped_dst`` name the copies whose source or target is -1."""

    layers: int
    copies: int
    shape: tuple[int, ...]
    skipped_src: tuple[int, ...] = ()
    skipped_dst: tuple[int, ...] = ()


BF16 = torch.bfloat16

CASES = (
    Case(layers=1, copies=0, shape=(3, 8), seed=1),
    Case(layers=1, copies=1, shape=(1,), seed=2),
    Case(layers=3, copies=4, shape=(2, 5, 7), skipped_src=(1,), skipped_dst=(2,), seed=3),
    Case(layers=2, copies=2, shape=(3, 33), skipped_src=(0, 1), seed=4),
    Case(layers=2, copies=3, shape=(3, 48), dtype=BF16, skipped_dst=(0,), seed=5),
    Case(layers=2, copies=2, shape=(2, 128, 128), seed=6),
)


def make_inputs(case: Case, device: torch.device | str) -> Inputs:
    """A pool whose layers lie inside each slot, as in one byte pool; slots that are no source are NaN."""
    draw = Draw(case, device)
    num_slots = 2 * case.copies + 2
    slots = draw.distinct(2 * case.copies, below=num_slots, dtype=torch.int32)
    src_indices, dst_indices = slots[: case.copies], slots[case.copies :]
    states = draw.pool(num_slots, case.layers, *case.shape, used=src_indices).transpose(0, 1)
    src_indices[list(case.skipped_src)] = -1
    dst_indices[list(case.skipped_dst)] = -1
    return Inputs((states,), {"src_indices": src_indices, "dst_indices": dst_indices})


def cost(case: Case) -> Cost:
    return Cost(2 * case.copies * case.layers * torch.Size(case.shape).numel() * case.dtype.itemsize, 0)
