"""The policy on hand-made trees where what should go is plain, and against a twin that looks at all nodes each time."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator, Sequence

import pytest

from sglang_k3.mem.checkpoint_policy import Victim
from sglang_k3.mem.checkpoints import CheckpointCache, Snapshot
from sglang_k3.mem.limits import CheckpointLimits
from sglang_k3.mem.radix_tree import RadixTree, TreeNode, as_tokens
from sglang_k3.mem.replay_cost import ReplayCost
from sglang_k3.mem.replay_cost_policy import ALL, NO_STATE, Mechanism, ReplayCostPolicy
from sglang_k3.mem.state_slots import SlotState, StateSlots
from tests.kit.mem_scheduler import NO_KV

# A state takes as many bytes as the KV of ten tokens; deep tokens cost more than shallow ones.
COST = ReplayCost(linear_flops=1000, pair_flops=1, state_bytes=100, kv_bytes=10)
FLAT = dataclasses.replace(COST, pair_flops=0)


class Freed:
    def free(self, kv_locs: object) -> None: ...


class Cache(CheckpointCache):
    """On a grid of one token, without devices and requests."""

    def __init__(self, *, mechanisms: Mechanism = ALL, cost: ReplayCost = COST) -> None:
        limits = CheckpointLimits(state_chunk=1, page_size=1, track_interval=1, checkpoints_per_path=1 << 20)
        self.policy = ReplayCostPolicy(cost, mechanisms=mechanisms)
        super().__init__(RadixTree(1, NO_KV), StateSlots(4096), Freed(), policy=self.policy, limits=limits)

    def plant(self, tokens: Sequence[int], *, has_state: bool = True) -> TreeNode:
        snapshot = None
        if has_state:
            slot_id = self.slots.try_alloc("test")
            assert slot_id is not None
            self.slots.written(slot_id, "test", state=SlotState.SNAPSHOT, depth=len(tokens))
            snapshot = Snapshot(slot_id, len(tokens), False)
        kv_locs = NO_KV.new_zeros(len(tokens))
        return self.insert(None, as_tokens(tokens), kv_locs, owned_from=0, snapshot=snapshot, owner="test")

    def use(self, node: TreeNode) -> None:
        self.lock_state(node)
        self.touch(node)
        self.unlock_state(node)


def trunk(cache: Cache, depths: Sequence[int]) -> list[TreeNode]:
    """States on one path that a request is using, all about equally old: 100 ticks."""
    nodes = [cache.plant(range(depth)) for depth in depths]
    cache.lock(nodes[-1])
    let_pass(cache, 80)
    return nodes


def let_pass(cache: Cache, ticks: int) -> None:
    cache.lock(cache.plant([999], has_state=False))
    for _ in range(ticks):
        cache.plant([999], has_state=False)


def test_a_trunk_is_thinned_evenly():
    """Each state that goes raises the cost of its neighbour below: with half of them gone, every other one is left."""
    cache = Cache(cost=FLAT)
    nodes = trunk(cache, range(100, 1700, 100))
    for _ in range(8):
        assert cache.evict_state()
    left = [node.depth for node in nodes if node.checkpoint]
    assert {below - above for above, below in itertools.pairwise([0, *left])} <= {100, 200}


def test_against_its_own_edge_alone_a_trunk_loses_its_top():
    """What it is without the mechanism: shallow tokens cost less, and so all shallow states go first."""
    cache = Cache(mechanisms=ALL & ~Mechanism.NEXT_SURVIVOR)
    nodes = trunk(cache, range(100, 1700, 100))
    for _ in range(8):
        assert cache.evict_state()
    assert min(node.depth for node in nodes if node.checkpoint) >= 800


def test_a_long_replay_is_worth_more_than_a_short_one():
    cache = Cache()
    short, long = cache.plant([1] * 10), cache.plant([2] * 500)
    assert cache.policy.state_victim() is short
    cache.use(short)  # used just now, it is still the cheaper one to lose
    assert cache.policy.state_victim() is short
    assert long.checkpoint


def test_without_the_cost_the_older_one_goes():
    cache = Cache(mechanisms=ALL & ~Mechanism.REPLAY_COST)
    long = cache.plant([2] * 500)
    for token in range(3, 40):
        cache.plant([token] * 10)
    assert cache.policy.state_victim() is long


def test_bytes_count():
    """Two states of like age and use: the leaf saves a little more, and frees five times the bytes with its KV."""
    verdicts = []
    for mechanisms in (ALL, ALL & ~Mechanism.PER_BYTE):
        cache = Cache(mechanisms=mechanisms)
        locked, leaf = cache.plant([1] * 40), cache.plant([3] * 41)
        cache.lock(locked)
        let_pass(cache, 80)
        verdicts.append(cache.policy.victim() == Victim(leaf, is_leaf=True))
        assert cache.policy.victim() in (Victim(leaf, is_leaf=True), Victim(locked, is_leaf=False))
    assert verdicts == [True, False]


def test_a_leaf_without_a_state_goes_before_all():
    cache = Cache()
    cache.plant([1] * 10)
    useless = cache.plant([1] * 10 + [2] * 90, has_state=False)
    assert cache.policy.victim() == Victim(useless, is_leaf=True)
    assert cache.policy.worth(Victim(useless, is_leaf=True)) == 0


def test_only_the_state_that_was_used_is_younger():
    cache = Cache()
    above, below, other = cache.plant([1] * 100), cache.plant([1] * 200), cache.plant([2] * 100)
    for token in range(3, 60):
        cache.plant([token])
    cache.use(below)
    cache.use(other)
    records = cache.policy._records
    assert records[above].used_at < records[below].used_at < records[other].used_at
    assert [node.checkpoint.uses for node in (above, below, other)] == [0, 1, 1]


@pytest.mark.parametrize("is_on", [True, False])
def test_a_fork_above_a_running_request_does_not_age(is_on: bool):
    """Two equal forks, the older one with a request below it."""
    cache = Cache(mechanisms=ALL if is_on else ALL & ~Mechanism.LIVE_FORKS)
    forks = []
    for token in (1, 2):
        forks.append(cache.plant([token] * 50))
        tips = [cache.plant([token] * 50 + [branch] * 400) for branch in (7, 8)]
        if token == 1:
            cache.lock(tips[0])
    for token in range(10, 60):
        cache.plant([token] * 3000)
    assert cache.policy.state_victim() is forks[1 if is_on else 0]


def test_what_is_never_used_again_is_learned_to_go():
    """A hundred ends of answers that nobody came back for, and a prefix that everybody used: a new end goes before it,
    though it is younger and costs more."""
    verdicts = []
    for mechanisms in (ALL, ALL & ~Mechanism.LEARNED_RATES):
        cache = Cache(mechanisms=mechanisms)
        prefix = cache.plant([1] * 60)
        for question in range(100):
            cache.use(prefix)
            cache.plant([1] * 60 + [1000 + question] * 30)
        for _ in range(8):  # meanwhile somebody else
            cache.plant([2, *range(50)], has_state=False)
        newest = cache.plant([1] * 60 + [5000] * 90)
        worth = cache.policy.worth
        verdicts.append(worth(Victim(newest, is_leaf=True)) < worth(Victim(prefix, is_leaf=False)))
    assert verdicts == [True, False]


def test_the_same_history_gives_the_same_evictions():
    def history() -> list[tuple[int, bool]]:
        cache, rng = Cache(), random.Random(5)
        return [(victim.node.node_id, victim.is_leaf) for victim in _walk(cache, rng, 1500)]

    assert history() == history()


def _walk(cache: Cache, rng: random.Random, steps: int) -> Iterator[Victim]:
    """Plants, uses, locks and evicts at random; yields what goes."""
    locked: list[TreeNode] = []
    for _ in range(steps):
        prefix = [rng.randrange(2) for _ in range(rng.randint(1, 6))] * rng.choice([1, 1, 3])
        event = rng.random()
        with_states = [node for node in cache.tree.nodes() if node.checkpoint]
        if event < 0.45:
            cache.plant(prefix, has_state=rng.random() < 0.8)
        elif event < 0.6 and with_states:
            cache.use(rng.choice(with_states))
        elif event < 0.7:
            locked.append(cache.plant(prefix, has_state=False))
            cache.lock(locked[-1])
        elif event < 0.8 and locked:
            cache.unlock(locked.pop(rng.randrange(len(locked))))
        else:
            victim = cache.policy.victim()
            if victim is not None:
                yield victim
                assert cache.evict()


def _worths_from_scratch(cache: Cache) -> dict[tuple[TreeNode, bool], float]:
    """Everything that may go, and what it is worth by the definition: rates and ages are the policy's, the rest is
    found by looking at the whole tree."""
    policy, found = cache.policy, {}
    for node in cache.tree.nodes():
        if node.checkpoint is None:
            if node.is_evictable_leaf:
                found[node, True] = 0.0
            continue
        above = [*node.path(), cache.tree.root][1:]
        state_above = next(one for one in above if one.checkpoint or one is cache.tree.root)
        shared_above = next(one for one in above if one.checkpoint or one is cache.tree.root or len(one.children) > 1)
        saved = COST.replay_flops(state_above.depth, node.depth)
        uses = min(node.checkpoint.uses, 2)
        group = (min(len(node.children), 2) * 3 + uses, policy._records[node].group[1])
        rate = policy._rates.rate(group)
        if not node.checkpoint.lock_ref:
            found[node, False] = rate * (saved / COST.state_bytes)
        if node.is_evictable_leaf:
            found[node, True] = rate * (saved / (COST.state_bytes + COST.kv_bytes * (node.depth - shared_above.depth)))
    return found


@pytest.mark.parametrize("seed", range(6))
def test_the_victim_is_the_least_of_all_computed_anew(seed: int):
    cache = Cache(mechanisms=ALL & ~Mechanism.LIVE_FORKS)
    count = 0
    for victim in _walk(cache, random.Random(seed), 1200):
        worths = _worths_from_scratch(cache)
        assert worths[victim.node, victim.is_leaf] == min(worths.values())
        if victim.node.checkpoint is None:  # of several that are worth nothing, the one that was used longest ago
            nothing = [node for (node, _), worth in worths.items() if node.checkpoint is None and worth == 0]
            assert victim.node.used_at == min(node.used_at for node in nothing)
        count += 1
    assert count > 100


@pytest.mark.parametrize("seed", range(3))
def test_the_records_follow_the_tree(seed: int):
    cache = Cache()
    for _ in _walk(cache, random.Random(seed), 1200):
        with_states = {node for node in cache.tree.nodes() if node.checkpoint}
        assert set(cache.policy._records) == with_states
        offered = {node for node in with_states if not node.checkpoint.lock_ref}
        assert {node for node in with_states if node in cache.policy._states} == offered
        leaves = {node for node in cache.tree.nodes() if node.is_evictable_leaf}
        assert {node for node in cache.tree.nodes() if node in cache.policy._leaves} == leaves
        assert NO_STATE not in {record.group for record in cache.policy._records.values()}


def test_of_a_path_the_cheapest_makes_way():
    cache = Cache()
    nodes = trunk(cache, [100, 110, 300])
    assert cache.policy.path_victim(nodes) is nodes[1]


def test_nothing_on_offer_is_no_victim():
    cache = Cache()
    node = cache.plant([1] * 5)
    cache.lock(node)
    cache.lock_state(node)
    assert (cache.policy.victim(), cache.policy.state_victim(), cache.policy.leaf_victim()) == (None, None, None)
    assert not cache.evict()
