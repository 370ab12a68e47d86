"""A served model against the step-by-step reference: same checkpoint, same tokens, no shared code.

The reference knows nothing of caches, batches or chunks, so whatever the server did to answer, its log-probs must
be those of the bare sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from sglang_k3.testing.reference import ReferenceModel, ReferenceState
from sglang_k3.testing.server import ServerProcess

STATE_EVERY = 16  # the reference keeps a state for every so many tokens, so that shared prefixes are stepped once


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far a served log-prob may be from the reference's.

    Attributes:
        max_error, rms_error: over the whole distribution of all tokens of one answer.
        sure_gap: the reference's distance between its two best logits above which the greedy token must agree.
    """

    max_error: float
    rms_error: float
    sure_gap: float


FLOAT32 = Tolerance(max_error=2e-3, rms_error=2e-3, sure_gap=0.0)
BFLOAT16 = Tolerance(max_error=0.5, rms_error=0.08, sure_gap=1.0)


class Oracle:
    """The reference's log-probs after any token sequence, remembered by prefix, computed on ``device``."""

    def __init__(self, folder: Path, device: str = "cpu") -> None:
        self.model = ReferenceModel.from_checkpoint(folder, device=device)
        self.vocab_size = self.model.config.vocab_size
        self._states: dict[tuple[int, ...], ReferenceState] = {(): self.model.new_state()}
        self._logprobs: dict[tuple[int, ...], torch.Tensor] = {}

    def after(self, ids: list[int]) -> torch.Tensor:
        """Log-probs ``[vocab]`` of the token that follows ``ids``."""
        key = tuple(ids)
        if key not in self._logprobs:
            start = next(n for n in range(len(key), -1, -1) if key[:n] in self._states and n < len(key))
            state = self._states[key[:start]].clone()
            for n in range(start, len(key)):
                logits = self.model.step(state, key[n])
                self._logprobs[key[: n + 1]] = logits.log_softmax(-1).cpu()
                if (n + 1) % STATE_EVERY == 0:
                    self._states[key[: n + 1]] = state.clone()
        return self._logprobs[key]


@dataclasses.dataclass(frozen=True)
class Answer:
    """One greedy answer: tokens, full distributions ``[n, vocab]``, and how much of the prompt was cached."""

    prompt: list[int]
    tokens: list[int]
    logprobs: torch.Tensor
    cached_tokens: int


def prompt_ids(length: int, *, seed: int, vocab_size: int) -> list[int]:
    """Random tokens; not the last id, which the host reports as 0 when it returns log-probs of the input."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size - 1, (length,), generator=generator).tolist()


def generate(
    server: ServerProcess,
    prompt: list[int],
    num_tokens: int,
    vocab_size: int,
    *,
    fields: Mapping[str, Any] = MappingProxyType({}),
    **params: Any,
) -> Answer:
    """Ask for a greedy answer with the whole distribution of every token.

    Args:
        fields: of the request, beside these.
        params: of the sampling.
    """
    sampling = {"max_new_tokens": num_tokens, "temperature": 0, "ignore_eos": True, **params}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": vocab_size}
    reply = server.post_json("/generate", body | fields)
    meta = reply["meta_info"]
    logprobs = torch.full((len(reply["output_ids"]), vocab_size), torch.nan)
    for row, top in zip(logprobs, meta["output_top_logprobs"], strict=True):
        values, ids = zip(*((value, token) for value, token, _ in top), strict=True)
        row[torch.tensor(ids)] = torch.tensor(values)
    return Answer(prompt, reply["output_ids"], logprobs, meta["cached_tokens"])


def generate_together(
    server: ServerProcess, prompts: list[list[int]], num_tokens: int, vocab_size: int
) -> list[Answer]:
    """The same for several prompts at once, so that they share batches."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: generate(server, prompt, num_tokens, vocab_size), prompts))


def assert_parity(answer: Answer, oracle: Oracle, tolerance: Tolerance) -> None:
    """Every distribution and every greedy token of an answer against the reference."""
    sequence = list(answer.prompt)
    errors = []
    for position, (token, served) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
        expected = oracle.after(sequence)
        errors.append((served - expected).abs())
        best = expected.topk(2)
        gap = float(best.values[0] - best.values[1])
        where = f"token {position} after a prompt of {len(answer.prompt)} ({answer.cached_tokens} cached)"
        assert token == int(best.indices[0]) or gap <= tolerance.sure_gap, (
            f"{where}: greedy {token}, reference {int(best.indices[0])} with a gap of {gap:.3f}"
        )
        sequence.append(token)
    error = torch.stack(errors)
    where = f"prompt of {len(answer.prompt)} ({answer.cached_tokens} cached)"
    assert error.isfinite().all(), f"{where}: log-probs missing or not finite"
    assert error.max() <= tolerance.max_error, f"{where}: max error {error.max():.2e} > {tolerance.max_error}"
    rms = error.square().mean().sqrt()
    assert rms <= tolerance.rms_error, f"{where}: rms error {rms:.2e} > {tolerance.rms_error}"


def input_logprobs(server: ServerProcess, prompt: list[int]) -> torch.Tensor:
    """Log-prob of every prompt token but the first, given those before it ``[len - 1]``."""
    sampling = {"max_new_tokens": 1, "temperature": 0}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    rows = server.post_json("/generate", body)["meta_info"]["input_token_logprobs"]
    return torch.tensor([value for value, _, _ in rows[1:]])
