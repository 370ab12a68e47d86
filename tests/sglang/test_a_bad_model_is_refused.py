"""A name, a folder or a checkpoint that cannot be served ends the start in words that say what to do."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sglang_k3.errors import K3Error
from sglang_k3.integration.names import refuse_no_model
from tests.kit.llama import write_llama
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


@pytest.mark.parametrize("path", ["/no/where", "./nowhere", "../nowhere"])
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


def test_a_home_that_no_shell_has_expanded_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(K3Error, match=rf"No shell has expanded the ~ of ~/k3\. Write {tmp_path}/k3\."):
        start("~/k3")


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise RuntimeError("No accelerator.")

    monkeypatch.setattr("sglang.srt.server_args.get_device", none)


@pytest.mark.usefixtures("no_accelerator")
def test_a_name_that_may_be_a_folder_misspelt_is_refused() -> None:
    with pytest.raises(K3Error, match=r"There is no folder out/k3, .*: No accelerator\. If it is a K3 model, download"):
        start("out/k3")


@pytest.mark.usefixtures("no_accelerator")
def test_of_a_model_that_is_known_to_be_another_the_host_speaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama = write_llama(tmp_path / "llama")
    monkeypatch.setattr("sglang_k3.integration.names.try_to_load_from_cache", lambda *_: str(llama / "config.json"))
    for model in (str(llama), "somebody/llama"):
        with pytest.raises(RuntimeError, match=r"^No accelerator\.$"):
            start(model)


def test_what_the_host_says_of_another_model_later_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("CUDA is out of order.")

    monkeypatch.setattr("sglang.srt.server_args.ServerArgs._handle_missing_default_values", broken)
    with pytest.raises(RuntimeError, match=r"^CUDA is out of order\.$"):
        start("somebody/llama", device="cuda")
