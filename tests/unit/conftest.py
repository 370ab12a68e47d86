"""The published ``config.json``, typed in from fact sheet 1.1 to 1.5, for the tests of what is read from it."""

from __future__ import annotations

import copy
from typing import Any

import pytest

FULL_ATTENTION_LAYERS = [*range(4, 93, 4), 93]  # one-based, as the file has them

PUBLISHED_CONFIG: dict[str, Any] = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "model_type": "kimi_k3",
    "auto_map": {
        "AutoConfig": "configuration_kimi_k3.KimiK3Config",
        "AutoModel": "modeling_kimi_k3.KimiK3ForConditionalGeneration",
        "AutoModelForCausalLM": "modeling_kimi_k3.KimiK3ForConditionalGeneration",
    },
    "dtype": "bfloat16",
    "bos_token_id": 163584,
    "eos_token_id": 163586,
    "pad_token_id": 163839,
    "ignore_index": -100,
    "media_placeholder_token_id": 163605,
    "image_placeholder": "<|kimi_image_placeholder|>",
    "tie_word_embeddings": False,
    "text_config": {
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "vocab_size": 163840,
        "hidden_size": 7168,
        "num_hidden_layers": 93,
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "intermediate_size": 33792,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "max_position_embeddings": 1048576,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "attn_res_block_size": 12,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_shared_experts": 2,
        "moe_intermediate_size": 3072,
        "routed_expert_hidden_size": 3584,
        "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "num_nextn_predict_layers": 0,
        "bos_token_id": 163584,
        "eos_token_id": 163586,
        "pad_token_id": 163839,
        "tie_word_embeddings": False,
        "use_cache": True,
        "transformers_version": "4.56.2",
        "linear_attn_config": {
            "num_heads": 96,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
            "full_attn_layers": FULL_ATTENTION_LAYERS,
            "kda_layers": [i for i in range(1, 94) if i not in FULL_ATTENTION_LAYERS],
        },
        "quantization_config": {
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
                        "group_size": 32,
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
        },
    },
    "vision_config": {
        "patch_size": 14,
        "init_pos_emb_height": 64,
        "init_pos_emb_width": 64,
        "init_pos_emb_time": 4,
        "pos_emb_type": "divided_fixed",
        "pos_emb_interpolation_mode": "bilinear",
        "patch_embed_proj_bias": False,
        "vt_hidden_size": 1024,
        "vt_intermediate_size": 4096,
        "vt_num_hidden_layers": 27,
        "vt_num_attention_heads": 12,
        "qkv_hidden_size": 1536,
        "norm_type": "rmsnorm",
        "mlp_type": "mlp2",
        "activation_func": "gelu_pytorch_tanh",
        "attn_bias": False,
        "linear_bias": False,
        "merge_type": "sd2_tpool",
        "merge_kernel_size": [2, 2],
        "mm_projector_type": "patchmergerv2",
        "mm_hidden_size": 1024,
        "projector_hidden_act": "gelu",
        "projector_ln_eps": 1e-5,
        "text_hidden_size": 7168,
        "_attn_implementation": "flash_attention_2",
    },
}


@pytest.fixture
def published_config() -> dict[str, Any]:
    """A copy that the test may change."""
    return copy.deepcopy(PUBLISHED_CONFIG)


@pytest.fixture
def text_config(published_config: dict[str, Any]) -> dict[str, Any]:
    """The language model inside ``published_config``; a change to it is a change there."""
    return published_config["text_config"]
