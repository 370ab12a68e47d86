"""A plugin for the host that recounts every state slot and every KV page after each step of its scheduler (I1 to I3).

A violation ends the scheduler with a traceback in the log, where the tests look for one.
"""

from __future__ import annotations

import logging
import multiprocessing
from typing import Any

from sglang_k3.mem.ledger import check_kv, check_slots

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
REPORT_EVERY = 100

logger = logging.getLogger(__name__)


def register() -> None:
    if multiprocessing.parent_process() is None:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    checks = Checks()
    for step in ("get_next_batch_to_run", "process_batch_result"):
        HookRegistry.register(f"{SCHEDULER}.{step}", checks.check, HookType.AFTER)


class Checks:
    """What the log says of them: ``ledger: N checks, M skipped``."""

    def __init__(self) -> None:
        self._count = self._skipped = 0

    def check(self, result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> None:
        from sglang_k3.host.prefix_cache import K3PrefixCache

        cache = scheduler.tree_cache
        if not isinstance(cache, K3PrefixCache):
            return
        check_slots(cache.engine)
        check_host_kv(cache)
        self._count += 1
        skipped = cache.engine.cache.counts.skipped.total()
        if skipped != self._skipped or self._count % REPORT_EVERY == 0:
            self._skipped = skipped
            logger.info("ledger: %d checks, %d skipped", self._count, skipped)


def check_host_kv(cache: Any) -> None:
    """The host's own lists of free pages and rows of requests."""
    allocator, table = cache.token_to_kv_pool_allocator, cache.req_to_token_pool.req_to_token
    held = [
        table[req.req_pool_idx, lease.node.depth : req.kv.kv_allocated_len].long()
        for req, lease in cache._leases.items()
        if req.kv is not None
    ]
    free = [*allocator.free_pages.tolist(), *allocator.release_pages.tolist()]
    check_kv(cache.engine, num_pages=allocator.size // allocator.page_size, free_pages=free, held=held)
