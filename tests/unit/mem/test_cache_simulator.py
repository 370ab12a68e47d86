"""The simulator plays the engine that serves, and the rivals do what was published: on cases whose answer is known."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import pytest

from sglang_k3.config import K3Config
from sglang_k3.mem.checkpoint_policy import CheckpointPolicy, LRUPolicy, Victim
from sglang_k3.mem.ledger import check_slots
from sglang_k3.mem.radix_tree import Checkpoint, TreeNode, as_tokens
from sglang_k3.mem.replay_cost import ReplayCost
from sglang_k3.mem.replay_cost_policy import Mechanism
from sglang_k3.mem.state_slots import SlotId
from sglang_k3.testing import cache_traces
from sglang_k3.testing.cache_contest import ABLATIONS, K3_COST, NAMES, OURS, RIVALS, Cell, _marconi, working_set
from sglang_k3.testing.cache_future import NEVER, Future
from sglang_k3.testing.cache_rivals import GarbageFirstLRU, MarconiPolicy, OraclePolicy
from sglang_k3.testing.cache_simulator import Contender, Simulator, smallest_pool
from sglang_k3.testing.cache_traces import UNIT, Session, Trace, Turn
from tests.kit.mem_scheduler import NO_KV

ROOM = 1 << 40
SGLANG = next(one for one in RIVALS if one.name == "sglang")
EVERY_CHUNK = next(one for one in RIVALS if one.name == "every_chunk_lru")


def ids(tokens: int, first: int = 0) -> array[int]:
    return array("q", range(first, first + tokens // UNIT))


def one_by_one(*turns: Turn) -> Trace:
    return Trace("hand-made", tuple(Session(1000.0 * number, (turn,)) for number, turn in enumerate(turns)))


def play(contender: Contender, trace: Trace, pool_bytes: int = ROOM) -> Simulator:
    simulator = Simulator(contender, trace, pool_bytes, K3_COST)
    simulator.run()
    check_slots(simulator.engine)
    return simulator


def state_depths(simulator: Simulator) -> list[int]:
    return sorted(node.depth * UNIT for node in simulator.cache.tree.nodes() if node.checkpoint)


# A prompt of 5,008 tokens, then one that leaves it after 3,008, which is on the grid.
FIRST = Turn(ids(5008), ids(320, 10_000))
SECOND = Turn(ids(3008) + ids(2000, 20_000), ids(320, 30_000))


@pytest.mark.parametrize(
    ("contender", "first", "both"),
    [
        # Chunk ends, the end of the prompt, and the last interval of 256 of the answer.
        (EVERY_CHUNK, [2048, 4096, 4992, 5120], [2048, 4096, 4096, 4992, 4992, 5120, 5120]),
        # The second one starts at 2,048, and plants the fork instead of the end of its first chunk.
        (SGLANG, [2048, 4096, 4992, 5120], [2048, 3008, 4096, 4992, 4992, 5120, 5120]),
        # A leaf; then nothing to start from, a fork, and another leaf.
        (_marconi(0.0), [5120], [3008, 5120, 5120]),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_what_is_planted(contender: Contender, first: list[int], both: list[int]):
    assert state_depths(play(contender, one_by_one(FIRST))) == first
    assert state_depths(play(contender, one_by_one(FIRST, SECOND))) == both


def test_the_third_to_branch_hits_at_the_fork_that_the_second_planted():
    third = Turn(ids(3008) + ids(2000, 40_000), ids(64, 50_000))
    trace = one_by_one(FIRST, SECOND, third)
    contenders = (EVERY_CHUNK, SGLANG, _marconi(0.0), OURS)
    hits = {one.name: play(one, trace).outcome.hit_units * UNIT for one in contenders}
    assert hits == {
        "every_chunk_lru": 2048 + 2048,
        "sglang": 2048 + 3008,
        "marconi": 0 + 3008,
        "ours": 2048 + 3008,
    }


def test_a_hit_touches_the_path_for_sglang_alone():
    again = Turn(FIRST.prompt, ids(16, 60_000))
    for contender, expected in ((SGLANG, {True}), (EVERY_CHUNK, {False})):
        simulator = play(contender, one_by_one(FIRST, Turn(ids(64, 70_000), ids(16, 80_000)), again))
        nodes, _ = simulator.cache.tree.walk(None, FIRST.prompt)
        used = nodes[-1].used_at
        above = [node.checkpoint.used_at for node in nodes[:2] if node.checkpoint]
        other = min(node.used_at for node in simulator.cache.tree.nodes() if node.tokens[0] >= 70_000)
        assert len(above) == 2 and {used_at > other for used_at in above} == expected, (used, above)


def leaf(node_id: int, depth: int, used_at: int, parent: TreeNode) -> TreeNode:
    tokens = as_tokens(range(depth - parent.depth))
    node = TreeNode(node_id, None, tokens, NO_KV, depth, parent, checkpoint=Checkpoint(SlotId(node_id), False))
    node.used_at = node.checkpoint.used_at = used_at
    parent.children[node_id] = node
    return node


def offered(policy: CheckpointPolicy, nodes: Sequence[TreeNode]) -> CheckpointPolicy:
    for node in nodes:
        policy.offer_state(node)
        if node.is_evictable_leaf:
            policy.offer_leaf(node)
    return policy


@pytest.fixture
def three_leaves() -> list[TreeNode]:
    """An old deep one, a middle one, a young shallow one; the FLOPs per byte rise with the depth."""
    root = TreeNode(0, None, as_tokens(()), NO_KV, 0, None)
    return [leaf(1, 5000, 10, root), leaf(2, 900, 50, root), leaf(3, 100, 90, root)]


def test_marconi_weighs_recency_against_flops_per_byte(three_leaves: list[TreeNode]):
    """now = 90, ages 81, 41, 1, so recency is 0, 0.012, 1 when normalised; FLOPs per byte 1, 0.43, 0."""
    victims = []
    for alpha in (0.0, 0.01, 0.02, 0.5, 3.0):
        found = offered(MarconiPolicy(K3_COST, alpha=alpha), three_leaves).victim()
        utilities = _utilities(three_leaves, alpha)
        assert found == Victim(three_leaves[utilities.index(min(utilities))], is_leaf=True)
        victims.append(found.node.node_id)
    assert (victims[0], victims[-1]) == (1, 3), "alpha moves it from the oldest to the least efficient"


def _utilities(nodes: list[TreeNode], alpha: float) -> list[float]:
    """The published formula, written out."""
    recency = [1 / (90 + 1 - node.used_at) for node in nodes]
    efficiency = [
        K3_COST.replay_flops(0, node.depth) / (K3_COST.state_bytes + K3_COST.kv_bytes * node.depth) for node in nodes
    ]

    def normalised(values: list[float]) -> list[float]:
        return [(value - min(values)) / (max(values) - min(values)) for value in values]

    return [r + alpha * e for r, e in zip(normalised(recency), normalised(efficiency), strict=True)]


def test_marconi_spares_forks_until_nothing_else_is_left():
    root = TreeNode(0, None, as_tokens(()), NO_KV, 0, None)
    fork = leaf(1, 100, 1, root)
    branches = [leaf(2, 200, 5, fork), leaf(3, 300, 6, fork)]
    policy = offered(MarconiPolicy(K3_COST), [fork, *branches])
    assert policy.victim().node in branches
    for branch in branches:
        branch.lock_ref = 1
        policy.withdraw_state(branch)
        policy.withdraw_leaf(branch)
    assert policy.victim() == Victim(fork, is_leaf=False)


def test_lru_takes_the_oldest_state_or_leaf_and_before_that_what_is_no_use():
    root = TreeNode(0, None, as_tokens(()), NO_KV, 0, None)
    above = leaf(1, 100, 5, root)
    below, other = leaf(2, 200, 9, above), leaf(3, 300, 7, root)
    for plain in (LRUPolicy(), GarbageFirstLRU()):
        policy = offered(plain, [above, below, other])
        assert policy.victim() == Victim(above, is_leaf=False)
    assert LRUPolicy().victim() is None
    useless = leaf(4, 50, 20, root)
    useless.checkpoint = None
    policy.offer_leaf(useless)
    assert policy.victim() == Victim(useless, is_leaf=True)


def test_the_oracle_gives_up_what_is_restored_furthest_ahead():
    """a b c | b a c: after c has arrived, c itself is used last."""
    prompts = {name: ids(256, 1000 * number) for number, name in enumerate("abc")}
    trace = one_by_one(*(Turn(prompts[name], ids(16, 9000)) for name in "abcbac"))
    future = Future(trace)
    assert [want.num_restorable for want in future.wants] == [0, 0, 0, 3, 3, 3]
    root = TreeNode(0, None, as_tokens(()), NO_KV, 0, None)
    nodes = []
    for number, name in enumerate("abc"):
        node = leaf(number + 1, 12, number, root)
        node.tokens = prompts[name][:12]
        nodes.append(node)
    policy = offered(OraclePolicy(future), nodes)
    future.arrived(2)
    assert [future.next_restore(policy._prefix(node)) for node in nodes] == [4, 3, 5]
    assert policy.victim() == Victim(nodes[2], is_leaf=True)
    future.arrived(4)
    assert future.next_restore(policy._prefix(nodes[0])) == NEVER
    assert policy.victim() == Victim(nodes[0], is_leaf=True)


def test_the_oracle_keeps_what_pays_and_plants_nothing_else():
    again = [Turn(ids(1040, 5000 * n), ids(16, 90_000 + n)) for n in (0, 1, 0)]
    trace = one_by_one(*again)
    cell = Cell(trace, ROOM, 1.0)
    outcome = cell.run_named("oracle", Future(trace))
    assert outcome.counts.planted == 1 and outcome.hit_units * UNIT == 1024


def test_the_working_set_of_one_request_is_what_it_holds():
    """2,048 tokens of prompt and 16 of answer in pages of 64; the working slot, and the snapshot behind the prompt."""
    trace = one_by_one(Turn(ids(2048), ids(16, 9000)))
    assert working_set(trace) == 2112 * K3_COST.kv_bytes + 2 * K3_COST.state_bytes


def test_the_cost_is_that_of_the_published_model(published_config: dict[str, Any]):
    assert ReplayCost.of(K3Config.from_dict(published_config), tp_size=8) == K3_COST


@pytest.fixture(scope="module")
def small() -> Trace:
    return cache_traces._groups(1, groups=12, per_group=6)


@pytest.mark.parametrize("name", [*NAMES, *(one.name for one in ABLATIONS)])
def test_no_byte_is_lost_and_no_run_differs(small: Trace, name: str):
    cell, future = Cell(small, working_set(small), 0.3), Future(small)
    outcomes = []
    for _ in range(2):
        future.arrived(-1)
        outcomes.append(cell.run_named(name, future))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0].num_arrived == 72 and 0 < outcomes[0].token_hit_rate < 1


@pytest.mark.parametrize("contender", [OURS, *RIVALS, _marconi(1.0)], ids=lambda one: one.name)
def test_under_pressure_aborts_and_retractions_the_ledger_balances(contender: Contender):
    trace = cache_traces._mixture(3)
    trace = Trace("T8", trace.sessions[:60])
    simulator = play(contender, trace, smallest_pool(trace, K3_COST))
    assert simulator.outcome.num_retracted > 0 and simulator.budget.most_used <= simulator.budget.total
    simulator.engine.flush()
    assert simulator.budget.used == 0
    assert simulator.cache.slots.num_free == simulator.cache.slots.size


def test_marconi_is_tuned_on_a_window_of_the_trace(small: Trace, monkeypatch: pytest.MonkeyPatch):
    """Every alpha is tried on the same window, and the best is in force behind it."""
    cell = Cell(small, working_set(small), 0.3)
    plain = cell.run(_marconi(0.0))
    first = plain.first_eviction
    assert first is not None
    tried: list[tuple[float, int | None]] = []
    run = Cell.run

    def spied(self: Cell, contender: Contender, **options: Any) -> Any:
        tried.append((contender.policy(K3_COST).alpha, options.get("stop_after")))
        return run(self, contender, **options)

    monkeypatch.setattr(Cell, "run", spied)
    cell.run_named("marconi", Future(small))
    windows = {stop for alpha, stop in tried[1:7]}
    assert [alpha for alpha, _ in tried[1:7]] == [0.0, 0.1, 0.25, 0.5, 1.0, 2.0] and len(windows) == 1
    assert first < windows.pop() <= max(first + 1, 72 // 4)


def test_where_nothing_is_evicted_marconi_is_not_tuned(small: Trace):
    cell = Cell(small, working_set(small), 2.0)
    assert cell.run_named("marconi", Future(small)) == cell.run(_marconi(0.0))


def test_ours_is_not_behind_anybody_under_pressure(small: Trace):
    cell, future = Cell(small, working_set(small), 0.3), Future(small)
    rates = {name: cell.run_named(name, future).token_hit_rate for name in NAMES[:4]}
    assert rates.pop("ours") > max(rates.values()) - 0.005, rates


def test_every_mechanism_has_its_ablation():
    names = [one.name for one in ABLATIONS]
    assert len({*names}) == len(names)
    for mechanism in Mechanism:
        assert f"without {mechanism.name.lower().replace('_', ' ')}" in names
