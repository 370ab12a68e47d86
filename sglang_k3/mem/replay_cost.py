"""What a state costs: the FLOPs of computing it again, and the bytes that it and the KV above it take.

Replaying the tokens ``start .. end`` behind a state at ``start`` runs every layer over them: a linear part, the same
for every token, and MLA's attention, which grows with the depth. All figures are integers, so that every rank that
compares two of them decides alike.

Shapes: ``shared/spec/k3_facts.md`` 2.3 to 2.6 and 3.3 to 3.8; state and KV bytes: 3.3.7 and 3.4 there.
"""

from __future__ import annotations

import dataclasses

from sglang_k3.config import K3Config

# Per head and token the KDA recurrence (k3_facts 3.3.5) passes its [K, V] state: decay (1 FLOP per element), the
# prediction, the update and the read (2 each).
KDA_FLOPS_PER_STATE_ELEMENT = 7


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReplayCost:
    """The cost model of one model on one rank.

    Attributes:
        linear_flops: per token, whatever its depth.
        pair_flops: per token and token before it, itself included.
        state_bytes: of one state slot, all KDA layers.
        kv_bytes: of one token, all MLA layers.
    """

    linear_flops: int
    pair_flops: int
    state_bytes: int
    kv_bytes: int

    @classmethod
    def of(cls, config: K3Config, *, tp_size: int = 1, state_itemsize: int = 4, dtype_itemsize: int = 2) -> ReplayCost:
        """The cost on one of ``tp_size`` ranks, which share the KDA heads and each hold all KV.

        FLOPs are those of the whole model: only their ratios count, and they are the same on every rank.

        Args:
            state_itemsize: bytes per element of the recurrent state; 4 is fp32, the default.
            dtype_itemsize: bytes per element of convolution states and KV; 2 is bf16.
        """
        kda, mla = config.kda, config.mla
        conv = 3 * kda.width * (kda.short_conv_kernel_size - 1)
        state_elements = kda.width * kda.head_dim
        return cls(
            linear_flops=sum(_layer_flops(config, layer) for layer in range(config.num_hidden_layers)),
            pair_flops=2 * len(config.full_attention_layers) * mla.num_heads * (mla.qk_head_dim + mla.v_head_dim),
            state_bytes=len(config.kda_layers) * (state_elements * state_itemsize + conv * dtype_itemsize) // tp_size,
            kv_bytes=len(config.full_attention_layers) * mla.latent_dim * dtype_itemsize,
        )

    def replay_flops(self, start: int, end: int) -> int:
        """FLOPs of the tokens ``start .. end`` with everything before them at hand."""
        pairs = (end * (end + 1) - start * (start + 1)) // 2
        return self.linear_flops * (end - start) + self.pair_flops * pairs

    def in_units_of(self, tokens: int) -> ReplayCost:
        """The same model for a cache that counts in units of ``tokens`` tokens, as a scaled trace does."""
        return dataclasses.replace(
            self,
            linear_flops=self.linear_flops * tokens,
            pair_flops=self.pair_flops * tokens * tokens,
            kv_bytes=self.kv_bytes * tokens,
        )


def _layer_flops(config: K3Config, layer: int) -> int:
    """Two FLOPs per weight that a token meets, and the recurrence; norms and activations are left out (below 0.1 %)."""
    if config.is_full_attention(layer):
        attention = 2 * _mla_weights(config)
    else:
        attention = 2 * _kda_weights(config) + KDA_FLOPS_PER_STATE_ELEMENT * config.kda.width * config.kda.head_dim
    mlp = _moe_weights(config) if config.is_moe(layer) else 3 * config.hidden_size * config.intermediate_size
    return attention + 2 * mlp


def _kda_weights(config: K3Config) -> int:
    kda, hidden = config.kda, config.hidden_size
    projections = 5 * hidden * kda.width  # q, k, v, output gate, output
    convolutions = 3 * kda.width * kda.short_conv_kernel_size
    decay_gate = hidden * kda.head_dim + kda.head_dim * kda.width
    return projections + convolutions + decay_gate + hidden * kda.num_heads


def _mla_weights(config: K3Config) -> int:
    mla, hidden = config.mla, config.hidden_size
    query = hidden * mla.q_lora_rank + mla.q_lora_rank * mla.num_heads * mla.qk_head_dim
    key_value = hidden * mla.latent_dim + mla.kv_lora_rank * mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    width = mla.num_heads * mla.v_head_dim
    return query + key_value + hidden * width * (2 if mla.use_output_gate else 1)


def _moe_weights(config: K3Config) -> int:
    """Of the router, the latent projections, the chosen experts and the shared ones."""
    moe, hidden = config.moe, config.hidden_size
    experts = moe.top_k * 3 * moe.latent_size * moe.intermediate_size
    return hidden * moe.num_experts + 2 * hidden * moe.latent_size + experts + 3 * hidden * moe.shared_intermediate_size
