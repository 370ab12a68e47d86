"""CheckpointLayout: the tensors of the published checkpoint, name by name and shape by shape (fact sheet 1.7 and 2)."""

from __future__ import annotations

import functools
import json
import math
from typing import Any

import pytest

from sglang_k3.config import K3Config
from sglang_k3.errors import ConfigError
from sglang_k3.weights.layout import CheckpointLayout, TensorSpec, canonical_name

Json = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]

MODEL_LEVEL: Shapes = {
    "language_model.model.embed_tokens.weight": (163840, 7168),
    "language_model.lm_head.weight": (163840, 7168),
    "language_model.model.norm.weight": (7168,),
    "language_model.model.output_attn_res_norm.weight": (7168,),
    "language_model.model.output_attn_res_proj.weight": (1, 7168),
}
EVERY_LAYER: Shapes = {
    "input_layernorm.weight": (7168,),
    "post_attention_layernorm.weight": (7168,),
    "self_attention_res_norm.weight": (7168,),
    "self_attention_res_proj.weight": (1, 7168),
    "mlp_res_norm.weight": (7168,),
    "mlp_res_proj.weight": (1, 7168),
    "self_attn.g_proj.weight": (12288, 7168),
    "self_attn.o_proj.weight": (7168, 12288),
}
KDA: Shapes = {
    "self_attn.q_proj.weight": (12288, 7168),
    "self_attn.k_proj.weight": (12288, 7168),
    "self_attn.v_proj.weight": (12288, 7168),
    "self_attn.q_conv1d.weight": (12288, 1, 4),
    "self_attn.k_conv1d.weight": (12288, 1, 4),
    "self_attn.v_conv1d.weight": (12288, 1, 4),
    "self_attn.f_a_proj.weight": (128, 7168),
    "self_attn.f_b_proj.weight": (12288, 128),
    "self_attn.b_proj.weight": (96, 7168),
    "self_attn.A_log": (96,),
    "self_attn.dt_bias": (12288,),
    "self_attn.o_norm.weight": (128,),
}
MLA: Shapes = {
    "self_attn.q_a_proj.weight": (1536, 7168),
    "self_attn.q_a_layernorm.weight": (1536,),
    "self_attn.q_b_proj.weight": (18432, 1536),
    "self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
    "self_attn.kv_a_layernorm.weight": (512,),
    "self_attn.kv_b_proj.weight": (24576, 512),
}
DENSE: Shapes = {
    "mlp.gate_proj.weight": (33792, 7168),
    "mlp.up_proj.weight": (33792, 7168),
    "mlp.down_proj.weight": (7168, 33792),
}
MOE: Shapes = {
    "block_sparse_moe.gate.weight": (896, 7168),
    "block_sparse_moe.gate.e_score_correction_bias": (896,),
    "block_sparse_moe.routed_expert_down_proj.weight": (3584, 7168),
    "block_sparse_moe.routed_expert_norm.weight": (3584,),
    "block_sparse_moe.routed_expert_up_proj.weight": (7168, 3584),
    "block_sparse_moe.shared_experts.gate_proj.weight": (6144, 7168),
    "block_sparse_moe.shared_experts.up_proj.weight": (6144, 7168),
    "block_sparse_moe.shared_experts.down_proj.weight": (7168, 6144),
}
EXPERT: Shapes = {
    "w1.weight_packed": (3072, 1792),
    "w1.weight_scale": (3072, 112),
    "w3.weight_packed": (3072, 1792),
    "w3.weight_scale": (3072, 112),
    "w2.weight_packed": (3584, 1536),
    "w2.weight_scale": (3584, 96),
    "w1.weight": (3072, 3584),
    "w3.weight": (3072, 3584),
    "w2.weight": (3584, 3072),
}
VISION: Shapes = {
    "vision_tower.patch_embed.proj.weight": (1024, 3, 14, 14),
    "vision_tower.patch_embed.pos_emb.weight": (64, 64, 1024),
    "vision_tower.encoder.final_layernorm.weight": (1024,),
    "mm_projector.proj.0.weight": (4096, 4096),
    "mm_projector.proj.2.weight": (7168, 4096),
    "mm_projector.post_norm.weight": (7168,),
}
VISION_BLOCK: Shapes = {
    "norm0.weight": (1024,),
    "norm1.weight": (1024,),
    "wqkv.weight": (4608, 1024),
    "wo.weight": (1024, 1536),
    "mlp.fc0.weight": (4096, 1024),
    "mlp.fc1.weight": (1024, 4096),
}


def layout_of(config: Json) -> CheckpointLayout:
    return _layout_of(json.dumps(config))


@functools.lru_cache(maxsize=2)  # a quarter of a million names: not again for every test
def _layout_of(config: str) -> CheckpointLayout:
    return CheckpointLayout(K3Config.from_dict(json.loads(config)))


@pytest.fixture
def published(published_config: Json) -> CheckpointLayout:
    return layout_of(published_config)


def with_prefix(prefix: str, shapes: Shapes) -> Shapes:
    return {prefix + name: shape for name, shape in shapes.items()}


def test_published_counts(published: CheckpointLayout) -> None:
    """Tensors with an expert as six; parameters with experts unpacked and A_log padded, as the sheet counts them."""
    assert len(published.experts) == 92 * 896 * 3
    assert len(published.vision) == 168
    assert len(published.required) + 2 * len(published.experts) + len(published.vision) == 497_220
    vision = sum(math.prod(spec.shape) for spec in published.vision.values())
    experts = sum(math.prod(shape) for shape in published.experts.values())
    others = sum(spec.padded_to or math.prod(spec.shape) for spec in published.required.values())
    assert vision == 447_358_976
    assert experts == 2_722_740_830_208
    assert others + experts + vision == 2_779_931_837_184


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        pytest.param(0, EVERY_LAYER | KDA | DENSE, id="KDA and dense"),
        pytest.param(1, EVERY_LAYER | KDA | MOE, id="KDA and MoE"),
        pytest.param(3, EVERY_LAYER | MLA | MOE, id="MLA and MoE"),
        pytest.param(90, EVERY_LAYER | KDA | MOE, id="last KDA"),
        pytest.param(91, EVERY_LAYER | MLA | MOE, id="first of two MLA"),
        pytest.param(92, EVERY_LAYER | MLA | MOE, id="last"),
    ],
)
def test_published_layer(layer: int, expected: Shapes, published: CheckpointLayout) -> None:
    """All names outside the routed experts, and no other."""
    prefix = f"language_model.model.layers.{layer}."
    found = {name: spec.shape for name, spec in published.required.items() if name.startswith(prefix)}
    assert found == with_prefix(prefix, expected)


def test_published_tensors_outside_the_layers(published: CheckpointLayout) -> None:
    found = {name: spec.shape for name, spec in published.required.items() if ".layers." not in name}
    assert found == MODEL_LEVEL


@pytest.mark.parametrize(("layer", "expert"), [(1, 0), (3, 17), (92, 895)])
def test_published_experts(layer: int, expert: int, published: CheckpointLayout) -> None:
    """Each in both forms: packed with its scale, and plain."""
    prefix = f"language_model.model.layers.{layer}.block_sparse_moe.experts.{expert}."
    for name, shape in with_prefix(prefix, EXPERT).items():
        assert published.find(name) == TensorSpec(shape, packed=not name.endswith(".weight")), name


def test_published_vision(published: CheckpointLayout) -> None:
    expected = VISION | {
        f"vision_tower.encoder.blocks.{block}.{name}": shape
        for block in range(27)
        for name, shape in VISION_BLOCK.items()
    }
    assert {name: spec.shape for name, spec in published.vision.items()} == expected


@pytest.mark.parametrize(
    "name",
    [
        "language_model.model.layers.93.input_layernorm.weight",
        "language_model.model.layers.3.self_attn.A_log",  # MLA
        "language_model.model.layers.0.self_attn.q_a_proj.weight",  # KDA
        "language_model.model.layers.0.block_sparse_moe.gate.weight",  # dense
        "language_model.model.layers.0.block_sparse_moe.experts.0.w1.weight_packed",
        "language_model.model.layers.1.mlp.gate_proj.weight",  # MoE
        "language_model.model.layers.1.block_sparse_moe.experts.896.w1.weight_packed",
        "language_model.model.layers.1.block_sparse_moe.experts.0.w4.weight_packed",
        "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_scale_2",  # NVFP4
        "language_model.model.layers.1.block_sparse_moe.experts.0.w1.bias",
        "language_model.model.layers.1.self_attn.q_proj.bias",
        "language_model.model.layers.1.self_attn.q_proj.weight_packed",
        "model.norm.weight",
        "vision_tower.encoder.blocks.27.wo.weight",
        "mm_projector.proj.1.weight",
        "lm_head.weight",
        "",
    ],
)
def test_what_the_config_does_not_describe_is_not_found(name: str, published: CheckpointLayout) -> None:
    assert published.find(name) is None


def test_a_log_may_be_padded_to_128(published: CheckpointLayout) -> None:
    spec = published.find("language_model.model.layers.0.self_attn.A_log")
    assert [n for n in (1, 95, 96, 97, 127, 128, 129, 256) if spec.accepts((n,))] == [96, 128]
    assert not spec.accepts((128, 1))
    assert published.find("language_model.model.norm.weight").accepts((7168,))
    assert not published.find("language_model.model.norm.weight").accepts((7296,))


def test_padding_of_a_log_follows_the_head_count(published_config: Json, text_config: Json) -> None:
    text_config["linear_attn_config"]["num_heads"] = 129
    spec = layout_of(published_config).find("language_model.model.layers.0.self_attn.A_log")
    assert [n for n in (128, 129, 256, 384) if spec.accepts((n,))] == [129, 256]


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"tie_word_embeddings": True}, ["language_model.lm_head.weight"]),
        (
            {"mla_use_output_gate": False},
            [f"language_model.model.layers.{i}.self_attn.g_proj.weight" for i in (*range(3, 92, 4), 92)],
        ),
        (
            {"latent_moe_use_norm": False},
            [f"language_model.model.layers.{i}.block_sparse_moe.routed_expert_norm.weight" for i in range(1, 93)],
        ),
        (
            {"num_shared_experts": 0},
            [
                f"language_model.model.layers.{i}.block_sparse_moe.shared_experts.{name}_proj.weight"
                for i in range(1, 93)
                for name in ("gate", "up", "down")
            ],
        ),
        (
            {"attn_res_block_size": None},
            [
                f"language_model.model.{stem}_{part}.weight"
                for stem in (
                    "output_attn_res",
                    *(f"layers.{i}.{name}" for i in range(93) for name in ("self_attention_res", "mlp_res")),
                )
                for part in ("norm", "proj")
            ],
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_switch_takes_its_tensors_away(
    change: Json, names: list[str], published_config: Json, text_config: Json
) -> None:
    before = layout_of(published_config).required
    text_config |= change
    after = layout_of(published_config).required
    assert before.keys() - after.keys() == set(names)
    assert after.items() <= before.items()


def test_widths_follow_the_value_head_size(published_config: Json, text_config: Json) -> None:
    """MLA gate and output widths come from its own value head size, not from KDA's."""
    text_config["v_head_dim"] = 160
    layout = layout_of(published_config)
    prefix = "language_model.model.layers.3.self_attn."
    assert layout.find(f"{prefix}g_proj.weight").shape == (96 * 160, 7168)
    assert layout.find(f"{prefix}o_proj.weight").shape == (7168, 96 * 160)
    assert layout.find(f"{prefix}kv_b_proj.weight").shape == (96 * (128 + 160), 512)
    assert layout.find("language_model.model.layers.0.self_attn.g_proj.weight").shape == (12288, 7168)


def test_a_width_that_cannot_be_packed_is_only_found_plain(published_config: Json, text_config: Json) -> None:
    text_config["moe_intermediate_size"] = 3088
    layout = layout_of(published_config)
    prefix = "language_model.model.layers.1.block_sparse_moe.experts.0."
    assert layout.find(f"{prefix}w2.weight").shape == (3584, 3088)
    assert layout.find(f"{prefix}w2.weight_packed") is None
    assert layout.find(f"{prefix}w2.weight_scale") is None
    assert layout.find(f"{prefix}w1.weight_packed").shape == (3088, 1792)


def test_older_names_leave_out_the_middle_model() -> None:
    for old, new in (
        ("language_model.layers.7.self_attn.A_log", "language_model.model.layers.7.self_attn.A_log"),
        ("language_model.embed_tokens.weight", "language_model.model.embed_tokens.weight"),
        ("language_model.norm.weight", "language_model.model.norm.weight"),
        ("language_model.output_attn_res_proj.weight", "language_model.model.output_attn_res_proj.weight"),
        ("language_model.output_attn_res_norm.weight", "language_model.model.output_attn_res_norm.weight"),
    ):
        assert canonical_name(old) == new
        assert canonical_name(new) == new


@pytest.mark.parametrize(
    "name",
    ["language_model.lm_head.weight", "layers.7.mlp_res_norm.weight", "vision_tower.layers.0.weight", "language_model"],
)
def test_other_names_are_left_as_they_are(name: str) -> None:
    assert canonical_name(name) == name


def test_vision_tensors_without_a_vision_config_are_refused(published_config: Json) -> None:
    del published_config["vision_config"]
    layout = layout_of(published_config)
    assert layout.find("language_model.model.norm.weight") is not None
    with pytest.raises(ConfigError, match="no vision_config.*same checkpoint, or remove the vision tensors"):
        layout.find("vision_tower.patch_embed.proj.weight")


@pytest.mark.parametrize(
    "key",
    [
        "vt_hidden_size",
        "vt_intermediate_size",
        "qkv_hidden_size",
        "patch_size",
        "vt_num_hidden_layers",
        "init_pos_emb_height",
        "init_pos_emb_width",
        "merge_kernel_size",
    ],
)
def test_a_missing_vision_size_is_named(key: str, published_config: Json) -> None:
    del published_config["vision_config"][key]
    with pytest.raises(ConfigError, match=f"no vision_config.{key}"):
        layout_of(published_config).find("vision_tower.patch_embed.proj.weight")
