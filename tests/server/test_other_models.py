"""A server for another model starts with the plugin installed and answers as it does without."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from sglang_k3 import report
from sglang_k3.testing.server import ServerProcess, sglang_command
from tests.kit.llama import write_llama

pytestmark = [
    pytest.mark.server,
    pytest.mark.full,  # in make test, their arguments are resolved with and without the plugin
    pytest.mark.skipif(torch.cuda.is_available(), reason="the flags below are those that stock SGLang needs on a CPU"),
]

# Stock SGLang serves a rotary model on a CPU only beside vLLM, of which it takes this one function. Both servers of
# the test get the same stand-in: what it computes does not matter.
VLLM_STAND_IN = "def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox):\n    pass\n"
FLAGS = (
    *("--load-format", "dummy", "--device", "cpu", "--attention-backend", "torch_native", "--skip-server-warmup"),
    *("--random-seed", "7", "--max-total-tokens", "2048", "--disable-overlap-schedule"),
)


def answer(folder: Path, log: Path, plugins: str) -> tuple[list[int], str]:
    stand_in = folder / "stand_in" / "vllm"
    stand_in.mkdir(parents=True, exist_ok=True)
    (stand_in / "__init__.py").touch()
    (stand_in / "_custom_ops.py").write_text(VLLM_STAND_IN)
    env = {**os.environ, "PYTHONPATH": str(stand_in.parent), "SGLANG_PLUGINS": plugins}
    with ServerProcess(sglang_command(str(folder), *FLAGS), log_path=log, env=env) as server:
        body = {"input_ids": list(range(10, 40)), "sampling_params": {"max_new_tokens": 12, "temperature": 0}}
        with pytest.raises(ValueError, match="serves no K3 model with this plugin"):
            report.fetch(server.url, None)
        return server.post_json("/generate", body)["output_ids"], log.read_text()


def test_a_llama_is_served_as_without_the_plugin(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "llama")
    with_plugin, log = answer(folder, tmp_path / "with.log", "k3")
    without, _ = answer(folder, tmp_path / "without.log", "none")
    assert with_plugin == without
    # Without this the comparison could be of the host with itself.
    assert "K3ServerArgs(" in log
    assert "sglang_k3.models" not in log
