"""KDA (Kimi Delta Attention) over packed sequences, with the recurrent states updated in place.

The recurrence is that of ``kda_step``. q and k come as the convolution left them and are L2-normalised here.

Numerics: RATIO; fp32 inside, the output is rounded once. The state stays fp32 over the whole extend and is rounded to
the dtype of the pool where it is stored. Where none of q, k and v is fp32, a kernel may multiply with the precision of
bf16: then a state of fp32, too, is held to the tolerance of bf16, 5e-3 of its RMS.

On a CPU, with an fp32 pool, the reference gives the bits of ``kda_decode`` token by token (I6). Lengths and indices are
device tensors: a kernel can be captured in a CUDA graph, the reference reads them on the host and cannot.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from sglang_k3.kernels import OpContext, bind
from sglang_k3.kernels.checks import BOOL, FLOATS, FP32, INTEGERS, check_dtypes, check_shapes, check_together
from sglang_k3.kernels.dispatch import Impl, reference_impl
from sglang_k3.kernels.kda_prefill import reference
from sglang_k3.kernels.triton_support import supports_triton_up_to, triton_impl

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IMPLS", "kda_prefill"]

IMPLS: tuple[Impl, ...] = (
    triton_impl(reference.kda_prefill, supports_triton_up_to(K=128, V=128)),
    reference_impl(reference.kda_prefill),
)


def kda_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    ssm_states: Tensor,
    cu_seqlens: Tensor,
    cache_indices: Tensor,
    has_initial_state: Tensor,
    scale: float,
    lower_bound: float = -math.inf,
    track_lens: Tensor | None = None,
    track_indices: Tensor | None = None,
) -> Tensor:
    """Run each sequence from its state.

    Args:
        q, k: after the convolution, not normalised, ``[T, H, K]``.
        v: ``[T, H, V]``; V may differ from K.
        g: log decay ``[T, H, K]``, fp32, from ``kda_gate``.
        beta: write strength in (0, 1), ``[T, H]``, fp32 (after its sigmoid).
        ssm_states: pool ``[S, H, V, K]`` (V-major), fp32 or bf16, any strides; updated in place.
        cu_seqlens: where each extend begins in ``q``, ``[B + 1]``.
        cache_indices: slot of each sequence ``[B]``; -1 is a padding row: its output is zero, no slot is touched.
        has_initial_state: ``[B]``, bool; where false the state starts at zero and the old content is ignored.
        scale: multiplies the normalised q; ``K ** -0.5`` in K3.
        lower_bound: no element of g is lower, on the word of the caller; the closer, the fewer passes a kernel needs.
        track_lens: tokens of the extend after which to take a snapshot ``[B]``, ``0 <= n <= length``; -1 for none.
        track_indices: slot that receives the snapshot ``[B]``; never one that this call uses otherwise (I4).
    Returns:
        ``[T, H, V]`` in the dtype of ``v``.
    Raises:
        ValueError: a shape or dtype does not fit, or only one of the track arguments is given.
    """
    op = "kda_prefill"
    sizes = check_shapes(
        op,
        q=(q, "T H K"),
        k=(k, "T H K"),
        v=(v, "T H V"),
        g=(g, "T H K"),
        beta=(beta, "T H"),
        ssm_states=(ssm_states, "S H V K"),
        cache_indices=(cache_indices, "B"),
        cu_seqlens=(cu_seqlens, "B+1"),
        has_initial_state=(has_initial_state, "B"),
        track_lens=(cache_indices if track_lens is None else track_lens, "B"),
        track_indices=(cache_indices if track_indices is None else track_indices, "B"),
    )
    check_together(op, track_lens=track_lens, track_indices=track_indices)
    check_dtypes(op, FLOATS, q=q, k=k, v=v, ssm_states=ssm_states)
    check_dtypes(op, FP32, g=g, beta=beta)
    check_dtypes(op, BOOL, has_initial_state=has_initial_state)
    integers = {"track_lens": track_lens, "track_indices": track_indices}
    check_dtypes(op, INTEGERS, cu_seqlens=cu_seqlens, cache_indices=cache_indices, **integers)
    o: Tensor = bind(op, OpContext(q.device, q.dtype, sizes))(
        q,
        k,
        v,
        g,
        beta,
        ssm_states=ssm_states,
        cu_seqlens=cu_seqlens,
        cache_indices=cache_indices,
        has_initial_state=has_initial_state,
        scale=scale,
        lower_bound=lower_bound,
        track_lens=track_lens,
        track_indices=track_indices,
    )
    return o
