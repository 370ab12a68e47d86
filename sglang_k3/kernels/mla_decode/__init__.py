"""Absorbed MLA (multi-head latent attention): one query per sequence over cached latent rows, with its log-sum-exp.

A cached row is ``[latent | shared key]``. The key half of the up projection is already multiplied into q, so that all
heads read the same rows, and the value of a row is its latent part:

    s_j = scale q . row_j;   out = sum_j softmax(s)_j row_j[:v_dim];   lse = log sum_j exp(s_j)     natural logarithm

A sequence that attends to nothing (a padding row, or a rank that owns none of it) has output 0 and lse -inf.

Numerics: RATIO; fp32 inside and out, but a kernel may round the weights of 16-bit values to their dtype before it
multiplies both, and FlashMLA rounds the output. By the Triton kernel a row does not depend on the batch around it
(BITWISE); by FlashMLA it does. No host synchronisation in the contract: a kernel can be captured in a CUDA graph, the
reference cannot.

Whoever binds the op and lists whole pages, each from its first row on, names their size as ``page`` (for FlashMLA).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_k3.kernels import OpContext, bind
from sglang_k3.kernels.checks import BOOL, FLOATS, INTEGERS, check_dtypes, check_shapes
from sglang_k3.kernels.dispatch import Impl, reference_impl
from sglang_k3.kernels.mla_decode import reference
from sglang_k3.kernels.mla_decode.flashmla import FLASHMLA
from sglang_k3.kernels.triton_support import supports_triton_up_to, triton_impl

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IMPLS", "mla_decode"]

IMPLS: tuple[Impl, ...] = (
    FLASHMLA,
    triton_impl(reference.mla_decode, supports_triton_up_to(D=576)),
    reference_impl(reference.mla_decode),
)


def mla_decode(
    q: Tensor,
    kv_pool: Tensor,
    *,
    kv_spans: Tensor,
    kv_indices: Tensor,
    max_len: int,
    scale: float,
    v_dim: int,
    owner_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend from each query to the rows listed for it.

    Args:
        q: absorbed queries ``[B, H, D]`` with ``D = latent + shared key``.
        kv_pool: cached rows ``[S, D]``, any strides.
        kv_spans: where the list of each sequence begins and ends in ``kv_indices``, ``[B, 2]``, int64. Lists may lie
            apart or overlap, so that a table with a row per request serves as it is.
        kv_indices: physical slots ``[N]``.
        max_len: no list is longer; a bound known without asking the device, from which memory is set aside.
        scale: multiplies the scores.
        v_dim: leading elements of a row that are its value.
        owner_mask: ``[N]``, bool; entries that are false are neither read nor attended (decode context parallel).
    Returns:
        Output ``[B, H, v_dim]`` and log-sum-exp ``[B, H]``, both fp32.
    Raises:
        ValueError: a shape or dtype does not fit, or ``v_dim`` exceeds a row.
    """
    op = "mla_decode"
    sizes = check_shapes(
        op,
        q=(q, "B H D"),
        kv_pool=(kv_pool, "S D"),
        kv_spans=(kv_spans, "B P"),
        kv_indices=(kv_indices, "N"),
        owner_mask=(kv_indices if owner_mask is None else owner_mask, "N"),
    )
    check_dtypes(op, FLOATS, q=q, kv_pool=kv_pool)
    check_dtypes(op, INTEGERS, kv_spans=kv_spans, kv_indices=kv_indices)
    check_dtypes(op, BOOL, owner_mask=owner_mask)
    if sizes["P"] != 2:
        raise ValueError(f"{op}: kv_spans has shape {tuple(kv_spans.shape)}, but [B, 2] is needed: begin and end.")
    if not 0 < v_dim <= sizes["D"]:
        raise ValueError(f"{op}: v_dim={v_dim} must be 1 to {sizes['D']}, the width of a row. Pass the latent rank.")
    fn = bind(op, OpContext(q.device, q.dtype, sizes))
    attended: tuple[Tensor, Tensor] = fn(
        q,
        kv_pool,
        kv_spans=kv_spans,
        kv_indices=kv_indices,
        max_len=max_len,
        scale=scale,
        v_dim=v_dim,
        owner_mask=owner_mask,
    )
    return attended
