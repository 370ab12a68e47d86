"""Output of KDA: RMSNorm over each head, then the sigmoid gate.

    out = o (mean(o^2) + eps)^(-1/2) weight * sigmoid(gate)

Numerics: ULP; fp32 throughout, one downcast at the end. Capturable in CUDA graphs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_k3.kernels import OpContext, bind
from sglang_k3.kernels.checks import FLOATS, FP32, check_dtypes, check_shapes
from sglang_k3.kernels.dispatch import Impl, reference_impl
from sglang_k3.kernels.gated_rms_norm import reference
from sglang_k3.kernels.triton_support import triton_impl

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IMPLS", "gated_rms_norm"]

IMPLS: tuple[Impl, ...] = (triton_impl(reference.gated_rms_norm), reference_impl(reference.gated_rms_norm))


def gated_rms_norm(o: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    """Normalise each head and gate it.

    Args:
        o: ``[T, H, V]``, any strides.
        gate: before its sigmoid, ``[T, H, V]``.
        weight: shared by all heads ``[V]``, fp32.
        eps: added to the mean square.
    Returns:
        ``[T, H, V]`` in the dtype of ``gate``.
    Raises:
        ValueError: a shape or dtype does not fit.
    """
    sizes = check_shapes("gated_rms_norm", o=(o, "T H V"), gate=(gate, "T H V"), weight=(weight, "V"))
    check_dtypes("gated_rms_norm", FLOATS, o=o, gate=gate)
    check_dtypes("gated_rms_norm", FP32, weight=weight)
    out: Tensor = bind("gated_rms_norm", OpContext(o.device, gate.dtype, sizes))(o, gate, weight, eps=eps)
    return out
