"""Seam: what the host's sessions leave to their prefix cache, and what ends their scheduler.

A streaming session has one turn at a time, and its cache says when the turn is over. A turn that leaves the queue
before it runs never comes to the cache, and the session would wait for it for ever. One that is refused beside the
turn that runs comes there, and would end the other's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_k3.host.request_limits import check_wire

CONTROLLER = "sglang.srt.session.session_controller"
SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


def install_main() -> None:
    target = "sglang.srt.managers.tokenizer_manager.TokenizerManager.open_session"
    HookRegistry.register(target, _open, HookType.AROUND)


def install_scheduler() -> None:
    for target, hook in (
        (f"{CONTROLLER}.Session.create_req", _create),
        (f"{CONTROLLER}.SessionReqNode.clear", _clear),
        (f"{SCHEDULER}.abort_request", _leave_the_queue),
        (f"{SCHEDULER}._abort_on_waiting_timeout", _leave_the_queue),
        (f"{SCHEDULER}._abort_on_queued_limit", _leave_the_queue),
    ):
        HookRegistry.register(target, hook, HookType.AROUND)
    HookRegistry.apply_hooks()


def is_turn(req: Any) -> bool:
    """Whether a request is the one turn of a streaming session."""
    return req.session is not None and bool(req.session.streaming)


def _open(original: Callable[..., Any], manager: Any, request: Any, *rest: Any) -> Any:
    """Refuse what the host's ranks would not agree on; what is raised becomes a 400."""
    args = manager.server_args
    is_k3 = getattr(args, "is_k3", False)
    if is_k3:
        check_wire("session_id", request.session_id)
    if is_k3 and args.dp_size > 1:
        raise ValueError(
            f"a session needs --dp-size 1: a turn goes to any of the {args.dp_size} ranks, which know only their own."
        )
    ranks = args.tp_size * args.pp_size
    if is_k3 and request.timeout is not None and ranks > 1:
        raise ValueError(
            f"timeout={request.timeout} of a session is measured by each of the {ranks} ranks for itself, and their "
            "caches would differ: leave it out, and close the session."
        )
    return original(manager, request, *rest)


def _create(original: Callable[..., Any], session: Any, recv_req: Any, *args: Any, **kwargs: Any) -> Any:
    params = recv_req.session_params
    if not session.streaming and params.replace and params.rid is None:
        # The host deletes from the nodes while it iterates over them.
        for node in session.req_nodes.values():
            node.abort()
        session.req_nodes.clear()
    req = original(session, recv_req, *args, **kwargs)
    if session.streaming and req.to_finish is not None:
        req.session = None
    return req


def _clear(original: Callable[..., None], node: Any, nodes: dict[str, Any]) -> None:
    """In place of the host's own, which a request id that comes twice in a session or a long one would break."""
    left = [node]
    while left:
        node = left.pop()
        left += node.children
        node.abort()
        nodes.pop(node.req.rid, None)


def _leave_the_queue(original: Callable[..., Any], scheduler: Any, *args: Any) -> Any:
    """Of the host's methods that take requests out of the queue: such a turn is over."""
    turns = [req for req in scheduler.waiting_queue if is_turn(req)]
    result = original(scheduler, *args)
    gone = []
    if turns:
        waiting = set(map(id, scheduler.waiting_queue))
        gone = [req for req in turns if id(req) not in waiting]
    if result is True and is_turn(args[0]):  # the queue is full, and this one is not let in
        gone.append(args[0])
    for req in gone:
        req.session.abort_req()
        if req.session.close_on_finish:  # now, and not when this rank's clock says so
            scheduler.tree_cache.release_session(req.session.session_id)
    return result
