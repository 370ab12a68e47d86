"""Seam: K3's prefix cache, by the host's registry, and where the host's scheduler must ask it.

The registry gives a cache its pools. What it does not give is the moment of admission, at which a request gets its
state slot, and the launch of a forward pass, around which states are copied.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_k3.integration.refusals import PREFIX_CACHE
from sglang_k3.mem.limits import SLOTS_PER_REQUEST, CheckpointLimits


def install() -> None:
    from sglang.srt.mem_cache.registry import get_radix_cache_factory, register_radix_cache_backend

    if get_radix_cache_factory(PREFIX_CACHE) is None:
        register_radix_cache_backend(PREFIX_CACHE, _create)


def install_scheduler() -> None:
    for target, hook in (
        ("sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req", _add_one_req),
        ("sglang.srt.managers.scheduler.Scheduler.run_batch", _run_batch),
        ("sglang.srt.model_executor.model_runner.ModelRunner.forward", _forward),
        ("sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator._calculate_mamba_ratio", _slots_per_request),
    ):
        HookRegistry.register(target, hook, HookType.AROUND)
    HookRegistry.apply_hooks()


def limits_of(server_args: Any, page_size: int) -> CheckpointLimits:
    """What the engine is held to.

    Raises:
        ConfigError: an interval or cap that does not work.
    """
    from sglang_k3.integration.defaults import STATE_CHUNK

    return CheckpointLimits(
        state_chunk=STATE_CHUNK,
        page_size=page_size,
        track_interval=server_args.mamba_track_interval,
        checkpoints_per_path=server_args.k3_checkpoints_per_path,
    )


def _create(context: Any) -> Any:
    from sglang_k3.host.prefix_cache import K3PrefixCache

    return K3PrefixCache(context.params, limits_of(context.server_args, context.params.page_size))


def _add_one_req(original: Callable[..., Any], adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    """Reserve, then commit: a request that the host has no room for gives everything back."""
    from sglang.srt.managers.schedule_policy import AddReqResult

    from sglang_k3.host.prefix_cache import K3PrefixCache
    from sglang_k3.mem.engine import Refusal

    cache = adder.tree_cache
    if not isinstance(cache, K3PrefixCache):
        return original(adder, req, *args, **kwargs)
    refusal = cache.admit(req)
    if refusal is Refusal.SHARED_PREFIX_IN_FLIGHT:
        return AddReqResult.CONTINUE  # it stays in the queue, and those behind it are looked at
    if refusal is not None:
        return AddReqResult.OTHER
    result = original(adder, req, *args, **kwargs)
    if not (adder.can_run_list and adder.can_run_list[-1] is req):
        cache.withdraw(req)
    return result


def _run_batch(original: Callable[..., Any], scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang_k3.host.prefix_cache import K3PrefixCache

    if not isinstance(scheduler.tree_cache, K3PrefixCache):
        return original(scheduler, batch, *args, **kwargs)
    with scheduler.tree_cache.forward(batch):
        return original(scheduler, batch, *args, **kwargs)


def _forward(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang_k3.host.prefix_cache import HostSlots

    slots = getattr(runner.req_to_token_pool, "mamba_allocator", None)
    if isinstance(slots, HostSlots):
        slots.moves.run()
    return original(runner, *args, **kwargs)


def _slots_per_request(original: Callable[..., int], configurator: Any) -> int:
    if configurator.server_args.radix_cache_backend == PREFIX_CACHE:
        return SLOTS_PER_REQUEST
    return original(configurator)
