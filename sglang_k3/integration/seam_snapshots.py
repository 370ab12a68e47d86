"""Seam: which depth the host takes the snapshot of a decoding request to have.

A decode step at a multiple of the track interval writes a snapshot. Under the overlap schedule the host learns of it
when it handles an earlier or a later result, by the length that the request has by then. A prefill between two decode
steps shifts the two: the same snapshot is noted twice, and the second time the slot with the older state is taken for
it (law I1).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def install() -> None:
    processor = "sglang.srt.managers.scheduler_components.batch_result_processor.SchedulerBatchResultProcessor"
    pool = "sglang.srt.mem_cache.memory_pool.HybridReqToTokenPool"
    HookRegistry.register(f"{processor}._mamba_check_track_boundary", _written_snapshot, HookType.AROUND)
    HookRegistry.register(f"{pool}.get_mamba_ping_pong_keep_idx", _noted_slot, HookType.AROUND)
    HookRegistry.apply_hooks()


def _written_snapshot(
    original: Callable[..., tuple[bool, int]], processor: Any, req: Any, batch: Any, result: Any, i: int
) -> tuple[bool, int]:
    """Whether there is a snapshot to note, and its depth."""
    if not batch.spec_algorithm.is_none():
        return original(processor, req, batch, result, i)
    interval = processor.server_args.mamba_track_interval
    if not processor.server_args.enable_mamba_extra_buffer_lazy():
        # The step whose result this is wrote it, if any did.
        length = int(batch.seq_lens_cpu[i])
        return length % interval == 0, length
    # A lazy request has a second slot from the launch of such a step until its snapshot is noted, here: the step whose
    # result this is, or the one launched since.
    depth = req.kv_committed_len // interval * interval
    if req.kv_committed_len - depth > 1 or req.mamba_last_track_seqlen == depth:
        return False, 0
    return _has_both(req) or req.kv_committed_len == depth, depth


def _noted_slot(original: Callable[..., int], pool: Any, req: Any) -> int:
    """Index of the slot with the snapshot that is noted; the host's lazy strategy takes the one last written to."""
    if pool.enable_mamba_extra_buffer_lazy and _has_both(req):
        return 1 - int(req.mamba_next_track_idx)
    return original(pool, req)


def _has_both(req: Any) -> bool:
    return bool((req.mamba_ping_pong_track_buffer >= 0).all())
