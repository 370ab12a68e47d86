"""K3Config: the published file is read as the fact sheet says, and what cannot be run is refused with the remedy."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from typing import Any

import pytest

from sglang_k3.config import K3Config, with_overrides
from sglang_k3.errors import ConfigError

REMOVED: Any = object()
Json = dict[str, Any]


def changed(config: Json, path: str, value: Any) -> Json:
    """``config`` with the key at a dotted path set, or taken out."""
    *parents, key = path.split(".")
    inner = config
    for parent in parents:
        inner = inner[parent]
    if value is REMOVED:
        del inner[key]
    else:
        inner[key] = value
    return config


def test_published_sizes(published_config: Json) -> None:
    config = K3Config.from_dict(published_config)
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (163840, 7168, 33792)
    assert (config.activation_situ_beta, config.activation_situ_linear_beta, config.rms_norm_eps) == (4.0, 25.0, 1e-5)
    assert config.max_position_embeddings == 1048576
    assert config.tie_word_embeddings is False
    assert config.mxfp4_experts is True
    assert config.vision == published_config["vision_config"]
    assert dataclasses.asdict(config.kda) == {
        "num_heads": 96,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
    }
    assert config.kda.width == 12288
    assert dataclasses.asdict(config.mla) == {
        "num_heads": 96,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "use_output_gate": True,
    }
    assert (config.mla.qk_head_dim, config.mla.latent_dim) == (192, 576)
    assert config.mla.scale == pytest.approx(0.0721687836487032, rel=1e-14)  # 192 ** -0.5
    assert dataclasses.asdict(config.moe) == {
        "num_experts": 896,
        "top_k": 16,
        "num_shared_experts": 2,
        "intermediate_size": 3072,
        "latent_size": 3584,
        "use_norm": True,
        "renormalize": True,
        "routed_scaling_factor": 1.0,
        "num_expert_group": 1,
        "topk_group": 1,
    }
    assert config.moe.shared_intermediate_size == 6144


def test_published_schedule(published_config: Json) -> None:
    config = K3Config.from_dict(published_config)
    mla = (3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43, 47, 51, 55, 59, 63, 67, 71, 75, 79, 83, 87, 91, 92)
    assert config.num_hidden_layers == 93
    assert config.full_attention_layers == mla
    assert len(mla) == 24 and len(config.kda_layers) == 69
    assert sorted((*mla, *config.kda_layers)) == list(range(93))
    assert [layer for layer in range(93) if config.is_full_attention(layer)] == list(mla)
    assert [layer for layer in range(93) if not config.is_moe(layer)] == [0]


def test_published_bank_rows(published_config: Json) -> None:
    """The table of fact sheet 3.5, whose MLP side sees the row that the layer itself appends."""
    config = K3Config.from_dict(published_config)
    table = {0: (0, 1), 12: (1, 2), 84: (7, 8)}
    table |= dict.fromkeys(range(1, 12), (1, 1)) | dict.fromkeys(range(13, 24), (2, 2))
    table |= dict.fromkeys(range(85, 93), (8, 8))
    for layer, rows in table.items():
        attention_side = config.num_bank_rows(layer)
        assert (attention_side, attention_side + config.appends_bank_row(layer)) == rows, layer
    assert [layer for layer in range(93) if config.appends_bank_row(layer)] == [0, 12, 24, 36, 48, 60, 72, 84]
    assert config.num_bank_rows(93) == 8


def test_quantization_config_may_stand_at_the_top(published_config: Json) -> None:
    """Other tools hoist it when they write the file again."""
    published_config["quantization_config"] = published_config["text_config"].pop("quantization_config")
    assert K3Config.from_dict(published_config).mxfp4_experts is True
    del published_config["quantization_config"]
    assert K3Config.from_dict(published_config).mxfp4_experts is False


def test_a_text_only_copy_has_no_vision(published_config: Json) -> None:
    del published_config["vision_config"]
    assert K3Config.from_dict(published_config).vision is None


def test_kda_layers_may_be_left_out(published_config: Json) -> None:
    """One list says it all; the file has both."""
    expected = K3Config.from_dict(published_config)
    del published_config["text_config"]["linear_attn_config"]["kda_layers"]
    assert K3Config.from_dict(published_config) == expected


def test_keys_that_may_be_left_out(published_config: Json, text_config: Json) -> None:
    for key in (
        "rms_norm_eps",
        "moe_layer_freq",
        "mla_use_output_gate",
        "latent_moe_use_norm",
        "moe_renormalize",
        "routed_scaling_factor",
        "num_expert_group",
        "topk_group",
        "tie_word_embeddings",
    ):
        expected = K3Config.from_dict(published_config)
        del text_config[key]
        assert K3Config.from_dict(published_config) == expected, key


REQUIRED_KEYS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "intermediate_size",
    "activation_situ_beta",
    "activation_situ_linear_beta",
    "max_position_embeddings",
    "first_k_dense_replace",
    "num_attention_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "num_experts",
    "num_experts_per_token",
    "num_shared_experts",
    "moe_intermediate_size",
    "routed_expert_hidden_size",
    "linear_attn_config.num_heads",
    "linear_attn_config.head_dim",
    "linear_attn_config.short_conv_kernel_size",
    "linear_attn_config.gate_lower_bound",
)


@pytest.mark.parametrize("key", REQUIRED_KEYS)
def test_a_missing_key_is_named(key: str, published_config: Json) -> None:
    config = changed(published_config, f"text_config.{key}", REMOVED)
    with pytest.raises(ConfigError, match=f"^config.json has no text_config.{re.escape(key)}: K3 needs it"):
        K3Config.from_dict(config)


@pytest.mark.parametrize("value", [None, [], "text"], ids=repr)
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("text_config", "no text_config object: a K3 checkpoint nests the language model there"),
        ("text_config.linear_attn_config", "linear_attn_config.*Take config.json from the published checkpoint"),
    ],
)
def test_a_missing_object_is_named(path: str, message: str, value: Any, published_config: Json) -> None:
    with pytest.raises(ConfigError, match=message):
        K3Config.from_dict(changed(published_config, path, value))
    with pytest.raises(ConfigError, match=message):
        K3Config.from_dict(changed(published_config, path, REMOVED))


@pytest.mark.parametrize("key", ["hidden_size", "num_experts", "first_k_dense_replace", "linear_attn_config.num_heads"])
@pytest.mark.parametrize("value", [True, "7168", 7168.0, -1, None, [1]], ids=repr)
def test_a_count_is_a_non_negative_integer(key: str, value: Any, published_config: Json) -> None:
    message = rf"text_config.{re.escape(key)} = {re.escape(repr(value))} is not a non-negative integer"
    with pytest.raises(ConfigError, match=message):
        K3Config.from_dict(changed(published_config, f"text_config.{key}", value))


@pytest.mark.parametrize("key", ["hidden_size", "attn_res_block_size", "moe_layer_freq", "linear_attn_config.head_dim"])
def test_a_size_is_at_least_one(key: str, published_config: Json) -> None:
    with pytest.raises(ConfigError, match=f"text_config.{re.escape(key)} = 0, but at least 1 is needed"):
        K3Config.from_dict(changed(published_config, f"text_config.{key}", 0))


@pytest.mark.parametrize("key", ["rms_norm_eps", "activation_situ_beta", "linear_attn_config.gate_lower_bound"])
@pytest.mark.parametrize("value", [True, "1e-5", [1.0], math.nan, math.inf, 10**400], ids=lambda value: repr(value)[:9])
def test_a_number_is_a_finite_number(key: str, value: Any, published_config: Json) -> None:
    message = rf"text_config.{re.escape(key)} = {re.escape(repr(value))} is not a finite number"
    with pytest.raises(ConfigError, match=message):
        K3Config.from_dict(changed(published_config, f"text_config.{key}", value))


def test_an_integer_will_do_for_a_number(published_config: Json, text_config: Json) -> None:
    expected = K3Config.from_dict(published_config)
    text_config |= {"activation_situ_beta": 4, "activation_situ_linear_beta": 25}
    text_config["linear_attn_config"]["gate_lower_bound"] = -5
    assert K3Config.from_dict(published_config) == expected


@pytest.mark.parametrize(
    "key", ["mla_use_output_gate", "moe_renormalize", "tie_word_embeddings", "linear_attn_config.use_full_rank_gate"]
)
@pytest.mark.parametrize("value", [1, 0, "false", None], ids=repr)
def test_a_switch_is_true_or_false(key: str, value: Any, published_config: Json) -> None:
    message = rf"text_config.{re.escape(key)} = {re.escape(repr(value))} is not true or false"
    with pytest.raises(ConfigError, match=message):
        K3Config.from_dict(changed(published_config, f"text_config.{key}", value))


def test_switches_are_read(published_config: Json, text_config: Json) -> None:
    text_config |= {"mla_use_output_gate": False, "latent_moe_use_norm": False, "moe_renormalize": False}
    config = K3Config.from_dict(published_config)
    assert (config.mla.use_output_gate, config.moe.use_norm, config.moe.renormalize) == (False, False, False)


def test_tied_embeddings_are_read_from_the_text_config_first(published_config: Json, text_config: Json) -> None:
    published_config["tie_word_embeddings"] = True
    assert K3Config.from_dict(published_config).tie_word_embeddings is False
    del text_config["tie_word_embeddings"]
    assert K3Config.from_dict(published_config).tie_word_embeddings is True


def test_a_null_linear_beta_switches_the_cap_off(published_config: Json, text_config: Json) -> None:
    """Leaving the key out is an error instead: no tensor would tell the two models apart."""
    text_config["activation_situ_linear_beta"] = None
    assert K3Config.from_dict(published_config).activation_situ_linear_beta is None
    del text_config["activation_situ_linear_beta"]
    with pytest.raises(ConfigError, match="activation_situ_linear_beta"):
        K3Config.from_dict(published_config)


@pytest.mark.parametrize("value", [None, REMOVED], ids=["null", "missing"])
def test_without_a_block_size_residuals_are_ordinary(value: Any, published_config: Json) -> None:
    """Null and missing mean the same here: the ``*_res_*`` tensors of the checkpoint tell if either is a mistake."""
    config = K3Config.from_dict(changed(published_config, "text_config.attn_res_block_size", value))
    assert config.attn_res_block_size is None
    assert not any(config.appends_bank_row(layer) for layer in range(93))
    assert {config.num_bank_rows(layer) for layer in range(94)} == {0}


def test_moe_layers_may_be_sparse(published_config: Json, text_config: Json) -> None:
    text_config |= {"first_k_dense_replace": 3, "moe_layer_freq": 2}
    config = K3Config.from_dict(published_config)
    assert [layer for layer in range(10) if config.is_moe(layer)] == [4, 6, 8]


ALL_LAYERS = list(range(1, 94))
MLA_LAYERS = [*range(4, 93, 4), 93]
KDA_LAYERS = [layer for layer in ALL_LAYERS if layer not in MLA_LAYERS]


@pytest.mark.parametrize(
    ("full", "kda"),
    [
        pytest.param(MLA_LAYERS, [*KDA_LAYERS, 4], id="overlapping"),
        pytest.param([*MLA_LAYERS, 93], KDA_LAYERS, id="doubled"),
        pytest.param(MLA_LAYERS, KDA_LAYERS[:-1], id="short"),
        pytest.param(MLA_LAYERS, [*KDA_LAYERS, 94], id="long"),
        pytest.param([i - 1 for i in MLA_LAYERS], [i - 1 for i in KDA_LAYERS], id="zero-based"),
        pytest.param([*MLA_LAYERS, 94], None, id="beyond the last layer"),
        pytest.param([0, *MLA_LAYERS], None, id="before the first layer"),
    ],
)
def test_a_schedule_names_each_layer_once(
    full: list[int], kda: list[int] | None, published_config: Json, text_config: Json
) -> None:
    linear = text_config["linear_attn_config"] | {"full_attn_layers": full, "kda_layers": kda}
    text_config["linear_attn_config"] = {key: value for key, value in linear.items() if value is not None}
    with pytest.raises(ConfigError, match=r"must together name each of the layers 1\.\.93 exactly once \(one-based\)"):
        K3Config.from_dict(published_config)


@pytest.mark.parametrize(("full", "kda"), [(ALL_LAYERS, []), ([], ALL_LAYERS)])
def test_both_kinds_of_attention_are_needed(
    full: list[int], kda: list[int], published_config: Json, text_config: Json
) -> None:
    text_config["linear_attn_config"] |= {"full_attn_layers": full, "kda_layers": kda}
    message = f"at least one MLA and one KDA layer, got {len(full)} and {len(kda)}"
    with pytest.raises(ConfigError, match=message):
        K3Config.from_dict(published_config)


@pytest.mark.parametrize("key", ["full_attn_layers", "kda_layers"])
@pytest.mark.parametrize("value", [None, 4, "4, 8", [4.0], [True], ["4"]], ids=repr)
def test_a_schedule_is_a_list_of_integers(key: str, value: Any, published_config: Json) -> None:
    message = rf"linear_attn_config.{key} = {re.escape(repr(value))} is not a list of one-based layer numbers"
    with pytest.raises(ConfigError, match=message):
        K3Config.from_dict(changed(published_config, f"text_config.linear_attn_config.{key}", value))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("linear_attn_config.use_full_rank_gate", False, "false: the low-rank output gate .* K3 checkpoints set it to"),
        (
            "linear_attn_config.gate_lower_bound",
            None,
            r"None: .* needs a negative bound \(published: -5\.0\); the softplus",
        ),
        ("linear_attn_config.gate_lower_bound", 0, r"0\.0: .* needs a negative bound"),
        ("linear_attn_config.gate_lower_bound", 5.0, r"5\.0: .* needs a negative bound"),
        ("hidden_act", "silu", "'silu' is not implemented: K3 checkpoints have 'situ'"),
        ("moe_router_activation_func", "softmax", "'softmax' is not implemented: K3 checkpoints have 'sigmoid'"),
        ("mla_use_nope", False, "False is not implemented: K3 checkpoints have True"),
        ("num_nextn_predict_layers", 1, "1 is not implemented: K3 checkpoints have 0"),
    ],
)
def test_another_model_is_refused(key: str, value: Any, message: str, published_config: Json) -> None:
    with pytest.raises(ConfigError, match=rf"text_config\.{re.escape(key)} = {message}"):
        K3Config.from_dict(changed(published_config, f"text_config.{key}", value))


@pytest.mark.parametrize("path", ["quantization_config", "text_config.quantization_config"])
@pytest.mark.parametrize(
    "quantization",
    [
        {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
        {"quant_method": "modelopt_fp4", "format": "nvfp4-pack-quantized"},
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        {"quant_method": "compressed-tensors", "format": "pack-quantized"},
        {"quant_method": "fp8"},
        {"quant_method": "mxfp4", "format": "mxfp4-pack-quantized"},
    ],
    ids=str,
)
def test_another_quantisation_is_refused(path: str, quantization: Json, published_config: Json) -> None:
    """NVFP4 and the rest; the remedy is the checkpoint that can be read."""
    published_config["text_config"].pop("quantization_config")
    method, fmt = quantization["quant_method"], quantization.get("format")
    message = f"quant_method {method!r} and format {fmt!r}: .* Use moonshotai/Kimi-K3 or a bf16 checkpoint"
    with pytest.raises(ConfigError, match=message):
        K3Config.from_dict(changed(published_config, path, quantization))


def test_another_group_size_is_refused(published_config: Json, text_config: Json) -> None:
    text_config["quantization_config"]["config_groups"]["group_0"]["weights"]["group_size"] = 16
    with pytest.raises(ConfigError, match="group_size 16: MXFP4 has one scale per 32"):
        K3Config.from_dict(published_config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_token": 897}, "num_experts_per_token = 897 exceeds the 896 experts"),
        ({"num_expert_group": 112, "topk_group": 1}, "num_experts_per_token = 16 exceeds the 8 experts"),
        ({"num_expert_group": 3}, "num_expert_group = 3 must divide num_experts = 896"),
        ({"topk_group": 2}, "num_expert_group = 1 .* be at least topk_group = 2"),
    ],
)
def test_routing_must_leave_enough_experts(
    change: Json, message: str, published_config: Json, text_config: Json
) -> None:
    text_config |= change
    with pytest.raises(ConfigError, match=message):
        K3Config.from_dict(published_config)


def test_as_many_experts_as_the_groups_leave_are_accepted(published_config: Json, text_config: Json) -> None:
    text_config |= {"num_expert_group": 112, "topk_group": 2}
    assert K3Config.from_dict(published_config).moe.topk_group == 2


def test_overrides_replace_values_and_merge_objects(published_config: Json) -> None:
    before = copy.deepcopy(published_config)
    changes = {
        "text_config": {"rms_norm_eps": 1e-3, "linear_attn_config": {"gate_lower_bound": -4.0}},
        "dtype": "float16",
    }
    merged = with_overrides(published_config, changes)
    assert published_config == before
    assert merged["dtype"] == "float16"
    config, original = K3Config.from_dict(merged), K3Config.from_dict(before)
    kda = dataclasses.replace(original.kda, gate_lower_bound=-4.0)
    assert config == dataclasses.replace(original, rms_norm_eps=1e-3, kda=kda)


def test_an_override_may_replace_an_object_by_null(published_config: Json) -> None:
    assert with_overrides(published_config, {"vision_config": None})["vision_config"] is None
    assert with_overrides(published_config, {}) == published_config


def test_an_override_of_an_unknown_key_is_refused(published_config: Json) -> None:
    with pytest.raises(ConfigError, match="no hidden_act, v_head_dim at the top.*under text_config"):
        with_overrides(published_config, {"v_head_dim": 64, "hidden_act": "silu"})


@pytest.mark.parametrize("key", ["architectures", "model_type"])
@pytest.mark.parametrize("where", ["", "text_config."])
def test_an_override_makes_no_other_model(where: str, key: str, published_config: Json) -> None:
    says = rf"{re.escape(where + key)} 'other' would make another model of this one, which has .*Leave it out"
    with pytest.raises(ConfigError, match=says):
        with_overrides(published_config, {"text_config": {key: "other"}} if where else {key: "other"})
    same = {key: published_config[key]}
    assert with_overrides(published_config, same) == published_config
