"""Reference of ``mxfp4_dequant``."""

from __future__ import annotations

import torch
from torch import Tensor

_GROUP_SIZE = 32
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mxfp4_dequant(packed: Tensor, scale: Tensor, *, dtype: torch.dtype) -> Tensor:
    values = torch.tensor(_MAGNITUDES + tuple(-m for m in _MAGNITUDES), device=packed.device)
    codes = torch.stack([packed & 0xF, packed >> 4], dim=-1).flatten(-2)  # low nibble first
    factors = _powers_of_two(scale).repeat_interleave(_GROUP_SIZE, dim=-1)
    return (values[codes.int()] * factors).to(dtype)


def _powers_of_two(scale: Tensor) -> Tensor:
    """``2 ** (code - 127)`` by its fp32 bits: the code is the exponent field, but for 0 (subnormal) and 255 (NaN)."""
    bits = scale.int() << 23
    bits = bits.masked_fill(scale == 0, 1 << 22).masked_fill(scale == 255, 0x7FC00000)
    return bits.view(torch.float32)
