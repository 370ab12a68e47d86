"""Every tensor of a K3 checkpoint, from its config alone (fact sheet section 2).

A tensor group is a set of alternatives: an expert matrix is either one float ``weight`` or a
``weight_packed`` with its ``weight_scale``. Float tensors may be stored in any of three float types; what is
packed is bytes.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from sglang_k3.config import MXFP4_GROUP_SIZE, K3Config
from sglang_k3.errors import ConfigError

TEXT_PREFIX = "language_model."
VISION_PREFIXES = ("vision_tower.", "mm_projector.")
# The head count of A_log is rounded up to this in published files; the padding is ignored on load.
A_LOG_PADDING = 128
_OLD_LAYERS = re.compile(r"^language_model\.(layers|embed_tokens|norm|output_attn_res_(?:norm|proj))\b")


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One tensor: its shape, whether it holds packed bytes, and the padded length that is accepted too."""

    shape: tuple[int, ...]
    packed: bool = False
    padded_to: int | None = None

    def accepts(self, shape: tuple[int, ...]) -> bool:
        return shape == self.shape or shape == (self.padded_to,)


class CheckpointLayout:
    """The tensors that a config asks for.

    Attributes:
        required: name -> spec of every tensor outside the routed experts and the vision tower.
        experts: stem (without ``.weight``) -> logical shape ``[out, in]`` of every routed expert matrix.
    """

    def __init__(self, config: K3Config) -> None:
        self.required = dict(_text_tensors(config))
        self.experts = dict(_expert_matrices(config))
        self._vision_config = config.vision
        self._hidden_size = config.hidden_size

    @cached_property
    def vision(self) -> dict[str, TensorSpec]:
        """The vision tower and projector; a text-only copy of a checkpoint has none of them.

        Raises:
            ConfigError: ``vision_config`` is absent or lacks a size.
        """
        return dict(_vision_tensors(self._vision_config, self._hidden_size))

    def find(self, name: str) -> TensorSpec | None:
        """The spec of a canonical name, or None if the checkpoint should not have it."""
        if name.startswith(VISION_PREFIXES):
            return self.vision.get(name)
        if (spec := self.required.get(name)) is not None:
            return spec
        stem, _, suffix = name.rpartition(".")
        shape = self.experts.get(stem)
        if shape is None:
            return None
        out, inner = shape
        if suffix == "weight":
            return TensorSpec(shape)
        if inner % MXFP4_GROUP_SIZE:
            return None
        if suffix == "weight_packed":
            return TensorSpec((out, inner // 2), packed=True)
        if suffix == "weight_scale":
            return TensorSpec((out, inner // MXFP4_GROUP_SIZE), packed=True)
        return None


def canonical_name(name: str) -> str:
    """Older files leave out the middle ``model.`` of the text tensors."""
    return _OLD_LAYERS.sub(r"language_model.model.\1", name)


def _text_tensors(config: K3Config) -> Iterator[tuple[str, TensorSpec]]:
    hidden, model = config.hidden_size, f"{TEXT_PREFIX}model."
    yield f"{model}embed_tokens.weight", TensorSpec((config.vocab_size, hidden))
    if not config.tie_word_embeddings:
        yield f"{TEXT_PREFIX}lm_head.weight", TensorSpec((config.vocab_size, hidden))
    yield f"{model}norm.weight", TensorSpec((hidden,))
    yield from _mix_tensors(config, f"{model}output_attn_res")
    for layer in range(config.num_hidden_layers):
        prefix = f"{model}layers.{layer}."
        yield f"{prefix}input_layernorm.weight", TensorSpec((hidden,))
        yield f"{prefix}post_attention_layernorm.weight", TensorSpec((hidden,))
        yield from _mix_tensors(config, f"{prefix}self_attention_res")
        yield from _mix_tensors(config, f"{prefix}mlp_res")
        attention = _mla_tensors if config.is_full_attention(layer) else _kda_tensors
        for name, spec in attention(config):
            yield f"{prefix}self_attn.{name}", spec
        if config.is_moe(layer):
            for name, spec in _moe_tensors(config):
                yield f"{prefix}block_sparse_moe.{name}", spec
        else:
            yield from _mlp_tensors(f"{prefix}mlp.", hidden, config.intermediate_size)


def _mix_tensors(config: K3Config, stem: str) -> Iterator[tuple[str, TensorSpec]]:
    if config.attn_res_block_size is not None:
        yield f"{stem}_norm.weight", TensorSpec((config.hidden_size,))
        yield f"{stem}_proj.weight", TensorSpec((1, config.hidden_size))


def _mlp_tensors(prefix: str, hidden: int, width: int) -> Iterator[tuple[str, TensorSpec]]:
    yield f"{prefix}gate_proj.weight", TensorSpec((width, hidden))
    yield f"{prefix}up_proj.weight", TensorSpec((width, hidden))
    yield f"{prefix}down_proj.weight", TensorSpec((hidden, width))


def _kda_tensors(config: K3Config) -> Iterator[tuple[str, TensorSpec]]:
    kda, hidden = config.kda, config.hidden_size
    for name in "qkv":
        yield f"{name}_proj.weight", TensorSpec((kda.width, hidden))
        yield f"{name}_conv1d.weight", TensorSpec((kda.width, 1, kda.short_conv_kernel_size))
    yield "f_a_proj.weight", TensorSpec((kda.head_dim, hidden))
    yield "f_b_proj.weight", TensorSpec((kda.width, kda.head_dim))
    yield "b_proj.weight", TensorSpec((kda.num_heads, hidden))
    yield "g_proj.weight", TensorSpec((kda.width, hidden))
    yield "o_proj.weight", TensorSpec((hidden, kda.width))
    padded = -(-kda.num_heads // A_LOG_PADDING) * A_LOG_PADDING
    yield "A_log", TensorSpec((kda.num_heads,), padded_to=padded)
    yield "dt_bias", TensorSpec((kda.width,))
    yield "o_norm.weight", TensorSpec((kda.head_dim,))


def _mla_tensors(config: K3Config) -> Iterator[tuple[str, TensorSpec]]:
    mla, hidden = config.mla, config.hidden_size
    v_width = mla.num_heads * mla.v_head_dim
    yield "q_a_proj.weight", TensorSpec((mla.q_lora_rank, hidden))
    yield "q_a_layernorm.weight", TensorSpec((mla.q_lora_rank,))
    yield "q_b_proj.weight", TensorSpec((mla.num_heads * mla.qk_head_dim, mla.q_lora_rank))
    yield "kv_a_proj_with_mqa.weight", TensorSpec((mla.latent_dim, hidden))
    yield "kv_a_layernorm.weight", TensorSpec((mla.kv_lora_rank,))
    yield "kv_b_proj.weight", TensorSpec((mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank))
    if mla.use_output_gate:
        yield "g_proj.weight", TensorSpec((v_width, hidden))
    yield "o_proj.weight", TensorSpec((hidden, v_width))


def _moe_tensors(config: K3Config) -> Iterator[tuple[str, TensorSpec]]:
    moe, hidden = config.moe, config.hidden_size
    yield "gate.weight", TensorSpec((moe.num_experts, hidden))
    yield "gate.e_score_correction_bias", TensorSpec((moe.num_experts,))
    yield "routed_expert_down_proj.weight", TensorSpec((moe.latent_size, hidden))
    if moe.use_norm:
        yield "routed_expert_norm.weight", TensorSpec((moe.latent_size,))
    yield "routed_expert_up_proj.weight", TensorSpec((hidden, moe.latent_size))
    if moe.num_shared_experts:
        yield from _mlp_tensors("shared_experts.", hidden, moe.shared_intermediate_size)


def _expert_matrices(config: K3Config) -> Iterator[tuple[str, tuple[int, int]]]:
    moe = config.moe
    wide, narrow = (moe.intermediate_size, moe.latent_size), (moe.latent_size, moe.intermediate_size)
    for layer in filter(config.is_moe, range(config.num_hidden_layers)):
        prefix = f"{TEXT_PREFIX}model.layers.{layer}.block_sparse_moe.experts."
        for expert in range(moe.num_experts):
            yield f"{prefix}{expert}.w1", wide
            yield f"{prefix}{expert}.w2", narrow
            yield f"{prefix}{expert}.w3", wide


def _vision_tensors(vision: Mapping[str, Any] | None, text_size: int) -> Iterator[tuple[str, TensorSpec]]:
    if vision is None:
        raise ConfigError(
            "The checkpoint has vision tensors but config.json has no vision_config: their shapes are unknown. "
            "Take config.json from the same checkpoint, or remove the vision tensors."
        )
    try:
        size, width, qkv = vision["vt_hidden_size"], vision["vt_intermediate_size"], vision["qkv_hidden_size"]
        patch, blocks = vision["patch_size"], vision["vt_num_hidden_layers"]
        positions = (vision["init_pos_emb_height"], vision["init_pos_emb_width"])
        merged = size * math.prod(vision["merge_kernel_size"])
    except KeyError as key:
        raise ConfigError(f"config.json has no vision_config.{key.args[0]}, which the vision tensors need.") from None
    tower = "vision_tower."
    yield f"{tower}patch_embed.proj.weight", TensorSpec((size, 3, patch, patch))
    yield f"{tower}patch_embed.pos_emb.weight", TensorSpec((*positions, size))
    for block in range(blocks):
        prefix = f"{tower}encoder.blocks.{block}."
        yield f"{prefix}norm0.weight", TensorSpec((size,))
        yield f"{prefix}norm1.weight", TensorSpec((size,))
        yield f"{prefix}wqkv.weight", TensorSpec((3 * qkv, size))
        yield f"{prefix}wo.weight", TensorSpec((size, qkv))
        yield f"{prefix}mlp.fc0.weight", TensorSpec((width, size))
        yield f"{prefix}mlp.fc1.weight", TensorSpec((size, width))
    yield f"{tower}encoder.final_layernorm.weight", TensorSpec((size,))
    yield "mm_projector.proj.0.weight", TensorSpec((merged, merged))
    yield "mm_projector.proj.2.weight", TensorSpec((text_size, merged))
    yield "mm_projector.post_norm.weight", TensorSpec((text_size,))
