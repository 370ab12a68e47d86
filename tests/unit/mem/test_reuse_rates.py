"""How soon a state is used again is learned from uses and from waiting in vain."""

from __future__ import annotations

import random

import pytest

from sglang_k3.mem import reuse_rates
from sglang_k3.mem.reuse_rates import BUCKETS, ReuseRates, bucket_end, bucket_of


def test_buckets_double():
    assert [bucket_of(age) for age in range(8)] == [0, 1, 1, 2, 2, 2, 2, 3]
    assert all(bucket_of(bucket_end(k) - 1) == k and bucket_of(bucket_end(k)) == k + 1 for k in range(BUCKETS - 1))
    assert bucket_of(1 << 60) == BUCKETS - 1


def test_before_anything_is_seen_the_rate_falls_as_one_over_age():
    rates = ReuseRates(1)
    for bucket in range(BUCKETS - 1):
        assert rates.rate((0, bucket)) == pytest.approx(2 * rates.rate((0, bucket + 1)))


def test_the_rate_is_the_best_over_all_times_to_give_up():
    """Against the definition: every stop is tried."""
    rng = random.Random(0)
    for _ in range(200):
        hazards = [rng.choice([0.0, 1e-6, rng.random(), rng.random() / 100]) + 1e-9 for _ in range(12)]
        found = reuse_rates._best_rates(hazards)
        for start in range(len(hazards)):
            chance = time = best = 0.0
            alive = 1.0
            for bucket in range(start, len(hazards)):
                width = 1 << bucket
                survives = 1 / (1 + hazards[bucket] * width)
                chance += alive * (1 - survives)
                time += alive * width * survives
                alive *= survives
                best = max(best, chance / time)
            assert found[start] == pytest.approx(best), (hazards, start)


def stay(rates: ReuseRates, group: tuple[int, int], times: int, length: int, *, is_used: bool) -> None:
    for _ in range(times):
        rates.enter(group, 0)
        rates.leave(group, 0, length, is_used=is_used)


def test_a_class_that_is_used_is_worth_more_than_one_that_is_not():
    rates = ReuseRates(2)
    stay(rates, (0, 3), 100, 4, is_used=True)
    stay(rates, (1, 3), 100, 8, is_used=False)
    rates.advance(1000)
    assert rates.rate((0, 3)) == pytest.approx(1 / 4, rel=0.05)
    assert rates.rate((1, 3)) < rates.rate((0, 3)) / 10


def test_what_is_never_used_young_is_worth_keeping_for_later():
    """A user who types: no use before age 63, then always one."""
    rates = ReuseRates(1)
    for bucket in range(6):
        stay(rates, (0, bucket), 1000, 1 << bucket, is_used=False)
    stay(rates, (0, 6), 1000, 10, is_used=True)
    for bucket in range(7, BUCKETS):
        stay(rates, (0, bucket), 1000, 1 << bucket, is_used=False)
    rates.advance(10_000)
    assert [rates.rate((0, bucket)) for bucket in range(6)] == sorted(rates.rate((0, bucket)) for bucket in range(6))
    chance, time = 6.4 / 7.4, 63 + 64 / 7.4  # 64 ticks at 1/10 per tick
    assert rates.rate((0, 0)) == pytest.approx(chance / time, rel=0.01)
    assert rates.rate((0, 7)) < rates.rate((0, 0)) / 10


def test_those_that_wait_now_count_too():
    rates = ReuseRates(1)
    for _ in range(100):
        rates.enter((0, 4), 0)
    before = rates.rate((0, 4))
    rates.advance(1000)
    assert rates.rate((0, 4)) < before / 3  # what is left of it is hope for later buckets, of which nothing is known


def test_without_learning_nothing_moves():
    rates = ReuseRates(1, learns=False)
    before = rates.rate((0, 2))
    stay(rates, (0, 2), 1000, 4, is_used=False)
    rates.advance(10_000)
    assert rates.rate((0, 2)) == before
