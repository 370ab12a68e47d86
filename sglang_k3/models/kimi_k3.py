"""Kimi K3 as stock SGLang loads it: ``KimiK3ForConditionalGeneration``.

Text only for now: the vision tensors of a checkpoint are checked and left unused.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from sglang.srt.distributed import get_pp_group
from sglang.srt.layers.dp_attention import is_dp_attention_enabled
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.layers.utils import PPMissingLayer
from sglang.srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, PPProxyTensors
from sglang.srt.runtime_context import get_server_args
from sglang.srt.utils import make_layers
from torch import nn

from sglang_k3.config import K3Config
from sglang_k3.host.hf_config import K3HFConfig
from sglang_k3.models.text.attn_residual import DepthMix, ResidualBank
from sglang_k3.models.text.decoder_layer import KimiDecoderLayer
from sglang_k3.models.text.experts import RoutedExperts
from sglang_k3.models.text.norm import RMSNorm
from sglang_k3.models.text.weights import Loaders, leading_rows, load_checkpoint, prefixed, whole
from sglang_k3.options import ServeOptions
from sglang_k3.weights.layout import TEXT_PREFIX, CheckpointLayout

if TYPE_CHECKING:
    from sglang.srt.layers.quantization.base_config import QuantizationConfig

logger = logging.getLogger(__name__)


class KimiK3Model(nn.Module):
    """Embedding, decoder layers of this pipeline stage, final mix and norm."""

    def __init__(self, config: K3Config, options: ServeOptions) -> None:
        super().__init__()
        self.config = config
        self.pp_group = get_pp_group()
        self.embed_tokens = (
            VocabParallelEmbedding(config.vocab_size, config.hidden_size, use_attn_tp_group=is_dp_attention_enabled())
            if self.pp_group.is_first_rank
            else PPMissingLayer()
        )
        self.layers, self.start_layer, self.end_layer = make_layers(
            config.num_hidden_layers,
            lambda idx, prefix: KimiDecoderLayer(
                config,
                idx,
                packed_experts=config.mxfp4_experts,
                latent_norm_eps=options.latent_norm_eps(config.rms_norm_eps),
            ),
            pp_rank=self.pp_group.rank_in_group,
            pp_size=self.pp_group.world_size,
        )
        if self.pp_group.is_last_rank:
            self.output_attn_res = DepthMix(config.hidden_size, eps=config.rms_norm_eps)
            self.norm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    @property
    def handoff_width(self) -> int:
        """Elements per token that the stage before hands over (see ``_hand_over``)."""
        return self.config.hidden_size * (1 + self.config.num_bank_rows(self.start_layer))

    def loaders(self) -> Loaders:
        loaders: Loaders = {}
        if self.pp_group.is_first_rank:
            loaders["embed_tokens.weight"] = whole(self.embed_tokens)
        for index in range(self.start_layer, self.end_layer):
            loaders |= prefixed(f"layers.{index}.", self.layers[index].loaders())
        if self.pp_group.is_last_rank:
            loaders["norm.weight"] = leading_rows(self.norm.weight)
            if self.config.attn_res_block_size is not None:
                loaders["output_attn_res_norm.weight"] = self.output_attn_res.load_norm
                loaders["output_attn_res_proj.weight"] = self.output_attn_res.load_proj
        return loaders

    def forward(
        self,
        input_ids: torch.Tensor | None,
        forward_batch: ForwardBatch,
        input_embeds: torch.Tensor | None = None,
        pp_proxy_tensors: PPProxyTensors | None = None,
    ) -> torch.Tensor | PPProxyTensors:
        """Final hidden states ``[T, D]``, or the hand-off to the next pipeline stage."""
        prefix_sum, bank = self._enter(input_ids, input_embeds, pp_proxy_tensors)
        delta = None
        for index in range(self.start_layer, self.end_layer):
            prefix_sum, delta = self.layers[index](prefix_sum, delta, bank, forward_batch)
        if not self.pp_group.is_last_rank:
            return self._hand_over(prefix_sum if delta is None else prefix_sum + delta, bank)
        return self.output_attn_res(bank, prefix_sum, delta, self.norm)[0]

    def _enter(
        self,
        input_ids: torch.Tensor | None,
        input_embeds: torch.Tensor | None,
        pp_proxy_tensors: PPProxyTensors | None,
    ) -> tuple[torch.Tensor, ResidualBank]:
        max_rows = self.config.num_bank_rows(self.end_layer)
        if self.pp_group.is_first_rank:
            prefix_sum = self.embed_tokens(input_ids) if input_embeds is None else input_embeds
            return prefix_sum, ResidualBank.empty(max_rows, prefix_sum)
        assert pp_proxy_tensors is not None, "a later pipeline stage needs the earlier one's tensors"
        packed = pp_proxy_tensors["hidden_states"].unflatten(-1, (-1, self.config.hidden_size)).transpose(0, 1)
        return packed[0].contiguous(), ResidualBank.holding(packed[1:], max_rows)

    def _hand_over(self, prefix_sum: torch.Tensor, bank: ResidualBank) -> PPProxyTensors:
        """``[prefix_sum, bank rows]`` side by side in one tensor ``[T, (N + 1) D]``: the host cuts along tokens."""
        return PPProxyTensors({"hidden_states": torch.stack([prefix_sum, *bank.rows], dim=1).flatten(1)})


class KimiK3ForConditionalGeneration(nn.Module):
    """The class that the ``architectures`` entry of a K3 ``config.json`` names."""

    # Only safetensors files are audited, so only they are loaded.
    fall_back_to_pt_during_load = False

    def __init__(self, config: K3HFConfig, quant_config: QuantizationConfig | None = None, prefix: str = "") -> None:
        super().__init__()
        self.config = config
        self.k3 = config.k3
        self.pp_group = get_pp_group()
        self.model = KimiK3Model(self.k3, ServeOptions.from_server_args(get_server_args()))
        self.logits_processor = LogitsProcessor(config.text_config)
        if not self.pp_group.is_last_rank:
            self.lm_head = PPMissingLayer()
        elif self.k3.tie_word_embeddings and self.pp_group.is_first_rank:
            self.lm_head = self.model.embed_tokens
        else:
            by_attention_rank = self.logits_processor.use_attn_tp_group
            self.lm_head = ParallelLMHead(self.k3.vocab_size, self.k3.hidden_size, use_attn_tp_group=by_attention_rank)

    @property
    def start_layer(self) -> int:
        return self.model.start_layer

    @property
    def end_layer(self) -> int:
        return self.model.end_layer

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    @torch.no_grad()
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
        input_embeds: torch.Tensor | None = None,
        pp_proxy_tensors: PPProxyTensors | None = None,
    ) -> LogitsProcessorOutput | PPProxyTensors:
        """One step of the scheduler's batch. ``positions`` is unused: nothing in K3 depends on it."""
        hidden_states = self.model(input_ids, forward_batch, input_embeds, pp_proxy_tensors)
        if not self.pp_group.is_last_rank:
            return hidden_states
        return self.logits_processor(input_ids, hidden_states, self.lm_head, forward_batch)

    def loaders(self) -> Loaders:
        loaders = prefixed(f"{TEXT_PREFIX}model.", self.model.loaders())
        if self.pp_group.is_last_rank:
            head = f"{TEXT_PREFIX}{'model.embed_tokens' if self.k3.tie_word_embeddings else 'lm_head'}.weight"
            loaders[head] = whole(self.lm_head)
        return loaders

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Stream a checkpoint in.

        Raises:
            CheckpointError: a tensor is missing, unexpected, doubled, or of the wrong shape or type.
        """
        try:
            audit = load_checkpoint(weights, self.loaders(), CheckpointLayout(self.k3))
        finally:
            for module in self.model.modules():
                if isinstance(module, RoutedExperts):
                    module.latent_experts.layout.forget()
        if audit.num_vision_tensors:
            logger.info(
                "K3: %d vision tensors checked and left unused: this version serves text only.",
                audit.num_vision_tensors,
            )


EntryClass = KimiK3ForConditionalGeneration
