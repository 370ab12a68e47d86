"""Seam: when the host begins to send an answer.

A request may be retracted before the result of its prefill is handled, which then counts for nothing. The host sends
its empty answer all the same, and takes the log-prob of the first token, which is yet to come, for sent.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def install() -> None:
    target = "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept"
    HookRegistry.register(target, _not_before_the_first_token, HookType.AROUND)
    HookRegistry.apply_hooks()


def _not_before_the_first_token(original: Callable[..., None], accumulator: Any, *, req: Any) -> None:
    if req.output_ids or req.finished():
        original(accumulator, req=req)
