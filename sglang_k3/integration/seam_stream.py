"""Seam: when the host begins to send an answer, and what it must not send.

A request may be retracted before the result of its prefill is handled, which then counts for nothing. The host sends
its empty answer all the same, and takes the log-prob of the first token, which is yet to come, for sent. And the mark
of a broken row (see ``host.broken_rows``) is no token that log-probs could be decoded with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def install() -> None:
    target = "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept"
    HookRegistry.register(target, _send, HookType.AROUND)
    HookRegistry.apply_hooks()


def _send(original: Callable[..., None], accumulator: Any, *, req: Any) -> None:
    from sglang_k3.host.broken_rows import unmark_logprobs

    if req.output_ids or req.finished():
        unmark_logprobs(req)
        original(accumulator, req=req)
