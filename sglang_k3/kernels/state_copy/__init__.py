"""Copy state slots inside a pool, for all layers at once, in place: ``states[:, dst] = states[:, src]``.

This is the one way that a restore, a snapshot or a move touches bytes; it runs on the forward stream (I4).

Numerics: BITWISE. No host synchronisation in the contract: a kernel can be captured in a CUDA graph, the reference
cannot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_k3.kernels import OpContext, bind
from sglang_k3.kernels.checks import INTEGERS, check_dtypes, check_shapes
from sglang_k3.kernels.dispatch import Impl, reference_impl
from sglang_k3.kernels.state_copy import reference
from sglang_k3.kernels.triton_support import triton_impl

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IMPLS", "state_copy"]

IMPLS: tuple[Impl, ...] = (triton_impl(reference.state_copy), reference_impl(reference.state_copy))


def state_copy(states: Tensor, *, src_indices: Tensor, dst_indices: Tensor) -> None:
    """Copy slot ``src_indices[b]`` to slot ``dst_indices[b]`` for each b where neither is negative.

    Args:
        states: pool ``[Lyr, S, ...]``, any dtype and strides; updated in place.
        src_indices: ``[B]``; may repeat.
        dst_indices: ``[B]``; distinct from each other and from every source (I4).
    Raises:
        ValueError: a shape or dtype does not fit.
    """
    if states.ndim < 3:
        raise ValueError(
            f"state_copy: states has shape {tuple(states.shape)}, but [layers, slots, ...] is needed. "
            "Add a dimension of one layer with .unsqueeze(0)."
        )
    sizes = check_shapes("state_copy", src_indices=(src_indices, "B"), dst_indices=(dst_indices, "B"))
    check_dtypes("state_copy", INTEGERS, src_indices=src_indices, dst_indices=dst_indices)
    fn = bind("state_copy", OpContext(states.device, states.dtype, sizes))
    fn(states, src_indices=src_indices, dst_indices=dst_indices)
