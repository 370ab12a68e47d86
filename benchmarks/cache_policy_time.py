"""What the checkpoint policy itself takes, in a tree of 100,000 nodes, per step of the server."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from rows import Row, load

from sglang_k3.mem.checkpoint_policy import CheckpointPolicy, LRUPolicy
from sglang_k3.mem.radix_tree import TreeNode
from sglang_k3.mem.replay_cost_policy import ReplayCostPolicy
from sglang_k3.testing.big_cache import BigCache
from sglang_k3.testing.cache_contest import K3_COST

NUM_NODES = 100_000
EVENTS = 2_000
# 64 requests with answers of 256 tokens: a quarter of a request per decode step, three states each.
EVENTS_PER_STEP = 0.75
# A decode step of 64 requests on one of eight GPUs: no rank does less than an eighth of the unit slice at full width,
# which is 4 of 93 layers.
SLICE = "decode/tp1/bs64/ctx1024/distinct"


class Stopwatch:
    """A policy whose calls are timed, in CPU time of the thread: the machine may be doing other things."""

    def __init__(self, policy: CheckpointPolicy) -> None:
        self._policy, self.seconds = policy, 0.0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._policy, name)

        def timed(*args: object) -> Any:
            start = time.thread_time()
            try:
                return call(*args)
            finally:
                self.seconds += time.thread_time() - start

        return timed


def decode_step_ms() -> float:
    slice_ms = next(float(str(row["value"])) for row in load("unit_slice") if row["case"] == SLICE)
    return slice_ms * 93 / 4 / 8


def policy_time(command: str) -> list[Row]:
    """An event restores one state, plants one, and gives up what that takes."""
    rows = []
    for name, policy in (("ours", ReplayCostPolicy(K3_COST)), ("lru", LRUPolicy())):
        watch = Stopwatch(policy)
        cache = BigCache(watch, num_nodes=NUM_NODES, seed=0)
        nodes: list[TreeNode] = cache.nodes
        rng = random.Random(1)
        watch.seconds = 0.0
        for _ in range(EVENTS):
            cache.step(rng)
        per_step_ms = watch.seconds / EVENTS * EVENTS_PER_STEP * 1e3
        case = f"policy time at {len(nodes):,} nodes/{name}"
        limit = round(decode_step_ms() / 100, 4)
        rows.append(
            Row(
                case=case, metric="ms_per_step", value=round(per_step_ms, 4), unit="ms", baseline=limit, command=command
            )
        )
    return rows
