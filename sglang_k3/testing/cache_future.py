"""What a trace will ask for, which the oracle knows.

A prefix is named by a chain of hashes, one per grid point. For each request, in nominal order of arrival, this finds
the deepest state that anybody could have kept for it: at a grid point of an earlier prompt, or at a track interval of
an earlier answer. Everything here is exact and knows no policy.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
from array import array

from sglang_k3.testing.cache_simulator import GRID, INTERVAL
from sglang_k3.testing.cache_traces import Trace

NEVER = 1 << 60


def chain(tokens: array[int], before: int = 0) -> list[int]:
    """A hash per whole grid step: of everything up to its end. ``before``: that of what precedes ``tokens``."""
    hashes = []
    for start in range(0, len(tokens) - GRID + 1, GRID):
        before = hash((before, tokens[start : start + GRID].tobytes()))
        hashes.append(before)
    return hashes


@dataclasses.dataclass(frozen=True)
class Want:
    """Of one request: its prompt's chain, how many grid steps of it were computed before, the state it could use."""

    made: list[int]
    num_shared: int
    num_restorable: int


class Future:
    """All requests of a trace. ``restores`` gives per prefix the numbers of the requests that it is the best for."""

    def __init__(self, trace: Trace) -> None:
        self.turns = trace.turns_in_order()
        self.wants: list[Want] = []
        self.restores: dict[int, list[int]] = collections.defaultdict(list)
        self.now = -1
        computed: set[int] = set()
        restorable: set[int] = set()
        for number, turn in enumerate(self.turns):
            made = chain(turn.prompt + turn.answer)
            usable = (len(turn.prompt) - 1) // GRID
            num_shared = _deepest(made[:usable], computed)
            num_restorable = next((k for k in range(num_shared, 0, -1) if made[k - 1] in restorable), 0)
            self.wants.append(Want(made, num_shared, num_restorable))
            if num_restorable:
                self.restores[made[num_restorable - 1]].append(number)
            in_prompt = len(turn.prompt) // GRID
            if turn.aborts_after_s is not None:  # what it had not donated by then is lost
                made = made[: in_prompt if turn.aborts_after_s > turn.prefill_s else 0]
            computed.update(made)
            step = INTERVAL // GRID
            restorable.update(made[:in_prompt])
            restorable.update(made[k - 1] for k in range(step, len(made) + 1, step) if k > in_prompt)

    def arrived(self, number: int) -> None:
        """Only what comes behind request ``number`` is the future."""
        self.now = number

    def next_restore(self, prefix: int) -> int:
        """The next request, behind the last that arrived, that wants the state of this prefix; ``NEVER`` if none."""
        numbers = self.restores.get(prefix, [])
        index = bisect.bisect_right(numbers, self.now)
        return numbers[index] if index < len(numbers) else NEVER

    @property
    def best_hit_rate(self) -> float:
        """With room for everything."""
        return GRID * sum(want.num_restorable for want in self.wants) / sum(len(turn.prompt) for turn in self.turns)


def _deepest(made: list[int], known: set[int]) -> int:
    """How many of a chain are known; what is known of a prefix is known of all that is shorter."""
    low, high = 0, len(made)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if made[middle - 1] in known else (low, middle - 1)
    return low
