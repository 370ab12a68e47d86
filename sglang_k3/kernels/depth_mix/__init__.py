"""Attention residual: a softmax over depth, per token, of the bank rows and the running prefix sum.

    R   = bank rows in order, then prefix_sum + delta       [N + 1, D]
    e_i = sum_c R_ic (mean_c R_ic^2 + eps)^(-1/2) folded_weight_c
    out = sum_i softmax(e)_i R_i                             the rows themselves, not normalised

The last sub-layer's output is still to be added to the prefix when the next one mixes, so the op does that. What reads
a mix normalises it first, so the op can also do that: then ``out`` is ``rms_norm(out, norm_weight)``.

Numerics: RATIO; the new prefix is rounded as a sum of its own (bitwise), rows are widened to fp32, everything is fp32,
one downcast at the end. Normalised rows are never rounded. ``rms_norm`` takes the rounded mix and rounds as that op
does. Capturable in CUDA graphs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_k3.kernels import OpContext, bind
from sglang_k3.kernels.checks import FLOATS, FP32, check_dtypes, check_shapes
from sglang_k3.kernels.depth_mix import reference
from sglang_k3.kernels.dispatch import Impl, reference_impl
from sglang_k3.kernels.triton_support import triton_impl

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IMPLS", "depth_mix"]

IMPLS: tuple[Impl, ...] = (triton_impl(reference.depth_mix), reference_impl(reference.depth_mix))


def depth_mix(
    bank: Tensor,
    prefix_sum: Tensor,
    folded_weight: Tensor,
    *,
    eps: float,
    norm_weight: Tensor | None = None,
    delta: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Mix the rows of each token.

    Args:
        bank: frozen rows ``[N, T, D]``, any strides; ``N == 0`` mixes the prefix alone and so returns its values.
        prefix_sum: running sum since the last bank row ``[T, D]``.
        folded_weight: norm weight times projection vector ``[D]``, fp32.
        eps: added to the mean square of each row, and to that of the mix if it is normalised.
        norm_weight: ``[D]``, normalises the mix; converted to the dtype of ``prefix_sum``.
        delta: what is added to the prefix before it is mixed ``[T, D]``.
    Returns:
        The mix ``[T, D]`` in the dtype of ``prefix_sum``, never an alias of it; and the prefix that was mixed, which is
        ``prefix_sum`` itself without a ``delta``.
    Raises:
        ValueError: a shape or dtype does not fit.
    """
    sizes = check_shapes(
        "depth_mix",
        bank=(bank, "N T D"),
        prefix_sum=(prefix_sum, "T D"),
        folded_weight=(folded_weight, "D"),
        norm_weight=(folded_weight if norm_weight is None else norm_weight, "D"),
        delta=(prefix_sum if delta is None else delta, "T D"),
    )
    check_dtypes("depth_mix", FLOATS, prefix_sum=prefix_sum, norm_weight=norm_weight)
    check_dtypes("depth_mix", (prefix_sum.dtype,), bank=bank, delta=delta)
    check_dtypes("depth_mix", FP32, folded_weight=folded_weight)
    fn = bind("depth_mix", OpContext(prefix_sum.device, prefix_sum.dtype, sizes))
    mixed: tuple[Tensor, Tensor] = fn(bank, prefix_sum, folded_weight, eps=eps, norm_weight=norm_weight, delta=delta)
    return mixed
