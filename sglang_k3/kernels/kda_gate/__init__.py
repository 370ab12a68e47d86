"""The gates of KDA (Kimi Delta Attention): the bounded decay, per head and key channel, and what a head writes.

    g    = lower_bound * sigmoid( exp(A_log[h]) * (a + dt_bias[h, c]) )      lower_bound < g < 0, the log of the decay
    beta = sigmoid(b)                                                        the write strength

Numerics: RATIO; everything in fp32. Capturable in CUDA graphs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_k3.kernels import OpContext, bind
from sglang_k3.kernels.checks import FLOATS, FP32, check_dtypes, check_shapes
from sglang_k3.kernels.dispatch import Impl, reference_impl
from sglang_k3.kernels.kda_gate import reference
from sglang_k3.kernels.triton_support import triton_impl

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IMPLS", "kda_gate"]

IMPLS: tuple[Impl, ...] = (triton_impl(reference.kda_gate), reference_impl(reference.kda_gate))


def kda_gate(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, *, lower_bound: float) -> tuple[Tensor, Tensor]:
    """Turn the projected gates into log decay and write strength.

    Args:
        a: projection of the decay ``[T, H, K]``, any strides.
        b: projection of the write strength ``[T, H]``.
        A_log: ``[H]``, fp32.
        dt_bias: ``[H, K]``, fp32.
        lower_bound: smallest log decay, negative.
    Returns:
        ``g [T, H, K]`` and ``beta [T, H]``, fp32.
    Raises:
        ValueError: a shape or dtype does not fit, or ``lower_bound`` is not negative.
    """
    if lower_bound >= 0:
        raise ValueError(f"kda_gate: lower_bound={lower_bound} must be negative, else states grow. K3 uses -5.0.")
    sizes = check_shapes("kda_gate", a=(a, "T H K"), b=(b, "T H"), A_log=(A_log, "H"), dt_bias=(dt_bias, "H K"))
    check_dtypes("kda_gate", FLOATS, a=a, b=b)
    check_dtypes("kda_gate", FP32, A_log=A_log, dt_bias=dt_bias)
    fn = bind("kda_gate", OpContext(a.device, a.dtype, sizes))
    gates: tuple[Tensor, Tensor] = fn(a, b, A_log, dt_bias, lower_bound=lower_bound)
    return gates
