"""Turns of the host's streaming sessions over K3's prefix cache, and what of the host's sessions would end a server."""

from __future__ import annotations

import asyncio
import inspect
from array import array
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from sglang.srt.managers.io_struct import SessionParams
from sglang.srt.managers.schedule_batch import FINISH_ABORT, FINISH_LENGTH, BaseFinishReason
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.session.session_controller import Session, SessionController, SessionReqNode

from sglang_k3.integration.seam_sessions import _clear, _create, _leave_the_queue, _open
from tests.sglang.test_prefix_cache import TOKENS, Host, Req

pytestmark = pytest.mark.sglang
PROMPT = [*range(10)]


class Streaming:
    """A streaming session of the host, and its turns over K3's cache."""

    def __init__(self) -> None:
        self.host = Host()
        self.controller = SessionController(self.host.cache)
        self.controller.open(SimpleNamespace(session_id="s", capacity_of_str_len=0, streaming=True, timeout=None))
        self.session = self.controller.sessions["s"]

    def begin(self, prompt: list[int], row: int = 1) -> Req:
        """A turn that is prefilled."""
        req = self.host.admit("turn", prompt, row)
        req.session, req.origin_input_ids_unpadded, req.multimodal_inputs = self.session, req.origin_input_ids, None
        self.session._inflight = True
        self.host.extend(req)
        return req

    def end(self, req: Req, reason: Any, **options: bool) -> None:
        req.finished_reason = reason
        self.host.finish(req, **options)

    def close(self) -> None:
        self.controller.close(SimpleNamespace(session_id="s"))

    def left_by_eviction(self) -> int:
        self.host.cache.evict_all()
        return self.host.cache.total_size()


@pytest.fixture
def streaming(monkeypatch: pytest.MonkeyPatch) -> Streaming:
    # Not the engine's own way to room, which ends sessions for it.
    made = Streaming()
    made.host.cache.evict_all = lambda: made.host.cache._cache.evict_kv(TOKENS)
    return made


def test_a_turn_that_ends_is_what_the_next_one_starts_from(streaming: Streaming) -> None:
    first = streaming.begin(PROMPT)
    streaming.end(first, FINISH_LENGTH(0))
    assert not streaming.session._inflight and [*streaming.session.req_nodes] == ["turn"]
    assert streaming.left_by_eviction() == 8
    second = streaming.begin([*PROMPT, 77, 78], row=2)
    assert len(second.prefix_indices) == 8
    streaming.end(second, FINISH_LENGTH(0))
    streaming.close()
    assert streaming.left_by_eviction() == 0 and streaming.host.is_balanced()


def test_room_for_others_is_taken_from_a_session(streaming: Streaming) -> None:
    streaming.end(streaming.begin(PROMPT), FINISH_LENGTH(0))
    assert (streaming.host.cache.evictable_size(), streaming.host.cache.protected_size()) == (8, 0)
    assert streaming.host.cache.evict(EvictParams(num_tokens=1)).num_tokens_evicted == 8
    streaming.close()
    assert streaming.host.is_balanced()


@pytest.mark.covers("k3", "session", "abort")
@pytest.mark.parametrize("is_insert", [True, False])
def test_a_turn_that_is_aborted_leaves_the_session_where_it_was(streaming: Streaming, is_insert: bool) -> None:
    first = streaming.begin(PROMPT)
    streaming.end(first, FINISH_LENGTH(0))
    aborted = streaming.begin([*PROMPT, *range(20, 30)], row=2)
    streaming.end(aborted, FINISH_ABORT("gone"), is_insert=is_insert)
    assert not streaming.session._inflight
    assert [node.req for node in streaming.session.req_nodes.values()] == [first]
    assert streaming.left_by_eviction() == 8
    streaming.close()
    assert streaming.left_by_eviction() == 0 and streaming.host.is_balanced()


@pytest.mark.covers("k3", "session", "retract")
def test_a_turn_that_is_retracted_goes_on_later(streaming: Streaming) -> None:
    streaming.end(streaming.begin(PROMPT), FINISH_LENGTH(0))
    streaming.end(streaming.begin([*PROMPT, *range(20, 30)], row=2), None, is_insert=False)
    assert streaming.session._inflight
    again = streaming.begin([*PROMPT, *range(20, 30)], row=2)
    assert len(again.prefix_indices) == 8
    streaming.end(again, FINISH_LENGTH(0))
    assert [node.req for node in streaming.session.req_nodes.values()] == [again]


@pytest.mark.parametrize("reason", [FINISH_LENGTH(0), FINISH_ABORT("gone")], ids=["finished", "aborted"])
def test_a_session_that_is_closed_under_its_turn_holds_nothing_from_the_turn_s_end_on(
    streaming: Streaming, reason: BaseFinishReason
) -> None:
    streaming.end(streaming.begin(PROMPT), FINISH_LENGTH(0))
    second = streaming.begin([*PROMPT, 77, 78], row=2)
    streaming.close()
    assert streaming.left_by_eviction() == 8
    streaming.end(second, reason)
    assert streaming.left_by_eviction() == 0
    streaming.controller.maybe_reap(now=float("inf"))
    assert not streaming.controller.sessions and streaming.host.is_balanced()


def create(session: Session, rid: str, *, append_to: str | None = None, replace: bool = False) -> Any:
    params = SessionParams(id="s", rid=append_to, replace=replace)
    request = MagicMock(rid=rid, input_ids=array("q", [1, 2]), session_params=params, mm_inputs=None)
    original = inspect.unwrap(Session.create_req)  # also where another test has loaded the plugin
    return _create(original, session, request, None, 384)


def test_a_turn_beside_another_is_refused_and_is_nobody_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang.srt.managers.schedule_batch.get_parallel", lambda: SimpleNamespace(tp_rank=1))
    session = Session(0, "s", streaming=True)
    running, refused = create(session, "one"), create(session, "two")
    assert running.session is session and running.to_finish is None
    assert refused.session is None and "already has an active request" in refused.to_finish.message
    assert session._inflight


def queue_of(*reqs: Any) -> SimpleNamespace:
    return SimpleNamespace(waiting_queue=[*reqs])


def a_turn() -> SimpleNamespace:
    session = Session(0, "s", streaming=True)
    session._inflight = True
    return SimpleNamespace(session=session)


def test_a_turn_that_leaves_the_queue_is_over() -> None:
    aborted, waiting, plain = a_turn(), a_turn(), SimpleNamespace(session=None)
    _leave_the_queue(
        lambda scheduler, rid: scheduler.waiting_queue.remove(aborted), queue_of(aborted, plain, waiting), 0
    )
    assert not aborted.session._inflight and waiting.session._inflight


def test_a_session_that_is_closed_while_its_turn_waits_holds_nothing_once_it_leaves() -> None:
    released: list[str] = []
    turn = a_turn()
    turn.session.close_on_finish = True
    queue = queue_of(turn)
    queue.tree_cache = SimpleNamespace(release_session=released.append)
    _leave_the_queue(lambda scheduler: scheduler.waiting_queue.clear(), queue)
    assert released == ["s"]


@pytest.mark.parametrize("is_refused", [True, False])
def test_a_turn_that_a_full_queue_does_not_let_in_is_over(is_refused: bool) -> None:
    turn = a_turn()
    assert _leave_the_queue(lambda scheduler, req: is_refused, queue_of(), turn) is is_refused
    assert turn.session._inflight is not is_refused


def test_the_host_takes_requests_out_of_its_queue_nowhere_else() -> None:
    """Beside these three, the queue is written where it is made and where its requests begin to run."""
    source = inspect.getsource(inspect.getmodule(Scheduler))
    assert source.count("self.waiting_queue.pop(") == 2
    assert source.count("self.waiting_queue = ") == 2 and source.count("self.waiting_queue: List[Req] = []") == 1


def a_req(rid: str, reason: Any = "length") -> MagicMock:
    ids = array("q", [1, 2])
    return MagicMock(
        rid=rid, finished_reason=reason, origin_input_ids=ids, origin_input_ids_unpadded=ids, output_ids=ids
    )


@pytest.mark.parametrize("begin", [None, "0"])
def test_a_session_is_begun_anew(begin: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's own fails without a rid; and with one if an id came twice, or many requests follow each other."""
    original = inspect.unwrap(SessionReqNode.clear)
    monkeypatch.setattr(SessionReqNode, "clear", lambda node, nodes: _clear(original, node, nodes))
    session = Session(0, "s")
    node = None
    for rid in map(str, range(1500)):
        node = session.req_nodes[rid] = SessionReqNode(a_req(rid), node)
    running = a_req("1", reason=None)
    for req in (a_req("1"), running):
        session.req_nodes["1"] = SessionReqNode(req, session.req_nodes["0"])
    create(session, "new", append_to=begin, replace=True)
    assert {*session.req_nodes} == ({"new"} if begin is None else {"0", "new"})
    assert isinstance(running.to_finish, FINISH_ABORT)


@pytest.mark.parametrize(
    ("ranks", "timeout", "says"),
    [
        pytest.param(
            *({"dp_size": 2}, None, "a session needs --dp-size 1: .* any of the 2 ranks"),
            marks=pytest.mark.refuses("session", "dp"),
        ),
        ({"tp_size": 2, "pp_size": 2}, 5.0, "timeout=5.0 .* each of the 4 ranks for itself.*leave it out"),
    ],
)
def test_a_session_that_ranks_would_not_agree_on_is_refused(
    ranks: dict[str, int], timeout: float | None, says: str
) -> None:
    sizes = {"tp_size": 1, "pp_size": 1, "dp_size": 1, "is_k3": True}
    request = SimpleNamespace(timeout=timeout, session_id="s")
    with pytest.raises(ValueError, match=says):
        _open(MagicMock(), SimpleNamespace(server_args=SimpleNamespace(**sizes | ranks)), request)
    for other in (sizes, sizes | ranks | {"is_k3": False}):
        assert _open(lambda *_: "opened", SimpleNamespace(server_args=SimpleNamespace(**other)), request) == "opened"


def test_an_id_that_no_message_can_carry_opens_nothing() -> None:
    opened = MagicMock()
    args = SimpleNamespace(tp_size=1, pp_size=1, dp_size=1, is_k3=True)
    with pytest.raises(ValueError, match="session_id is not Unicode text"):
        _open(opened, SimpleNamespace(server_args=args), SimpleNamespace(timeout=None, session_id="\ud800"))
    assert not opened.called


def test_the_host_s_open_is_awaited() -> None:
    """What ``_open`` returns is awaited by the endpoint."""
    assert asyncio.iscoroutinefunction(inspect.unwrap(TokenizerManager.open_session))
