"""Output gate of MLA: ``o * sigmoid(gate)``.

Numerics: ULP; the sigmoid is computed in fp32 and rounded, the product is rounded again (both roundings are part of the
definition). Capturable in CUDA graphs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_k3.kernels import OpContext, bind
from sglang_k3.kernels.checks import FLOATS, check_dtypes
from sglang_k3.kernels.dispatch import Impl, reference_impl
from sglang_k3.kernels.sigmoid_gate import reference
from sglang_k3.kernels.triton_support import triton_impl

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IMPLS", "sigmoid_gate"]

IMPLS: tuple[Impl, ...] = (triton_impl(reference.sigmoid_gate), reference_impl(reference.sigmoid_gate))


def sigmoid_gate(o: Tensor, gate: Tensor) -> Tensor:
    """Gate element by element.

    Args:
        o: any shape and strides.
        gate: before its sigmoid, of the shape and dtype of ``o``.
    Returns:
        A tensor like ``o``.
    Raises:
        ValueError: shapes or dtypes differ.
    """
    if o.shape != gate.shape:
        raise ValueError(
            f"sigmoid_gate: gate has shape {tuple(gate.shape)}, but {tuple(o.shape)}, that of o, is needed."
        )
    check_dtypes("sigmoid_gate", FLOATS, o=o)
    check_dtypes("sigmoid_gate", (o.dtype,), gate=gate)
    out: Tensor = bind("sigmoid_gate", OpContext(o.device, o.dtype))(o, gate)
    return out
