"""Seam: the host learns what a K3 config and tokenizer are, and that K3 is a hybrid MLA model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_k3.chat.segments import END_OF_MESSAGE
from sglang_k3.config import ARCHITECTURE, MODEL_TYPE
from sglang_k3.integration.names import is_k3


def install() -> None:
    from sglang.srt.arg_groups import overrides
    from sglang.srt.configs.linear_attn_model_registry import (
        LinearAttnModelSpec,
        get_linear_attn_spec_by_arch,
        register_linear_attn_model,
    )
    from sglang.srt.utils.hf_transformers.common import _CONFIG_REGISTRY
    from transformers import AutoConfig

    from sglang_k3.host.hf_config import K3HFConfig, K3TextHFConfig

    AutoConfig.register(MODEL_TYPE, K3HFConfig, exist_ok=True)
    AutoConfig.register(K3TextHFConfig.model_type, K3TextHFConfig, exist_ok=True)
    # AutoConfig's object loses attributes in the host's parser; its own registry reloads the class as it is.
    _CONFIG_REGISTRY[MODEL_TYPE] = K3HFConfig
    if get_linear_attn_spec_by_arch(ARCHITECTURE) is None:
        register_linear_attn_model(
            LinearAttnModelSpec(
                config_class=K3TextHFConfig,
                backend_class_name="sglang_k3.host.kda_backend.K3KDABackend",
                arch_names=[ARCHITECTURE],
                support_mamba_cache_extra_buffer=True,
                unwrap_text_config=True,
            )
        )
    # The spec's own field for this is never read by the host.
    overrides._MAMBA_EXTRA_BUFFER_ARCHS = overrides._MAMBA_EXTRA_BUFFER_ARCHS | {ARCHITECTURE}
    HookRegistry.register(
        "sglang.srt.configs.model_config.ModelConfig._derive_model_shapes", _derive_model_shapes, HookType.AROUND
    )
    HookRegistry.register(
        "sglang.srt.utils.hf_transformers.tokenizer._auto_tokenizer_from_pretrained", _load_tokenizer, HookType.AROUND
    )


def _derive_model_shapes(original: Callable[..., None], model_config: Any) -> None:
    """The host knows MLA models by a list of names; K3's shapes come from its own config."""
    original(model_config)
    if ARCHITECTURE not in model_config.hf_config.architectures:
        return
    from sglang.srt.configs.model_config import AttentionArch

    mla = model_config.hf_config.k3.mla
    model_config.attention_arch = AttentionArch.MLA
    model_config.head_dim = mla.qk_head_dim
    model_config.kv_lora_rank = mla.kv_lora_rank
    model_config.qk_nope_head_dim = mla.qk_nope_head_dim
    model_config.qk_rope_head_dim = mla.qk_rope_head_dim
    model_config.v_head_dim = mla.v_head_dim
    model_config.scaling = mla.scale


def _load_tokenizer(original: Callable[..., Any], name: str, *args: Any, **options: Any) -> Any:
    """A class named in ``tokenizer_config.json``, which may be code of the checkpoint, outranks a registered one."""
    if not is_k3(str(name), options.get("tokenizer_revision") or options.get("revision")):
        return original(name, *args, **options)
    from sglang_k3.host.hf_config import K3HFConfig
    from sglang_k3.host.tokenizer import KimiK3TokenizerFast

    for choice_of_class in ("use_fast", "trust_remote_code"):
        options.pop(choice_of_class, None)
    # The detokenizer passes one of them, the tokenizer manager both.
    revisions = [options.pop(key, None) for key in ("tokenizer_revision", "revision")]
    revision = next(filter(None, revisions), "main")
    tokenizer = KimiK3TokenizerFast.from_pretrained(name, *args, revision=revision, **options)
    # /tokenize reports it, and fails on the 10**30 that stands for "not given".
    context_length: int = K3HFConfig.from_pretrained(name, revision=revision).text_config.max_position_embeddings
    tokenizer.model_max_length = min(tokenizer.model_max_length, context_length)
    # A turn ends with this token whatever the tokenizer's files call their end of text; the host looks it up here when
    # it holds back the end of an answer that is to have a minimal length.
    if tokenizer.convert_tokens_to_ids(END_OF_MESSAGE) is not None:
        tokenizer.eos_token = END_OF_MESSAGE
    return tokenizer
