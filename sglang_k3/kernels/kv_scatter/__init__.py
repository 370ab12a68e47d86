"""Write rows into the KV pool, in place: ``kv_pool[loc[t]] = rows[t]``.

Numerics: BITWISE equal to a cast to the dtype of the pool. No host synchronisation in the contract: a kernel can be
captured in a CUDA graph, the reference cannot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_k3.kernels import OpContext, bind
from sglang_k3.kernels.checks import BOOL, FLOATS, INTEGERS, check_dtypes, check_shapes
from sglang_k3.kernels.dispatch import Impl, reference_impl
from sglang_k3.kernels.kv_scatter import reference
from sglang_k3.kernels.triton_support import triton_impl

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IMPLS", "kv_scatter"]

IMPLS: tuple[Impl, ...] = (triton_impl(reference.kv_scatter), reference_impl(reference.kv_scatter))


def kv_scatter(rows: Tensor, kv_pool: Tensor, *, loc: Tensor, owner_mask: Tensor | None = None) -> None:
    """Store one row per token.

    Args:
        rows: ``[T, D]``.
        kv_pool: ``[S, D]``, any strides; updated in place.
        loc: physical slot of each row ``[T]``, int64; -1 is skipped. Distinct otherwise.
        owner_mask: ``[T]``, bool; rows that are false are skipped (decode context parallel).
    Raises:
        ValueError: a shape or dtype does not fit.
    """
    sizes = check_shapes(
        "kv_scatter",
        rows=(rows, "T D"),
        kv_pool=(kv_pool, "S D"),
        loc=(loc, "T"),
        owner_mask=(loc if owner_mask is None else owner_mask, "T"),
    )
    check_dtypes("kv_scatter", FLOATS, rows=rows, kv_pool=kv_pool)
    check_dtypes("kv_scatter", INTEGERS, loc=loc)
    check_dtypes("kv_scatter", BOOL, owner_mask=owner_mask)
    bind("kv_scatter", OpContext(rows.device, kv_pool.dtype, sizes))(rows, kv_pool, loc=loc, owner_mask=owner_mask)
