"""The ledger recounts: whatever is lost, shared or at the wrong depth is named (I1, I2, I3)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from sglang_k3.mem.checkpoints import TREE
from sglang_k3.mem.ledger import Balance, check_kv, check_slots
from sglang_k3.mem.state_slots import SlotState
from tests.kit.mem_scheduler import Scheduler, small_server
from tests.unit.mem.test_warm_equals_cold import ids


@pytest.fixture
def server() -> Scheduler:
    """One request decodes; its prompt is cached, with states at 64 and 128."""
    server = small_server(num_slots=8, num_tokens=512)
    server.arrive("r", ids(130, seed=1), 50)
    while not (server.running and server.running[0].answer):
        server.step()
    server.check()
    return server


def test_it_says_where_everything_is(server: Scheduler):
    assert check_slots(server.engine) == Balance(free=5, tree=2, requests=1)
    kv_locs = server.running[0].kv_locs
    behind = kv_locs[server.running[0].lease.node.depth :]
    balance = check_kv(server.engine, num_pages=512, free_pages=server.kv.free_pages, held=[behind])
    assert balance == Balance(free=512 - len(kv_locs), tree=128, requests=len(kv_locs) - 128)


def leak_a_slot(server: Scheduler) -> None:
    server.slots.try_alloc("nobody")


def lose_a_state(server: Scheduler) -> None:
    next(node for node in server.tree.nodes() if node.checkpoint).checkpoint = None


def share_a_state(server: Scheduler) -> None:
    first, second = (node for node in server.tree.nodes() if node.checkpoint)
    second.checkpoint = first.checkpoint


def move_a_state(server: Scheduler) -> None:
    server.slots.free(next(node for node in server.tree.nodes() if node.checkpoint).checkpoint.slot_id, TREE)
    slot_id = server.slots.try_alloc(TREE)
    server.slots.written(slot_id, TREE, state=SlotState.SNAPSHOT, depth=60)
    server.slots.donate(slot_id, TREE, to=TREE, depth=60)


def keep_a_slot_in_the_tree_and_the_request(server: Scheduler) -> None:
    node = next(node for node in server.tree.nodes() if node.checkpoint)
    server.running[0].lease.working = node.checkpoint.slot_id


def miscount_the_protected(server: Scheduler) -> None:
    next(node for node in server.tree.nodes() if node.checkpoint).checkpoint.lock_ref += 1


def list_a_slot_twice(server: Scheduler) -> None:
    server.slots._free.append(server.slots._free[0])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (leak_a_slot, "I2: owned"),
        (lose_a_state, "I2: owned"),
        (share_a_state, "I3: .* and another have state slot|I1"),
        (move_a_state, "I1: .* has a state of 60 tokens"),
        (keep_a_slot_in_the_tree_and_the_request, "I3: Lease.* and another have state slot"),
        (miscount_the_protected, r"I2: \(2, 0\) states and protected ones, found \(2, 1\)"),
        (list_a_slot_twice, "I2: 6 slots are listed free, 5 are"),
    ],
)
def test_slots(server: Scheduler, damage: Callable[[Scheduler], None], message: str):
    damage(server)
    with pytest.raises(AssertionError, match=message):
        check_slots(server.engine)


def test_pages(server: Scheduler):
    lease, kv_locs = server.running[0].lease, server.running[0].kv_locs
    behind, free = kv_locs[lease.node.depth :], server.kv.free_pages
    with pytest.raises(AssertionError, match="I2: Balance"):
        check_kv(server.engine, num_pages=512, free_pages=free[1:], held=[behind])
    with pytest.raises(AssertionError, match="I2: Balance"):
        check_kv(server.engine, num_pages=512, free_pages=free, held=[behind[1:]])
    with pytest.raises(AssertionError, match=r"I3: KV pages \[\d+\] have two owners"):
        check_kv(server.engine, num_pages=512, free_pages=free, held=[kv_locs[lease.node.depth - 1 :]])
    with pytest.raises(AssertionError, match=r"I3: KV pages \[\d+\] have two owners"):
        check_kv(server.engine, num_pages=512, free_pages=[*free, int(behind[0])], held=[behind])


def test_the_scheduler_s_own_check_sees_a_state_of_another_depth(server: Scheduler):
    """Oracle B: the state itself counts its tokens."""
    slot_id = next(node for node in server.tree.nodes() if node.checkpoint).checkpoint.slot_id
    server.model.recurrent[0, slot_id, 1] += 1
    with pytest.raises(AssertionError, match="I1: TreeNode"):
        server.check()
    server.model.recurrent[0, slot_id, 1] = torch.nan
    with pytest.raises(AssertionError, match="I1: TreeNode"):
        server.check()
