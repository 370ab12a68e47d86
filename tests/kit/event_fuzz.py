"""Random events against the miniature scheduler, and the shortest sequence of them that still fails.

An event is a kind and a number; what the number means depends on what is there when its turn comes, so that a sequence
stays playable whatever is deleted from it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from tests.kit.mem_scheduler import Request, Scheduler

Event = tuple[str, int]

# Steps drive chunks and decoding; the rest happens between them, anywhere.
WEIGHTS = {
    "step": 60,
    "arrive": 14,
    "append": 4,
    "abort": 5,
    "retract": 3,
    "evict state": 4,
    "evict kv": 3,
    "close": 2,
    "flush": 1,
    "burst": 1,
}
SESSIONS = 3
MAX_WAITING = 6


def random_events(seed: int, count: int) -> list[Event]:
    rng = random.Random(seed)
    kinds = rng.choices([*WEIGHTS], [*WEIGHTS.values()], k=count)
    return [(kind, rng.randrange(1 << 30)) for kind in kinds]


class Player:
    """Plays events; after each, all laws are checked."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.finished = 0
        self._requests: list[Request] = []
        self._histories: dict[str, list[int]] = {}  # of sessions
        self._trunk = [random.Random(7).randrange(3) for _ in range(64)]

    def play(self, events: Sequence[Event]) -> None:
        for kind, number in events:
            getattr(self, "_" + kind.replace(" ", "_"))(random.Random(number))
            self.scheduler.check()
        self.scheduler.run()
        self._collect()
        self.scheduler.check()

    def _step(self, rng: random.Random) -> None:
        self.scheduler.step()
        self._collect()

    def _arrive(self, rng: random.Random) -> None:
        if len(self.scheduler.waiting) < MAX_WAITING:
            self._ask(self._prompt(rng), rng, namespace=rng.choice([None, None, None, "salt"]))

    def _burst(self, rng: random.Random) -> None:
        prompt = self._prompt(rng)
        for _ in range(rng.randint(2, 4)):
            self._ask(prompt, rng)

    def _append(self, rng: random.Random) -> None:
        session = f"session {rng.randrange(SESSIONS)}"
        if not any(request.session == session for request in self._requests):
            history = self._histories.get(session, [])
            if len(history) > 60:
                history = []
            self._ask(history + [rng.randrange(3) for _ in range(rng.randint(1, 9))], rng, session=session)

    def _close(self, rng: random.Random) -> None:
        session = f"session {rng.randrange(SESSIONS)}"
        self.scheduler.engine.close_session(session)
        self._histories.pop(session, None)

    def _abort(self, rng: random.Random) -> None:
        if there := [*self.scheduler.waiting, *self.scheduler.running]:
            self.scheduler.abort(rng.choice(there))
            self._collect()

    def _retract(self, rng: random.Random) -> None:
        if self.scheduler.running:
            self.scheduler.retract(rng.choice(self.scheduler.running))

    def _evict_state(self, rng: random.Random) -> None:
        self.scheduler.cache.evict_state()

    def _evict_kv(self, rng: random.Random) -> None:
        self.scheduler.engine.evict_kv(rng.randint(1, 20))

    def _flush(self, rng: random.Random) -> None:
        self.scheduler.engine.flush()

    def _ask(self, prompt: list[int], rng: random.Random, **options: str | None) -> None:
        self._requests.append(self.scheduler.arrive("fuzz", prompt, rng.choice([1, 2, 3, 9, 20]), **options))

    def _prompt(self, rng: random.Random) -> list[int]:
        shared = self._trunk[: rng.choice([0, 4, 8, 9, 16, 23, 32, 40])]
        return shared + [rng.randrange(3) for _ in range(rng.randint(1, 24))]

    def _collect(self) -> None:
        for request in [request for request in self._requests if request.is_over]:
            self._requests.remove(request)
            is_whole = len(request.answer) == request.num_tokens
            self.finished += is_whole
            if is_whole and request.session is not None:
                self._histories[request.session] = request.prompt + request.answer


def shortest_failing(events: Sequence[Event], fails: Callable[[Sequence[Event]], bool]) -> list[Event]:
    """``events`` with as many deleted as possible, in runs of ever fewer, until none can be spared."""
    shortest, run = [*events], len(events) // 2
    while run:
        before, start = len(shortest), 0
        while start < len(shortest):
            candidate = shortest[:start] + shortest[start + run :]
            if fails(candidate):
                shortest = candidate
            else:
                start += run
        if run > 1 or len(shortest) == before:
            run //= 2
    return shortest
