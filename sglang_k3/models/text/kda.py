"""Kimi Delta Attention: gated delta rule with a decay per key channel (fact sheet 3.3).

The state is not here: it lives in the host's pool and is read and written by ``host.kda_backend``. This
module owns the projections before and the gated norm after the recurrence.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from sglang.srt.distributed import divide
from sglang.srt.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.runtime_context import get_parallel
from torch import nn

from sglang_k3.config import K3Config
from sglang_k3.kernels import OpContext, bind
from sglang_k3.models.text.weights import Loaders, column_shard, leading_rows, whole

if TYPE_CHECKING:
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


class KimiDeltaAttention(nn.Module):
    """One KDA sub-layer, split by head over the attention tensor-parallel group."""

    def __init__(self, config: K3Config, layer: int) -> None:
        super().__init__()
        kda, hidden_size = config.kda, config.hidden_size
        parallel = get_parallel()
        ranks = {"tp_rank": parallel.attn_tp_rank, "tp_size": parallel.attn_tp_size}
        self.num_heads = divide(kda.num_heads, parallel.attn_tp_size)
        self.first_head = parallel.attn_tp_rank * self.num_heads
        self.head_dim = kda.head_dim
        width = self.num_heads * kda.head_dim

        self.qkv_proj = MergedColumnParallelLinear(hidden_size, [kda.width] * 3, bias=False, **ranks)
        self.f_a_proj = ReplicatedLinear(hidden_size, kda.head_dim, bias=False)
        self.f_b_proj = ColumnParallelLinear(kda.head_dim, kda.width, bias=False, **ranks)
        self.b_proj = ColumnParallelLinear(hidden_size, kda.num_heads, bias=False, **ranks)
        self.g_proj = ColumnParallelLinear(hidden_size, kda.width, bias=False, **ranks)
        self.o_proj = RowParallelLinear(kda.width, hidden_size, bias=False, **ranks)
        # These stay fp32 whatever the run dtype: rounding them moves decay and state (fact sheet 7.2).
        # Tap by tap in memory, so that the kernels read the weights of neighbouring channels together.
        taps = torch.zeros(kda.short_conv_kernel_size, 3 * width, dtype=torch.float32)
        self.qkv_conv1d = nn.Parameter(taps.T, requires_grad=False)
        self.A_log = _fp32(self.num_heads)
        self.dt_bias = _fp32(self.num_heads, kda.head_dim)
        self.o_norm = _fp32(kda.head_dim)

        self.attn = RadixLinearAttention(
            layer_id=layer,
            num_q_heads=self.num_heads,
            num_k_heads=self.num_heads,
            num_v_heads=self.num_heads,
            head_q_dim=kda.head_dim,
            head_k_dim=kda.head_dim,
            head_v_dim=kda.head_dim,
            conv_weights=self.qkv_conv1d,
            A_log=self.A_log,
            dt_bias=self.dt_bias,
        )
        self.attn.lower_bound = kda.gate_lower_bound
        self.eps = config.rms_norm_eps
        self.gated_rms_norm = bind("gated_rms_norm", OpContext.of(self.o_proj.weight, H=self.num_heads, V=kda.head_dim))

    def loaders(self) -> Loaders:
        heads = slice(self.first_head, self.first_head + self.num_heads)
        channels = slice(heads.start * self.head_dim, heads.stop * self.head_dim)
        width = channels.stop - channels.start
        loaders: Loaders = {
            "f_a_proj.weight": whole(self.f_a_proj),
            "f_b_proj.weight": whole(self.f_b_proj),
            "b_proj.weight": whole(self.b_proj),
            "g_proj.weight": whole(self.g_proj),
            "o_proj.weight": whole(self.o_proj),
            "A_log": leading_rows(self.A_log, heads),
            "dt_bias": leading_rows(self.dt_bias.view(-1), channels),
            "o_norm.weight": leading_rows(self.o_norm, slice(0, self.head_dim)),
        }
        for i, name in enumerate("qkv"):
            loaders[f"{name}_proj.weight"] = column_shard(self.qkv_proj, i)
            taps = self.qkv_conv1d[i * width : (i + 1) * width].unsqueeze(1)
            loaders[f"{name}_conv1d.weight"] = leading_rows(taps, channels)
        return loaders

    def forward(self, x: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        mixed_qkv, _ = self.qkv_proj(x)
        decay, _ = self.f_b_proj(self.f_a_proj(x)[0])
        write_strength, _ = self.b_proj(x)
        gate, _ = self.g_proj(x)
        o = self.attn(forward_batch, mixed_qkv, decay, write_strength)
        heads = (-1, self.num_heads, self.head_dim)
        o = self.gated_rms_norm(o.view(heads), gate.view(heads), self.o_norm, eps=self.eps)
        out, _ = self.o_proj(o.flatten(1))
        return out


def _fp32(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape, dtype=torch.float32), requires_grad=False)
