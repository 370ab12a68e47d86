"""Give up first what costs the least to miss: FLOPs of bringing it back, times how soon it is used, per byte freed.

    worth = rate(class, age) x replay_flops(next surviving state above .. node) / bytes freed

* The cost of a state is what lies between it and the *next surviving* state above: it rises when that one goes, and
  falls when one is planted in between. A long trunk is thinned evenly, whatever the order in which it was filled.
* A leaf frees its state, and its KV up to the next state or branch above: that KV serves nothing else.
* A leaf without a state goes first: no request can start from its KV.
* Only the state that a request started from is used.
* A fork above a running request counts as just used.
* How soon: ``reuse_rates``, learned from the uses seen so far. With nothing learned it is 1 / age.

Logical time is the clock of the cache, a tick per insertion and use. Nothing else goes in but token counts, so that all
ranks decide alike. Ties: the node made first.

Costs: an offer or a withdrawal O(log n + WALK); a victim O(log n + groups + WALK), amortised; a walk up ends at the
next state, as deep as the locks of an admission. Below a node whose state comes or goes at most ``WALK`` nodes are
looked at: behind that, a worth is corrected when it is the least (it had risen) or at its node's next offer (it had
fallen).
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Sequence
from typing import Final, NamedTuple

from sglang_k3.mem.checkpoint_policy import CheckpointPolicy, Victim
from sglang_k3.mem.eviction_order import EvictionOrder, Worth
from sglang_k3.mem.radix_tree import Checkpoint, TreeNode
from sglang_k3.mem.replay_cost import ReplayCost
from sglang_k3.mem.reuse_rates import ReuseRates, bucket_end, bucket_of

WALK: Final = 64  # nodes
MANY: Final = 2  # branches below, or uses: more are not told apart
NUM_CLASSES: Final = (MANY + 1) ** 2

Group = tuple[int, int]  # class, age bucket
NO_STATE: Final[Group] = (-1, -1)


class Mechanism(enum.Flag):
    """What the policy consists of; the ablations of ``benchmarks/cache_traces.py`` leave one out."""

    REPLAY_COST = enum.auto()  # without: every state costs the same
    NEXT_SURVIVOR = enum.auto()  # without: the cost is that of the node's own edge
    PER_BYTE = enum.auto()  # without: bytes do not count
    LEARNED_RATES = enum.auto()  # without: 1 / age
    LIVE_FORKS = enum.auto()


ALL: Final = ~Mechanism(0)


@dataclasses.dataclass(eq=False)
class _Record:
    """What the policy knows of a node's state; the keys are what it is worth per use, alone and as a leaf."""

    used_at: int
    uses: int
    group: Group
    entered_at: int
    is_on_offer: bool = False
    state_key: float = 0.0
    leaf_key: float = 0.0


class Value(NamedTuple):
    """FLOPs saved by each use of a state; the bytes that go with its node as a leaf."""

    saved_flops: int
    leaf_bytes: int


class ReplayCostPolicy(CheckpointPolicy):
    """See the module.

    Args:
        cost: of the model on this rank.
        mechanisms: all, but in ablations.
    """

    def __init__(self, cost: ReplayCost, *, mechanisms: Mechanism = ALL) -> None:
        self._cost, self._mechanisms = cost, mechanisms
        self._rates = ReuseRates(NUM_CLASSES, learns=Mechanism.LEARNED_RATES in mechanisms)
        self._records: dict[TreeNode, _Record] = {}
        self._states: EvictionOrder[Group] = EvictionOrder()
        self._leaves: EvictionOrder[Group] = EvictionOrder()
        self._birthdays: dict[int, list[TreeNode]] = {}  # by the tick at which a state grows into the next bucket
        self._num_birthdays = 0
        self._now = 0

    def offer_state(self, node: TreeNode) -> None:
        record = self._look(node)
        if not record.is_on_offer:
            record.is_on_offer = True
            self._value_anew(node)

    def withdraw_state(self, node: TreeNode) -> None:
        if node.checkpoint is None:
            self._forget(node)
        else:
            self._look(node).is_on_offer = False
            self._states.withdraw(node)

    def offer_leaf(self, node: TreeNode) -> None:
        self._advance(node.used_at)
        self._leaves.offer(node, NO_STATE, node.used_at)
        if node.checkpoint is not None:
            self._look(node)
            self._value_anew(node)

    def withdraw_leaf(self, node: TreeNode) -> None:
        self._advance(node.used_at)
        self._leaves.withdraw(node)
        if node.checkpoint is not None:
            self._look(node)
        elif len(node.children) == 1:
            self._value_below(node)  # the KV of its edge went with several branches, and now with one

    def state_victim(self) -> TreeNode | None:
        found = self._first(self._states)
        return None if found is None else found.node

    def leaf_victim(self) -> TreeNode | None:
        found = self._first(self._leaves)
        return None if found is None else found.node

    def victim(self) -> Victim | None:
        state, leaf = self._first(self._states), self._first(self._leaves)
        if leaf is not None and (state is None or leaf[:2] <= state[:2]):
            return Victim(leaf.node, is_leaf=True)
        return None if state is None else Victim(state.node, is_leaf=False)

    def path_victim(self, path: Sequence[TreeNode]) -> TreeNode:
        return min(path, key=lambda node: (self._rate(self._look(node).group) * self._value(node)[0], node.node_id))

    def worth(self, victim: Victim) -> float:
        """FLOPs per tick and byte that are lost with it."""
        if victim.node.checkpoint is None:
            return 0.0
        value = self._value(victim.node)
        return self._rate(self._records[victim.node].group) * self._key(value, victim.is_leaf)

    def _look(self, node: TreeNode) -> _Record:
        """The record, brought up to date with what has happened to the node."""
        checkpoint = node.checkpoint
        assert checkpoint is not None, f"{node} has no state to order"
        self._advance(max(node.used_at, checkpoint.used_at))
        record = self._records.get(node)
        if record is None:
            return self._remember(node, checkpoint)
        if checkpoint.uses > record.uses:
            record.uses, record.used_at = checkpoint.uses, checkpoint.used_at
            self._regroup(node, record, is_used=True)
        elif _class_of(node, record.uses) != record.group[0]:
            self._regroup(node, record)
        return record

    def _remember(self, node: TreeNode, checkpoint: Checkpoint) -> _Record:
        record = _Record(checkpoint.used_at, checkpoint.uses, (0, 0), self._now)
        self._records[node] = record
        self._join(node, record)
        self._value_anew(node)
        self._value_below(node)
        return record

    def _forget(self, node: TreeNode) -> None:
        record = self._records.pop(node, None)
        if record is None:
            return
        self._states.withdraw(node)
        self._rates.leave(record.group, record.entered_at, self._now)
        if node in self._leaves:
            self._leaves.offer(node, NO_STATE, node.used_at)
        self._value_below(node)

    def _join(self, node: TreeNode, record: _Record) -> None:
        """Into the group of its class and age; and when it leaves that for being older."""
        self._enter(node, record, (_class_of(node, record.uses), bucket_of(self._now - record.used_at)))
        if self._num_birthdays > 4 * len(self._records) + 64:
            self._birthdays, self._num_birthdays = {}, 0
            for of, known in self._records.items():
                self._expect(of, known)

    def _enter(self, node: TreeNode, record: _Record, group: Group) -> None:
        record.group, record.entered_at = group, self._now
        self._rates.enter(group, self._now)
        self._expect(node, record)

    def _expect(self, node: TreeNode, record: _Record) -> None:
        self._birthdays.setdefault(record.used_at + bucket_end(record.group[1]), []).append(node)
        self._num_birthdays += 1

    def _regroup(self, node: TreeNode, record: _Record, *, is_used: bool = False) -> None:
        self._rates.leave(record.group, record.entered_at, self._now, is_used=is_used)
        self._join(node, record)
        self._place(node, record)

    def _advance(self, now: int) -> None:
        """Logical time has come to ``now``: whoever grew into another bucket on the way moves there."""
        while self._now < now:
            self._now += 1
            due = self._birthdays.pop(self._now, ())
            self._num_birthdays -= len(due)
            for node in due:
                record = self._records.get(node)
                if record is not None and record.used_at + bucket_end(record.group[1]) == self._now:
                    self._rates.leave(record.group, record.entered_at, self._now)
                    self._enter(node, record, (record.group[0], record.group[1] + 1))
                    self._place(node, record)
        self._rates.advance(self._now)

    def _place(self, node: TreeNode, record: _Record) -> None:
        """Where the node stands in the orders that it is in."""
        if record.is_on_offer:
            self._states.offer(node, record.group, record.state_key)
        if node in self._leaves:
            self._leaves.offer(node, record.group, record.leaf_key)

    def _value_anew(self, node: TreeNode) -> None:
        record = self._records[node]
        value = self._value(node)
        record.state_key, record.leaf_key = self._key(value, is_leaf=False), self._key(value, is_leaf=True)
        self._place(node, record)

    def _value_below(self, node: TreeNode) -> None:
        """The next states below: what is above them has changed."""
        stack, budget = [*itertools.islice(node.children.values(), WALK)], WALK
        while stack and budget:
            below = stack.pop()
            budget -= 1
            if below in self._records:
                self._value_anew(below)
            else:
                stack.extend(itertools.islice(below.children.values(), budget))

    def _first(self, order: EvictionOrder[Group]) -> Worth | None:
        """The node of least worth, once its key is known to be right and no running request is near it."""
        while (found := order.first(self._rate)) is not None:
            node = found.node
            record = self._records.get(node)
            if record is None:
                return found
            before, young = order.entry(node), (record.group[0], 0)
            self._value_anew(node)
            if self._is_live_fork(node) and self._rate(young) > self._rate(record.group):
                # In the order alone, until it grows older: what is learned about ages must not hear of it.
                order.offer(node, young, record.state_key)
            if order.entry(node) == before:
                return found
        return None

    def _is_live_fork(self, node: TreeNode) -> bool:
        return node.lock_ref > 0 and len(node.children) >= MANY and Mechanism.LIVE_FORKS in self._mechanisms

    def _rate(self, group: Group) -> float:
        return 0.0 if group == NO_STATE else self._rates.rate(group)

    def _value(self, node: TreeNode) -> Value:
        """Up to the next state above; on the way, to where KV begins that others use, too."""
        assert node.parent is not None
        above, kv_from = node.parent, None
        while above.parent is not None and above.checkpoint is None:
            if kv_from is None and len(above.children) > 1:
                kv_from = above.depth
            above = above.parent
        kv_from = above.depth if kv_from is None else kv_from
        leaf_bytes = self._cost.state_bytes + self._cost.kv_bytes * (node.depth - kv_from)
        if Mechanism.REPLAY_COST not in self._mechanisms:
            return Value(1, leaf_bytes)
        start = above.depth if Mechanism.NEXT_SURVIVOR in self._mechanisms else node.parent.depth
        return Value(self._cost.replay_flops(start, node.depth), leaf_bytes)

    def _key(self, value: Value, is_leaf: bool) -> float:
        if Mechanism.PER_BYTE not in self._mechanisms:
            return float(value.saved_flops)
        return value.saved_flops / (value.leaf_bytes if is_leaf else self._cost.state_bytes)


def _class_of(node: TreeNode, uses: int) -> int:
    return min(len(node.children), MANY) * (MANY + 1) + min(uses, MANY)
