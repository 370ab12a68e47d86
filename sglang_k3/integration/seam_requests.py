"""Seam: one request of a K3 server cannot end its scheduler, neither by what it asks nor by what the model answers."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.io_struct import GenerateReqInput


def install_main() -> None:
    HookRegistry.register(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request", _check, HookType.AROUND
    )


def install_scheduler() -> None:
    from sglang_k3.host.broken_rows import abort_if_marked
    from sglang_k3.host.penalties import apply_scaling_penalties

    HookRegistry.register("sglang.srt.layers.sampler.Sampler.forward", _sample, HookType.AROUND)
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler._relay_forward_payload", _relay, HookType.AROUND)
    finish = "sglang.srt.managers.schedule_batch.Req.update_finish_state"
    HookRegistry.register(finish, abort_if_marked, HookType.BEFORE)
    HookRegistry.register(
        "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.cache_finished_req", _release, HookType.AROUND
    )
    token_ids = "sglang.srt.layers.logprob_processor.get_token_ids_logprobs"
    HookRegistry.register(token_ids, _token_ids_logprobs, HookType.AROUND)
    penalties = "sglang.srt.sampling.penaltylib.repetition_penalty.apply_scaling_penalties"
    HookRegistry.register(penalties, apply_scaling_penalties, HookType.REPLACE)
    HookRegistry.apply_hooks()


def _check(original: Callable[..., Any], manager: Any, request: Any, *args: Any, **kwargs: Any) -> Any:
    """Every endpoint, and the engine without a server, asks here; what is raised becomes the endpoint's 400."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    from sglang_k3.host.request_limits import check_request

    if getattr(manager.server_args, "is_k3", False) and isinstance(request, GenerateReqInput):
        try:
            check_request(request, manager.model_config.vocab_size)
            _refuse_running_ids(request, manager.rid_to_state)
        except ValueError:
            # What the host does after a stream asks for both; the id is new, as it aborts whatever has it.
            request.is_single, request.rid = True, uuid.uuid4().hex
            raise
    return original(manager, request, *args, **kwargs)


def _refuse_running_ids(request: GenerateReqInput, running: Mapping[str, Any]) -> None:
    """Or the host, when it cleans up after the second request of an id, would abort the first.

    The host makes one id into several, for prompts in a list and for ``n``: a copy is normalized to have them all.
    """
    expanded = copy.copy(request)
    expanded.normalize_batch_and_arguments()
    for name in expanded.rid if isinstance(expanded.rid, list) else [expanded.rid]:
        if name in running:
            raise ValueError(f"rid={name!a} is the id of a request that is still running: choose another, or none.")


def _sample(
    original: Callable[..., torch.Tensor], sampler: Any, logits_output: Any, *args: Any, **kwargs: Any
) -> torch.Tensor:
    from sglang_k3.host.broken_rows import disarm

    filled = disarm(logits_output.next_token_logits)
    return filled.mark(original(sampler, logits_output, *args, **kwargs))


def _relay(original: Callable[..., None], scheduler: Any, future_indices: Any, batch_result: Any) -> None:
    """The next step may begin before the marks are seen, and is given token 0 in their place."""
    token_ids = batch_result.next_token_ids
    if token_ids is not None:
        batch_result.next_token_ids = token_ids.clamp(min=0)
    original(scheduler, future_indices, batch_result)
    batch_result.next_token_ids = token_ids


def _token_ids_logprobs(
    original: Callable[..., Any], logprobs: torch.Tensor, asked: Any, no_copy_to_cpu: bool = False
) -> tuple[list[Any], list[Any]]:
    """The host makes lists of the rows' tensors later, and has none for a row that asks for no token ids."""
    values, ids = original(logprobs, asked, no_copy_to_cpu)
    if no_copy_to_cpu:
        values = [logprobs.new_empty(0) if isinstance(value, list) else value for value in values]
    return values, ids


def _release(original: Callable[..., None], tree: Any, req: Any, *args: Any, **kwargs: Any) -> None:
    from sglang_k3.host.broken_rows import drop_broken_states

    original(tree, req, *args, **kwargs)
    drop_broken_states(tree, req)
