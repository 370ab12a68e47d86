"""Reference of ``sigmoid_gate``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang_k3.kernels.elementwise import sigmoid

if TYPE_CHECKING:
    from torch import Tensor


def sigmoid_gate(o: Tensor, gate: Tensor) -> Tensor:
    return o * sigmoid(gate.float()).to(gate.dtype)
