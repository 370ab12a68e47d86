"""A decode step under a CUDA graph answers as the same step without one, alone and in batches of every size."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sglang_k3.testing.server import ServerProcess
from tests.kit.configurations import Configuration, start
from tests.kit.parity import prompt_ids

pytestmark = [pytest.mark.server, pytest.mark.gpu]

# Where the two best logits are closer than this, 16-bit noise may choose either, and the answers part.
NEAR_TIE = 0.5
MAX_ERROR = 0.5
NEW_TOKENS = 64
VOCAB = 2048
POOLS = ("--max-total-tokens", "65536", "--max-running-requests", "32", "--max-mamba-cache-size", "160")
WITH = Configuration("graphs-on", preset="gpu", dtype="bfloat16", flags=POOLS)
WITHOUT = dataclasses.replace(WITH, name="graphs-off", flags=(*POOLS, "--cuda-graph-backend-decode", "disabled"))


@dataclasses.dataclass(frozen=True)
class Answer:
    """Attributes:
    tokens, logprobs: the greedy ones.
    gaps: between the two best log-probs at each of them.
    """

    tokens: list[int]
    logprobs: list[float]
    gaps: list[float]


@pytest.fixture(scope="module")
def servers(tiny_cache: Path) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    pending = [start(configuration, tiny_cache, tiny_cache / "logs")[0] for configuration in (WITH, WITHOUT)]
    with contextlib.ExitStack() as stack:
        with ThreadPoolExecutor(2) as pool:
            graphs, eager = pool.map(stack.enter_context, pending)
        yield graphs, eager
        graphs.check_alive()
        eager.check_alive()


def ask(server: ServerProcess, prompt: list[int]) -> Answer:
    sampling = {"max_new_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
    body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "top_logprobs_num": 2}
    reply = server.post_json("/generate", body)
    pairs = [(first[0], second[0]) for first, second in reply["meta_info"]["output_top_logprobs"]]
    return Answer(reply["output_ids"], [first for first, _ in pairs], [first - second for first, second in pairs])


def ask_together(server: ServerProcess, prompts: list[list[int]]) -> list[Answer]:
    server.post_text("/flush_cache?timeout=30", {})
    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(lambda prompt: ask(server, prompt), prompts))


def compare(actual: Answer, expected: Answer) -> int:
    """Tokens that were compared: those up to the first near tie."""
    assert len(actual.tokens) == len(expected.tokens) == NEW_TOKENS
    for n, gap in enumerate(expected.gaps):
        if gap < NEAR_TIE:
            return n
        assert actual.tokens[n] == expected.tokens[n], f"token {n}, where the two best are {gap:.2f} apart"
        assert abs(actual.logprobs[n] - expected.logprobs[n]) <= MAX_ERROR, f"log-prob of token {n}"
    return NEW_TOKENS


@pytest.mark.parametrize("together", [1, 2, 3, 8, 13, 32])
def test_graphs_on_is_graphs_off(servers: tuple[ServerProcess, ServerProcess], together: int) -> None:
    """Batches that fill a captured size, and batches that are padded to one."""
    lengths = [5 + 37 * n % 300 for n in range(32)]
    prompts = [prompt_ids(length, seed=n, vocab_size=VOCAB) for n, length in enumerate(lengths)]
    compared = 0
    for first in range(0, 32, together):
        batch = prompts[first : first + together]
        answers = zip(*(ask_together(server, batch) for server in servers), strict=True)
        compared += sum(compare(on, off) for on, off in answers)
    assert compared >= 32, "too few tokens were sure enough to be compared"


def test_the_graphs_were_used_and_only_where_asked(servers: tuple[ServerProcess, ServerProcess]) -> None:
    graphs, eager = (server.log_path.read_text() for server in servers)
    assert "cuda graph: True" in graphs
    assert "cuda graph: True" not in eager
