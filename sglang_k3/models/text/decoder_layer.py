"""One decoder layer: mix over depth, attention, mix over depth, MLP or MoE (fact sheet 3.5)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import nn

from sglang_k3.config import K3Config
from sglang_k3.models.text.attn_residual import DepthMix, ResidualBank
from sglang_k3.models.text.data_parallel import over_all_requests
from sglang_k3.models.text.kda import KimiDeltaAttention
from sglang_k3.models.text.latent_moe import LatentMoE
from sglang_k3.models.text.mla import KimiMLAAttention
from sglang_k3.models.text.mlp import SiTUMLP
from sglang_k3.models.text.norm import RMSNorm
from sglang_k3.models.text.weights import Loaders, leading_rows, prefixed

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class KimiDecoderLayer(nn.Module):
    """Layer ``layer`` (zero-based) of the language model."""

    def __init__(self, config: K3Config, layer: int, *, packed_experts: bool, latent_norm_eps: float) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.appends_bank_row = config.appends_bank_row(layer)
        self.has_residual_bank = config.attn_res_block_size is not None
        self.input_layernorm = RMSNorm(size, eps=eps)
        self.post_attention_layernorm = RMSNorm(size, eps=eps)
        self.self_attention_res = DepthMix(size, eps=eps)
        self.mlp_res = DepthMix(size, eps=eps)
        self.self_attn = (
            KimiMLAAttention(config, layer, latent_norm_eps=latent_norm_eps)
            if config.is_full_attention(layer)
            else KimiDeltaAttention(config, layer)
        )
        if config.is_moe(layer):
            self.mlp_name = "block_sparse_moe"
            self.mlp: LatentMoE | SiTUMLP = LatentMoE(config, packed=packed_experts)
        else:
            self.mlp_name = "mlp"
            self.mlp = SiTUMLP(config, config.intermediate_size)

    def loaders(self) -> Loaders:
        loaders: Loaders = {
            "input_layernorm.weight": leading_rows(self.input_layernorm.weight),
            "post_attention_layernorm.weight": leading_rows(self.post_attention_layernorm.weight),
            **prefixed("self_attn.", self.self_attn.loaders()),
            **prefixed(f"{self.mlp_name}.", self.mlp.loaders()),
        }
        if self.has_residual_bank:
            for name, mix in (("self_attention_res", self.self_attention_res), ("mlp_res", self.mlp_res)):
                loaders[f"{name}_norm.weight"] = mix.load_norm
                loaders[f"{name}_proj.weight"] = mix.load_proj
        return loaders

    def forward(
        self, prefix_sum: torch.Tensor, delta: torch.Tensor | None, bank: ResidualBank, forward_batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``prefix_sum`` before the MLP's output and that output, ``delta``, both ``[T, D]``: the next mix adds them.

        Takes the pair of the layer before; ``delta`` is None where a stage begins. At a block boundary the prefix joins
        ``bank``.
        """
        x, prefix_sum = self.self_attention_res(bank, prefix_sum, delta, self.input_layernorm)
        # A data-parallel rank without requests has nothing to attend to, but takes part in the experts.
        delta = x if forward_batch.forward_mode.is_idle() else self.self_attn(x, forward_batch)
        if self.appends_bank_row:
            bank.append(prefix_sum)
            prefix_sum, delta = delta, None
        x, prefix_sum = self.mlp_res(bank, prefix_sum, delta, self.post_attention_layernorm)
        return prefix_sum, over_all_requests(self.mlp, x, forward_batch)
