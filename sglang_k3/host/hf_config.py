"""K3's ``config.json`` as the Hugging Face config objects that SGLang passes around.

They only carry what the host reads by attribute; everything this package computes with comes from
``K3Config``, rebuilt from them on demand so that ``--json-model-override-args`` takes effect.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2StateDType,
    mamba2_state_dtype,
)
from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.runtime_context import get_parallel
from transformers import PretrainedConfig

from sglang_k3.config import MODEL_TYPE, K3Config, with_overrides


@dataclasses.dataclass(kw_only=True, frozen=True)
class K3CacheParams(KimiLinearCacheParams):
    """State shapes of one rank.

    Attributes:
        num_charged_layers: KDA layers of the pipeline stage that has most of them.
    """

    num_charged_layers: int

    @property
    def mamba_cache_per_req(self) -> int:
        """Bytes of one state slot on the largest stage, from which all stages work out the same number of slots.

        The host would charge every stage for the states of the whole model, and leave that memory unused.
        """
        bytes_per_layer: int = super().mamba_cache_per_req // len(self.layers)
        return bytes_per_layer * self.num_charged_layers


class K3TextHFConfig(PretrainedConfig):
    """The nested ``text_config``; unknown keys stay attributes."""

    model_type = f"{MODEL_TYPE}_text"

    # transformers turns a subclass without its own __init__ into a dataclass and drops what it does not know.
    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("tie_word_embeddings", False)
        super().__init__(**kwargs)

    @property
    def k3(self) -> K3Config:
        return K3Config.from_dict({"text_config": self.to_dict()})

    @property
    def full_attention_layer_ids(self) -> list[int]:
        return list(self.k3.full_attention_layers)

    @property
    def linear_layer_ids(self) -> list[int]:
        return list(self.k3.kda_layers)

    @property
    def mamba2_cache_params(self) -> K3CacheParams:
        """State shapes of this rank; the host reads it once the parallel groups exist."""
        kda, layers, pp_size = self.k3.kda, self.linear_layer_ids, get_parallel().pp_size
        stages = (get_pp_indices(self.num_hidden_layers, rank, pp_size) for rank in range(pp_size))
        charged = max(sum(first <= layer < end for layer in layers) for first, end in stages)
        shape = KimiLinearStateShape.create(
            tp_world_size=get_parallel().attn_tp_size,
            num_heads=kda.num_heads,
            head_dim=kda.head_dim,
            conv_kernel_size=kda.short_conv_kernel_size,
        )
        dtype: Mamba2StateDType = mamba2_state_dtype(self)
        return K3CacheParams(shape=shape, layers=layers, dtype=dtype, num_charged_layers=charged)


class K3HFConfig(PretrainedConfig):
    """The top level of a K3 ``config.json``."""

    model_type = MODEL_TYPE
    sub_configs = {"text_config": K3TextHFConfig}

    def __init__(
        self,
        text_config: dict[str, Any] | K3TextHFConfig | None = None,
        quantization_config: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(text_config, K3TextHFConfig):
            text = {key: value for key, value in (text_config or {}).items() if key != "model_type"}
            # Read by tensor, not by the host's quantisation registry: it must not see a top-level one.
            if quantization_config is not None:
                text.setdefault("quantization_config", quantization_config)
            for key in ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings"):
                if key in kwargs:
                    text.setdefault(key, kwargs[key])
                elif key in text:
                    kwargs[key] = text[key]
            text_config = K3TextHFConfig(**text)
        self.text_config = text_config
        kwargs.setdefault("tie_word_embeddings", text_config.tie_word_embeddings)
        super().__init__(**kwargs)

    def update(self, config_dict: dict[str, Any]) -> None:
        """``--json-model-override-args``: nested objects are merged, where the base class would replace them."""
        old = {key: getattr(self, key) for key in config_dict if hasattr(self, key)}
        if "text_config" in config_dict:
            old["text_config"] = self.text_config.to_dict()
        for key, value in with_overrides(old, config_dict).items():
            setattr(self, key, K3TextHFConfig(**value) if key == "text_config" else value)

    @property
    def k3(self) -> K3Config:
        return K3Config.from_dict(
            {"text_config": self.text_config.to_dict(), "vision_config": getattr(self, "vision_config", None)}
        )
