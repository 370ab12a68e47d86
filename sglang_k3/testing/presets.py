"""Sizes of the tiny checkpoints, and the published ``config.json`` layout filled with them.

Every preset keeps each structural feature of K3: a dense layer 0, both attention kinds, two MLA layers at the
end, several bank rows, an MLA value size that differs from the KDA head size, biased routing, both MLP kinds.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from sglang_k3.testing import fitted
from sglang_k3.testing.mxfp4 import GROUP_SIZE
from sglang_k3.testing.tokenizer import END_OF_MESSAGE, MEDIA_PAD, Merges, special_token_ids


@dataclasses.dataclass(frozen=True, kw_only=True)
class TinyPreset:
    """Sizes of one tiny model; ``full_attention_layers`` is one-based as in ``config.json``.

    ``fitted`` names the weights and tokenizer merges in ``testing/data``; None for random weights and no such merges.
    """

    num_layers: int
    attn_res_block_size: int
    full_attention_layers: tuple[int, ...]
    hidden_size: int = 64
    kda_heads: int = 4
    kda_head_dim: int = 16
    mla_heads: int = 4
    q_lora_rank: int = 24
    kv_lora_rank: int = 16
    qk_nope_head_dim: int = 16
    qk_rope_head_dim: int = 8
    v_head_dim: int = 24
    num_experts: int = 8
    top_k: int = 2
    num_shared_experts: int = 2
    latent_size: int = 32
    moe_width: int = 32
    dense_width: int = 96
    vocab_size: int = 384
    max_position_embeddings: int = 8192
    fitted: str | None = None

    @property
    def learned_merges(self) -> tuple[tuple[str, str], ...]:
        return () if self.fitted is None else fitted.load_merges(self.fitted)

    def __post_init__(self) -> None:
        if self.latent_size % GROUP_SIZE or self.moe_width % GROUP_SIZE:
            raise ValueError(
                f"latent_size={self.latent_size} and moe_width={self.moe_width} must be multiples of {GROUP_SIZE}, "
                "the MXFP4 group size."
            )


PRESETS: dict[str, TinyPreset] = {
    "default": TinyPreset(num_layers=9, attn_res_block_size=4, full_attention_layers=(4, 8, 9)),
    "odd": TinyPreset(
        num_layers=13,
        attn_res_block_size=4,
        full_attention_layers=(4, 8, 12, 13),
        hidden_size=72,
        kda_heads=3,
        kda_head_dim=20,
        mla_heads=5,
        q_lora_rank=28,
        kv_lora_rank=20,
        qk_nope_head_dim=12,
        qk_rope_head_dim=4,
        v_head_dim=28,
        num_experts=11,
        top_k=3,
        num_shared_experts=1,
        latent_size=96,
        dense_width=100,
        vocab_size=371,
    ),
    "deep": TinyPreset(num_layers=25, attn_res_block_size=12, full_attention_layers=(4, 8, 12, 16, 20, 24, 25)),
    "chat": TinyPreset(
        num_layers=5,
        attn_res_block_size=2,
        full_attention_layers=(4, 5),
        hidden_size=96,
        q_lora_rank=48,
        kv_lora_rank=64,
        num_experts=4,
        vocab_size=1472,
        fitted="chat",
    ),
}


# Too large for a CPU to be tested on: heads and latent rows have the sizes of K3's own, and so have the kernels' tiles.
_GPU = TinyPreset(
    num_layers=8,
    attn_res_block_size=4,
    full_attention_layers=(4, 8),
    hidden_size=1024,
    kda_heads=16,
    kda_head_dim=128,
    mla_heads=16,
    q_lora_rank=384,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    num_experts=16,
    top_k=4,
    latent_size=512,
    moe_width=256,
    dense_width=2048,
    vocab_size=2048,
    max_position_embeddings=32768,
)
GPU_PRESETS: dict[str, TinyPreset] = {
    "gpu": _GPU,
    "gpu-96-heads": dataclasses.replace(_GPU, mla_heads=96),  # as many as a rank has under data-parallel attention
}


# The published sizes: nothing to write to a disk, but what plans and benchmarks are made for.
K3_SIZES = TinyPreset(
    num_layers=93,
    full_attention_layers=(*range(4, 93, 4), 93),
    attn_res_block_size=12,
    hidden_size=7168,
    kda_heads=96,
    kda_head_dim=128,
    mla_heads=96,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    num_experts=896,
    top_k=16,
    latent_size=3584,
    moe_width=3072,
    dense_width=33792,
    vocab_size=163840,
    max_position_embeddings=1 << 20,
)


def find_preset(name: str) -> TinyPreset:
    """The preset of this name.

    Raises:
        ValueError: there is none; the message lists those that exist.
    """
    presets = PRESETS | GPU_PRESETS
    if name not in presets:
        raise ValueError(f"unknown tiny preset {name!r}: choose one of {', '.join(presets)}.")
    return presets[name]


def published_config(
    preset: TinyPreset, *, dtype: str, packed_experts: bool, vision: bool, merges: Merges | None = None
) -> dict[str, Any]:
    """The parsed ``config.json`` of a tiny checkpoint.

    ``auto_map`` is left out: it would name Python files that a tiny checkpoint does not carry. Without vision there
    is no ``vision_config``; with unpacked experts no ``quantization_config``. ``merges`` stands in for the preset's own
    while those are being learned.
    """
    ids = special_token_ids(preset.vocab_size, preset.learned_merges if merges is None else merges)
    token_ids = {
        "bos_token_id": ids["[BOS]"],
        "eos_token_id": ids[END_OF_MESSAGE],
        "pad_token_id": ids["[PAD]"],
    }
    config: dict[str, Any] = {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": dtype,
        **token_ids,
        "ignore_index": -100,
        "media_placeholder_token_id": ids[MEDIA_PAD],
        "image_placeholder": "<|kimi_image_placeholder|>",
        "tie_word_embeddings": False,
        "text_config": _text_config(preset) | token_ids,
    }
    if packed_experts:
        config["text_config"]["quantization_config"] = _mxfp4_config()
    if vision:
        config["vision_config"] = _vision_config(preset)
    return config


def _text_config(preset: TinyPreset) -> dict[str, Any]:
    layers = range(1, preset.num_layers + 1)
    return {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "vocab_size": preset.vocab_size,
        "hidden_size": preset.hidden_size,
        "num_hidden_layers": preset.num_layers,
        "num_attention_heads": preset.mla_heads,
        "num_key_value_heads": preset.mla_heads,
        "intermediate_size": preset.dense_width,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "max_position_embeddings": preset.max_position_embeddings,
        "q_lora_rank": preset.q_lora_rank,
        "kv_lora_rank": preset.kv_lora_rank,
        "qk_nope_head_dim": preset.qk_nope_head_dim,
        "qk_rope_head_dim": preset.qk_rope_head_dim,
        "v_head_dim": preset.v_head_dim,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "attn_res_block_size": preset.attn_res_block_size,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_experts": preset.num_experts,
        "num_experts_per_token": preset.top_k,
        "num_shared_experts": preset.num_shared_experts,
        "moe_intermediate_size": preset.moe_width,
        "routed_expert_hidden_size": preset.latent_size,
        "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "use_cache": True,
        "transformers_version": "4.56.2",
        "linear_attn_config": {
            "num_heads": preset.kda_heads,
            "head_dim": preset.kda_head_dim,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
            "full_attn_layers": list(preset.full_attention_layers),
            "kda_layers": [i for i in layers if i not in preset.full_attention_layers],
        },
    }


def _mxfp4_config() -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": "mxfp4-pack-quantized",
                "input_activations": None,
                "output_activations": None,
                "weights": {
                    "num_bits": 4,
                    "type": "float",
                    "group_size": GROUP_SIZE,
                    "strategy": "group",
                    "symmetric": True,
                    "dynamic": False,
                    "observer": "minmax",
                    "observer_kwargs": {},
                    "scale_dtype": "torch.uint8",
                    "zp_dtype": None,
                    "actorder": None,
                    "block_structure": None,
                },
            }
        },
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*",
            "re:.*vision_tower.*",
            "re:.*mm_projector.*",
        ],
    }


def _vision_config(preset: TinyPreset) -> dict[str, Any]:
    return {
        "patch_size": 14,
        "init_pos_emb_height": 8,
        "init_pos_emb_width": 8,
        "init_pos_emb_time": 4,
        "pos_emb_type": "divided_fixed",
        "pos_emb_interpolation_mode": "bilinear",
        "patch_embed_proj_bias": False,
        "vt_hidden_size": 32,
        "vt_intermediate_size": 64,
        "vt_num_hidden_layers": 2,
        "vt_num_attention_heads": 2,
        "qkv_hidden_size": 48,
        "norm_type": "rmsnorm",
        "mlp_type": "mlp2",
        "activation_func": "gelu_pytorch_tanh",
        "attn_bias": False,
        "linear_bias": False,
        "merge_type": "sd2_tpool",
        "merge_kernel_size": [2, 2],
        "mm_projector_type": "patchmergerv2",
        "mm_hidden_size": 32,
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-5,
        "text_hidden_size": preset.hidden_size,
        "_attn_implementation": "flash_attention_2",
    }
