"""Seam: ``GET /k3/cache_report``, which ``sglang-k3 cache-report`` asks.

The question goes to the schedulers as the host's own one about their state does, marked by its id, and each of them
that answers such questions, one per data-parallel rank, describes its prefix cache. It needs the key that the host's
``/server_info`` needs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_k3.mem.cache_report import ENDPOINT

QUESTION: Final = "k3_cache_report"


def install_main() -> None:
    HookRegistry.register(
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server", _add_endpoint, HookType.AROUND
    )


def install_scheduler() -> None:
    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.get_internal_state", _answer, HookType.AROUND)
    HookRegistry.apply_hooks()


def _add_endpoint(original: Callable[..., Any], server_args: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang.srt.entrypoints.http_server import app

    if getattr(server_args, "is_k3", False):
        app.add_api_route(ENDPOINT, cache_report, methods=["GET"])
    return original(server_args, *args, **kwargs)


async def cache_report() -> Any:
    """``{"ranks": [...]}``, a description per data-parallel rank; 409 where the tree is not K3's own."""
    from fastapi import HTTPException
    from fastapi.responses import ORJSONResponse
    from sglang.srt.entrypoints.http_server import get_global_state
    from sglang.srt.managers.io_struct import GetInternalStateReq

    manager = get_global_state().tokenizer_manager
    manager.auto_create_handle_loop()
    answers = await manager.get_internal_state_communicator(GetInternalStateReq(rid=QUESTION))
    reports = [answer.internal_state for answer in answers]
    others = [report["other"] for report in reports if "other" in report]
    if others:
        raise HTTPException(
            status_code=409,
            detail=f"this server's prefix cache is the host's ({others[0]}), which does not describe itself: start it "
            "without --disable-radix-cache and without the flags of the host's tree",
        )
    return ORJSONResponse({"ranks": sorted(reports, key=lambda report: report["dp_rank"])})


def _answer(original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
    from sglang.srt.managers.io_struct import GetInternalStateReqOutput

    from sglang_k3.host.prefix_cache import K3PrefixCache

    if request.rid != QUESTION:
        return original(scheduler, request)
    cache = scheduler.tree_cache
    if isinstance(cache, K3PrefixCache):
        return GetInternalStateReqOutput(internal_state={"dp_rank": scheduler.ps.dp_rank or 0, **cache.report()})
    return GetInternalStateReqOutput(internal_state={"other": type(cache).__name__})
