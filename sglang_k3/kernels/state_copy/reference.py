"""Reference of ``state_copy``."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def state_copy(states: Tensor, *, src_indices: Tensor, dst_indices: Tensor) -> None:
    copied = (src_indices >= 0) & (dst_indices >= 0)
    states[:, dst_indices[copied].long()] = states[:, src_indices[copied].long()]
