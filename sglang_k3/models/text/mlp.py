"""The SiTU-gated MLP: dense layers and shared experts (fact sheet 3.6, 3.7)."""

from __future__ import annotations

import torch
from sglang.srt.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from torch import nn

from sglang_k3.config import K3Config
from sglang_k3.kernels import OpContext, bind
from sglang_k3.models.text.weights import Loaders, column_shard, whole


class SiTUMLP(nn.Module):
    """``SiTU(x Wg, x Wu) Wd``, split by width over the tensor-parallel group.

    Args:
        reduce_results: False leaves the partial sum of this rank, for a caller that adds more before reducing.
    """

    def __init__(self, config: K3Config, intermediate_size: int, *, reduce_results: bool = True) -> None:
        super().__init__()
        self.gate_up_proj = MergedColumnParallelLinear(config.hidden_size, [intermediate_size] * 2, bias=False)
        self.down_proj = RowParallelLinear(
            intermediate_size, config.hidden_size, bias=False, reduce_results=reduce_results
        )
        self.beta = config.activation_situ_beta
        self.linear_beta = config.activation_situ_linear_beta
        self.situ_and_mul = bind("situ_and_mul", OpContext.of(self.gate_up_proj.weight, I=intermediate_size))

    def loaders(self) -> Loaders:
        return {
            "gate_proj.weight": column_shard(self.gate_up_proj, 0),
            "up_proj.weight": column_shard(self.gate_up_proj, 1),
            "down_proj.weight": whole(self.down_proj),
        }

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate_up, _ = self.gate_up_proj(x)
        out, _ = self.down_proj(self.situ_and_mul(gate_up, beta=self.beta, linear_beta=self.linear_beta))
        return out
