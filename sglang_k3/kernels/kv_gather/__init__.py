"""Read rows of the KV pool: ``out[n] = kv_pool[loc[n]]``, zero where there is nothing to read.

Ranks of decode context parallel each read the rows they own; the sum over ranks is the whole.

Numerics: BITWISE. No host synchronisation in the contract: a kernel can be captured in a CUDA graph, the reference
cannot.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_k3.kernels import OpContext, bind
from sglang_k3.kernels.checks import BOOL, FLOATS, INTEGERS, check_dtypes, check_shapes
from sglang_k3.kernels.dispatch import Impl, reference_impl
from sglang_k3.kernels.kv_gather import reference
from sglang_k3.kernels.triton_support import triton_impl

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["IMPLS", "kv_gather"]

IMPLS: tuple[Impl, ...] = (triton_impl(reference.kv_gather), reference_impl(reference.kv_gather))


def kv_gather(kv_pool: Tensor, *, loc: Tensor, owner_mask: Tensor | None = None) -> Tensor:
    """Load one row per entry of ``loc``.

    Args:
        kv_pool: ``[S, D]``, any strides.
        loc: physical slots ``[N]``, int64; -1 gives a row of zeros.
        owner_mask: ``[N]``, bool; entries that are false are not read and give zeros.
    Returns:
        ``[N, D]`` in the dtype of the pool, contiguous.
    Raises:
        ValueError: a shape or dtype does not fit.
    """
    sizes = check_shapes(
        "kv_gather",
        kv_pool=(kv_pool, "S D"),
        loc=(loc, "N"),
        owner_mask=(loc if owner_mask is None else owner_mask, "N"),
    )
    check_dtypes("kv_gather", FLOATS, kv_pool=kv_pool)
    check_dtypes("kv_gather", INTEGERS, loc=loc)
    check_dtypes("kv_gather", BOOL, owner_mask=owner_mask)
    fn = bind("kv_gather", OpContext(kv_pool.device, kv_pool.dtype, sizes))
    rows: Tensor = fn(kv_pool, loc=loc, owner_mask=owner_mask)
    return rows
