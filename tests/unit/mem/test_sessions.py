"""A session keeps what its next turn starts from, for as long as no running request needs the room."""

from __future__ import annotations

import pytest

from tests.kit.mem_scheduler import Scheduler, small_server
from tests.unit.mem.test_warm_equals_cold import ids


def turn(server: Scheduler, history: list[int], new: list[int], num_tokens: int = 20) -> tuple[list[int], int]:
    """The history after a turn, and what it found cached."""
    request = server.serve(history + new, num_tokens, session="s")
    return request.prompt + request.answer, request.cached[0]


@pytest.mark.parametrize("chunk", [16, 64, 2048])
def test_each_turn_starts_from_the_last(chunk: int):
    server = small_server(chunk=chunk)
    history, cached = turn(server, [], ids(100, seed=1))
    counts = [cached]
    for seed in (2, 3, 4):
        history, cached = turn(server, history, ids(50, seed=seed))
        counts.append(cached)
    # The prompts are 100, 170, 240 and 310 long; the third answer passed 256, where a state is kept while decoding.
    assert counts == [0, 64, 128, 256]
    server.check()


def test_what_a_session_holds_is_not_evicted():
    server = small_server()
    history, _ = turn(server, [], ids(100, seed=1))
    server.cache.evict_kv(10_000)
    assert not server.cache.evict_state()
    server.check()
    _, cached = turn(server, history, [1, 2])
    assert cached == 64


def test_what_sessions_alone_hold_is_there_for_who_runs():
    """A scheduler that counts it as taken would wait for ever for the room that it has."""
    server = small_server(chunk=64)
    history, _ = turn(server, [], ids(100, seed=1))
    assert server.tree.num_held_tokens == server.tree.num_protected_tokens == 64
    server.arrive("shares", history[:80] + ids(90, seed=3), 4)
    server.step()
    assert (server.tree.num_held_tokens, server.tree.num_protected_tokens) == (0, 64)
    server.run()
    assert server.tree.num_held_tokens == 64
    server.engine.close_session("s")
    assert server.tree.num_held_tokens == 0
    server.check()


def test_a_closed_session_holds_nothing():
    server = small_server()
    history, _ = turn(server, [], ids(100, seed=1))
    server.engine.close_session("s")
    server.engine.close_session("s")
    assert server.tree.num_protected_tokens == 0
    server.cache.evict_kv(10_000)
    assert server.tree.num_tokens == 0
    _, cached = turn(server, history, [1, 2])
    assert cached == 0
    server.check()


def test_the_next_turn_takes_the_hold_over():
    server = small_server()
    history, _ = turn(server, [], ids(100, seed=1))
    history, _ = turn(server, history, ids(100, seed=2))
    protected = [node.depth for node in server.tree.nodes() if node.checkpoint and node.checkpoint.lock_ref]
    assert protected == [192]
    server.engine.close_session("s")
    assert not any(node.lock_ref for node in server.tree.nodes())


def test_a_turn_that_is_aborted_leaves_the_last_hold():
    server = small_server()
    history, _ = turn(server, [], ids(100, seed=1))
    request = server.arrive("aborted", history + [1], 9, session="s")
    server.step()
    server.abort(request)
    server.run()
    server.cache.evict_kv(10_000)
    assert turn(server, history, [1, 2])[1] == 64


def test_a_session_never_keeps_a_request_from_its_slot():
    server = small_server(num_slots=4)
    for n in range(6):
        server.serve(ids(65, seed=n), 1, session=f"s{n}")
    server.check()
    server.serve(ids(200, seed=99), 5)
    server.check()


def test_sessions_that_hold_every_other_slot_make_way_for_a_second_request():
    server = small_server(num_slots=8)
    for n in range(9):
        server.serve(ids(65, seed=n), 1, session=f"s{n}")
    assert server.slots.num_free == 1
    for n in range(2):
        server.arrive(f"r{n}", ids(200, seed=50 + n), 5)
    server.step()
    assert len(server.running) == 2
    server.run()
    server.check()


def test_a_session_never_keeps_a_request_from_its_kv():
    server = small_server(num_tokens=300)
    for n in range(3):
        server.serve(ids(65, seed=n), 1, session=f"s{n}")
    assert server.tree.num_protected_tokens > 300 - 284
    server.serve(ids(280, seed=99), 5)
    server.check()


def test_a_flush_ends_holds():
    server = small_server()
    turn(server, [], ids(100, seed=1))
    server.engine.flush()
    assert server.tree.num_tokens == 0
    server.check()
