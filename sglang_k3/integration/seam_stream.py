"""Seams: when the host begins to send an answer, what it must not send, and how it ends one that is given up.

A request may be retracted before the result of its prefill is handled, which then counts for nothing. The host sends
its empty answer all the same, and takes the log-prob of the first token, which is yet to come, for sent. And the mark
of a broken row (see ``host.broken_rows``) is no token that log-probs could be decoded with.

A request that is aborted while it waits, or between two chunks of its prompt, has an answer by then if it was retracted
before. The host ends its stream with the whole text and the last token alone, which is right for neither kind of
stream: an output has all tokens so far, or only the new ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType


def install_main() -> None:
    target = "sglang.srt.managers.tokenizer_manager.TokenizerManager._handle_abort_req"
    HookRegistry.register(target, _end_waiting, HookType.AROUND)


def install_scheduler() -> None:
    target = "sglang.srt.managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept"
    HookRegistry.register(target, _send, HookType.AROUND)
    HookRegistry.apply_hooks()


def _send(original: Callable[..., None], accumulator: Any, *, req: Any) -> None:
    if not req.output_ids and not req.finished():
        return
    if req.return_logprob:
        from sglang_k3.host.broken_rows import unmark_logprobs

        unmark_logprobs(req)
    original(accumulator, req=req)


def _end_waiting(original: Callable[..., None], manager: Any, message: Any) -> None:
    state = manager.rid_to_state.get(message.rid)
    original(manager, message)
    was_ended = state is not None and message.rid not in manager.rid_to_state
    if was_ended and getattr(manager.server_args, "is_k3", False) and getattr(state.obj, "stream", False):
        _complete_last_output(state, is_incremental=manager.incremental_streaming_output)


def _complete_last_output(state: Any, *, is_incremental: bool) -> None:
    from sglang.srt.managers.tokenizer_manager import _slice_streaming_output_meta_info

    last = state.out_list[-1]
    if not is_incremental:
        last["output_ids"] = state.output_ids.copy()
        return
    # Every text and every id that came is in an output before it.
    last["text"], last["output_ids"] = "", []
    _slice_streaming_output_meta_info(last["meta_info"], len(state.output_ids), state.customized_info_accumulated)
