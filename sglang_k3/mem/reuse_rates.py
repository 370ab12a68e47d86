"""How soon a state is likely to be used again, learned from the states that were and those that were not.

States are told apart by *class* (how many branches lie below, how often they were used) and *age* (logical time since
the last use), in buckets that double: 1, 2, 4, ... ticks. Each pair keeps how many uses it has seen and how long states
have stayed in it, evicted ones up to their end, so that what is evicted early teaches nothing wrong.

The *rate* of a pair is the best that holding on to such a state can bring, over all times at which one might give it
up:

    rate(k) = max over j >= k of  P(used in buckets k..j) / E(time held in them)

(the Gittins index of keeping it: a state that is never used young, as in a chat whose user is typing, is worth keeping
for what comes). Before anything is seen each bucket has the same chance of a use, and the rate falls as 1 / age: LRU.
"""

from __future__ import annotations

import dataclasses
from typing import Final

BUCKETS: Final = 32  # 2**32 ticks are for ever
PRIOR_CHANCE: Final = 0.5  # of a use per bucket, before anything is seen
PRIOR_WEIGHT: Final = 1.0  # how many stays in a bucket that is worth
REFRESH: Final = 64  # ticks between two looks at what was learned


def bucket_of(age: int) -> int:
    """Ages 0; 1..2; 3..6; ...: bucket ``k`` is ``2**k`` ticks wide."""
    return min((age + 1).bit_length(), BUCKETS) - 1


def bucket_end(bucket: int) -> int:
    """The first age behind a bucket."""
    return (2 << bucket) - 1


@dataclasses.dataclass
class _Seen:
    uses: int = 0
    closed_time: int = 0  # of stays that ended
    num_inside: int = 0
    entry_times: int = 0  # their sum

    def time(self, now: int) -> int:
        return self.closed_time + self.num_inside * now - self.entry_times


class ReuseRates:
    """What was seen, and the rates that follow.

    Args:
        num_classes: classes are numbered from 0.
        learns: without it, the rates stay what they are before anything is seen.
    """

    def __init__(self, num_classes: int, *, learns: bool = True) -> None:
        self._seen = [[_Seen() for _ in range(BUCKETS)] for _ in range(num_classes)]
        self._learns = learns
        self._rates: list[list[float]] = [[] for _ in range(num_classes)]
        self._refreshed_at = 0
        self._refresh(0)

    def enter(self, group: tuple[int, int], now: int) -> None:
        """A state has come into ``(class, bucket)``."""
        seen = self._seen[group[0]][group[1]]
        seen.num_inside += 1
        seen.entry_times += now

    def leave(self, group: tuple[int, int], entered_at: int, now: int, *, is_used: bool = False) -> None:
        """It has left: used, older, of another class, or gone."""
        seen = self._seen[group[0]][group[1]]
        seen.num_inside -= 1
        seen.entry_times -= entered_at
        seen.closed_time += now - entered_at
        seen.uses += is_used

    def rate(self, group: tuple[int, int]) -> float:
        """Uses per tick, at best."""
        return self._rates[group[0]][group[1]]

    def advance(self, now: int) -> None:
        """Look at what was learned, every ``REFRESH`` ticks. O(classes x buckets) then, O(1) otherwise."""
        if self._learns and now - self._refreshed_at >= REFRESH:
            self._refreshed_at = now
            self._refresh(now)

    def _refresh(self, now: int) -> None:
        for rates, seen in zip(self._rates, self._seen, strict=True):
            rates[:] = _best_rates([self._hazard(bucket, known, now) for bucket, known in enumerate(seen)])

    def _hazard(self, bucket: int, seen: _Seen, now: int) -> float:
        width = 1 << bucket
        return (seen.uses + PRIOR_WEIGHT * PRIOR_CHANCE) / (seen.time(now) + PRIOR_WEIGHT * width)


def _best_rates(hazards: list[float]) -> list[float]:
    """Per bucket, from the uses per tick in each. O(buckets): the best stop of a bucket is decided from behind.

    The rate of ``k..j`` is an average of hazards; the best one either stops after ``k`` or goes on as ``k + 1`` would
    at its best, so blocks of buckets are merged from the end while that raises the average.
    """
    rates = [0.0] * len(hazards)
    blocks: list[tuple[float, float, float]] = []  # (chance of a use, expected time, chance to survive), next one last
    for bucket in range(len(hazards) - 1, -1, -1):
        width, hazard = 1 << bucket, hazards[bucket]
        survival = 1 / (1 + hazard * width)
        chance, time = 1 - survival, width * survival  # chance / time == hazard
        while blocks and blocks[-1][0] * time > chance * blocks[-1][1]:
            next_chance, next_time, next_survival = blocks.pop()
            chance, time = chance + survival * next_chance, time + survival * next_time
            survival *= next_survival
        blocks.append((chance, time, survival))
        rates[bucket] = chance / time
    return rates
