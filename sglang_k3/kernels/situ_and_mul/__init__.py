"""SiTU activation of a gate, times the capped linear branch.

    SiTU(g, u) = [beta tanh(g / beta) sigmoid(g)] * [linear_beta tanh(u / linear_beta)]

The sigmoid takes the uncapped gate. Numerics: ULP; fp32 inside, one downcast. Capturable in CUDA graphs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_k3.kernels import OpContext, bind
from sglang_k3.kernels.checks import FLOATS, check_dtypes, check_shapes
from sglang_k3.kernels.dispatch import Impl, reference_impl
from sglang_k3.kernels.situ_and_mul import reference
from sglang_k3.kernels.triton_support import triton_impl

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IMPLS", "situ_and_mul"]

IMPLS: tuple[Impl, ...] = (triton_impl(reference.situ_and_mul), reference_impl(reference.situ_and_mul))


def situ_and_mul(gate_up: Tensor, *, beta: float, linear_beta: float | None) -> Tensor:
    """Activate the first half of each row and multiply it into the second.

    Args:
        gate_up: gate, then up, ``[T, 2I]``, any strides.
        beta: cap of the gate.
        linear_beta: cap of the up branch; ``None`` leaves it as it is.
    Returns:
        ``[T, I]`` in the dtype of ``gate_up``.
    Raises:
        ValueError: a shape or dtype does not fit.
    """
    sizes = check_shapes("situ_and_mul", gate_up=(gate_up, "T 2I"))
    check_dtypes("situ_and_mul", FLOATS, gate_up=gate_up)
    fn = bind("situ_and_mul", OpContext(gate_up.device, gate_up.dtype, sizes))
    out: Tensor = fn(gate_up, beta=beta, linear_beta=linear_beta)
    return out
