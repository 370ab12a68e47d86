"""One token per sequence through KDA (Kimi Delta Attention), recurrent states updated in place.

The recurrence is that of ``kda_step``, the same function that ``kda_prefill`` calls (I6).

Numerics: RATIO; fp32 inside. The state is rounded once, where it is stored; the output is read from the unrounded state
and rounded once. A row does not depend on the batch around it (BITWISE). No host synchronisation in the contract: a
kernel can be captured in a CUDA graph, the reference cannot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_k3.kernels import OpContext, bind
from sglang_k3.kernels.checks import FLOATS, FP32, INTEGERS, check_dtypes, check_shapes
from sglang_k3.kernels.dispatch import Impl, reference_impl
from sglang_k3.kernels.kda_decode import reference
from sglang_k3.kernels.triton_support import supports_triton_up_to, triton_impl

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IMPLS", "kda_decode"]

IMPLS: tuple[Impl, ...] = (
    triton_impl(reference.kda_decode, supports_triton_up_to(K=128, V=128)),
    reference_impl(reference.kda_decode),
)


def kda_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    ssm_states: Tensor,
    cache_indices: Tensor,
    scale: float,
) -> Tensor:
    """Advance each sequence by one token.

    Args:
        q, k: after the convolution, not normalised, ``[B, H, K]``.
        v: ``[B, H, V]``; V may differ from K.
        g: log decay ``[B, H, K]``, fp32, from ``kda_gate``.
        beta: write strength in (0, 1), ``[B, H]``, fp32 (after its sigmoid).
        ssm_states: pool ``[S, H, V, K]`` (V-major), fp32 or bf16, any strides; updated in place.
        cache_indices: slot of each sequence ``[B]``; -1 is a padding row: its output is zero, no slot is touched.
        scale: multiplies the normalised q; ``K ** -0.5`` in K3.
    Returns:
        ``[B, H, V]`` in the dtype of ``v``.
    Raises:
        ValueError: a shape or dtype does not fit.
    """
    op = "kda_decode"
    sizes = check_shapes(
        op,
        q=(q, "B H K"),
        k=(k, "B H K"),
        v=(v, "B H V"),
        g=(g, "B H K"),
        beta=(beta, "B H"),
        ssm_states=(ssm_states, "S H V K"),
        cache_indices=(cache_indices, "B"),
    )
    check_dtypes(op, FLOATS, q=q, k=k, v=v, ssm_states=ssm_states)
    check_dtypes(op, FP32, g=g, beta=beta)
    check_dtypes(op, INTEGERS, cache_indices=cache_indices)
    fn = bind(op, OpContext(q.device, q.dtype, sizes))
    o: Tensor = fn(q, k, v, g, beta, ssm_states=ssm_states, cache_indices=cache_indices, scale=scale)
    return o
