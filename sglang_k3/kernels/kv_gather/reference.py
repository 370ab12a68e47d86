"""Reference of ``kv_gather``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def kv_gather(kv_pool: Tensor, *, loc: Tensor, owner_mask: Tensor | None = None) -> Tensor:
    read = loc >= 0 if owner_mask is None else (loc >= 0) & owner_mask
    rows = kv_pool.new_zeros(loc.shape[0], kv_pool.shape[1])
    rows[read] = kv_pool[loc[read]]
    return rows
