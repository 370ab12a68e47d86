"""How the Triton kernel wants packed weights to lie: the same bits, moved about within each pair of words of a row.

The decode makes two bf16 at a time, of the same column in either word. Their bits therefore share a word: the low
halves of both words make the first, the high halves the second. In each half, its four values lie where few steps bring
a sign to bit 15 and a magnitude to bits 8 to 6, which are those of a bf16 (see ``DECODE_PTX``).

Rows and experts stay where they are, so that a slice that cuts no group of 32 values may be moved by itself.
"""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

from sglang_k3.kernels.dispatch import Layout

# Where a half keeps the bits of its four values, each from the lowest of the magnitude to the sign.
PLACES = ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (13, 10, 11, 14))


def _move(weight: Tensor, *, back: bool) -> None:
    if weight.dtype != torch.uint8:
        return  # plain weights lie as they are published
    table = _moved_halves(weight.device, back)
    for matrix in weight.unbind() if weight.ndim > 2 else (weight,):  # what this needs in memory is little
        halves = matrix.view(torch.int16)
        moved = table[halves.int().bitwise_and_(0xFFFF)]
        halves.unflatten(-1, (-1, 2, 2)).copy_(moved.unflatten(-1, (-1, 2, 2)).transpose(-1, -2))


@functools.lru_cache(maxsize=16)
def _moved_halves(device: torch.device, back: bool) -> Tensor:
    """What becomes of each of the 2^16 halves."""
    halves = torch.arange(2**16, dtype=torch.int32, device=device)
    moved = torch.zeros_like(halves)
    for bit, place in enumerate(itertools.chain(*PLACES)):
        source, destination = (place, bit) if back else (bit, place)
        moved |= (halves >> source & 1) << destination
    return moved.short()


PAIRED_WORDS = Layout(("w13", "w2"), functools.partial(_move, back=False), functools.partial(_move, back=True))
