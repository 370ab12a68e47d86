"""K3Config: a frozen, checked view of a K3 ``config.json``.

The published file nests the language model in ``text_config``; everything the code needs is read here
once, under the published key names, and checked, so that the rest of the package neither repeats a
default nor meets a shape it cannot run. Layer indices are zero-based (the file's two lists are one-based).
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from sglang_k3.errors import ConfigError

MODEL_TYPE = "kimi_k3"
ARCHITECTURE = "KimiK3ForConditionalGeneration"
MXFP4_GROUP_SIZE = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class KDAConfig:
    """Kimi Delta Attention (``linear_attn_config``)."""

    num_heads: int
    head_dim: int
    short_conv_kernel_size: int
    gate_lower_bound: float

    @property
    def width(self) -> int:
        """Channels of each of q, k, v: ``num_heads * head_dim``."""
        return self.num_heads * self.head_dim


@dataclasses.dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Multi-head latent attention without positions."""

    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    use_output_gate: bool

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Elements of one cached row: the normalised latent, then the shared key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def scale(self) -> float:
        return 1.0 / math.sqrt(self.qk_head_dim)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """Routed experts in a latent space, beside shared experts at full width."""

    num_experts: int
    top_k: int
    num_shared_experts: int
    intermediate_size: int
    latent_size: int
    use_norm: bool
    renormalize: bool
    routed_scaling_factor: float
    num_expert_group: int
    topk_group: int

    @property
    def shared_intermediate_size(self) -> int:
        return self.num_shared_experts * self.intermediate_size


@dataclasses.dataclass(frozen=True, kw_only=True)
class K3Config:
    """The language model of a K3 checkpoint, and what is known of its vision tower.

    Attributes:
        full_attention_layers: zero-based indices of the MLA layers, ascending; all others are KDA.
        attn_res_block_size: layers per bank row; ``None`` means ordinary pre-norm residuals.
        mxfp4_experts: whether ``quantization_config`` announces packed experts; the tensors have the last word.
        vision: the ``vision_config`` object as stored, or ``None`` for a text-only checkpoint.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    intermediate_size: int
    rms_norm_eps: float
    activation_situ_beta: float
    activation_situ_linear_beta: float | None
    max_position_embeddings: int
    full_attention_layers: tuple[int, ...]
    attn_res_block_size: int | None
    first_k_dense_replace: int
    moe_layer_freq: int
    tie_word_embeddings: bool
    kda: KDAConfig
    mla: MLAConfig
    moe: MoEConfig
    mxfp4_experts: bool
    vision: Mapping[str, Any] | None

    @classmethod
    def from_dict(cls, config: Mapping[str, Any]) -> K3Config:
        """Read a parsed ``config.json``.

        Raises:
            ConfigError: a key is missing, has the wrong type, or asks for what is not implemented.
        """
        text = config.get("text_config")
        if not isinstance(text, Mapping):
            raise ConfigError(
                "config.json has no text_config object: a K3 checkpoint nests the language model there. "
                f"Found the keys {sorted(config)[:12]}."
            )
        read = _Reader(text, "text_config")
        linear = text.get("linear_attn_config")
        if not isinstance(linear, Mapping):
            raise ConfigError(
                "config.json has no text_config.linear_attn_config: without it the KDA layers have no head "
                "count, head size or schedule. Take config.json from the published checkpoint."
            )
        read_linear = _Reader(linear, "text_config.linear_attn_config")
        num_layers = read.positive("num_hidden_layers")
        made = cls(
            vocab_size=read.positive("vocab_size"),
            hidden_size=read.positive("hidden_size"),
            num_hidden_layers=num_layers,
            intermediate_size=read.positive("intermediate_size"),
            rms_norm_eps=read.number("rms_norm_eps", default=1e-5),
            activation_situ_beta=read.number("activation_situ_beta"),
            activation_situ_linear_beta=read.number_or_null("activation_situ_linear_beta"),
            max_position_embeddings=read.positive("max_position_embeddings"),
            full_attention_layers=_schedule(read_linear, num_layers),
            attn_res_block_size=read.positive_or_none("attn_res_block_size"),
            first_k_dense_replace=read.integer("first_k_dense_replace"),
            moe_layer_freq=read.positive("moe_layer_freq", default=1),
            tie_word_embeddings=read.boolean("tie_word_embeddings", default=config.get("tie_word_embeddings", False)),
            kda=_kda_config(read_linear),
            mla=MLAConfig(
                num_heads=read.positive("num_attention_heads"),
                q_lora_rank=read.positive("q_lora_rank"),
                kv_lora_rank=read.positive("kv_lora_rank"),
                qk_nope_head_dim=read.positive("qk_nope_head_dim"),
                qk_rope_head_dim=read.positive("qk_rope_head_dim"),
                v_head_dim=read.positive("v_head_dim"),
                use_output_gate=read.boolean("mla_use_output_gate", default=True),
            ),
            moe=_moe_config(read),
            mxfp4_experts=_announces_mxfp4(text.get("quantization_config") or config.get("quantization_config")),
            vision=config.get("vision_config"),
        )
        _refuse_what_is_not_implemented(read)
        return made

    @cached_property
    def kda_layers(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.num_hidden_layers) if not self.is_full_attention(i))

    def is_full_attention(self, layer: int) -> bool:
        return layer in self._full_attention_set

    def is_moe(self, layer: int) -> bool:
        return layer >= self.first_k_dense_replace and layer % self.moe_layer_freq == 0

    def appends_bank_row(self, layer: int) -> bool:
        """Whether the running prefix is frozen into the bank before this layer's attention."""
        return self.attn_res_block_size is not None and layer % self.attn_res_block_size == 0

    def num_bank_rows(self, layer: int) -> int:
        """Rows in the bank when layer ``layer`` starts; ``num_hidden_layers`` gives the final count."""
        if self.attn_res_block_size is None:
            return 0
        return math.ceil(layer / self.attn_res_block_size)

    @cached_property
    def _full_attention_set(self) -> frozenset[int]:
        return frozenset(self.full_attention_layers)


def with_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A parsed ``config.json`` with some values replaced, objects merged key by key.

    Raises:
        ConfigError: a top-level key that the file does not have, since most keys belong under ``text_config``; or
            one that makes another model of it.
    """
    unknown = sorted(set(overrides) - set(config))
    if unknown:
        raise ConfigError(
            f"--json-model-override-args: config.json has no {', '.join(unknown)} at the top. "
            'Keys of the language model go under text_config: {"text_config": {...}}.'
        )
    _refuse_another_model(config, overrides)
    return _merged(config, overrides)


def _refuse_another_model(values: Mapping[str, Any], overrides: Mapping[str, Any], where: str = "") -> None:
    for key, value in overrides.items():
        old = values.get(key)
        if key in ("architectures", "model_type") and value != old:
            raise ConfigError(
                f"--json-model-override-args: {where}{key} {value!r} would make another model of this one, which has "
                f"{old!r}. Leave it out."
            )
        if isinstance(old, Mapping) and isinstance(value, Mapping):
            _refuse_another_model(old, value, f"{where}{key}.")


def _merged(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for key, value in overrides.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged


class _Reader:
    """Typed access to one JSON object; an error names the key as the user would look it up."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where

    def _get(self, key: str, default: Any) -> Any:
        value = self.values.get(key, default)
        if value is _REQUIRED:
            raise ConfigError(f"config.json has no {self.where}.{key}: K3 needs it.")
        return value

    def integer(self, key: str, default: Any = None) -> int:
        value = self._get(key, _REQUIRED if default is None else default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise ConfigError(f"{self.where}.{key} = {value!r} is not a non-negative integer.")
        return value

    def positive(self, key: str, default: Any = None) -> int:
        value = self.integer(key, default)
        if value == 0:
            raise ConfigError(f"{self.where}.{key} = 0, but at least 1 is needed.")
        return value

    def positive_or_none(self, key: str) -> int | None:
        return None if self.values.get(key) is None else self.positive(key)

    def number(self, key: str, default: Any = None) -> float:
        value = self._get(key, _REQUIRED if default is None else default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
            raise ConfigError(f"{self.where}.{key} = {value!r} is not a finite number.")
        return float(value)

    def number_or_null(self, key: str) -> float | None:
        """A key that must be present, because leaving it out and switching it off are different models."""
        return None if self._get(key, _REQUIRED) is None else self.number(key)

    def boolean(self, key: str, *, default: bool) -> bool:
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{self.where}.{key} = {value!r} is not true or false.")
        return value


_REQUIRED: Any = object()


def _kda_config(read: _Reader) -> KDAConfig:
    if not read.boolean("use_full_rank_gate", default=True):
        raise ConfigError(
            f"{read.where}.use_full_rank_gate = false: the low-rank output gate of Kimi-Linear is not implemented; "
            "K3 checkpoints set it to true."
        )
    lower_bound = read.number_or_null("gate_lower_bound")
    if lower_bound is None or lower_bound >= 0:
        raise ConfigError(
            f"{read.where}.gate_lower_bound = {lower_bound}: only K3's bounded decay gate is implemented, which "
            "needs a negative bound (published: -5.0); the softplus gate of Kimi-Linear is another function."
        )
    return KDAConfig(
        num_heads=read.positive("num_heads"),
        head_dim=read.positive("head_dim"),
        short_conv_kernel_size=read.positive("short_conv_kernel_size"),
        gate_lower_bound=lower_bound,
    )


def _schedule(read: _Reader, num_layers: int) -> tuple[int, ...]:
    """The MLA layers, zero-based, after checking that the two one-based lists split the layers."""
    full = _one_based(read, "full_attn_layers")
    kda = _one_based(read, "kda_layers") if "kda_layers" in read.values else None
    if kda is None:
        kda = sorted(set(range(1, num_layers + 1)) - set(full))
    if sorted(full + kda) != list(range(1, num_layers + 1)):
        raise ConfigError(
            f"{read.where}: full_attn_layers {full} and kda_layers {kda} must together name each of the layers "
            f"1..{num_layers} exactly once (one-based)."
        )
    if not full or not kda:
        raise ConfigError(f"{read.where}: K3 needs at least one MLA and one KDA layer, got {len(full)} and {len(kda)}.")
    return tuple(sorted(i - 1 for i in full))


def _one_based(read: _Reader, key: str) -> list[int]:
    value = read.values.get(key)
    if not isinstance(value, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in value):
        raise ConfigError(f"{read.where}.{key} = {value!r} is not a list of one-based layer numbers.")
    return value


def _moe_config(read: _Reader) -> MoEConfig:
    moe = MoEConfig(
        num_experts=read.positive("num_experts"),
        top_k=read.positive("num_experts_per_token"),
        num_shared_experts=read.integer("num_shared_experts"),
        intermediate_size=read.positive("moe_intermediate_size"),
        latent_size=read.positive("routed_expert_hidden_size"),
        use_norm=read.boolean("latent_moe_use_norm", default=True),
        renormalize=read.boolean("moe_renormalize", default=True),
        routed_scaling_factor=read.number("routed_scaling_factor", default=1.0),
        num_expert_group=read.positive("num_expert_group", default=1),
        topk_group=read.positive("topk_group", default=1),
    )
    if moe.num_experts % moe.num_expert_group or moe.topk_group > moe.num_expert_group:
        raise ConfigError(
            f"{read.where}: num_expert_group = {moe.num_expert_group} must divide num_experts = {moe.num_experts} "
            f"and be at least topk_group = {moe.topk_group}."
        )
    eligible = moe.num_experts // moe.num_expert_group * moe.topk_group
    if moe.top_k > eligible:
        raise ConfigError(
            f"{read.where}.num_experts_per_token = {moe.top_k} exceeds the {eligible} experts that a token may "
            "choose from."
        )
    return moe


def _announces_mxfp4(quantization: Mapping[str, Any] | None) -> bool:
    """Whether the experts are packed; anything but K3's own format is refused."""
    if not quantization:
        return False
    method, fmt = quantization.get("quant_method"), quantization.get("format")
    if (method, fmt) != ("compressed-tensors", "mxfp4-pack-quantized"):
        raise ConfigError(
            f"quantization_config has quant_method {method!r} and format {fmt!r}: this version reads K3's own MXFP4 "
            "experts ('compressed-tensors', 'mxfp4-pack-quantized') and unquantised experts. Use moonshotai/Kimi-K3 "
            "or a bf16 checkpoint."
        )
    for group in (quantization.get("config_groups") or {}).values():
        size = (group.get("weights") or {}).get("group_size", MXFP4_GROUP_SIZE)
        if size != MXFP4_GROUP_SIZE:
            raise ConfigError(f"quantization_config has group_size {size}: MXFP4 has one scale per {MXFP4_GROUP_SIZE}.")
    return True


def _refuse_what_is_not_implemented(read: _Reader) -> None:
    for key, only in (
        ("hidden_act", "situ"),
        ("moe_router_activation_func", "sigmoid"),
        ("mla_use_nope", True),
        ("num_nextn_predict_layers", 0),
    ):
        value = read.values.get(key, only)
        if value != only:
            raise ConfigError(f"{read.where}.{key} = {value!r} is not implemented: K3 checkpoints have {only!r}.")
