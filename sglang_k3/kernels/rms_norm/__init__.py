"""RMSNorm with a learned weight: ``weight * round(x * (mean(x^2) + eps)^(-1/2))``.

Numerics: ULP. Statistics and scaling in fp32, rounded to the dtype of ``x``, then multiplied by the weight in that
dtype (two roundings). A kernel may multiply in fp32 and round once, which is within the class. Capturable in CUDA
graphs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_k3.kernels import OpContext, bind
from sglang_k3.kernels.checks import FLOATS, check_dtypes, check_shapes
from sglang_k3.kernels.dispatch import Impl, reference_impl
from sglang_k3.kernels.rms_norm import reference
from sglang_k3.kernels.triton_support import triton_impl

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IMPLS", "rms_norm"]

IMPLS: tuple[Impl, ...] = (triton_impl(reference.rms_norm), reference_impl(reference.rms_norm))


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Normalise the last dimension.

    Args:
        x: ``[..., D]``, any strides.
        weight: ``[D]``; converted to the dtype of ``x``.
        eps: added to the mean square.
    Returns:
        ``[..., D]`` in the dtype of ``x``.
    Raises:
        ValueError: a shape or dtype does not fit.
    """
    sizes = check_shapes("rms_norm", x=(x, "... D"), weight=(weight, "D"))
    check_dtypes("rms_norm", FLOATS, x=x, weight=weight)
    out: Tensor = bind("rms_norm", OpContext(x.device, x.dtype, sizes))(x, weight, eps=eps)
    return out
