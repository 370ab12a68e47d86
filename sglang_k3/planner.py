"""Will it fit: the bytes of a rank that a model takes before its first request, from its config alone.

Weights are counted as the model's modules hold them: experts as they are stored, the rest in the run dtype, split by
head, by width or by expert, or whole on every rank. What a step needs besides is the host's reserve.
"""

from __future__ import annotations

import dataclasses
import math

from sglang_k3.config import MXFP4_GROUP_SIZE, K3Config
from sglang_k3.weights.layout import TEXT_PREFIX, CheckpointLayout

GB = 1e9
# The host's own tree takes up to five recurrent states per running request: working slot, pair, two in the tree.
STATES_PER_REQUEST = 5
_WHOLE = ("q_a_proj", "kv_a_proj_with_mqa", "f_a_proj", "routed_expert_down_proj", "routed_expert_up_proj", "gate")
_FP32 = ("A_log", "dt_bias", "conv1d", "o_norm", "e_score_correction_bias", "_res_norm", "_res_proj")


@dataclasses.dataclass(frozen=True)
class Ranks:
    """How a model is spread: tensor-parallel ranks, data-parallel attention groups, and pipeline stages of layers."""

    tp_size: int = 1
    dp_size: int = 1
    stages: tuple[tuple[int, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes on one rank.

    Attributes:
        num_states, num_tokens: how many recurrent states and latent rows there are room for.
    """

    weights: int
    states: int
    latent_rows: int
    num_states: int
    num_tokens: int

    @property
    def total(self) -> int:
        return self.weights + self.states + self.latent_rows

    def __str__(self) -> str:
        return (
            f"{self.total / GB:.1f} GB on each rank: {self.weights / GB:.1f} of weights, {self.states / GB:.1f} of "
            f"{self.num_states} states, {self.latent_rows / GB:.1f} of {self.num_tokens} cached tokens"
        )


def plan_stages(
    config: K3Config,
    ranks: Ranks,
    *,
    num_states: int,
    num_tokens: int,
    itemsize: int = 2,
    row_itemsize: int = 2,
    state_itemsize: int = 4,
) -> list[MemoryPlan]:
    """The plan of a rank of each pipeline stage.

    Args:
        num_states, num_tokens: of the pools of a rank.
        itemsize: bytes of an element of the run dtype.
        row_itemsize: bytes of an element of a latent row.
        state_itemsize: bytes of an element of a recurrent state.
    """
    stages = ranks.stages or ((0, config.num_hidden_layers),)
    plans = []
    for first, end in stages:
        layers = range(first, end)
        kda = len([layer for layer in config.kda_layers if layer in layers])
        mla = len([layer for layer in config.full_attention_layers if layer in layers])
        attention_ranks = ranks.tp_size // ranks.dp_size
        width = config.kda.width // attention_ranks
        state = width * config.kda.head_dim * state_itemsize
        state += 3 * width * (config.kda.short_conv_kernel_size - 1) * itemsize
        plans.append(
            MemoryPlan(
                weights=_weights(config, ranks, layers, itemsize),
                states=num_states * kda * state,
                latent_rows=num_tokens * mla * config.mla.latent_dim * row_itemsize,
                num_states=num_states,
                num_tokens=num_tokens,
            )
        )
    return plans


def _weights(config: K3Config, ranks: Ranks, layers: range, itemsize: int) -> int:
    layout = CheckpointLayout(config)
    total = 0
    for name, spec in layout.required.items():
        if _in_stage(name, layers, config.num_hidden_layers):
            size = 4 if any(part in name for part in _FP32) else itemsize
            total += math.prod(spec.shape) * size // _split(name, spec.shape, ranks)
    per_value = (0.5 + 1 / MXFP4_GROUP_SIZE) if config.mxfp4_experts else itemsize
    experts = sum(
        out * inner
        for name, (out, inner) in layout.experts.items()
        if _in_stage(name, layers, config.num_hidden_layers)
    )
    return total + int(experts * per_value) // ranks.tp_size


def _in_stage(name: str, layers: range, num_layers: int) -> bool:
    parts = name.removeprefix(f"{TEXT_PREFIX}model.").split(".")
    if parts[0] == "layers":
        return int(parts[1]) in layers
    return layers.start == 0 if parts[0] == "embed_tokens" else layers.stop == num_layers


def _split(name: str, shape: tuple[int, ...], ranks: Ranks) -> int:
    """Over how many ranks a tensor is spread."""
    stem = name.split(".")[-2]
    vector = len(shape) == 1 and name.split(".")[-1] not in ("A_log", "dt_bias")
    if vector or stem in _WHOLE or "_res_proj" in name:
        return 1
    by_attention = ".self_attn." in name or stem in ("embed_tokens", "lm_head")
    return ranks.tp_size // ranks.dp_size if by_attention else ranks.tp_size
