"""Cases of ``short_conv_prefill``."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import torch

from sglang_k3.kernels.case_kit import BaseCase, Cost, Draw, Inputs, cu_seqlens

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = "ratio"
BF16 = torch.bfloat16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(BaseCase):
    """``lens``: one extend per sequence; ``padding``, ``fresh``: which of them are padding, or have no state yet."""

    lens: tuple[int, ...]
    channels: int
    taps: int = 4
    padding: tuple[int, ...] = ()
    fresh: tuple[int, ...] = ()
    track: bool = True


CASES = tuple(
    Case(lens=lens, channels=channels, taps=taps, padding=padding, fresh=fresh, track=track, dtype=dtype, seed=seed)
    for dtype in (torch.float32, BF16)
    for seed, (lens, channels, taps, padding, fresh, track) in enumerate(
        [
            ((1,), 1, 4, (), (), False),
            ((5, 2, 1), 6, 4, (), (1,), True),
            ((0, 3, 0, 7), 33, 4, (), (0, 3), True),
            ((4, 0, 2, 8), 64, 4, (1, 2), (0, 2), True),
            ((16, 17), 63, 2, (), (0,), True),
            ((3, 64, 1), 48, 5, (0,), (), True),
            ((40, 3, 37), 130, 4, (), (2,), True),
        ]
    )
) + (Case(lens=(52,), channels=1030, seed=20), Case(lens=(52, 9), channels=1030, padding=(1,), dtype=BF16, seed=21))


def make_inputs(case: Case, device: torch.device | str) -> Inputs:
    draw = Draw(case, device)
    num_seqs = len(case.lens)
    num_slots = 2 * num_seqs + 2
    slots = draw.distinct(2 * num_seqs, below=num_slots, dtype=torch.int32)
    working, targets = slots[:num_seqs], slots[num_seqs:]
    has_initial_state = torch.tensor([b not in case.fresh for b in range(num_seqs)], device=draw.device)
    is_padding = torch.tensor([b in case.padding for b in range(num_seqs)], device=draw.device)
    used = working[has_initial_state & ~is_padding]
    kwargs = {
        "conv_states": draw.pool(num_slots, case.taps - 1, case.channels, used=used),
        "cu_seqlens": cu_seqlens(case.lens, draw.device),
        "cache_indices": working.masked_fill(is_padding, -1),
        "has_initial_state": has_initial_state,
        "track_lens": draw_track_lens(draw, case.lens) if case.track else None,
        "track_indices": targets if case.track else None,
    }
    x = draw.normal(sum(case.lens), case.channels)
    return Inputs((x, draw.normal(case.taps, case.channels, dtype=torch.float32).T), kwargs)


def draw_track_lens(draw: Draw, lens: tuple[int, ...]) -> Tensor:
    """For each sequence -1 (no snapshot) or a depth from 0 to its length."""
    return torch.tensor([int(draw.integers(1, low=-1, high=n + 1)) for n in lens], device=draw.device)


def cost(case: Case) -> Cost:
    num_elements = sum(case.lens) * case.channels
    state_elements = len(case.lens) * (case.taps - 1) * case.channels
    num_bytes = (2 * num_elements + 2 * state_elements) * case.dtype.itemsize + 4 * case.channels * case.taps
    return Cost(num_bytes, num_elements * (2 * case.taps + 4))
