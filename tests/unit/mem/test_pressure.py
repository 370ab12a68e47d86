"""Too few slots or pages: requests complete, checkpoints are skipped or given up, and nothing leaks (I2, I5)."""

from __future__ import annotations

import random

import pytest

from sglang_k3.mem.checkpoints import TREE
from sglang_k3.mem.engine import Refusal
from sglang_k3.mem.limits import SLOTS_PER_REQUEST
from tests.kit.mem_scheduler import Scheduler, small_server
from tests.unit.mem.test_warm_equals_cold import ids


def lock_every_state(server: Scheduler, leave: int) -> None:
    """Fill the tree with states that nobody may evict, but for ``leave`` slots that stay free."""
    n = 0
    while server.slots.num_free > leave:
        server.serve(ids(65, seed=1000 + n), 1)
        for node in server.tree.nodes():
            if node.checkpoint and not node.checkpoint.lock_ref:
                server.cache.lock(node)
                server.cache.lock_state(node)
        n += 1


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("chunk", [16, 64, 2048])
def test_long_prompts_complete_at_the_minimum_with_every_node_locked(count: int, chunk: int):
    server = small_server(num_slots=SLOTS_PER_REQUEST * count, chunk=chunk)
    lock_every_state(server, leave=count)
    server.check()
    planted = server.cache.counts.planted
    for n in range(count):
        server.arrive(f"r{n}", ids(700, seed=n), 20)
    server.run()
    server.check()
    due = {16: 10, 64: 10, 2048: 1}[chunk]  # per prompt: every grid point at a chunk's end, or one inside it
    skipped = server.cache.counts.skipped["no slot"]
    # The last prompts to end find the slots of those that have ended.
    assert skipped >= due and skipped + server.cache.counts.planted - planted == due * count


@pytest.mark.parametrize("chunk", [16, 64, 2048])
def test_a_pool_of_four_slots_per_request_skips_nothing(chunk: int):
    rng = random.Random(chunk)
    for num_requests in (1, 2, 4):
        server = small_server(num_slots=SLOTS_PER_REQUEST * num_requests, chunk=chunk)
        trunk = ids(300, seed=1)
        for n in range(12):
            server.arrive(f"r{n}", trunk[: rng.randrange(300)] + ids(rng.randint(1, 300), seed=n), rng.randint(1, 300))
        server.run()
        server.check()
        assert server.cache.counts.skipped.total() == 0
        assert server.cache.counts.evicted["for a slot"] > 0


def test_a_request_owns_and_protects_four_slots_at_most_and_two_away_from_boundaries():
    most, away = 0, 0
    for chunk in (16, 64, 2048):
        server = small_server(chunk=chunk, lag=0)
        trunk = ids(300, seed=1)
        for n in range(12):
            server.serve(trunk[: 40 * (n % 8)] + ids(64 - 40 * (n % 8) % 64 + 64 * (n % 3), seed=n), 300)
        most, away = max(most, server.most_slots), max(away, server.most_slots_away_from_boundaries)
    assert (most, away) == (SLOTS_PER_REQUEST, 2)


def test_a_refused_admission_leaves_the_ledger_as_it_was():
    """For want of a slot, and for want of KV after the slot was taken: asked again and again."""
    server = small_server(num_slots=4, num_tokens=256, chunk=64)
    prompt = ids(100, seed=1)
    server.serve(prompt, 1)
    hoard = [server.slots.try_alloc(TREE) for _ in range(server.slots.num_free)]
    node = next(node for node in server.tree.nodes() if node.checkpoint)
    before = repr(server.slots)
    for _ in range(5):
        # The only state that could make way is the one that it would start from.
        assert server.engine.admit("r", None, prompt) is Refusal.NO_STATE_SLOT
        assert (repr(server.slots), node.checkpoint.lock_ref, node.lock_ref) == (before, 0, 0)
    for slot_id in hoard:
        server.slots.free(slot_id, TREE)
    server.kv.free_pages, pages = [], server.kv.free_pages
    server.cache.lock(node)
    request = server.arrive("r", prompt, 1)
    for _ in range(5):
        server.step()
        after = (repr(server.slots), node.checkpoint.lock_ref, node.lock_ref)
        assert after == ("StateSlots(4: 3 free, 1 checkpoint)", 0, 1)
    server.cache.unlock(node)
    server.kv.free_pages = pages
    server.run()
    server.check()
    assert request.cached == [64]


def test_a_request_that_never_started_has_used_nothing():
    """Asked for again and again without room for its KV, it does not keep the state that it would start from."""
    server = small_server(num_slots=8)
    prompts = [ids(100, seed=n) for n in range(2)]
    for prompt in prompts:
        server.serve(prompt, 1)
    lease = server.engine.admit("r", None, prompts[0])
    server.engine.discard(lease, server.cache.kv_locs(lease.node, 0))
    assert server.cache.evict_state()
    assert [server.cache.match(None, lease.tokens[:-1]).state_depth, server.serve(prompts[1]).cached] == [0, [64]]


@pytest.mark.parametrize("moment", range(9))
@pytest.mark.parametrize("lag", [0, 1, 2])
def test_an_abort_at_any_moment_gives_everything_back(moment: int, lag: int):
    """In the queue, between chunks, before the first token, while decoding across a boundary."""
    server = small_server(chunk=64, lag=lag)
    request = server.arrive("r", ids(64 * 3 + 61, seed=1), 40)
    for _ in range(moment):
        server.step()
    server.abort(request)
    server.check()
    server.run()
    server.check()
    server.engine.flush()
    assert server.slots.num_free == server.slots.size
    assert len(server.kv.free_pages) == server.kv.num_pages


def test_too_little_kv_retracts_and_every_answer_is_right():
    server = small_server(num_slots=32, num_tokens=600, chunk=64)
    requests = [server.arrive(f"r{n}", ids(100, seed=n), 80) for n in range(6)]
    server.run()
    server.check()
    assert server.num_retracted > 0
    assert all(len(request.answer) == 80 for request in requests)


@pytest.mark.parametrize(("policy", "kept"), [("lru", [512, 576, 640]), ("replay-cost", [448, 576, 640])])
def test_a_path_keeps_as_many_states_as_its_cap(policy: str, kept: list[int]):
    server = small_server(chunk=64, cap=3, policy=policy)
    server.serve(ids(64 * 10 + 5, seed=1))
    assert sorted(node.depth for node in server.tree.nodes() if node.checkpoint) == kept
    assert +server.cache.counts.evicted == {"for its path": 7}
    server.check()


def test_a_full_path_whose_states_are_all_protected_takes_no_more():
    server = small_server(chunk=64, cap=1)
    prompt = ids(300, seed=1)
    server.serve(prompt[:65], 1)
    (node,) = (node for node in server.tree.nodes() if node.checkpoint)
    server.cache.lock_state(node)
    server.serve(prompt, 1)
    assert +server.cache.counts.skipped == {"path is full": 3}
    server.cache.unlock_state(node)
    server.check()


def test_kv_without_a_state_tells_where_one_is_worth_planting(monkeypatch: pytest.MonkeyPatch):
    """A prompt whose state found no slot, and an answer behind its last state."""
    server = small_server(chunk=2048)
    prompt = ids(200, seed=1)
    with monkeypatch.context() as patch:
        take = type(server.engine)._take_slot
        patch.setattr(server.engine, "_take_slot", lambda owner: None if server.running else take(server.engine, owner))
        first = server.serve(prompt, 100)
    assert +server.cache.counts.skipped == {"no slot": 2}
    assert sorted(node.depth for node in server.tree.nodes()) == [192, 256]
    assert [server.serve(prompt).cached[0] for _ in range(2)] == [0, 192]
    assert [server.serve(first.prompt + first.answer + ids(90, seed=n)).cached[0] for n in (2, 3)] == [192, 256]


def test_forks_do_not_count_towards_the_cap():
    server = small_server(chunk=2048, cap=1)
    trunk = ids(700, seed=1)
    server.serve(trunk)
    for depth in range(100, 700, 100):
        server.serve(trunk[:depth] + ids(40, seed=depth))
    forks = sorted(node.depth for node in server.tree.nodes() if node.checkpoint and node.checkpoint.is_fork)
    assert forks == [64, 192, 256, 384, 448, 576]
    assert [server.serve(trunk[:depth] + ids(9, seed=depth + 1)).cached[0] for depth in range(100, 700, 100)] == forks


def test_a_common_length_that_jitters_is_reused():
    """A prompt of 6,000 tokens whose common part ends anywhere in 4,900 to 5,200."""
    rng = random.Random(0)
    server = small_server(page=64, chunk=2048, num_tokens=1 << 18)
    base = ids(6000, seed=1)
    rates = []
    for n in range(12):
        common = rng.randint(4900, 5200)
        cached = server.serve(base[:common] + ids(6000 - common, seed=n), 1).cached[0]
        rates.append(cached / common)
    assert rates[0] == 0
    assert min(rates[3:]) > 0.8 and sum(rates[3:]) / len(rates[3:]) > 0.9


def test_a_hit_refreshes_the_state_that_it_used_and_no_other():
    """Many sessions take turns over too few states: refreshing whole paths would let the cold ones lose everything."""

    def hit_rate(refresh_path: bool) -> float:
        server = small_server(num_slots=4 * 12 + 4, chunk=2048, num_tokens=1 << 16, max_running=1)
        if refresh_path:
            touch_one = server.cache.touch
            server.cache.touch = lambda node: [touch_one(above) for above in node.path()]
        rng = random.Random(1)
        histories = {n: ids(40, seed=n) for n in range(24)}
        cached = total = 0
        for _ in range(200):
            n = rng.choice([*histories]) if rng.random() < 0.5 else rng.randrange(8)
            prompt = histories[n] + ids(70, seed=rng.randrange(1000))
            if len(prompt) > 1000:
                prompt = ids(40, seed=rng.randrange(1000))
            request = server.serve(prompt, 1)
            histories[n] = prompt + request.answer
            cached, total = cached + request.cached[0], total + len(prompt)
        return cached / total

    consumed, path = hit_rate(refresh_path=False), hit_rate(refresh_path=True)
    assert consumed > path + 0.02, (consumed, path)
