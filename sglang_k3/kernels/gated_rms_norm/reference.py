"""Reference of ``gated_rms_norm``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_k3.kernels.elementwise import root_mean_square, sigmoid

if TYPE_CHECKING:
    from torch import Tensor


def gated_rms_norm(o: Tensor, gate: Tensor, weight: Tensor, *, eps: float) -> Tensor:
    o32 = o.float()
    normed = o32 / root_mean_square(o32, eps=eps) * weight
    return (normed * sigmoid(gate.float())).to(gate.dtype)
