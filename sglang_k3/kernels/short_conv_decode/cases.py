"""Cases of ``short_conv_decode``."""

from __future__ import annotations

import dataclasses

import torch

from sglang_k3.kernels.case_kit import BaseCase, Cost, Draw, Inputs

TOLERANCE = "ratio"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(BaseCase):
    """``padding`` names the rows that are padding."""

    batch: int
    channels: int
    taps: int = 4
    padding: tuple[int, ...] = ()


CASES = tuple(
    Case(batch=batch, channels=channels, taps=taps, padding=padding, dtype=dtype, seed=seed)
    for dtype in (torch.float32, torch.bfloat16)
    for seed, (batch, channels, taps, padding) in enumerate(
        [(0, 8, 4, ()), (1, 1, 4, ()), (3, 33, 4, (1,)), (5, 64, 2, ()), (7, 63, 5, (0, 6)), (2, 48, 4, (0, 1))]
    )
)


def make_inputs(case: Case, device: torch.device | str) -> Inputs:
    draw = Draw(case, device)
    num_slots = case.batch + 3
    slots = draw.distinct(case.batch, below=num_slots, dtype=torch.int32)
    is_padding = torch.tensor([b in case.padding for b in range(case.batch)], dtype=torch.bool, device=draw.device)
    pool = draw.pool(num_slots, case.taps - 1, case.channels, used=slots[~is_padding])
    x = draw.normal(case.batch, case.channels)
    weight = draw.normal(case.taps, case.channels, dtype=torch.float32).T
    return Inputs((x, weight), {"conv_states": pool, "cache_indices": slots.masked_fill(is_padding, -1)})


def cost(case: Case) -> Cost:
    num_elements = case.batch * case.channels
    num_bytes = (2 + 2 * (case.taps - 1)) * num_elements * case.dtype.itemsize + 4 * case.channels * case.taps
    return Cost(num_bytes, num_elements * (2 * case.taps + 4))
