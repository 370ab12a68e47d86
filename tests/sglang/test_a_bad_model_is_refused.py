"""A name, a folder or a checkpoint that cannot be served ends the start in words that say what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sglang_k3.errors import K3Error
from sglang_k3.integration.names import config_folder, is_k3, refuse_no_model
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


@pytest.mark.parametrize("name", ["tokenizer.json", "model.safetensors.index.json", "generation_config.json"])
def test_a_folder_with_everything_but_its_config_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(K3Error, match=rf"{tmp_path} has no config\.json: it is not a checkpoint folder"):
        start(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_file_of_a_checkpoint_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(K3Error, match=rf"{name} is a file of a checkpoint\. Give its folder, {tmp_path}\."):
        start(tmp_path / name)


def test_a_name_that_is_empty_is_refused() -> None:
    with pytest.raises(K3Error, match="The model's name is empty"):
        start("")


def test_a_checkpoint_without_a_tokenizer_is_refused(checkpoint: Path) -> None:
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(K3Error, match=r"has neither tokenizer\.json nor tiktoken\.model: .*--tokenizer-path"):
        start(checkpoint)
    start(checkpoint, device="cpu", skip_tokenizer_init=True)


@pytest.mark.parametrize("where", ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"])
def test_a_file_that_cannot_be_read_is_named(checkpoint: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root reads everything, so that the refusal is of ours."""
    for method in ("open", "read_text"):
        original = getattr(Path, method)

        def refuse(self: Path, *args: object, original: Callable[..., Any] = original, **options: object) -> object:
            if self.name == where:
                raise PermissionError(13, "Permission denied", str(self))
            return original(self, *args, **options)

        monkeypatch.setattr(Path, method, refuse)
    with pytest.raises(K3Error, match=rf"Permission denied: '{checkpoint}/{where}'\. Give --model a folder whose"):
        start(checkpoint)


@pytest.fixture
def downloaded(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name and the revision of a repository in the hub's cache, whose ``main`` is not there."""
    revision = "a" * 40
    snapshots = tmp_path / "hub" / "models--somebody--k3" / "snapshots"
    snapshots.mkdir(parents=True)
    checkpoint.rename(snapshots / revision)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return revision


def test_a_downloaded_repository_is_known_by_its_revision(downloaded: str) -> None:
    assert is_k3("somebody/k3", downloaded)
    assert not is_k3("somebody/k3")
    assert config_folder("somebody/k3", downloaded) and not config_folder("somebody/k3", None)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"tp_size": 3}, "--tp-size gives 3 ranks"),
        ({"pp_size": 10}, "--pp-size 10 is more than the model's 9 layers"),
        ({"context_length": 9000}, "--context-length 9000 is longer than the model's 8192"),
    ],
)
def test_a_downloaded_repository_is_held_to_its_config(downloaded: str, arguments: dict[str, int], says: str) -> None:
    with pytest.raises(K3Error, match=says):
        start("somebody/k3", revision=downloaded, **arguments)


def test_a_downloaded_repository_is_sized_like_a_folder(downloaded: str) -> None:
    args = start("somebody/k3", revision=downloaded, device="cpu")
    assert args.dtype == "float32"
    assert args.max_running_requests and args.max_mamba_cache_size and args.max_total_tokens


def test_a_revision_that_was_not_downloaded_is_refused(downloaded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_k3.integration.names.PUBLISHED", "somebody/k3")
    with pytest.raises(K3Error, match=r"SGLang refuses these arguments: somebody/k3 must be downloaded first, and its"):
        start("somebody/k3", revision="b" * 40, device="cpu")


@pytest.mark.parametrize(("text", "says"), [('{"architectures": ["Kimi', "is not valid JSON"), ("[]", "holds a list")])
def test_a_broken_config_is_refused(checkpoint: Path, text: str, says: str) -> None:
    (checkpoint / "config.json").write_text(text)
    with pytest.raises(K3Error, match=rf"config\.json {says}"):
        start(checkpoint)


@pytest.mark.parametrize("name", ["params.json", "model_index.json", "weights.gguf"])
def test_a_folder_of_another_layout_is_left_to_the_host(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
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
    monkeypatch.setattr(
        "sglang_k3.integration.names.try_to_load_from_cache", lambda *_, **__: str(llama / "config.json")
    )
    for model in (str(llama), "somebody/llama"):
        with pytest.raises(RuntimeError, match=r"^No accelerator\.$"):
            start(model)


def test_what_the_host_says_of_another_model_later_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("CUDA is out of order.")

    monkeypatch.setattr("sglang.srt.server_args.ServerArgs._handle_missing_default_values", broken)
    with pytest.raises(RuntimeError, match=r"^CUDA is out of order\.$"):
        start("somebody/llama", device="cuda")
