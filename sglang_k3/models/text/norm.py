"""RMSNorm through this package's op, so that no host kernel is compiled at first use."""

from __future__ import annotations

import torch
from torch import nn

from sglang_k3.kernels import OpContext, bind


class RMSNorm(nn.Module):
    """``weight * round(x / rms(x))`` with fp32 statistics (fact sheet 0.3)."""

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size), requires_grad=False)
        self.eps = eps
        self.rms_norm = bind("rms_norm", OpContext.of(self.weight, D=size))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.rms_norm(x, self.weight, eps=self.eps)
