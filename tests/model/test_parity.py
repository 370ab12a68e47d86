"""The model in one process, over the backends, against the step-by-step reference: same tensors, no shared code.

The servers of ``tests/server`` show the same with everything around it; here a fault takes a second to find.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from torch import Tensor

from sglang_k3.models.kimi_k3 import KimiK3ForConditionalGeneration
from sglang_k3.options import ServeOptions
from sglang_k3.testing.reference import ReferenceModel
from tests.model.fakes import FakeRunner, Request, hybrid_backend
from tests.model.harness import TinyK3, tiny_k3

pytestmark = pytest.mark.sglang

MAX_ERROR = 5e-4  # of a log-prob, fp32 against fp64: 1e-5 is seen, 1e-4 with ordinary residuals, whose sums grow


def reference_of(tiny: TinyK3, folder: Path, **options: Any) -> ReferenceModel:
    (folder / "config.json").write_text(json.dumps(tiny.json))
    save_file(dict(tiny.tensors), folder / "model.safetensors")
    return ReferenceModel.from_checkpoint(folder, dtype=torch.float64, **options)


class InProcess:
    """A loaded model over fake pools."""

    def __init__(self, tiny: TinyK3) -> None:
        self.vocab_size = tiny.config.vocab_size
        self.model: KimiK3ForConditionalGeneration = tiny.build()
        self.model.load_weights(tiny.tensors.items())
        self.runner = FakeRunner(tiny.config)
        self.backend = hybrid_backend(self.runner, tiny.config)

    def step(self, requests: list[Request], prompts: list[Tensor], lens: list[int] | None = None) -> list[Tensor]:
        """Log-probs after each of the next ``lens`` tokens of every request; None decodes one."""
        starts = [request.length for request in requests]
        batch = self.runner.decode(requests) if lens is None else self.runner.extend(requests, lens)
        steps = lens or [1] * len(requests)
        ids = torch.cat([p[start : start + n] for p, start, n in zip(prompts, starts, steps, strict=True)])
        self.backend.init_forward_metadata(batch)
        with forward_context(ForwardContext(attn_backend=self.backend)), torch.no_grad():
            hidden = self.model.model(ids, batch)
        logits = hidden @ self.model.lm_head.weight[: self.vocab_size].T
        return list(logits.log_softmax(-1).split(steps))


def assert_parity(served: Tensor, prompt: Tensor, reference: ReferenceModel) -> None:
    expected = reference.logprobs(prompt[: len(served)].tolist())
    error = (served - expected).abs().max().item()
    assert error <= MAX_ERROR, f"max error {error:.2e}"


@pytest.mark.parametrize("experts", ["mxfp4", "bf16"])
@pytest.mark.parametrize("preset", ["default", "odd", "deep"])
def test_log_probs_are_those_of_the_reference(preset: str, experts: str, tmp_path: Path) -> None:
    """Two prompts of different lengths, in pieces, together and alone, then decoded together."""
    tiny = tiny_k3(preset, experts=experts)
    reference, served = reference_of(tiny, tmp_path), InProcess(tiny)
    prompts = [torch.randint(served.vocab_size, (n,)) for n in (19, 12)]
    first, second = requests = [served.runner.new_request() for _ in prompts]
    parts: list[list[Tensor]] = [served.step([first], prompts[:1], [6]), []]
    for lens in ([1, 5], [8, 3], None, None, None, None):
        for part, new in zip(parts, served.step(requests, prompts, lens), strict=True):
            part.append(new)
    assert (first.length, second.length) == (19, 12)
    for part, prompt in zip(parts, prompts, strict=True):
        assert_parity(torch.cat(part), prompt, reference)


@pytest.mark.parametrize(
    "switch",
    [
        {"tie_word_embeddings": True},
        {"attn_res_block_size": None},
        {"attn_res_block_size": 9},
        {"mla_use_output_gate": False},
        {"latent_moe_use_norm": False},
        {"num_shared_experts": 0},
        {"moe_renormalize": False, "latent_moe_use_norm": False},
        {"routed_scaling_factor": 2.5, "latent_moe_use_norm": False},
        {"num_expert_group": 4, "topk_group": 2},
        {"activation_situ_linear_beta": None},
        {"activation_situ_beta": 1.5, "activation_situ_linear_beta": 2.0},
        {"rms_norm_eps": 0.05},
    ],
    ids=str,
)
def test_log_probs_with_another_config(switch: dict[str, Any], tmp_path: Path) -> None:
    """Each switch changes what the model computes, and both agree on what it becomes."""
    tiny = tiny_k3(**switch)
    reference, served, plain = reference_of(tiny, tmp_path), InProcess(tiny), InProcess(tiny_k3())
    prompt = torch.randint(served.vocab_size, (9,))
    request = served.runner.new_request()
    (first,), (last,) = served.step([request], [prompt], [8]), served.step([request], [prompt])
    assert_parity(torch.cat([first, last]), prompt, reference)
    (unchanged,) = plain.step([plain.runner.new_request()], [prompt], [8])
    assert (unchanged - first).abs().max() > 10 * MAX_ERROR


def test_the_epsilon_of_the_latent_norms_is_an_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = tiny_k3()
    prompt = torch.randint(tiny.config.vocab_size, (9,))
    for choice, eps, other in (("reference", 1e-6, 1e-5), ("config", 1e-5, 1e-6)):
        args = SimpleNamespace(**dataclasses.asdict(ServeOptions(k3_latent_norm_eps=choice)))
        monkeypatch.setattr("sglang_k3.models.kimi_k3.get_server_args", lambda args=args: args)
        served = InProcess(tiny)
        (actual,) = served.step([served.runner.new_request()], [prompt], [9])
        assert_parity(actual, prompt, reference_of(tiny, tmp_path, latent_norm_eps=eps))
        with pytest.raises(AssertionError, match="max error"):
            assert_parity(actual, prompt, reference_of(tiny, tmp_path, latent_norm_eps=other))
