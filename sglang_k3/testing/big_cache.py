"""A checkpoint cache of any number of nodes, for what the policy costs: sessions below shared prefixes, no requests."""

from __future__ import annotations

import random
from typing import Final

import torch
from torch import Tensor

from sglang_k3.mem.checkpoint_policy import CheckpointPolicy
from sglang_k3.mem.checkpoints import CheckpointCache, Snapshot
from sglang_k3.mem.limits import CheckpointLimits
from sglang_k3.mem.radix_tree import RadixTree, TreeNode, as_tokens
from sglang_k3.mem.state_slots import SlotState, StateSlots

PREFIXES: Final = 20
TURNS: Final = 50  # nodes of a session, each with a state
NO_KV: Final = torch.empty(0, dtype=torch.int64)


class BigCache(CheckpointCache):
    """``num_nodes`` nodes with states, on a grid of one token.

    Args:
        policy: of which the calls are counted or timed.
        seed: of which session goes on when.
    """

    def __init__(self, policy: CheckpointPolicy, *, num_nodes: int, seed: int) -> None:
        limits = CheckpointLimits(state_chunk=1, page_size=1, track_interval=1, checkpoints_per_path=1 << 30)
        super().__init__(RadixTree(1, NO_KV), StateSlots(num_nodes + 64), self, policy=policy, limits=limits)
        rng = random.Random(seed)
        self._next_id = 0
        self._tips: list[list[int]] = []
        prefixes = [self._fresh(20) for _ in range(PREFIXES)]
        for prefix in prefixes:
            self._put(prefix)
        while self.num_states < num_nodes:
            if len(self._tips) * TURNS < num_nodes:
                self._tips.append([*rng.choice(prefixes)])
            self._go_on(rng)

    @property
    def nodes(self) -> list[TreeNode]:
        return [*self.tree.nodes()]

    def free(self, kv_locs: Tensor) -> None:
        """KV is not counted."""

    def step(self, rng: random.Random) -> None:
        """A session restores its deepest state, goes on, and something goes for that."""
        session = rng.choice(self._tips)
        source = next(
            (node for node in reversed(self.tree.walk(None, as_tokens(session)).nodes) if node.checkpoint), None
        )
        if source is not None:
            self.lock_state(source)
            self.touch(source)
            self.unlock_state(source)
        self._go_on(rng)
        self.evict()

    def _go_on(self, rng: random.Random) -> None:
        session = rng.choice(self._tips)
        session += self._fresh(rng.randint(1, 3))
        self._put(session)

    def _fresh(self, count: int) -> list[int]:
        self._next_id += count
        return [*range(self._next_id - count, self._next_id)]

    def _put(self, tokens: list[int]) -> None:
        slot_id = self.slots.try_alloc(self)
        assert slot_id is not None, f"{self.slots!r} is full"
        self.slots.written(slot_id, self, state=SlotState.SNAPSHOT, depth=len(tokens))
        snapshot = Snapshot(slot_id, len(tokens), is_fork=False)
        self.insert(None, as_tokens(tokens), NO_KV.new_zeros(len(tokens)), owned_from=0, snapshot=snapshot, owner=self)
