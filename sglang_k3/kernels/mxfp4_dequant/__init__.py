"""Decode MXFP4: E2M1 elements in groups of 32 along the last dimension, each group with an E8M0 scale.

Byte ``j`` holds column ``2j`` in its low nibble and ``2j + 1`` in its high one. Bit 3 of a nibble is the sign, bits 0-2
index the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6. The scale code ``e`` of a group means ``2 ** (e - 127)``; 255 is NaN.

Numerics: BITWISE. Every value is exact in fp32 and bf16, subnormals (codes 0 and 1) included; what exceeds the dtype
becomes infinite. In fp16 values are rounded once. Capturable in CUDA graphs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_k3.kernels import OpContext, bind
from sglang_k3.kernels.checks import BYTES, FLOATS, check_dtypes, check_shapes
from sglang_k3.kernels.dispatch import Impl, reference_impl
from sglang_k3.kernels.mxfp4_dequant import reference
from sglang_k3.kernels.triton_support import triton_impl

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["IMPLS", "mxfp4_dequant"]

IMPLS: tuple[Impl, ...] = (triton_impl(reference.mxfp4_dequant), reference_impl(reference.mxfp4_dequant))


def mxfp4_dequant(packed: Tensor, scale: Tensor, *, dtype: torch.dtype) -> Tensor:
    """Decode a weight.

    Args:
        packed: ``[..., R, C / 2]``, uint8.
        scale: ``[..., R, C / 32]``, uint8.
        dtype: of the result: fp32, bf16 or fp16.
    Returns:
        ``[..., R, C]``.
    Raises:
        ValueError: a shape or dtype does not fit, or C is no multiple of 32.
    """
    op = "mxfp4_dequant"
    sizes = check_shapes(op, scale=(scale, "... R C/32"), packed=(packed, "... R C/2"))
    if packed.shape[:-2] != scale.shape[:-2]:
        raise ValueError(
            f"{op}: packed has shape {tuple(packed.shape)} and scale {tuple(scale.shape)}; all dimensions but the last "
            "must agree. Slice both alike."
        )
    check_dtypes(op, BYTES, packed=packed, scale=scale)
    if dtype not in FLOATS:
        raise ValueError(f"{op}: cannot decode to {dtype}; use float32, bfloat16 or float16.")
    out: Tensor = bind(op, OpContext(packed.device, dtype, sizes))(packed, scale, dtype=dtype)
    return out
