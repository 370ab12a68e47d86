"""The trace suite T1 to T8: synthetic, seeded requests with the published statistics (spec/algorithms.md 9 and 10).

Lengths are in *units* of ``UNIT`` tokens, and a unit is one id: a trace of a hundred million tokens fits and plays in
seconds. Grid, chunk and interval of the simulated server are scaled alike (``cache_simulator``); what is lost is where
within a unit a length ends.

A session is a closed loop: each turn's prompt is what was said so far and something new, and arrives some thinking time
after the last answer. Times are nominal: they do not depend on what is cached, so that all policies meet one sequence.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from array import array
from collections.abc import Callable, Sequence
from typing import Final

UNIT: Final = 16  # tokens
CHUNK_TOKENS: Final = 2048  # of a prefill
CHUNK_S: Final = 0.25  # that one takes
DECODE_TOKENS_PER_S: Final = 40.0
TYPING_WORDS_PER_S: Final = 1.5  # 90 words per minute
WORDS_PER_TOKEN: Final = 0.75

Ids = Sequence[int]


@dataclasses.dataclass(frozen=True)
class Turn:
    """One request.

    Attributes:
        prompt: all of it, one id per unit.
        answer: likewise.
        think_s: between the end of the turn before and this one's arrival.
        aborts_after_s: the client leaves that long after the start, if at all.
        is_retracted: the server puts it back into the queue half-way through its answer.
    """

    prompt: array[int]
    answer: array[int]
    think_s: float = 0.0
    aborts_after_s: float | None = None
    is_retracted: bool = False

    @property
    def prefill_s(self) -> float:
        return math.ceil(len(self.prompt) * UNIT / CHUNK_TOKENS) * CHUNK_S

    @property
    def duration_s(self) -> float:
        """Cold, whatever is cached."""
        return self.prefill_s + len(self.answer) * UNIT / DECODE_TOKENS_PER_S


@dataclasses.dataclass(frozen=True)
class Session:
    """Turns, one after another; the first arrives at ``start_s``."""

    start_s: float
    turns: tuple[Turn, ...]


@dataclasses.dataclass(frozen=True)
class Trace:
    """``name`` says what it is; sessions by their start."""

    name: str
    sessions: tuple[Session, ...]

    def turns_in_order(self) -> list[Turn]:
        """By nominal time of arrival."""
        arrivals = []
        for number, session in enumerate(self.sessions):
            now = session.start_s
            for index, turn in enumerate(session.turns):
                now += turn.think_s if index else 0.0
                arrivals.append((now, number, index, turn))
                now += turn.duration_s
        return [turn for *_, turn in sorted(arrivals, key=lambda arrival: arrival[:3])]


class _Ids:
    """Fresh ids: no two units are equal unless they were copied."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._next = itertools.count(1)

    def units(self, tokens: float) -> array[int]:
        """At least one; a remainder becomes a unit with that probability, so that means are kept."""
        count = int(tokens / UNIT + self.rng.random())
        return array("q", itertools.islice(self._next, max(1, count)))

    def lognormal(self, median: float, sigma: float, *, most: float) -> float:
        return min(most, self.rng.lognormvariate(math.log(median), sigma))

    def starts(self, count: int, per_s: float) -> list[float]:
        """Times of a Poisson process."""
        return [*itertools.accumulate(self.rng.expovariate(per_s) for _ in range(count))]


def _chat(seed: int = 1, *, sessions: int = 140, per_s: float = 0.5, most_tokens: int = 32_000) -> Trace:
    """T1: chats of at least ten turns and at most 32k tokens; user median 30 tokens, answer median 220; typed."""
    ids = _Ids(seed)
    made = []
    for start in ids.starts(sessions, per_s):
        said = array("q")
        turns: list[Turn] = []
        for _ in range(10 + int(ids.rng.expovariate(1 / 4))):
            asked = ids.lognormal(30, 0.8, most=2000)
            answer = ids.units(ids.lognormal(220, 0.6, most=2000))
            said = said + ids.units(asked)
            if (len(said) + len(answer)) * UNIT > most_tokens:
                break
            turns.append(Turn(said, answer, asked * WORDS_PER_TOKEN / TYPING_WORDS_PER_S))
            said = said + answer
        made.append(Session(start, tuple(turns)))
    return Trace("T1", tuple(made))


def _agent(seed: int = 2, *, sessions: int = 20, per_s: float = 0.05) -> Trace:
    """T2: agents of one system prompt and tool list; 30 to 100 turns of 0.1k to 5k tokens of tool output, up to 200k
    tokens; 3 % of the turns rewrite what is behind the system prompt (compaction), 5 % go back to an earlier turn."""
    ids = _Ids(seed)
    systems = [ids.units(ids.rng.uniform(5_000, 20_000)) for _ in range(2)]
    made = []
    for start in ids.starts(sessions, per_s):
        system = systems[ids.rng.random() < 0.25]
        said = system + ids.units(ids.rng.uniform(100, 1_000))
        turns: list[Turn] = []
        ends = [len(said)]
        for _ in range(ids.rng.randint(30, 100)):
            fate = ids.rng.random()
            if fate < 0.03:
                said, ends = system + ids.units(ids.rng.uniform(1_000, 4_000)), [len(system)]
            elif fate < 0.08:
                end = ids.rng.choice(ends)
                said, ends = said[:end], [known for known in ends if known <= end]
            said = said + ids.units(ids.lognormal(600, 1.0, most=5_000) if len(turns) else 100)
            answer = ids.units(ids.lognormal(220, 0.5, most=2_000))
            if (len(said) + len(answer)) * UNIT > 200_000:
                break
            turns.append(Turn(said, answer, ids.rng.expovariate(1 / 4.0)))
            said = said + answer
            ends.append(len(said))
        made.append(Session(start, tuple(turns)))
    return Trace("T2", tuple(made))


def _single_turns(name: str, ids: _Ids, prompts: Sequence[array[int]], answers: Sequence[float], per_s: float) -> Trace:
    starts = ids.starts(len(prompts), per_s)
    made = zip(starts, prompts, answers, strict=True)
    return Trace(name, tuple(Session(at, (Turn(prompt, ids.units(answer)),)) for at, prompt, answer in made))


def _jittered_prefix(seed: int = 3, *, count: int = 600) -> Trace:
    """T3: single turns of about 6,000 tokens; 4,900 to 5,200 are common to all, another number each time."""
    ids = _Ids(seed)
    common = ids.units(5_200)
    prompts = [
        common[: round(ids.rng.uniform(4_900, 5_200) / UNIT)] + ids.units(ids.rng.uniform(600, 1_300))
        for _ in range(count)
    ]
    return _single_turns("T3", ids, prompts, [ids.lognormal(200, 0.7, most=2_000) for _ in prompts], 2.0)


def _trunks(seed: int = 4, *, trunks: int = 8, branches: int = 30) -> Trace:
    """T4: trunks of 40k tokens, each followed by 30 branches that leave it at random depths; four trunks at a time."""
    ids = _Ids(seed)
    waves = []
    for _ in range(trunks // 4):
        wave = []
        trunk_of = [ids.units(40_000) for _ in range(4)]
        for trunk in trunk_of:
            for _ in range(branches):
                depth = ids.rng.randrange(1, len(trunk))
                wave.append(trunk[:depth] + ids.units(ids.rng.uniform(200, 2_000)))
        ids.rng.shuffle(wave)
        waves += trunk_of + wave
    return _single_turns("T4", ids, waves, [200.0] * len(waves), 0.5)


def _groups(seed: int = 5, *, groups: int = 50, per_group: int = 10) -> Trace:
    """T5: ``generated-shared-prefix``: 50 groups of 10 prompts, 10,240 tokens shared by each, a question of 256."""
    ids = _Ids(seed)
    prompts = [
        system + ids.units(256) for system in (ids.units(10_240) for _ in range(groups)) for _ in range(per_group)
    ]
    ids.rng.shuffle(prompts)
    return _single_turns("T5", ids, prompts, [128.0] * len(prompts), 2.0)


def _random(seed: int = 6, *, count: int = 300) -> Trace:
    """T6: 8k of prompt, 1k of answer, nothing shared."""
    ids = _Ids(seed)
    return _single_turns("T6", ids, [ids.units(8_192) for _ in range(count)], [1_024.0] * count, 0.2)


def _bursts(seed: int = 7, *, bursts: int = 60) -> Trace:
    """T7: bursts of 2 to 8 identical prompts at one moment; a quarter of them come again, up to 20 bursts later."""
    ids = _Ids(seed)
    made: list[Session] = []
    past: list[array[int]] = []
    for start in ids.starts(bursts, 0.2):
        if past and ids.rng.random() < 0.25:
            prompt = ids.rng.choice(past[-20:])
        else:
            prompt = ids.units(ids.lognormal(4_000, 0.6, most=16_000))
            past.append(prompt)
        for _ in range(ids.rng.randint(2, 8)):
            made.append(Session(start, (Turn(prompt, ids.units(ids.lognormal(200, 0.6, most=1_000))),)))
    return Trace("T7", tuple(made))


def _mixture(seed: int = 8) -> Trace:
    """T8: T1, T2, T3, T5 and T6 in smaller measure over one time; 5 % of the requests abort, 5 % are retracted."""
    parts = (
        _chat(seed + 10, sessions=50, per_s=0.25),
        _agent(seed + 20, sessions=5, per_s=0.025),
        _jittered_prefix(seed + 30, count=80),
        _groups(seed + 50, groups=12, per_group=8),
        _random(seed + 60, count=30),
    )
    rng = random.Random(seed)
    made = []
    for number, part in enumerate(parts):
        ids = _shifted(number)
        stretch = 400.0 / part.sessions[-1].start_s
        for session in part.sessions:
            turns = tuple(_disturbed(dataclasses.replace(turn, prompt=ids(turn.prompt), answer=ids(turn.answer)), rng)
                          for turn in session.turns)  # fmt: skip
            made.append(Session(session.start_s * stretch, turns))
    return Trace("T8", tuple(sorted(made, key=lambda session: session.start_s)))


def _shifted(number: int) -> Callable[[array[int]], array[int]]:
    """Ids of one part that no other part has."""
    base = number << 40
    return lambda ids: array("q", (base + one for one in ids))


def _disturbed(turn: Turn, rng: random.Random) -> Turn:
    fate = rng.random()
    if fate < 0.05:
        return dataclasses.replace(turn, aborts_after_s=rng.random() * turn.duration_s)
    return dataclasses.replace(turn, is_retracted=fate < 0.10)


TRACES: Final[dict[str, Callable[[], Trace]]] = {
    "T1": _chat,
    "T2": _agent,
    "T3": _jittered_prefix,
    "T4": _trunks,
    "T5": _groups,
    "T6": _random,
    "T7": _bursts,
    "T8": _mixture,
}
