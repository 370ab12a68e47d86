"""LatentMoE: routed experts in a narrow latent space beside shared experts at full width (fact sheet 3.8).

The router and the shared experts see the full-width input; only the routed experts work on the latent.
The latent norm is not linear, so partial expert sums are reduced over the ranks before it.
"""

from __future__ import annotations

import torch
from sglang.srt.distributed import tensor_model_parallel_all_reduce
from sglang.srt.layers.linear import ReplicatedLinear
from sglang.srt.runtime_context import get_parallel
from torch import nn

from sglang_k3.config import K3Config
from sglang_k3.kernels import OpContext, bind
from sglang_k3.models.text.experts import RoutedExperts
from sglang_k3.models.text.mlp import SiTUMLP
from sglang_k3.models.text.norm import RMSNorm
from sglang_k3.models.text.weights import Loaders, leading_rows, prefixed, whole


class Router(nn.Module):
    """fp32 sigmoid scores; the correction bias takes part in the choice only."""

    def __init__(self, config: K3Config) -> None:
        super().__init__()
        moe = config.moe
        self.moe = moe
        self.weight = nn.Parameter(torch.empty(moe.num_experts, config.hidden_size), requires_grad=False)
        self.e_score_correction_bias = nn.Parameter(
            torch.zeros(moe.num_experts, dtype=torch.float32), requires_grad=False
        )
        self.router_topk = bind("router_topk", OpContext.of(self.weight, E=moe.num_experts, topk=moe.top_k))

    def loaders(self) -> Loaders:
        return {
            "weight": leading_rows(self.weight),
            "e_score_correction_bias": leading_rows(self.e_score_correction_bias),
        }

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``(topk_weights [T, k] fp32, topk_ids [T, k] int32)``."""
        return self.router_topk(
            x,
            self.weight,
            self.e_score_correction_bias,
            top_k=self.moe.top_k,
            renormalize=self.moe.renormalize,
            scaling_factor=self.moe.routed_scaling_factor,
            num_expert_group=self.moe.num_expert_group,
            topk_group=self.moe.topk_group,
        )


class LatentMoE(nn.Module):
    """``up(norm(sum_k w_k expert_k(down(x)))) + shared(x)``.

    Args:
        packed: whether ``config.json`` announces MXFP4 experts; the checkpoint's tensors have the last word.
    """

    def __init__(self, config: K3Config, *, packed: bool) -> None:
        super().__init__()
        moe = config.moe
        self.gate = Router(config)
        self.routed_expert_down_proj = ReplicatedLinear(config.hidden_size, moe.latent_size, bias=False)
        self.experts = RoutedExperts(config, packed=packed)
        self.routed_expert_norm = RMSNorm(moe.latent_size, eps=config.rms_norm_eps) if moe.use_norm else None
        self.routed_expert_up_proj = ReplicatedLinear(moe.latent_size, config.hidden_size, bias=False)
        self.shared_experts = SiTUMLP(config, moe.shared_intermediate_size) if moe.num_shared_experts else None

    def loaders(self) -> Loaders:
        loaders = {
            **prefixed("gate.", self.gate.loaders()),
            **prefixed("experts.", self.experts.loaders()),
            "routed_expert_down_proj.weight": whole(self.routed_expert_down_proj),
            "routed_expert_up_proj.weight": whole(self.routed_expert_up_proj),
        }
        if self.routed_expert_norm is not None:
            loaders["routed_expert_norm.weight"] = leading_rows(self.routed_expert_norm.weight)
        if self.shared_experts is not None:
            loaders |= prefixed("shared_experts.", self.shared_experts.loaders())
        return loaders

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        topk_weights, topk_ids = self.gate(x)
        latent, _ = self.routed_expert_down_proj(x)
        y = self.experts(latent, topk_weights, topk_ids)
        if get_parallel().tp_size > 1:
            y = tensor_model_parallel_all_reduce(y)
        if self.routed_expert_norm is not None:
            y = self.routed_expert_norm(y)
        out, _ = self.routed_expert_up_proj(y)
        if self.shared_experts is not None:
            out = out + self.shared_experts(x)
        return out
