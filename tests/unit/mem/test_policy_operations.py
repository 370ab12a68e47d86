"""The policy does no more for a tree ten times as large: its work is counted in lines executed, not in seconds."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest

from sglang_k3.mem import eviction_order, replay_cost_policy, reuse_rates
from sglang_k3.mem.radix_tree import TreeNode, as_tokens
from sglang_k3.mem.replay_cost_policy import ReplayCostPolicy
from sglang_k3.testing.big_cache import BigCache
from sglang_k3.testing.cache_contest import K3_COST
from tests.unit.mem.test_replay_cost_policy import Cache

FILES = {module.__file__ for module in (eviction_order, replay_cost_policy, reuse_rates)}


def lines_of(work: Callable[[], object]) -> int:
    """Lines of the policy that ``work`` executes; a heap operation counts as one."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        return counted if frame.f_code.co_filename in FILES else None

    def counted(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        count += event == "line"
        return counted

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def test_lines_are_counted():
    rates = reuse_rates.ReuseRates(1)
    assert lines_of(lambda: rates.rate((0, 0))) == 1
    assert lines_of(lambda: random.random()) == 0


@pytest.fixture(scope="module")
def per_step() -> dict[int, float]:
    """Per restore, plant and eviction, at two sizes; a tenth of the tree goes by, so that rebuilt heaps are counted."""
    found = {}
    for num_nodes, steps in ((1_000, 400), (10_000, 1_000)):
        cache, rng = BigCache(ReplayCostPolicy(K3_COST), num_nodes=num_nodes, seed=0), random.Random(1)
        found[num_nodes] = lines_of(lambda cache=cache, rng=rng, steps=steps: [cache.step(rng) for _ in range(steps)])
        found[num_nodes] /= steps
    return found


def test_ten_times_the_nodes_are_little_more_work(per_step: dict[int, float]):
    """log(10,000) / log(1,000) is 1.33; what is linear would be 10."""
    assert per_step[10_000] < 1.7 * per_step[1_000], per_step


@pytest.mark.full
def test_at_a_hundred_thousand_nodes(per_step: dict[int, float]):
    cache, rng = BigCache(ReplayCostPolicy(K3_COST), num_nodes=100_000, seed=0), random.Random(1)
    assert lines_of(lambda: [cache.step(rng) for _ in range(1_000)]) / 1_000 < 1.7 * per_step[10_000]


def evictions(cache: Cache, count: int) -> float:
    return lines_of(lambda: [cache.evict_state() for _ in range(count)]) / count


def star(size: int) -> Cache:
    """A fork above that many states."""
    cache = Cache()
    cache.plant([1] * 50)
    for branch in range(size):
        cache.plant([1] * 50 + [100 + branch] * 2)
    return cache


def trunk(size: int) -> Cache:
    """That many states one above the other."""
    cache = Cache()
    tokens = as_tokens(range(size))
    for depth in range(1, size + 1):
        cache.plant(tokens[:depth])
    return cache


@pytest.mark.parametrize("shape", [star, trunk])
def test_emptying_a_tree_of_any_shape_takes_as_much_per_state(shape: Callable[[int], Cache]):
    small, large = evictions(shape(150), 150), evictions(shape(1500), 1500)
    assert large < 2.5 * small, (small, large)


def test_a_state_above_many_comes_and_goes_at_bounded_cost():
    """The worst that a request can do: plant and lose the state above everything, again and again."""

    def per_round(size: int) -> float:
        cache = Cache()
        for branch in range(size):
            cache.plant([1] * 5 + [100 + branch] * 2)
        top: TreeNode = cache.tree.walk(None, as_tokens([1] * 5)).nodes[-1]

        def play() -> None:
            for _ in range(20):
                cache.plant([1] * 5)
                cache._drop_state(top, "for the test")

        return lines_of(play) / 20

    assert per_round(2000) < 1.5 * per_round(200)
