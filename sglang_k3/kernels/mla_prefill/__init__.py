"""Explicit MLA (multi-head latent attention) over packed sequences: softmax attention with its log-sum-exp.

    s_ij = scale q_i . k_j;   out_i = sum_j softmax(s_i)_j v_j;   lse_i = log sum_j exp(s_ij)      natural logarithm

Of the channels of a key, the last may be the same for all heads and come apart (``k_shared``), so that nobody copies
them to each head. Causal masks are aligned at the end: query i of n sees key j of m if ``j <= m - n + i``. A query that
sees no key has output 0 and lse -inf. There are no positions.

Numerics: RATIO; fp32 inside and out, but a kernel may round the weights of 16-bit values to their dtype before it
multiplies both. The reference reads the lengths on the host, so it cannot be captured in a CUDA
graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_k3.kernels import OpContext, bind
from sglang_k3.kernels.checks import FLOATS, INTEGERS, check_dtypes, check_shapes
from sglang_k3.kernels.dispatch import Impl, reference_impl
from sglang_k3.kernels.mla_prefill import reference
from sglang_k3.kernels.triton_support import supports_triton_up_to, triton_impl

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IMPLS", "mla_prefill"]


def _supports(ctx: OpContext) -> str | None:
    """A tile holds the channels of a head, and those of all heads beside them or, without these, the end of its own."""
    own = 128 if ctx.sizes.get("R", 0) else 192
    return supports_triton_up_to(K=own, R=64, V=128)(ctx)


IMPLS: tuple[Impl, ...] = (
    triton_impl(reference.mla_prefill, _supports),
    reference_impl(reference.mla_prefill),
)


def mla_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    k_shared: Tensor | None = None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    scale: float,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Attend inside each sequence.

    Args:
        q: ``[T, H, K + R]``, any strides.
        k: ``[N, H, K]``.
        v: ``[N, H, V]``; V may differ from K.
        k_shared: what follows ``k`` for all heads, ``[N, R]``; R is 0 without it.
        cu_seqlens_q: where the queries of each sequence begin ``[B + 1]``.
        cu_seqlens_k: where its keys begin ``[B + 1]``.
        scale: multiplies the scores.
        causal: whether the mask applies.
    Returns:
        Output ``[T, H, V]`` and log-sum-exp ``[T, H]``, both fp32.
    Raises:
        ValueError: a shape or dtype does not fit.
    """
    op = "mla_prefill"
    shared = k.new_empty(*k.shape[:1], 0) if k_shared is None else k_shared
    sizes = check_shapes(
        op,
        q=(q, "T H Q"),
        k=(k, "N H K"),
        k_shared=(shared, "N R"),
        v=(v, "N H V"),
        cu_seqlens_q=(cu_seqlens_q, "B+1"),
        cu_seqlens_k=(cu_seqlens_k, "B+1"),
    )
    if sizes["Q"] != sizes["K"] + sizes["R"]:
        raise ValueError(
            f"{op}: q has {sizes['Q']} channels, but K={sizes['K']} of k and R={sizes['R']} of k_shared make "
            f"{sizes['K'] + sizes['R']}. Pass queries and keys of the same channels."
        )
    check_dtypes(op, FLOATS, q=q, k=k, v=v, k_shared=shared)
    check_dtypes(op, INTEGERS, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)
    fn = bind(op, OpContext(q.device, q.dtype, sizes))
    if not sizes["R"]:
        k_shared = None
    attended: tuple[Tensor, Tensor] = fn(
        q, k, v, k_shared=k_shared, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, scale=scale, causal=causal
    )
    return attended
