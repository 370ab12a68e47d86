"""Reference of ``kda_gate``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_k3.kernels.elementwise import sigmoid

if TYPE_CHECKING:
    from torch import Tensor


def kda_gate(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, *, lower_bound: float) -> tuple[Tensor, Tensor]:
    g = lower_bound * sigmoid(A_log.exp().unsqueeze(-1) * (a.float() + dt_bias))
    return g, sigmoid(b.float())
