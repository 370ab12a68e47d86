"""Reference of ``situ_and_mul``."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_k3.kernels.elementwise import sigmoid


def situ_and_mul(gate_up: Tensor, *, beta: float, linear_beta: float | None) -> Tensor:
    gate, up = gate_up.float().chunk(2, dim=-1)
    activated = beta * torch.tanh(gate / beta) * sigmoid(gate)
    if linear_beta is not None:
        up = linear_beta * torch.tanh(up / linear_beta)
    return (activated * up).to(gate_up.dtype)
