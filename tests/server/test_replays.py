"""Under the host's graph runner, padded and over static buffers, decode steps answer as the bare sequence does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.configurations import Configuration, Served, start
from tests.kit.host_plugin import install_into
from tests.kit.parity import assert_parity, generate, generate_together, prompt_ids
from tests.kit.replays import SIZES

pytestmark = [pytest.mark.server, pytest.mark.full]

CONFIGURATIONS = [
    Configuration("replayed"),
    Configuration("replayed-pp2", flags=("--pp-size", "2")),
    Configuration(
        "replayed-dp2", flags=("--tp-size", "2", "--ep-size", "2", "--dp-size", "2", "--enable-dp-attention"), grid=0
    ),
]


@pytest.fixture(scope="module", params=CONFIGURATIONS, ids=lambda configuration: configuration.name)
def replayed(
    request: pytest.FixtureRequest, tiny_cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    env = install_into(tmp_path_factory.mktemp("plugin") / "site", "tests.kit.replays")
    base: Configuration = request.param
    configuration = Configuration(base.name, flags=(*base.flags, "--decode-log-interval", "1"), grid=base.grid, env=env)
    server, folder = start(configuration, tiny_cache, tiny_cache / "logs")
    with server:
        yield Served(configuration, server, configuration.oracle(folder))
        server.check_alive()


def prompt(served: Served, length: int, seed: int) -> list[int]:
    return prompt_ids(length, seed=seed, vocab_size=served.oracle.vocab_size)


@pytest.mark.parametrize("together", [1, 3, 5, SIZES[-1] + 3])
def test_batches_of_any_size(replayed: Served, together: int) -> None:
    """A size that is captured, two that are padded to one, and one that is too large and runs as it comes."""
    prompts = [prompt(replayed, 20 + 17 * n, seed=100 * together + n) for n in range(together)]
    for answer in generate_together(replayed.server, prompts, 12, replayed.oracle.vocab_size):
        assert_parity(answer, replayed.oracle, replayed.configuration.tolerance)


def test_a_snapshot_of_a_padded_step_serves_the_next_turn(replayed: Served) -> None:
    """Three answers cross a track boundary together, in a batch padded to four."""
    prompts = [prompt(replayed, 240, seed=500 + n) for n in range(3)]
    answers = generate_together(replayed.server, prompts, 24, replayed.oracle.vocab_size)
    for first in answers:
        assert_parity(first, replayed.oracle, replayed.configuration.tolerance)
        longer = [*first.prompt, *first.tokens, 1, 2, 3]
        again = generate(replayed.server, longer, 4, replayed.oracle.vocab_size)
        assert_parity(again, replayed.oracle, replayed.configuration.tolerance)
        if replayed.configuration.grid == 64:
            assert again.cached_tokens == 256


def test_the_steps_were_replayed(replayed: Served) -> None:
    assert "cpu graph: True" in replayed.server.log_path.read_text()
