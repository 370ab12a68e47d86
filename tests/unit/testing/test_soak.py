"""The soak sees what is wrong: each kind of fault in an answer, a log or the loads has its line."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest

from sglang_k3.testing.client import Client
from sglang_k3.testing.continuations import Sequence, SequenceSet, write_continuations
from sglang_k3.testing.reference import ReferenceModel
from sglang_k3.testing.soak import Request, complaints, count_retractions, judge, plan, wait_until_idle

REQUEST = Request(
    rid="r", prompt=[1, 2], answer=[3, 4, 5], logprobs=[-0.5, -1.0, -1.5], streamed=False, given_up=None, patience=0.0
)
GIVEN_UP = dataclasses.replace(REQUEST, given_up="disconnect")


def reply(ids: list[int], kind: str = "length", logprobs: tuple[float, ...] = (-0.5, -1.0, -1.5)) -> dict[str, Any]:
    served = [(value, token, None) for value, token in zip(logprobs, ids, strict=False)]
    reason = {"type": kind} if kind else None
    meta = {"finish_reason": reason, "num_retractions": 2, "output_token_logprobs": served}
    return {"output_ids": ids, "meta_info": meta}


def test_a_right_answer() -> None:
    outcome = judge(REQUEST, reply([3, 4, 5]))
    assert (outcome.fault, outcome.finished, outcome.tokens, outcome.retractions) == (None, True, 3, 2)


@pytest.mark.parametrize("ids", [[], [3], [3, 4]])
def test_a_given_up_answer_may_end_early(ids: list[int]) -> None:
    for kind in ("", "abort"):
        outcome = judge(GIVEN_UP, reply(ids, kind))
        assert outcome.fault is None and not outcome.finished


@pytest.mark.parametrize(
    ("asked", "served", "fault"),
    [
        (REQUEST, reply([3, 9, 5]), r"token 1 of 3 is 9, but \[4\] is right"),
        (REQUEST, reply([3, 4, 5, 6]), r"token 3 of 3 is 6, but \[\] is right"),
        (REQUEST, reply([3, 4]), "2 tokens of 3"),
        (REQUEST, reply([3, 4], "abort"), "not finished"),
        (REQUEST, {}, "not finished"),
        (REQUEST, reply([3, 4, 5], logprobs=(-0.5, -1.01, -1.5)), "log-prob 1 is -1.01000, but -1.00000 is right"),
        (REQUEST, reply([3, 4, 5], logprobs=(-0.5, float("nan"), -1.5)), "log-prob 1 is nan"),
        (REQUEST, reply([3, 4, 5], logprobs=(-0.5,)), "1 log-probs for 3 tokens"),
        (GIVEN_UP, reply([9], ""), r"token 0 of 3 is 9, but \[3\] is right"),
        (GIVEN_UP, reply([3], "", logprobs=(-0.6,)), "log-prob 0"),
    ],
)
def test_each_fault_is_seen(asked: Request, served: dict[str, Any], fault: str) -> None:
    found = judge(asked, served).fault
    assert found is not None and re.search(fault, found)


def test_a_log_is_searched() -> None:
    log = (
        "Prefill batch\n[x] pool memory leak detected! available_size=3\nTraceback (most recent call last):\n"
        "[x] KV cache pool is full. Retract requests. #retracted_reqs: 3, #new_tokens_gained: 9\n"
        "[x] Testing retraction. #retracted_reqs: 1, #new_tokens_gained: 9, #mamba_num_gained: 3\n"
    )
    assert complaints(log) == ["[x] pool memory leak detected! available_size=3", "Traceback (most recent call last):"]
    assert count_retractions(log) == (4, 3)


class Loads(Client):
    """A server that publishes these loads one after the other."""

    def __init__(self, *loads: dict[str, float]) -> None:
        super().__init__("http://127.0.0.1:1")
        self.loads = list(loads)

    def get_json(self, path: str, *, timeout_s: float = 60.0) -> Any:
        return {"loads": [self.loads.pop(0)]}


def load(timestamp: float, *, running: int = 0, waiting: int = 0, used: int = 0) -> dict[str, float]:
    return {
        "timestamp": timestamp,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_used_tokens": used,
    }


def test_idle_is_what_two_idle_turns_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_k3.testing.soak.POLL_S", 0.0)
    client = Loads(load(1), load(2, waiting=1), load(3), load(3), load(4))
    assert wait_until_idle(client) == (0, [])
    assert client.loads == []
    leaked, faults = wait_until_idle(Loads(load(1, used=7), load(2, used=7)))
    assert leaked == 7 and "7 cached tokens have no owner" in faults[0]


def test_a_server_that_is_never_idle_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sglang_k3.testing.soak.IDLE_LIMIT_S", -1.0)
    (fault,) = wait_until_idle(Loads(load(1, running=1)))[1]
    assert "not idle" in fault


def test_a_plan_asks_for_what_is_known() -> None:
    sequence = Sequence(ids=list(range(100)), given=40, logprobs=[-float(n) for n in range(40, 100)])
    requests = list(plan([sequence], 300, seed=1))
    assert requests == list(plan([sequence], 300, seed=1))
    for request in requests:
        cut = len(request.prompt)
        assert 40 <= cut < 100 and request.answer
        assert request.prompt + request.answer == list(range(cut + len(request.answer)))
        assert request.logprobs in (None, [-float(token) for token in request.answer])
    ways = {(r.streamed, r.given_up) for r in requests}
    assert len(ways) == 6
    assert 10 < sum(r.given_up is not None for r in requests) < 60
    assert len({r.rid for r in requests}) == 300 and len({len(r.rid) for r in requests}) == 1


def test_a_continuation_is_the_greedy_one(load_reference: Callable[..., ReferenceModel]) -> None:
    model = load_reference("default")
    for sequence in write_continuations(model, SequenceSet(count=2, stem=3, branch=5, written=6)):
        prompt, written = sequence.ids[: sequence.given], sequence.ids[sequence.given :]
        assert model.greedy(prompt, len(written))[0] == written
        table = model.logprobs(sequence.ids)
        right = [float(table[n - 1, sequence.ids[n]]) for n in range(sequence.given, len(sequence.ids))]
        assert sequence.logprobs == pytest.approx(right)


@pytest.mark.parametrize("url", ["http://example.com:80", "https://127.0.0.1:1", "http://127.0.0.1.example.com:1", "x"])
def test_only_this_machine_is_asked(url: str) -> None:
    with pytest.raises(ValueError, match="not on this machine"):
        Client(url)
