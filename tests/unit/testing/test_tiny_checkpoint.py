"""write_tiny: the published layout, the same bytes for a seed, complete or not at all."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from sglang_k3.config import K3Config
from sglang_k3.testing import mxfp4, tiny
from sglang_k3.testing.presets import PRESETS, TinyPreset
from sglang_k3.testing.reference import load_text_weights
from sglang_k3.testing.tiny import write_tiny

FILES = {
    "config.json",
    "tokenizer.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
}
BF16, F32, U8 = torch.bfloat16, torch.float32, torch.uint8
Census = dict[str, tuple[tuple[int, ...], torch.dtype]]


def read_config(folder: Path) -> dict[str, object]:
    return json.loads((folder / "config.json").read_text())


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors through the index, each from the shard that the index names."""
    weight_map = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(weight_map.values())):
        with safe_open(folder / file, framework="pt") as shard:
            assert set(shard.keys()) == {name for name, where in weight_map.items() if where == file}
            tensors |= {name: shard.get_tensor(name) for name in shard.keys()}  # noqa: SIM118 (no iterator)
    return tensors


def expected_census(p: TinyPreset) -> Census:
    """Names, shapes and dtypes of the language model, written from fact sheet 2.1 to 2.6 and nothing else."""
    hidden, root = p.hidden_size, "language_model.model"
    census: Census = {
        f"{root}.embed_tokens.weight": ((p.vocab_size, hidden), BF16),
        "language_model.lm_head.weight": ((p.vocab_size, hidden), BF16),
        f"{root}.norm.weight": ((hidden,), BF16),
        f"{root}.output_attn_res_norm.weight": ((hidden,), BF16),
        f"{root}.output_attn_res_proj.weight": ((1, hidden), BF16),
    }
    for layer in range(p.num_layers):
        name = f"{root}.layers.{layer}"
        for norm in ("input_layernorm", "post_attention_layernorm", "self_attention_res_norm", "mlp_res_norm"):
            census[f"{name}.{norm}.weight"] = ((hidden,), BF16)
        for proj in ("self_attention_res_proj", "mlp_res_proj"):
            census[f"{name}.{proj}.weight"] = ((1, hidden), BF16)
        attention = mla_census if layer + 1 in p.full_attention_layers else kda_census
        census |= attention(f"{name}.self_attn", p)
        if layer == 0:
            census |= mlp_census(f"{name}.mlp", hidden, p.dense_width)
        else:
            census |= moe_census(f"{name}.block_sparse_moe", p)
    return census


def kda_census(name: str, p: TinyPreset) -> Census:
    hidden, width = p.hidden_size, p.kda_heads * p.kda_head_dim
    census: Census = {
        f"{name}.f_a_proj.weight": ((p.kda_head_dim, hidden), BF16),
        f"{name}.f_b_proj.weight": ((width, p.kda_head_dim), BF16),
        f"{name}.b_proj.weight": ((p.kda_heads, hidden), BF16),
        f"{name}.A_log": ((128,), F32),
        f"{name}.dt_bias": ((width,), F32),
        f"{name}.o_norm.weight": ((p.kda_head_dim,), F32),
        f"{name}.g_proj.weight": ((width, hidden), BF16),
        f"{name}.o_proj.weight": ((hidden, width), BF16),
    }
    for c in "qkv":
        census[f"{name}.{c}_proj.weight"] = ((width, hidden), BF16)
        census[f"{name}.{c}_conv1d.weight"] = ((width, 1, 4), F32)
    return census


def mla_census(name: str, p: TinyPreset) -> Census:
    hidden, heads, width = p.hidden_size, p.mla_heads, p.mla_heads * p.v_head_dim
    nope, rope, v = p.qk_nope_head_dim, p.qk_rope_head_dim, p.v_head_dim
    return {
        f"{name}.q_a_proj.weight": ((p.q_lora_rank, hidden), BF16),
        f"{name}.q_a_layernorm.weight": ((p.q_lora_rank,), BF16),
        f"{name}.q_b_proj.weight": ((heads * (nope + rope), p.q_lora_rank), BF16),
        f"{name}.kv_a_proj_with_mqa.weight": ((p.kv_lora_rank + rope, hidden), BF16),
        f"{name}.kv_a_layernorm.weight": ((p.kv_lora_rank,), BF16),
        f"{name}.kv_b_proj.weight": ((heads * (nope + v), p.kv_lora_rank), BF16),
        f"{name}.g_proj.weight": ((width, hidden), BF16),
        f"{name}.o_proj.weight": ((hidden, width), BF16),
    }


def mlp_census(name: str, hidden: int, width: int) -> Census:
    return {
        f"{name}.gate_proj.weight": ((width, hidden), BF16),
        f"{name}.up_proj.weight": ((width, hidden), BF16),
        f"{name}.down_proj.weight": ((hidden, width), BF16),
    }


def moe_census(name: str, p: TinyPreset) -> Census:
    hidden, latent, width = p.hidden_size, p.latent_size, p.moe_width
    census: Census = {
        f"{name}.gate.weight": ((p.num_experts, hidden), BF16),
        f"{name}.gate.e_score_correction_bias": ((p.num_experts,), F32),
        f"{name}.routed_expert_down_proj.weight": ((latent, hidden), BF16),
        f"{name}.routed_expert_norm.weight": ((latent,), BF16),
        f"{name}.routed_expert_up_proj.weight": ((hidden, latent), BF16),
    }
    for expert in range(p.num_experts):
        for w, rows, columns in (("w1", width, latent), ("w3", width, latent), ("w2", latent, width)):
            census[f"{name}.experts.{expert}.{w}.weight_packed"] = ((rows, columns // 2), U8)
            census[f"{name}.experts.{expert}.{w}.weight_scale"] = ((rows, columns // 32), U8)
    return census | mlp_census(f"{name}.shared_experts", hidden, p.num_shared_experts * width)


def expected_vision_census(vision: dict[str, int]) -> Census:
    """Fact sheet 2.8."""
    width, qkv, mlp = vision["vt_hidden_size"], vision["qkv_hidden_size"], vision["vt_intermediate_size"]
    merged, text = 4 * vision["mm_hidden_size"], vision["text_hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {
        "vision_tower.patch_embed.proj.weight": (width, 3, 14, 14),
        "vision_tower.patch_embed.pos_emb.weight": (
            vision["init_pos_emb_height"],
            vision["init_pos_emb_width"],
            width,
        ),
        "vision_tower.encoder.final_layernorm.weight": (width,),
        "mm_projector.proj.0.weight": (merged, merged),
        "mm_projector.proj.2.weight": (text, merged),
        "mm_projector.post_norm.weight": (text,),
    }
    for block in range(vision["vt_num_hidden_layers"]):
        name = f"vision_tower.encoder.blocks.{block}"
        shapes |= {
            f"{name}.norm0.weight": (width,),
            f"{name}.norm1.weight": (width,),
            f"{name}.wqkv.weight": (3 * qkv, width),
            f"{name}.wo.weight": (width, qkv),
            f"{name}.mlp.fc0.weight": (mlp, width),
            f"{name}.mlp.fc1.weight": (width, mlp),
        }
    return {name: (shape, BF16) for name, shape in shapes.items()}


@pytest.mark.parametrize("preset", PRESETS)
def test_tensors_are_those_of_the_fact_sheet(preset: str, tiny_folder: Callable[[str], Path]) -> None:
    folder = tiny_folder(preset)
    found = {name: (tuple(t.shape), t.dtype) for name, t in read_tensors(folder).items()}
    assert found == expected_census(PRESETS[preset]) | expected_vision_census(read_config(folder)["vision_config"])


def test_published_sizes_give_the_published_tensor_count() -> None:
    """The census function itself, checked against fact sheet 1.7 (497,220 tensors, 168 of them vision)."""
    published = TinyPreset(
        num_layers=93, attn_res_block_size=12, full_attention_layers=(*range(4, 93, 4), 93), num_experts=896
    )
    assert len(expected_census(published)) == 497_220 - 168


@pytest.mark.parametrize("preset", PRESETS)
def test_config_is_read_back_as_the_preset(preset: str, tiny_folder: Callable[[str], Path]) -> None:
    sizes, config = PRESETS[preset], K3Config.from_dict(read_config(tiny_folder(preset)))
    assert config.num_hidden_layers == sizes.num_layers
    assert config.attn_res_block_size == sizes.attn_res_block_size
    assert config.full_attention_layers == tuple(i - 1 for i in sizes.full_attention_layers)
    assert config.full_attention_layers[-2:] == (sizes.num_layers - 2, sizes.num_layers - 1)
    assert (config.kda.num_heads, config.kda.head_dim) == (sizes.kda_heads, sizes.kda_head_dim)
    assert config.mla.v_head_dim == sizes.v_head_dim != config.kda.head_dim
    assert (config.moe.num_experts, config.moe.top_k) == (sizes.num_experts, sizes.top_k)


def test_folder_holds_the_published_files_and_no_other(tiny_folder: Callable[[str], Path]) -> None:
    folder = tiny_folder("default")
    assert {path.name for path in folder.iterdir()} == FILES
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in read_tensors(folder).values())


def test_quantization_config_sits_inside_text_config(tmp_path: Path, tiny_folder: Callable[[str], Path]) -> None:
    config = read_config(tiny_folder("default"))
    assert "quantization_config" not in config
    assert config["text_config"]["quantization_config"]["format"] == "mxfp4-pack-quantized"
    unpacked = read_config(write_tiny(tmp_path / "bf16", experts="bf16"))
    assert "quantization_config" not in unpacked | unpacked["text_config"]


def test_a_seed_gives_the_same_bytes_and_another_seed_others(
    tmp_path: Path, tiny_folder: Callable[[str], Path]
) -> None:
    again, other = write_tiny(tmp_path / "again"), write_tiny(tmp_path / "other", seed=1)
    for file in FILES:
        assert (again / file).read_bytes() == (tiny_folder("default") / file).read_bytes(), file
    first, second = read_tensors(again), read_tensors(other)
    assert first.keys() == second.keys()
    # E8M0 scales of small groups may coincide; every other tensor differs.
    same = {name for name in first if torch.equal(first[name], second[name])}
    assert all(name.endswith("weight_scale") for name in same), same


def test_dtype_changes_the_config_only(tmp_path: Path, tiny_folder: Callable[[str], Path]) -> None:
    folder = write_tiny(tmp_path / "bf16", dtype="bfloat16")
    assert read_config(folder) == read_config(tiny_folder("default")) | {"dtype": "bfloat16"}
    for file in FILES - {"config.json"}:
        assert (folder / file).read_bytes() == (tiny_folder("default") / file).read_bytes(), file


def test_text_only_leaves_out_vision_and_nothing_else(tmp_path: Path, tiny_folder: Callable[[str], Path]) -> None:
    folder = write_tiny(tmp_path / "text", vision=False)
    assert "vision_config" not in read_config(folder)
    with_vision, without = read_tensors(tiny_folder("default")), read_tensors(folder)
    assert {n for n in with_vision if n.startswith("language_model.")} == set(without)
    assert all(torch.equal(with_vision[name], tensor) for name, tensor in without.items())


def test_unpacked_experts_hold_the_values_of_the_packed_ones(
    tmp_path: Path, tiny_folder: Callable[[str], Path]
) -> None:
    packed, plain = read_tensors(tiny_folder("default")), read_tensors(write_tiny(tmp_path / "bf16", experts="bf16"))
    names = [name.removesuffix("_packed") for name in packed if name.endswith(".weight_packed")]
    assert len(names) == 8 * 8 * 3
    assert set(plain) == {n for n in packed if ".experts." not in n} | set(names)
    for name in names:
        decoded = mxfp4.decode(packed[f"{name}_packed"], packed[f"{name}_scale"], dtype=BF16)
        assert torch.equal(plain[name], decoded), name


def test_a_log_is_padded_with_zeros(tiny_folder: Callable[[str], Path]) -> None:
    a_log = read_tensors(tiny_folder("odd"))["language_model.model.layers.0.self_attn.A_log"]
    assert bool((a_log[:3] > 0).all())
    assert bool((a_log[3:] == 0).all())


@pytest.mark.parametrize("preset", PRESETS)
def test_checkpoint_is_small(preset: str, tiny_folder: Callable[[str], Path]) -> None:
    assert sum(path.stat().st_size for path in tiny_folder(preset).iterdir()) < 5e6


def test_an_empty_folder_is_filled(tmp_path: Path) -> None:
    assert write_tiny(tmp_path) == tmp_path
    assert {path.name for path in tmp_path.iterdir()} == FILES


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"preset": "huge"}, "unknown tiny preset 'huge': choose one of default, odd, deep"),
        ({"dtype": "float16"}, "dtype='float16' is not a choice: use one of float32, bfloat16"),
        ({"experts": "fp8"}, "experts='fp8' is not a choice: use one of mxfp4, bf16"),
    ],
)
def test_a_wrong_choice_lists_the_right_ones(arguments: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        write_tiny(tmp_path / "tiny", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_use_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(ValueError, match="not empty.*name a new one"):
        write_tiny(tmp_path)
    assert (tmp_path / "mine").read_text() == "keep"


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: object, **_kwargs: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(tiny, "save_file", fail)
    with pytest.raises(OSError, match="disk full"):
        write_tiny(tmp_path / "tiny")
    assert list(tmp_path.iterdir()) == []


def test_sizes_that_mxfp4_cannot_pack_are_refused() -> None:
    with pytest.raises(ValueError, match="multiples of 32"):
        dataclasses.replace(PRESETS["default"], moe_width=48)


def test_reference_reads_one_file_without_an_index(tmp_path: Path, tiny_folder: Callable[[str], Path]) -> None:
    shutil.copy(tiny_folder("default") / "config.json", tmp_path)
    save_file(read_tensors(tiny_folder("default")), tmp_path / "model.safetensors")
    single, sharded = load_text_weights(tmp_path, F32), load_text_weights(tiny_folder("default"), F32)
    assert single.keys() == sharded.keys()
    assert all(torch.equal(single[name], sharded[name]) for name in single)
