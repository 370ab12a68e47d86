"""The recount that served tests run after every step sees what is lost, shared or miscounted."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from tests.kit.step_ledger import REPORT_EVERY, Checks
from tests.sglang.test_prefix_cache import PROMPT, Host, Req

pytestmark = pytest.mark.sglang


def running(host: Host) -> Req:
    """One request between two chunks, and a cached prompt."""
    first = host.admit("first", PROMPT)
    host.extend(first)
    host.finish(first)
    req = host.admit("running", [*PROMPT[:9], *range(50, 60)], row=2)
    host.extend(req, end=13)
    req.kv = SimpleNamespace(kv_allocated_len=13)
    return req


def check(host: Host) -> None:
    Checks().check(None, SimpleNamespace(tree_cache=host.cache))


def test_what_is_in_order_passes_and_is_counted(caplog: pytest.LogCaptureFixture) -> None:
    host = Host()
    req, checks = running(host), Checks()
    caplog.set_level(logging.INFO)
    for _ in range(REPORT_EVERY):
        checks.check(None, SimpleNamespace(tree_cache=host.cache))
    assert caplog.messages[-1] == f"ledger: {REPORT_EVERY} checks, 0 skipped"
    host.cache.engine.cache.counts.skipped["no slot"] += 1
    checks.check(None, SimpleNamespace(tree_cache=host.cache))
    assert caplog.messages[-1] == f"ledger: {REPORT_EVERY + 1} checks, 1 skipped"
    req.extend_range.end = 13
    host.cache.cache_finished_req(req, is_insert=False, kv_len_to_handle=13)
    check(host)


def test_a_lost_page_is_seen() -> None:
    host = Host()
    running(host)
    host.allocator.alloc(1)
    with pytest.raises(AssertionError, match="I2: .* KV pages"):
        check(host)


def test_a_page_of_two_owners_is_seen() -> None:
    host = Host()
    req = running(host)
    host.pool.req_to_token[req.req_pool_idx, 12] = host.cache.all_values_flatten()[0].int()
    with pytest.raises(AssertionError, match="I3: KV pages .* two owners"):
        check(host)


def test_a_lost_slot_is_seen() -> None:
    host = Host()
    running(host)
    host.cache.engine.cache.slots.try_alloc("nobody")
    with pytest.raises(AssertionError, match="I2: owned"):
        check(host)


def test_another_cache_is_let_alone() -> None:
    Checks().check(None, SimpleNamespace(tree_cache=SimpleNamespace()))
