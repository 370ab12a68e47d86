"""Prompts that arrive together compute what they share once, and nobody waits for what will not come."""

from __future__ import annotations

import itertools
import random

import pytest

from sglang_k3.mem.engine import Refusal
from tests.kit.mem_scheduler import Scheduler, small_server
from tests.unit.mem.test_warm_equals_cold import ids

SHAPES = [*itertools.product([1, 16], [16, 64, 2048])]


@pytest.fixture(params=SHAPES, ids=lambda shape: f"page-{shape[0]}-chunk-{shape[1]}")
def server(request: pytest.FixtureRequest) -> Scheduler:
    page, chunk = request.param
    return small_server(page=page, chunk=chunk)


@pytest.mark.parametrize("count", range(2, 9))
@pytest.mark.parametrize("length", [8 * 64, 8 * 64 + 1, 8 * 64 + 37])
def test_identical_prompts_cost_at_most_two(server: Scheduler, count: int, length: int):
    prompt = ids(length, seed=length)
    requests = [server.arrive(f"r{n}", prompt, 3) for n in range(count)]
    server.run()
    server.check()
    shared = (length - 1) // 64 * 64
    assert [request.cached for request in requests] == [[0]] + [[shared]] * (count - 1)
    assert server.num_prefilled == length + (count - 1) * (length - shared) <= 2 * length


def test_prompts_with_a_common_beginning_compute_it_once(server: Scheduler):
    common = ids(400, seed=1)
    requests = [server.arrive(f"r{n}", common + ids(90, seed=10 + n), 3) for n in range(5)]
    server.run()
    assert [request.cached for request in requests] == [[0]] + [[384]] * 4
    assert [node.depth for node in server.tree.nodes() if node.checkpoint and node.checkpoint.is_fork] == [384]


def test_a_prompt_that_comes_a_chunk_later_still_shares(server: Scheduler):
    prompt = ids(600, seed=2)
    first = server.arrive("first", prompt, 3)
    server.step()
    second = server.arrive("second", prompt, 3)
    server.run()
    assert (first.cached, second.cached) == ([0], [576])


@pytest.mark.parametrize("way", ["abort", "retract"])
@pytest.mark.parametrize("steps", range(4))
def test_when_the_first_goes_another_takes_over(server: Scheduler, way: str, steps: int):
    prompt = ids(600, seed=3)
    requests = [server.arrive(f"r{n}", prompt, 3) for n in range(4)]
    for _ in range(1 + steps):
        server.step()
    if not requests[0].is_over:
        getattr(server, way)(requests[0])
    server.run()
    server.check()
    assert all(request.is_over for request in requests)
    assert server.num_prefilled <= 2 * len(prompt) + min(600, server.chunk * (1 + steps))


@pytest.mark.parametrize("chunk", [16, 64])
def test_nobody_waits_for_a_state_that_was_skipped(chunk: int, monkeypatch: pytest.MonkeyPatch):
    """The one in flight finds no slot for it: who waits is no longer made to as soon as that depth is passed."""
    server = small_server(chunk=chunk)
    prompt = ids(300, seed=4)
    server.arrive("first", prompt, 3)
    server.step()
    with monkeypatch.context() as patch:
        patch.setattr(server.slots, "try_alloc", lambda owner: None)
        while server.running[0].lease.computed < 256:
            assert server.engine.admit("probe", None, prompt) is Refusal.SHARED_PREFIX_IN_FLIGHT
            server.step()
        assert server.engine.admit("probe", None, prompt) is Refusal.NO_STATE_SLOT
    assert server.cache.counts.skipped["no slot"] >= 3
    server.serve(prompt)
    server.check()


def test_a_wait_holds_nothing_and_ends_with_the_state(server: Scheduler):
    prompt = ids(300, seed=5)
    engine = server.engine
    server.arrive("first", prompt, 50)
    second = server.arrive("second", prompt, 50)
    server.step()
    before = (server.slots.num_free, server.tree.num_protected_tokens, len([*engine.leases]))
    assert engine.admit("probe", None, prompt) is Refusal.SHARED_PREFIX_IN_FLIGHT
    assert (server.slots.num_free, server.tree.num_protected_tokens, len([*engine.leases])) == before
    while not any(node.depth == 256 for node in server.tree.nodes()):
        assert second in server.waiting
        server.step()
    server.step()
    assert second.cached == [256]
    server.run()


def test_nobody_waits_for_an_answer_in_progress(server: Scheduler):
    """Its states are the tree's when it ends, which may be long."""
    first = server.arrive("first", ids(200, seed=7), 400)
    while len(first.answer) < 100:
        server.step()
    assert any(snapshot.depth == 256 for snapshot in first.lease.snapshots)
    second = server.arrive("second", first.prompt + first.answer, 3)
    server.step()
    assert second.cached == [192]
    server.run()


def test_of_several_wanted_depths_the_deepest_is_planted():
    server = small_server(chunk=2048)
    prompt = ids(600, seed=8)
    first = server.arrive("first", prompt, 3)
    deep, shallow = (server.arrive(f"{n}", prompt[:n] + ids(50, seed=n), 3) for n in (450, 150))
    server.run()
    assert (first.cached, deep.cached, shallow.cached) == ([0], [448], [0])


def test_other_namespaces_and_other_beginnings_do_not_wait(server: Scheduler):
    prompt = ids(300, seed=6)
    server.arrive("first", prompt, 3)
    server.arrive("salted", prompt, 3, namespace="salt")
    server.arrive("other", [2 - token for token in prompt], 3)
    server.arrive("short", prompt[:60], 3)
    server.step()
    assert [request.name for request in server.running] == ["first", "salted", "other", "short"]
    server.run()


def test_random_families_of_prompts_all_end():
    for seed in range(8):
        rng = random.Random(seed)
        server = small_server(chunk=rng.choice([16, 50, 2048]), num_slots=rng.choice([8, 16, 32]), num_tokens=3000)
        trunk = ids(500, seed=seed)
        for n in range(12):
            server.arrive(f"r{n}", trunk[: rng.randrange(500)] + ids(rng.randint(1, 90), seed=n), rng.randint(1, 6))
        server.run()
        server.check()
