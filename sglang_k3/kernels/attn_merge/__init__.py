"""Merge two attentions of the same queries over disjoint keys.

    lse = log(exp(lse_a) + exp(lse_b));   out = exp(lse_a - lse) out_a + exp(lse_b - lse) out_b

A part with lse -inf saw no key: its output is not looked at, and the other part is returned bit for bit. Two such parts
give output 0 and lse -inf.

Numerics: RATIO; all fp32. Capturable in CUDA graphs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_k3.kernels import OpContext, bind
from sglang_k3.kernels.attn_merge import reference
from sglang_k3.kernels.checks import FP32, check_dtypes, check_shapes
from sglang_k3.kernels.dispatch import Impl, reference_impl
from sglang_k3.kernels.triton_support import triton_impl

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IMPLS", "attn_merge"]

IMPLS: tuple[Impl, ...] = (triton_impl(reference.attn_merge), reference_impl(reference.attn_merge))


def attn_merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Merge part a and part b.

    Args:
        out_a, out_b: outputs ``[T, H, V]``, fp32.
        lse_a, lse_b: natural log-sum-exp ``[T, H]``, fp32.
    Returns:
        Output ``[T, H, V]`` and log-sum-exp ``[T, H]``, both fp32.
    Raises:
        ValueError: a shape or dtype does not fit.
    """
    sizes = check_shapes(
        "attn_merge",
        out_a=(out_a, "T H V"),
        lse_a=(lse_a, "T H"),
        out_b=(out_b, "T H V"),
        lse_b=(lse_b, "T H"),
    )
    check_dtypes("attn_merge", FP32, out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    fn = bind("attn_merge", OpContext(out_a.device, out_a.dtype, sizes))
    merged: tuple[Tensor, Tensor] = fn(out_a, lse_a, out_b, lse_b)
    return merged
