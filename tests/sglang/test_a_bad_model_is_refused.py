"""A name, a folder or a checkpoint that cannot be served ends the start in words that say what to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from sglang_k3.errors import K3Error
from sglang_k3.integration.names import refuse_no_model
from tests.kit.start import edit_config, edit_tensor, start

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("plugin")]


def test_a_missing_tensor_is_named(checkpoint: Path) -> None:
    name = edit_tensor(checkpoint, "kv_b_proj.weight", lambda tensors, name: tensors.pop(name))
    with pytest.raises(K3Error, match=f"{name}: missing"):
        start(checkpoint)


def test_a_transposed_tensor_is_named(checkpoint: Path) -> None:
    def transpose(tensors: dict, name: str) -> None:
        tensors[name] = tensors[name].T.contiguous()

    name = edit_tensor(checkpoint, "layers.0.mlp.gate_proj.weight", transpose)
    with pytest.raises(K3Error, match=rf"{name}: shape \[64, 96\], expected \[96, 64\]"):
        start(checkpoint)


def test_a_config_without_the_kda_part_is_refused(checkpoint: Path) -> None:
    edit_config(checkpoint, lambda config: config["text_config"].pop("linear_attn_config"))
    with pytest.raises(K3Error, match=r"no text_config\.linear_attn_config"):
        start(checkpoint)


def test_another_quantisation_is_refused(checkpoint: Path) -> None:
    edit_config(checkpoint, lambda config: config.update(quantization_config={"quant_method": "modelopt"}))
    edit_config(checkpoint, lambda config: config["text_config"].pop("quantization_config"))
    with pytest.raises(K3Error, match="quant_method 'modelopt'.*Use moonshotai/Kimi-K3 or a bf16 checkpoint"):
        start(checkpoint)


def test_a_misspelt_name_is_refused() -> None:
    with pytest.raises(K3Error, match="no model 'kimi-k3-tinny': known names are kimi-k3 and kimi-k3-tiny"):
        start("kimi-k3-tinny")


@pytest.mark.parametrize("path", ["/no/where", "./nowhere", "../nowhere", "~/nowhere"])
def test_a_path_that_does_not_exist_is_refused(path: str) -> None:
    with pytest.raises(K3Error, match=f"There is no {re.escape(path)}. Give a checkpoint folder that exists, kimi-k3"):
        start(path)


@pytest.mark.parametrize("files", [{}, {"model.safetensors": ""}])
def test_a_folder_without_a_config_is_refused(tmp_path: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(K3Error, match=rf"{tmp_path} has no config\.json: it is not a checkpoint folder"):
        start(tmp_path)


@pytest.mark.parametrize(("text", "says"), [('{"architectures": ["Kimi', "is not valid JSON"), ("[]", "holds a list")])
def test_a_broken_config_is_refused(checkpoint: Path, text: str, says: str) -> None:
    (checkpoint / "config.json").write_text(text)
    with pytest.raises(K3Error, match=rf"config\.json {says}"):
        start(checkpoint)


def test_a_folder_of_another_layout_is_left_to_the_host(tmp_path: Path) -> None:
    (tmp_path / "params.json").write_text("{}")
    refuse_no_model(str(tmp_path))


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the host asks the hub for it")
def test_a_name_that_may_be_a_folder_misspelt_is_refused() -> None:
    with pytest.raises(K3Error, match=r"out/k3 is no folder here .*No accelerator.*download it and pass its folder"):
        start("out/k3")
