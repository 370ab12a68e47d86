"""Multi-head latent attention without positions, with an output gate (fact sheet 3.4).

One latent row per token is cached, shared by all heads. Which of the two equal forms is computed, the
absorbed one over latent rows (decode) or the explicit one over per-head keys (prefill), is the backend's
choice: this module hands it the explicit query, the new rows and ``kv_b_proj``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.distributed import divide
from sglang.srt.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.model_executor.forward_context import get_attn_backend
from sglang.srt.runtime_context import get_parallel
from torch import nn

from sglang_k3.config import K3Config
from sglang_k3.kernels import OpContext, bind
from sglang_k3.models.text.norm import RMSNorm
from sglang_k3.models.text.weights import Loaders, leading_rows, whole

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class KimiMLAAttention(nn.Module):
    """One MLA sub-layer, split by head over the attention tensor-parallel group.

    Args:
        latent_norm_eps: epsilon of ``q_a_layernorm`` and ``kv_a_layernorm`` (fact sheet 11).
    """

    def __init__(self, config: K3Config, layer: int, *, latent_norm_eps: float) -> None:
        super().__init__()
        self.mla = mla = config.mla
        hidden_size = config.hidden_size
        parallel = get_parallel()
        ranks = {"tp_rank": parallel.attn_tp_rank, "tp_size": parallel.attn_tp_size}
        self.num_heads = divide(mla.num_heads, parallel.attn_tp_size)
        v_width = mla.num_heads * mla.v_head_dim

        self.q_a_proj = ReplicatedLinear(hidden_size, mla.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(mla.q_lora_rank, eps=latent_norm_eps)
        self.q_b_proj = ColumnParallelLinear(mla.q_lora_rank, mla.num_heads * mla.qk_head_dim, bias=False, **ranks)
        self.kv_a_proj_with_mqa = ReplicatedLinear(hidden_size, mla.latent_dim, bias=False)
        self.kv_a_layernorm = RMSNorm(mla.kv_lora_rank, eps=latent_norm_eps)
        self.kv_b_proj = ColumnParallelLinear(
            mla.kv_lora_rank, mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), bias=False, **ranks
        )
        self.g_proj = ColumnParallelLinear(hidden_size, v_width, bias=False, **ranks) if mla.use_output_gate else None
        self.o_proj = RowParallelLinear(v_width, hidden_size, bias=False, **ranks)
        self.attn = RadixAttention(
            num_heads=self.num_heads,
            head_dim=mla.latent_dim,
            scaling=mla.scale,
            num_kv_heads=1,
            layer_id=layer,
            v_head_dim=mla.kv_lora_rank,
        )
        self.sigmoid_gate = bind("sigmoid_gate", OpContext.of(self.o_proj.weight, H=self.num_heads, V=mla.v_head_dim))

    def loaders(self) -> Loaders:
        loaders: Loaders = {
            "q_a_layernorm.weight": leading_rows(self.q_a_layernorm.weight),
            "kv_a_layernorm.weight": leading_rows(self.kv_a_layernorm.weight),
        }
        for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "g_proj", "o_proj"):
            if (module := getattr(self, name)) is not None:
                loaders[f"{name}.weight"] = whole(module)
        return loaders

    def forward(self, x: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        mla = self.mla
        q, _ = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)[0]))
        latent, k_shared = self.kv_a_proj_with_mqa(x)[0].split([mla.kv_lora_rank, mla.qk_rope_head_dim], dim=-1)
        rows = torch.cat([self.kv_a_layernorm(latent), k_shared], dim=-1)
        o = get_attn_backend().forward(
            q=q.unflatten(-1, (self.num_heads, mla.qk_head_dim)),
            k=rows,
            layer=self.attn,
            forward_batch=forward_batch,
            w_kv=self.kv_b_proj.weight.unflatten(0, (self.num_heads, -1)),
        )
        o = o.reshape(x.shape[0], self.num_heads * mla.v_head_dim)
        if self.g_proj is not None:
            o = self.sigmoid_gate(o, self.g_proj(x)[0])
        out, _ = self.o_proj(o)
        return out
