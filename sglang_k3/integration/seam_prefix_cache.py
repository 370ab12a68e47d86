"""Seam: K3's prefix cache, by the host's registry, and where the host's scheduler must ask it.

The registry gives a cache its pools. What it does not give is the moment of admission, at which a request gets its
state slot, and the launch of a forward pass, around which states are copied. And the host hands the labels of its
metrics to its own reporter only.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_k3.config import K3Config
from sglang_k3.integration.refusals import PREFIX_CACHE
from sglang_k3.mem.limits import SLOTS_PER_REQUEST, CheckpointLimits
from sglang_k3.mem.replay_cost import ReplayCost
from sglang_k3.options import ServeOptions


def install() -> None:
    from sglang.srt.mem_cache.registry import get_radix_cache_factory, register_radix_cache_backend

    if get_radix_cache_factory(PREFIX_CACHE) is None:
        register_radix_cache_backend(PREFIX_CACHE, _create)


def install_scheduler() -> None:
    for target, hook in (
        ("sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req", _add_one_req),
        ("sglang.srt.managers.scheduler.Scheduler.run_batch", _run_batch),
        ("sglang.srt.managers.scheduler.Scheduler.init_metrics_reporter", _init_metrics),
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


def cost_of(config: K3Config, server_args: Any, req_to_token_pool: Any) -> ReplayCost:
    """What a state and a token take on one attention rank, over all pipeline stages: equal wherever it is asked."""
    states = req_to_token_pool.mamba_pool.mamba_cache
    return ReplayCost.of(
        config,
        tp_size=server_args.tp_size // server_args.dp_size,
        state_itemsize=states.temporal.element_size(),
        dtype_itemsize=states.conv[0].element_size(),
    )


def _create(context: Any) -> Any:
    from sglang_k3.host.prefix_cache import K3PrefixCache

    limits = limits_of(context.server_args, context.params.page_size)
    cost = cost_of(context.model_config.hf_config.k3, context.server_args, context.params.req_to_token_pool)
    policy = ServeOptions.from_server_args(context.server_args).checkpoint_policy
    return K3PrefixCache(context.params, limits, policy, cost)


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


def _init_metrics(original: Callable[..., None], scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """Where the host counts for its endpoint, with the host's labels."""
    from sglang_k3.host.prefix_cache import K3PrefixCache

    original(scheduler, *args, **kwargs)
    context = scheduler.metrics_collector_context
    if context.current_scheduler_metrics_enabled and isinstance(scheduler.tree_cache, K3PrefixCache):
        scheduler.tree_cache.publish(context.collector.labels)


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
