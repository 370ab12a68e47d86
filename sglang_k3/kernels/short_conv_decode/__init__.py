"""One token per sequence through the causal depth-wise convolution and SiLU, conv states updated in place.

The equation is that of ``short_conv_prefill``; the state then drops its oldest input and takes the new one.

Numerics: RATIO; fp32 inside, taps added oldest first, one downcast. No host synchronisation in the contract: a kernel
can be captured in a CUDA graph, the reference cannot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_k3.kernels import OpContext, bind
from sglang_k3.kernels.checks import FLOATS, FP32, INTEGERS, check_dtypes, check_shapes
from sglang_k3.kernels.dispatch import Impl, reference_impl
from sglang_k3.kernels.short_conv_decode import reference
from sglang_k3.kernels.triton_support import triton_impl

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IMPLS", "short_conv_decode"]

IMPLS: tuple[Impl, ...] = (triton_impl(reference.short_conv_decode), reference_impl(reference.short_conv_decode))


def short_conv_decode(x: Tensor, weight: Tensor, *, conv_states: Tensor, cache_indices: Tensor) -> Tensor:
    """Convolve one token of each sequence.

    Args:
        x: inputs ``[B, C]``.
        weight: taps ``[C, W]``, fp32; the last one meets the current token.
        conv_states: pool ``[S, W - 1, C]``, any strides; updated in place.
        cache_indices: slot of each sequence ``[B]``; -1 is a padding row: its output is zero, no slot is touched.
    Returns:
        ``[B, C]`` in the dtype of ``x``.
    Raises:
        ValueError: a shape or dtype does not fit.
    """
    op = "short_conv_decode"
    sizes = check_shapes(
        op,
        x=(x, "B C"),
        weight=(weight, "C W"),
        conv_states=(conv_states, "S W-1 C"),
        cache_indices=(cache_indices, "B"),
    )
    check_dtypes(op, FLOATS, x=x, conv_states=conv_states)
    check_dtypes(op, FP32, weight=weight)
    check_dtypes(op, INTEGERS, cache_indices=cache_indices)
    fn = bind(op, OpContext(x.device, x.dtype, sizes))
    y: Tensor = fn(x, weight, conv_states=conv_states, cache_indices=cache_indices)
    return y
