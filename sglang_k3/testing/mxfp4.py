"""MXFP4 (E2M1 values, one E8M0 scale per 32 columns): the packed layout of K3's routed experts, by table.

A byte holds two columns, the even one in its low nibble. Bit 3 of a nibble is the sign, bits 2..0 index
``MAGNITUDES``. Column ``c`` of a row is scaled by ``2^(scale[c // 32] - 127)``; scale code 255 is NaN.

Encoding is the OCP MX rule: the scale exponent is ``floor(log2(amax)) - 2``, values are rounded to the nearest
magnitude (ties to the even code) and saturate at 6.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP_SIZE = 32
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SCALE_BIAS = 127
MAX_SCALE_CODE = 254
LARGEST_MAGNITUDE_EXPONENT = 2  # 6 = 1.5 * 2^2

# Midpoints of neighbouring magnitudes, by whether the tie belongs to the lower or to the upper (even) code.
_TIES_DOWN = (0.25, 1.25, 2.5, 5.0)
_TIES_UP = (0.75, 1.75, 3.5)


def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise ``[..., R, C]`` (any float dtype) to packed ``[..., R, C/2]`` and scale ``[..., R, C/32]``, both uint8.

    Raises:
        ValueError: C is not a multiple of 32, or a value is not finite.
    """
    columns = weight.shape[-1]
    if columns % GROUP_SIZE:
        raise ValueError(
            f"MXFP4 needs a multiple of {GROUP_SIZE} columns, got {columns} in shape {tuple(weight.shape)}: "
            f"pad the input dimension to {-(-columns // GROUP_SIZE) * GROUP_SIZE}."
        )
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("MXFP4 cannot hold inf or NaN: clean the weight before encoding it.")
    groups = weight.double().unflatten(-1, (columns // GROUP_SIZE, GROUP_SIZE))
    # frexp writes amax as m * 2^e with m in [0.5, 1), so floor(log2(amax)) = e - 1, exactly.
    exponent = torch.frexp(groups.abs().amax(dim=-1)).exponent - 1 - LARGEST_MAGNITUDE_EXPONENT
    scale = (exponent + SCALE_BIAS).clamp(0, MAX_SCALE_CODE).to(torch.uint8)
    scaled = (groups / _scale_factors(scale)[..., None]).flatten(-2)
    magnitude = scaled.abs()[..., None]
    code = (magnitude > scaled.new_tensor(_TIES_DOWN)).sum(-1) + (magnitude >= scaled.new_tensor(_TIES_UP)).sum(-1)
    nibble = (code + 8 * torch.signbit(scaled)).to(torch.uint8)
    return nibble[..., 0::2] | (nibble[..., 1::2] << 4), scale


def decode(packed: Tensor, scale: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
    """Decode packed ``[..., R, C/2]`` with scale ``[..., R, C/32]`` (uint8) to ``[..., R, C]``; inverse of ``encode``.

    Raises:
        ValueError: the two shapes do not belong together.
    """
    if packed.shape[-1] * 2 != scale.shape[-1] * GROUP_SIZE or packed.shape[:-1] != scale.shape[:-1]:
        raise ValueError(
            f"packed {tuple(packed.shape)} and scale {tuple(scale.shape)} do not belong together: one scale byte "
            f"covers {GROUP_SIZE // 2} packed bytes of the same row."
        )
    values = torch.tensor(MAGNITUDES + tuple(-m for m in MAGNITUDES), dtype=torch.float64)
    nibbles = torch.stack([packed & 0x0F, packed >> 4], dim=-1).flatten(-2)
    groups: Tensor = values[nibbles.long()].unflatten(-1, (scale.shape[-1], GROUP_SIZE))
    decoded: Tensor = groups * _scale_factors(scale)[..., None]
    return decoded.flatten(-2).to(dtype)


def _scale_factors(scale: Tensor) -> Tensor:
    """E8M0 codes to float64 factors; exact, including the codes below the smallest normal of float32."""
    table = [2.0 ** (code - SCALE_BIAS) for code in range(MAX_SCALE_CODE + 1)] + [float("nan")]
    return torch.tensor(table, dtype=torch.float64)[scale.long()]
