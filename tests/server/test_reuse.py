"""What is reused when the pool of states is small, and when requests are taken back: exact counts, right answers."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_k3.testing.soak import complaints, count_retractions, wait_until_idle
from tests.kit.configurations import Configuration, Served, start
from tests.kit.host_plugin import install_into
from tests.kit.parity import assert_parity, generate, generate_together, prompt_ids

SLOTS = 8
RETRACT = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "15"}  # only where two or more are running
FLAGS = (
    *("--max-running-requests", "2", "--max-mamba-cache-size", str(SLOTS), "--max-total-tokens", "8192"),
    "--enable-streaming-session",
    # What goes first must not depend on what it costs: here it is what was used longest ago.
    *("--k3-checkpoint-policy", "lru"),
)


def reusing(name: str, page: int, chunk: int, preset: str = "default") -> Configuration:
    flags = (*FLAGS, "--page-size", str(page), "--chunked-prefill-size", str(chunk))
    return Configuration(f"reuse-{name}", preset=preset, flags=flags, chunk=chunk, env=RETRACT)


CONFIGURATIONS = [
    reusing("whole", 1, 2048),
    reusing("chunk-16", 1, 16),
    reusing("chunk-64", 1, 64),
    reusing("paged-chunk-16", 16, 16, preset="odd"),
    reusing("paged-chunk-64", 16, 64, preset="odd"),
]
pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.covers("flush")]


@pytest.fixture(scope="module", params=CONFIGURATIONS, ids=lambda configuration: configuration.name)
def reuse(
    request: pytest.FixtureRequest, tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """Each step of the scheduler is followed by a recount."""
    ledger = install_into(tmp_path_factory.mktemp("plugin") / "site", "tests.kit.step_ledger")
    configuration = dataclasses.replace(request.param, env=request.param.env | ledger)
    server, folder = start(configuration, tiny_cache, tiny_cache / "logs")
    with server:
        yield Served(configuration, server, configuration.oracle(folder))
        server.check_alive()


@pytest.fixture(autouse=True)
def nothing_left(reuse: Served) -> Iterator[None]:
    reuse.server.post_text("/flush_cache?timeout=30", {})
    begin = reuse.server.log_path.stat().st_size
    yield
    assert wait_until_idle(reuse.server) == (0, [])
    assert complaints(log_from(reuse, begin)) == []


def log_from(reuse: Served, begin: int) -> str:
    return reuse.server.log_path.read_text()[begin:]


def words(reuse: Served, length: int, seed: int) -> list[int]:
    return prompt_ids(length, seed=seed, vocab_size=reuse.oracle.vocab_size)


def ask(reuse: Served, prompt: list[int], num_tokens: int = 4) -> int:
    """Check an answer; returns the tokens that came from the cache."""
    answer = generate(reuse.server, prompt, num_tokens, reuse.oracle.vocab_size)
    assert_parity(answer, reuse.oracle, reuse.configuration.tolerance)
    return answer.cached_tokens


def push_out_the_states(reuse: Served) -> None:
    """As many others as there are slots, of one state each; there is KV for all."""
    for n in range(SLOTS):
        ask(reuse, words(reuse, 65, seed=900 + n), 1)


def test_after_eviction_of_the_state_alone(reuse: Served) -> None:
    """The whole prompt is computed again, and its state comes back."""
    prompt = words(reuse, 130, seed=1)
    cached = [ask(reuse, prompt), ask(reuse, prompt)]
    push_out_the_states(reuse)
    cached += [ask(reuse, prompt), ask(reuse, prompt)]
    assert cached == [0, 128, 0, 128]


def test_a_branch_from_kv_without_a_state_plants_one_there(reuse: Served) -> None:
    """A prompt of one chunk would leave a state at 256 only, did the KV of the trunk not say where it diverges."""
    trunk = words(reuse, 130, seed=2)
    ask(reuse, trunk)
    push_out_the_states(reuse)
    branches = [trunk + words(reuse, 140, seed=20 + n) for n in range(3)]
    assert [ask(reuse, branch) for branch in branches] == [0, 128, 128]


@pytest.mark.covers("retract")
def test_after_retraction(reuse: Served) -> None:
    """The one that is taken back goes on from the last state of its prompt, and so does who comes after it."""
    begin = reuse.server.log_path.stat().st_size
    prompts = [words(reuse, 200, seed=3), words(reuse, 150, seed=4)]
    states = [192, 128]
    answers = generate_together(reuse.server, prompts, 40, reuse.oracle.vocab_size)
    for answer in answers:
        assert_parity(answer, reuse.oracle, reuse.configuration.tolerance)
    _, _, behind = log_from(reuse, begin).partition("Testing retraction")
    retracted, _ = count_retractions(log_from(reuse, begin))
    cached = [int(count) for count in re.findall(r"Prefill batch.*#cached-token: (\d+)", behind)]
    resumed = [count for count in cached if count]  # the others are later chunks, of either prompt
    assert len(resumed) == retracted > 0
    assert set(resumed) <= set(states)
    assert [ask(reuse, prompt) for prompt in prompts] == states
    assert [ask(reuse, [*answer.prompt, *answer.tokens, 1]) for answer in answers] == states


@pytest.mark.covers("session")
def test_a_long_prompt_completes_where_no_state_may_go(reuse: Served) -> None:
    """Sessions hold every slot but the one that it works in: no state of it is kept, and each is counted."""
    begin = reuse.server.log_path.stat().st_size
    with contextlib.ExitStack() as sessions:
        for n in range(SLOTS - 1):
            session = reuse.server.post_json("/open_session", {"capacity_of_str_len": 99, "streaming": True})
            sessions.callback(reuse.server.post_text, "/close_session", {"session_id": session})
            fields = {"session_params": {"id": session}}
            generate(reuse.server, words(reuse, 65, seed=30 + n), 1, reuse.oracle.vocab_size, fields=fields)
        prompt = words(reuse, 700, seed=5)
        assert [ask(reuse, prompt), ask(reuse, prompt)] == [0, 0]
        skipped = [int(count) for count in re.findall(r"ledger: \d+ checks, (\d+) skipped", log_from(reuse, begin))]
        due = 1 if reuse.configuration.chunk > 64 else 10  # per prompt: each grid point that ends a chunk
        assert skipped[-1] - ledger_before(reuse, begin) == 2 * due
    assert wait_until_idle(reuse.server) == (0, [])
    assert [ask(reuse, prompt), ask(reuse, prompt)] == [0, 640]


def ledger_before(reuse: Served, begin: int) -> int:
    """Skipped states by the log up to ``begin``."""
    found = re.findall(r"ledger: \d+ checks, (\d+) skipped", reuse.server.log_path.read_text()[:begin])
    return int(found[-1]) if found else 0
