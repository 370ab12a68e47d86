"""A checkpoint that another tool wrote: everything that the published layout leaves open, the other way round."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_k3.testing.server import ServerProcess, sglang_command
from tests.kit.configurations import DEVICE_FLAGS, Configuration
from tests.kit.parity import Oracle, assert_parity, generate, prompt_ids

pytestmark = [pytest.mark.server, pytest.mark.full]
SOURCE = Configuration("foreign", preset="odd", experts="bf16")


def rewrite(source: Path, target: Path) -> None:
    """One file, float32 throughout, unpadded ``A_log``, old names, no vision tensors, a config with remote code."""
    config = json.loads((source / "config.json").read_text())
    num_heads = config["text_config"]["linear_attn_config"]["num_heads"]
    tensors = {}
    for shard in source.glob("*.safetensors"):
        for name, tensor in load_file(shard).items():
            if not name.startswith("language_model."):
                continue
            if name.endswith("A_log"):
                tensor = tensor[:num_heads].clone()
            tensors[name.replace("language_model.model.layers.", "language_model.layers.")] = tensor.float()
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    save_file(tensors, target / "weights.safetensors")
    del config["dtype"], config["tie_word_embeddings"], config["pad_token_id"]
    config["torch_dtype"] = "float32"
    config["text_config"]["torch_dtype"] = "bfloat16"
    config["auto_map"] = {
        "AutoConfig": "configuration_kimi_k3.KimiK3Config",
        "AutoModelForCausalLM": "modeling_kimi_k3.KimiK3ForConditionalGeneration",
    }
    (target / "config.json").write_text(json.dumps(config))
    (target / "tokenizer.json").write_text((source / "tokenizer.json").read_text())


@pytest.fixture(scope="module")
def server_and_oracle(tiny_cache: Path) -> Iterator[tuple[ServerProcess, Oracle]]:
    source, target = SOURCE.checkpoint(tiny_cache), tiny_cache / "foreign"
    target.mkdir()
    rewrite(source, target)
    # Nothing but the path: device, backend, dtype, pools and environment are the plugin's business.
    command = sglang_command(str(target), *DEVICE_FLAGS)
    with ServerProcess(command, log_path=tiny_cache / "logs" / "foreign.log") as server:
        yield server, Oracle(source)


@pytest.mark.parametrize("length", [1, 65, 200])
def test_it_is_served_as_the_model_that_it_holds(server_and_oracle: tuple[ServerProcess, Oracle], length: int) -> None:
    server, oracle = server_and_oracle
    prompt = prompt_ids(length, seed=length, vocab_size=oracle.vocab_size)
    assert_parity(generate(server, prompt, 6, oracle.vocab_size), oracle, SOURCE.tolerance)


def test_the_run_dtype_is_that_of_the_top_level(server_and_oracle: tuple[ServerProcess, Oracle]) -> None:
    assert server_and_oracle[0].get_json("/server_info")["dtype"] == "float32"
