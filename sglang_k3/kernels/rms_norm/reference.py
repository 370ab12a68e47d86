"""Reference of ``rms_norm``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_k3.kernels.elementwise import root_mean_square

if TYPE_CHECKING:
    from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    x32 = x.float()
    return (x32 / root_mean_square(x32, eps=eps)).to(x.dtype) * weight.to(x.dtype)
