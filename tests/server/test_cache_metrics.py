"""What the prefix cache says of itself is what the answers say: metrics and report against a count made from these.

One request at a time, so that the published rules (README, The prefix cache) tell what each of them leaves. What it
found is read from its answer; what of its prompt was cached as KV, and what goes to make room, from a list of the
sequences so far. Which state goes is the policy's business, and shows in the answers alone.
"""

from __future__ import annotations

import collections
import dataclasses
import re
import urllib.request
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

from sglang_k3 import cli
from sglang_k3.testing.server import ServerProcess
from tests.kit.configurations import Configuration, Served
from tests.kit.parity import prompt_ids

SLOTS, GRID, NEW_TOKENS = 8, 64, 4
CONFIGURATION = Configuration(
    "visible", flags=("--enable-metrics", "--max-mamba-cache-size", str(SLOTS), "--max-running-requests", "1")
)
pytestmark = [pytest.mark.server, pytest.mark.parametrize("served", [CONFIGURATION], ids=["visible"], indirect=True)]
Series = tuple[str, str]  # name, value of the label of its own


def metrics(server: ServerProcess) -> collections.Counter[Series]:
    with urllib.request.urlopen(f"{server.url}/metrics") as response:
        text = response.read().decode()
    found: collections.Counter[Series] = collections.Counter()
    for name, labels, value in re.findall(r"^sglang:k3_(\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        own = re.search(r'\b(?:kind|reason|owner)="([^"]*)"', labels)
        assert 'tp_rank="0"' in labels and 'model_name="' in labels
        found[name.removesuffix("_total"), own[1] if own else ""] += int(float(value))
    return found


def flush(server: ServerProcess) -> None:
    server.post_text("/flush_cache?timeout=30", {})


@dataclasses.dataclass
class Book:
    """The count: what is cached as KV, how many states there are, and what has happened."""

    server: ServerProcess
    counted: collections.Counter[Series] = dataclasses.field(default_factory=collections.Counter)
    sequences: list[list[int]] = dataclasses.field(default_factory=list)
    depths: set[tuple[int, ...]] = dataclasses.field(default_factory=set)  # prefixes that have had a state
    cached: int = 0

    def ask(self, prompt: list[int]) -> int:
        """Tokens that the answer took from the cache."""
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        answer = self.server.post_json("/generate", {"input_ids": prompt, "sampling_params": sampling})
        found, length = answer["meta_info"]["cached_tokens"], answer["meta_info"]["prompt_tokens"]
        assert length == len(prompt) and (found == 0 or tuple(prompt[:found]) in self.depths)
        kv, diverges = self._kv(prompt)
        self._count("prefix_starts", 1)
        self._count("state_hits", found > 0)
        self._count("state_hit_tokens", found)
        self._count("kv_hits_without_state", kv > found)
        self._count("kv_tokens_without_state", kv - found)
        self._count("replayed_tokens", kv - found)
        fork = floor(kv) if floor(kv) > found else None
        inside, at_end = fork or max(floor(length - 1), found), length % GRID == 0
        kept = [(inside, fork is not None and diverges)] * (inside > found) + [(length, False)] * at_end
        self._make_room(1 + len(kept))
        for depth, is_fork in kept:
            # A repeat of a prompt that ends on the grid brings the state of its end once more.
            if at_end and depth == length and self._repeats_whole(prompt):
                self._count("checkpoints_skipped", 1, "duplicate")
            else:
                self._count("checkpoints_planted", 1, "fork" if is_fork else "plain")
                self.cached += 1
                self.depths.add(tuple(prompt[:depth]))
        computed = [*prompt, *answer["output_ids"][:-1]]
        self.sequences.append(computed[: floor(len(computed))])
        return found

    def flush(self) -> None:
        flush(self.server)
        self._count("checkpoints_evicted", self.cached, "by a flush")
        self.cached = 0
        self.sequences.clear()

    def _kv(self, prompt: list[int]) -> tuple[int, bool]:
        """Tokens of it whose KV is cached, but for the last, and whether another sequence goes on there."""
        usable = prompt[:-1]
        depths = [common(sequence, usable) for sequence in self.sequences]
        kv = max(depths, default=0)
        return kv, any(len(s) > kv for s, depth in zip(self.sequences, depths, strict=True) if depth == kv)

    def _repeats_whole(self, prompt: list[int]) -> bool:
        return any(sequence[: len(prompt)] == prompt for sequence in self.sequences)

    def _make_room(self, needed: int) -> None:
        evicted = max(0, self.cached + needed - SLOTS)
        self._count("checkpoints_evicted", evicted, "for a slot")
        self.cached -= evicted

    def _count(self, name: str, number: int, label: str = "") -> None:
        self.counted[name, label] += int(number)


def floor(depth: int) -> int:
    return depth // GRID * GRID


def common(left: list[int], right: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


def assert_equal(book: Book, before: collections.Counter[Series]) -> None:
    """Every series there is, with those that nothing has happened to."""
    now = metrics(book.server)
    slots = {owner: now.pop(("state_slots", owner)) for owner in ("free", "working", "snapshot", "cached", "protected")}
    assert slots == {"free": SLOTS - book.cached, "working": 0, "snapshot": 0, "cached": book.cached, "protected": 0}
    changed = {series: value - before[series] for series, value in now.items() if value != before[series]}
    assert changed == +book.counted


@pytest.fixture
def book(served: Served) -> Book:
    flush(served.server)
    return Book(served.server)


def random_prompt(length: int, seed: int) -> list[int]:
    return prompt_ids(length, seed=seed, vocab_size=200)


def test_a_session_counted_twice(
    served: Served, book: Book, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    before = metrics(book.server)
    trunk = random_prompt(200, 1)
    left, right = (trunk[:100] + random_prompt(120, seed) for seed in (2, 3))
    whole = random_prompt(128, 4)
    script = [
        (trunk, 0), (trunk, 192),  # a miss, and its repeat
        (left, 0), (right, 64),  # a branch that replays and plants, and one that starts there
        (left, 64), (left, 192),  # its KV was there, and now its state
        (whole, 0), (whole, 64),  # that ends on the grid
    ]  # fmt: skip
    for prompt, cached in script:
        assert book.ask(prompt) == cached
        assert_equal(book, before)
    assert book.counted["checkpoints_planted", "fork"] == book.counted["checkpoints_skipped", "duplicate"] == 1
    for seed in range(10, 16):  # more than there are slots
        assert book.ask(random_prompt(100, seed)) == 0
    assert_equal(book, before)
    assert book.counted["checkpoints_evicted", "for a slot"] >= 4
    misses = sum(book.ask(prompt) < cached for prompt, cached in ((trunk, 192), (left, 192), (right, 192)))
    assert misses, "of so many states some must be gone"
    assert_equal(book, before)

    picture = tmp_path / "cache.svg"
    assert cli.main(["cache-report", book.server.url, "--svg", str(picture)]) == 0
    assert_report(capsys.readouterr().out, book, before)
    assert len([*ET.parse(picture).iter("{http://www.w3.org/2000/svg}circle")]) > book.cached

    book.flush()
    assert_equal(book, before)


def assert_report(text: str, book: Book, before: collections.Counter[Series]) -> None:
    """Since the start of the server, as the metrics are."""
    total = before + book.counted

    def of(name: str, label: str = "") -> str:
        return f"{total[name, label]:,}"

    tokens = len({tuple(s[: n + 1]) for s in book.sequences for n in range(len(s))})
    for line in (
        f"policy replay-cost: {book.cached} of {SLOTS} state slots and {tokens:,} tokens of KV are cached",
        f"began {of('prefix_starts')} requests, {of('state_hits')} of them from a state, which saved "
        f"{of('state_hit_tokens')} tokens",
        f"{of('kv_hits_without_state')} found KV behind their state: {of('kv_tokens_without_state')} tokens, "
        f"{of('replayed_tokens')} of them computed again",
        f"evicted {of('checkpoints_evicted', 'for a slot')} for a slot",
    ):
        assert line in text, (line, text)
    planted = total["checkpoints_planted", "fork"] + total["checkpoints_planted", "plain"]
    assert f"planted {planted} states, {of('checkpoints_planted', 'fork')} of them at forks" in text
    branches: list[Any] = re.findall(r"^ *[\d,]+ \.\. [\d,]+ tokens, (?:(\d+) state|no state)", text, re.MULTILINE)
    assert sum(int(states or 0) for states in branches) == book.cached
