"""Causal depth-wise convolution and SiLU over packed sequences, with the conv states updated in place.

    y_t[c] = SiLU( sum_tau weight[c, tau] x_{t - (W - 1) + tau}[c] )       the last tap meets the current token

Inputs before the start of an extend come from its conv state (the last ``W - 1`` inputs, oldest first), or are zero.
After the call the state of a sequence holds the last ``W - 1`` inputs of state and extend together, also where the
extend is shorter than that. An extend of no tokens leaves what it started from, zeros included.

Numerics: RATIO; fp32 inside, taps added oldest first, one downcast. Lengths and indices are device tensors; the
reference reads them on the host, so it cannot be captured in a CUDA graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_k3.kernels import OpContext, bind
from sglang_k3.kernels.checks import BOOL, FLOATS, FP32, INTEGERS, check_dtypes, check_shapes, check_together
from sglang_k3.kernels.dispatch import Impl, reference_impl
from sglang_k3.kernels.short_conv_prefill import reference
from sglang_k3.kernels.triton_support import triton_impl

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IMPLS", "short_conv_prefill"]

IMPLS: tuple[Impl, ...] = (triton_impl(reference.short_conv_prefill), reference_impl(reference.short_conv_prefill))


def short_conv_prefill(
    x: Tensor,
    weight: Tensor,
    *,
    conv_states: Tensor,
    cu_seqlens: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor,
    track_lens: Tensor | None = None,
    track_indices: Tensor | None = None,
) -> Tensor:
    """Convolve each sequence.

    Args:
        x: inputs ``[T, C]``.
        weight: taps ``[C, W]``, fp32; the last one meets the current token.
        conv_states: pool ``[S, W - 1, C]``, any strides; updated in place.
        cu_seqlens: where each extend begins in ``x``, ``[B + 1]``.
        cache_indices: slot of each sequence ``[B]``; -1 is a padding row: its output is zero, no slot is touched.
        has_initial_state: ``[B]``, bool; where false the history is zero and the old content of the slot is ignored.
        track_lens: tokens of the extend after which to take a snapshot ``[B]``, ``0 <= n <= length``; -1 for none.
        track_indices: slot that receives the snapshot ``[B]``; never one that this call uses otherwise (I4).
    Returns:
        ``[T, C]`` in the dtype of ``x``.
    Raises:
        ValueError: a shape or dtype does not fit, or only one of the track arguments is given.
    """
    op = "short_conv_prefill"
    sizes = check_shapes(
        op,
        x=(x, "T C"),
        weight=(weight, "C W"),
        conv_states=(conv_states, "S W-1 C"),
        cache_indices=(cache_indices, "B"),
        cu_seqlens=(cu_seqlens, "B+1"),
        has_initial_state=(has_initial_state, "B"),
        track_lens=(cache_indices if track_lens is None else track_lens, "B"),
        track_indices=(cache_indices if track_indices is None else track_indices, "B"),
    )
    check_together(op, track_lens=track_lens, track_indices=track_indices)
    check_dtypes(op, FLOATS, x=x, conv_states=conv_states)
    check_dtypes(op, FP32, weight=weight)
    check_dtypes(op, BOOL, has_initial_state=has_initial_state)
    integers = {"track_lens": track_lens, "track_indices": track_indices}
    check_dtypes(op, INTEGERS, cu_seqlens=cu_seqlens, cache_indices=cache_indices, **integers)
    y: Tensor = bind(op, OpContext(x.device, x.dtype, sizes))(
        x,
        weight,
        conv_states=conv_states,
        cu_seqlens=cu_seqlens,
        cache_indices=cache_indices,
        has_initial_state=has_initial_state,
        track_lens=track_lens,
        track_indices=track_indices,
    )
    return y
