"""Reference of ``kv_scatter``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def kv_scatter(rows: Tensor, kv_pool: Tensor, *, loc: Tensor, owner_mask: Tensor | None = None) -> None:
    written = loc >= 0 if owner_mask is None else (loc >= 0) & owner_mask
    kv_pool[loc[written]] = rows[written].to(kv_pool.dtype)
