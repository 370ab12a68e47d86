"""The header audit: a sound checkpoint passes, and each kind of fault is refused with the name of what is wrong."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sglang_k3.config import K3Config
from sglang_k3.errors import CheckpointError, ConfigError
from sglang_k3.testing.presets import PRESETS
from sglang_k3.testing.tiny import write_tiny
from sglang_k3.weights.audit import INDEX_NAME, Audit, audit_folder
from sglang_k3.weights.layout import CheckpointLayout

Json = dict[str, Any]
Tensors = dict[str, Tensor]
# Tensors and the ``config.json`` beside them -> the audit's verdict.
AuditTensors = Callable[..., K3Config]

MODEL = "language_model.model."
KDA = f"{MODEL}layers.1.self_attn."
MLA = f"{MODEL}layers.3.self_attn."
MOE = f"{MODEL}layers.1.block_sparse_moe."
EXPERT = f"{MOE}experts.5.w1."
BLOCK = "vision_tower.encoder.blocks.1."


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default tiny checkpoint: MXFP4 experts and vision. No test may change it."""
    return write_tiny(tmp_path_factory.mktemp("tiny") / "default")


@pytest.fixture(scope="module")
def pristine(tiny: Path) -> Tensors:
    shards = sorted(tiny.glob("*.safetensors"))
    return {name: tensor for shard in shards for name, tensor in load_file(shard).items()}


@pytest.fixture
def tensors(pristine: Tensors) -> Tensors:
    """All tensors of the checkpoint, in a dictionary that the test may change."""
    return dict(pristine)


@pytest.fixture
def config(tiny: Path) -> Json:
    return json.loads((tiny / "config.json").read_text())


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """A copy of the checkpoint's folder that the test may break."""
    return Path(shutil.copytree(tiny, tmp_path / "copy"))


@pytest.fixture
def audit(tmp_path: Path, config: Json) -> AuditTensors:
    """Write tensors into one file and audit it."""

    def audit_tensors(*shards: Tensors, config: Json = config) -> K3Config:
        (tmp_path / "config.json").write_text(json.dumps(config))
        for i, shard in enumerate(shards):
            save_file(shard, tmp_path / f"{i}.safetensors")
        return audit_folder(tmp_path)

    return audit_tensors


def problems(raised: pytest.ExceptionInfo[CheckpointError]) -> list[str]:
    """The problems that the error lists, one per tensor."""
    message = str(raised.value)
    start, end = "The checkpoint does not fit its config.json: ", ". Download it again, or check that config.json and"
    assert message.startswith(start) and end in message
    return message.removeprefix(start).partition(end)[0].split("; ")


@pytest.mark.parametrize(
    ("preset", "experts", "vision"), [*itertools.product(PRESETS, ("mxfp4", "bf16"), (True, False))]
)
def test_a_sound_checkpoint_passes(preset: str, experts: str, vision: bool, tmp_path: Path) -> None:
    config = audit_folder(write_tiny(tmp_path / "tiny", preset, experts=experts, vision=vision))
    assert config.num_hidden_layers == PRESETS[preset].num_layers
    assert config.mxfp4_experts is (experts == "mxfp4")


def test_one_file_without_an_index_passes(audit: AuditTensors, tensors: Tensors) -> None:
    audit(tensors)


def test_several_files_without_an_index_pass(audit: AuditTensors, tensors: Tensors) -> None:
    names = list(tensors)
    audit({name: tensors[name] for name in names[::2]}, {name: tensors[name] for name in names[1::2]})


ONE_OF_EVERY_GROUP = (
    f"{MODEL}embed_tokens.weight",
    "language_model.lm_head.weight",
    f"{MODEL}norm.weight",
    f"{MODEL}output_attn_res_proj.weight",
    f"{MODEL}layers.0.mlp.up_proj.weight",
    f"{MODEL}layers.1.input_layernorm.weight",
    f"{MODEL}layers.8.mlp_res_norm.weight",
    f"{KDA}q_proj.weight",
    f"{KDA}v_conv1d.weight",
    f"{KDA}A_log",
    f"{KDA}dt_bias",
    f"{KDA}o_norm.weight",
    f"{MLA}q_a_layernorm.weight",
    f"{MLA}kv_b_proj.weight",
    f"{MLA}g_proj.weight",
    f"{MOE}gate.weight",
    f"{MOE}gate.e_score_correction_bias",
    f"{MOE}routed_expert_norm.weight",
    f"{MOE}shared_experts.down_proj.weight",
    f"{EXPERT}weight_packed",
    f"{EXPERT}weight_scale",
    "vision_tower.patch_embed.pos_emb.weight",
    f"{BLOCK}wqkv.weight",
    "mm_projector.post_norm.weight",
)


@pytest.mark.parametrize("name", ONE_OF_EVERY_GROUP)
def test_a_removed_tensor_is_named(name: str, audit: AuditTensors, tensors: Tensors) -> None:
    del tensors[name]
    with pytest.raises(CheckpointError) as raised:
        audit(tensors)
    assert problems(raised) == [f"{name}: missing"]


def test_a_removed_expert_matrix_is_named_in_both_forms(audit: AuditTensors, tensors: Tensors) -> None:
    del tensors[f"{EXPERT}weight_packed"], tensors[f"{EXPERT}weight_scale"]
    with pytest.raises(CheckpointError) as raised:
        audit(tensors)
    assert problems(raised) == [f"{EXPERT}weight_packed (or {EXPERT}weight): missing"]


@pytest.mark.parametrize(
    "name",
    [
        f"{MODEL}layers.9.input_layernorm.weight",
        f"{MODEL}layers.0.self_attn.q_proj.bias",
        f"{MOE}experts.8.w1.weight_packed",
        f"{MLA}A_log",
        f"{BLOCK}bias",
        "rotary_emb.inv_freq",
    ],
)
def test_an_extra_tensor_is_named(name: str, audit: AuditTensors, tensors: Tensors) -> None:
    tensors[name] = torch.zeros(64)
    with pytest.raises(CheckpointError) as raised:
        audit(tensors)
    assert problems(raised) == [f"{name}: unexpected: config.json describes no such tensor"]


@pytest.mark.parametrize(
    "name", [f"{MLA}o_proj.weight", f"{KDA}k_conv1d.weight", f"{EXPERT}weight_packed", f"{BLOCK}wo.weight"]
)
def test_a_transposed_tensor_is_named(name: str, audit: AuditTensors, tensors: Tensors) -> None:
    expected = list(tensors[name].shape)
    tensors[name] = tensors[name].transpose(0, -1).contiguous()
    with pytest.raises(CheckpointError) as raised:
        audit(tensors)
    assert problems(raised) == [f"{name}: shape {expected[::-1]}, expected {expected}"]


@pytest.mark.parametrize(
    ("name", "shape"),
    [(f"{MODEL}norm.weight", (1, 64)), (f"{MODEL}norm.weight", ()), (f"{KDA}A_log", (3,)), (f"{KDA}A_log", (256,))],
)
def test_a_tensor_of_another_rank_or_length_is_named(
    name: str, shape: tuple[int, ...], audit: AuditTensors, tensors: Tensors
) -> None:
    tensors[name] = torch.zeros(shape)
    with pytest.raises(CheckpointError) as raised:
        audit(tensors)
    (problem,) = problems(raised)
    assert problem.startswith(f"{name}: shape {list(shape)}, expected [")


@pytest.mark.parametrize("name", [f"{MODEL}norm.weight", f"{KDA}dt_bias", f"{MOE}gate.weight", f"{BLOCK}norm0.weight"])
@pytest.mark.parametrize(
    ("dtype", "spelling"),
    [
        (torch.uint8, "U8"),
        (torch.int8, "I8"),
        (torch.int64, "I64"),
        (torch.bool, "BOOL"),
        (torch.float64, "F64"),
        (torch.float8_e4m3fn, "F8_E4M3"),
    ],
    ids=str,
)
def test_another_type_where_float_is_due_is_named(
    name: str, dtype: torch.dtype, spelling: str, audit: AuditTensors, tensors: Tensors
) -> None:
    tensors[name] = tensors[name].to(dtype)
    with pytest.raises(CheckpointError) as raised:
        audit(tensors)
    assert problems(raised) == [f"{name}: type {spelling}, expected one of BF16, F16, F32"]


@pytest.mark.parametrize("suffix", ["weight_packed", "weight_scale"])
@pytest.mark.parametrize(
    ("dtype", "spelling"), [(torch.bfloat16, "BF16"), (torch.float32, "F32"), (torch.int8, "I8")], ids=str
)
def test_another_type_where_packed_bytes_are_due_is_named(
    suffix: str, dtype: torch.dtype, spelling: str, audit: AuditTensors, tensors: Tensors
) -> None:
    tensors[f"{EXPERT}{suffix}"] = tensors[f"{EXPERT}{suffix}"].to(dtype)
    with pytest.raises(CheckpointError) as raised:
        audit(tensors)
    assert problems(raised) == [f"{EXPERT}{suffix}: type {spelling}, expected U8 (packed bytes)"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_any_of_three_float_types_passes(dtype: torch.dtype, audit: AuditTensors, tensors: Tensors) -> None:
    audit({name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()})


def test_an_unpadded_a_log_passes(audit: AuditTensors, tensors: Tensors) -> None:
    heads = PRESETS["default"].kda_heads
    audit({name: t[:heads].clone() if name.endswith("A_log") else t for name, t in tensors.items()})


def test_layers_may_store_their_experts_differently(audit: AuditTensors, tensors: Tensors, tmp_path: Path) -> None:
    plain = load_tensors(write_tiny(tmp_path / "plain", experts="bf16"))
    audit({n: t for n, t in tensors.items() if not n.startswith(f"{MOE}experts")} | experts_of(plain, MOE))


def test_one_layer_may_not(audit: AuditTensors, tensors: Tensors, tmp_path: Path) -> None:
    plain = load_tensors(write_tiny(tmp_path / "plain", experts="bf16"))
    del tensors[f"{EXPERT}weight_packed"], tensors[f"{EXPERT}weight_scale"]
    tensors[f"{EXPERT}weight"] = plain[f"{EXPERT}weight"]
    with pytest.raises(CheckpointError, match="MXFP4 and plain experts in one layer: all of a layer must be stored"):
        audit(tensors)


def test_one_matrix_may_not_be_stored_both_ways(audit: AuditTensors, tensors: Tensors) -> None:
    tensors[f"{EXPERT}weight"] = torch.zeros(32, 32)
    with pytest.raises(CheckpointError, match="MXFP4 and plain experts in one layer"):
        audit(tensors)


def load_tensors(folder: Path) -> Tensors:
    return {name: tensor for shard in folder.glob("*.safetensors") for name, tensor in load_file(shard).items()}


def experts_of(tensors: Tensors, prefix: str) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name.startswith(f"{prefix}experts.")}


def test_a_tensor_in_two_shards_is_named(audit: AuditTensors, tensors: Tensors) -> None:
    name = f"{KDA}f_a_proj.weight"
    with pytest.raises(CheckpointError) as raised:
        audit(tensors, {name: tensors[name]})
    assert problems(raised) == [f"{name}: stored twice"]


def test_a_tensor_under_both_names_is_named(audit: AuditTensors, tensors: Tensors) -> None:
    old = "language_model.norm.weight"
    with pytest.raises(CheckpointError) as raised:
        audit(tensors, {old: tensors[f"{MODEL}norm.weight"]})
    assert problems(raised) == [f"{old}: stored twice"]


def test_older_names_pass(audit: AuditTensors, tensors: Tensors) -> None:
    """``language_model.layers.`` in place of ``language_model.model.layers.``, and likewise outside the layers."""
    renamed = {name.replace(MODEL, "language_model."): tensor for name, tensor in tensors.items()}
    assert "language_model.layers.0.input_layernorm.weight" in renamed and len(renamed) == len(tensors)
    audit(renamed)


def test_a_text_only_copy_passes_with_the_full_config(audit: AuditTensors, tensors: Tensors, config: Json) -> None:
    assert "vision_config" in config
    audit({name: tensor for name, tensor in tensors.items() if name.startswith("language_model.")})


def test_vision_tensors_without_a_vision_config_are_refused(
    audit: AuditTensors, tensors: Tensors, config: Json
) -> None:
    del config["vision_config"]
    with pytest.raises(ConfigError, match="no vision_config: .*or remove the vision tensors"):
        audit(tensors, config=config)


def test_half_a_vision_tower_is_refused(audit: AuditTensors, tensors: Tensors) -> None:
    kept = "vision_tower.patch_embed.proj.weight"
    text = {name: tensor for name, tensor in tensors.items() if name.startswith("language_model.")}
    with pytest.raises(CheckpointError, match=f"{BLOCK}norm0.weight: missing"):
        audit(text | {kept: tensors[kept]})


def test_all_problems_are_named(audit: AuditTensors, tensors: Tensors) -> None:
    """Bad tensors in the order of the file, then the missing ones; a bad tensor is not missing as well."""
    del tensors[f"{MLA}g_proj.weight"]
    tensors[f"{MLA}o_proj.weight"] = tensors[f"{MLA}o_proj.weight"].T.contiguous()
    tensors[f"{KDA}o_norm.weight"] = tensors[f"{KDA}o_norm.weight"].long()
    tensors["extra"] = torch.zeros(1)
    with pytest.raises(CheckpointError) as raised:
        audit(tensors)
    *bad, missing = problems(raised)
    assert missing == f"{MLA}g_proj.weight: missing"
    assert {problem.split(": ")[0] for problem in bad} == {
        f"{MLA}o_proj.weight",
        f"{KDA}o_norm.weight",
        "extra",
    }


@pytest.mark.parametrize(("removed", "listed"), [(1, 1), (8, 8), (9, 9), (20, 9)])
def test_a_long_list_is_cut_and_counted(removed: int, listed: int, audit: AuditTensors, tensors: Tensors) -> None:
    norms = [name for name in tensors if name.endswith("norm.weight")][:removed]
    for name in norms:
        del tensors[name]
    with pytest.raises(CheckpointError) as raised:
        audit(tensors)
    found = problems(raised)
    assert len(found) == listed
    if removed > 8:
        assert found.pop() == f"and {removed - 8} more"
    assert {problem.removesuffix(": missing") for problem in found} <= set(norms)


def test_the_account_counts_vision_tensors(config: Json, pristine: Tensors) -> None:
    account = Audit(CheckpointLayout(K3Config.from_dict(config)))
    for name, tensor in pristine.items():
        assert account.see(name, tuple(tensor.shape), "U8" if tensor.dtype == torch.uint8 else "F32") == name
    account.finish()
    assert account.num_vision_tensors == 2 + 2 * 6 + 1 + 3


def test_an_absent_shard_is_named(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()
    message = f"{INDEX_NAME} names 1 shard.* not in .*model-00002-of-00002.safetensors. Download them again"
    with pytest.raises(CheckpointError, match=message):
        audit_folder(folder)


def test_a_file_that_the_index_does_not_name_is_left_alone(folder: Path) -> None:
    """As the host does: a consolidated copy beside the shards is not a second set of tensors."""
    (folder / "consolidated.safetensors").write_bytes(b"whatever")
    audit_folder(folder)


def test_the_tensors_are_read_from_the_files_not_from_the_index(folder: Path) -> None:
    index = json.loads((folder / INDEX_NAME).read_text())
    index["weight_map"]["extra"] = index["weight_map"].pop(f"{MODEL}norm.weight")
    (folder / INDEX_NAME).write_text(json.dumps(index))
    audit_folder(folder)


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"weight_map": []}', "\xff"])
def test_a_broken_index_is_named(text: str, folder: Path) -> None:
    (folder / INDEX_NAME).write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=f"{INDEX_NAME} is not a safetensors index"):
        audit_folder(folder)


def test_no_safetensors_file_is_an_error(folder: Path) -> None:
    for file in (*folder.glob("*.safetensors"), folder / INDEX_NAME):
        file.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"weights")
    with pytest.raises(CheckpointError, match="no \\*.safetensors file: only safetensors checkpoints are read"):
        audit_folder(folder)


@pytest.mark.parametrize("kept", ["all but one byte", "the header", "half of the header", "the length", "4 bytes", ""])
def test_a_shard_that_is_cut_short_is_named(kept: str, folder: Path) -> None:
    shard = folder / "model-00002-of-00002.safetensors"
    data = shard.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    length = {
        "all but one byte": len(data) - 1,
        "the header": header,
        "half of the header": header // 2,
        "the length": 8,
        "4 bytes": 4,
        "": 0,
    }[kept]
    shard.write_bytes(data[:length])
    with pytest.raises(CheckpointError, match=f"{shard.name} is.* cut short: .*Download it again"):
        audit_folder(folder)


@pytest.mark.parametrize(
    "data",
    [
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
        b"<!DOCTYPE html><html>Access denied</html>",
        (4).to_bytes(8, "little") + b"\xff\xfe\xfd\xfc",
        (4).to_bytes(8, "little") + b"nope",
        (4).to_bytes(8, "little") + b"[0] ",
        (8).to_bytes(8, "little") + b'{"a": 1}',
        (21).to_bytes(8, "little") + b'{"a": {"shape": [1]}}',
    ],
    ids=["git-lfs pointer", "web page", "not text", "not JSON", "a list", "numbers", "other objects"],
)
def test_a_file_of_something_else_is_named(data: bytes, folder: Path) -> None:
    (folder / "model-00001-of-00002.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match="model-00001-of-00002.safetensors is not a safetensors file"):
        audit_folder(folder)


def test_a_folder_without_a_config_is_an_error(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match="has no config.json: it is not a checkpoint folder"):
        audit_folder(folder)


@pytest.mark.parametrize(
    ("data", "message"),
    [(b"{", "not valid JSON"), (b"", "not valid JSON"), (b"\xff\xfe", "not valid JSON"), (b"[]", "holds a list")],
)
def test_a_broken_config_is_named(data: bytes, message: str, folder: Path) -> None:
    (folder / "config.json").write_bytes(data)
    with pytest.raises(ConfigError, match=f"config.json .*{message}"):
        audit_folder(folder)


def test_another_config_is_caught_by_the_shapes(audit: AuditTensors, tensors: Tensors, config: Json) -> None:
    config["text_config"]["q_lora_rank"] = 32
    with pytest.raises(CheckpointError, match=r"q_a_proj.weight: shape \[24, 64\], expected \[32, 64\]"):
        audit(tensors, config=config)


def test_overrides_are_audited(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"q_a_proj.weight: shape \[24, 64\], expected \[32, 64\]"):
        audit_folder(folder, {"text_config": {"q_lora_rank": 32}})
