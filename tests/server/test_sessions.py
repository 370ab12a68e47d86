"""Sessions of the host: each turn is answered like the whole conversation, and starts from the state of the last."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sglang_k3.testing.cache import ensure_tiny
from sglang_k3.testing.server import ResponseError, ServerProcess, sglang_command
from sglang_k3.testing.soak import EAGER, SMALL_POOLS, complaints, count_retractions, wait_until_idle
from tests.kit.configurations import DEVICE_FLAGS, Configuration, Served
from tests.kit.host_plugin import install_into
from tests.kit.parity import Answer, assert_parity, generate, prompt_ids

FLAGS = ("--enable-streaming-session", "--max-running-requests", "2")
PAGED = ("--page-size", "16", "--chunked-prefill-size", "16")
CONFIGURATIONS = [
    Configuration("sessions", flags=FLAGS),
    Configuration("sessions-odd-paged-chunk-16", preset="odd", flags=(*FLAGS, *PAGED), chunk=16),
    Configuration("sessions-no-overlap", flags=(*FLAGS, "--disable-overlap-schedule")),
    Configuration("sessions-pp2", flags=(*FLAGS, "--pp-size", "2")),
    Configuration("sessions-tp2-ep2", flags=(*FLAGS, "--tp-size", "2", "--ep-size", "2")),
]
in_each_configuration = pytest.mark.parametrize(
    "served",
    [pytest.param(c, id=c.name) for c in CONFIGURATIONS],
    indirect=True,
)
pytestmark = [pytest.mark.server, pytest.mark.full, pytest.mark.covers("session", "flush")]
TALKERS, SESSIONS, TURNS = 6, 2, 5  # at once, each one's after each other, of each
LONG = 3000  # tokens of an answer that nobody waits for


class Talk:
    """A session, and what was said in it: the reference is asked for the whole of it, without a session."""

    def __init__(self, served: Served, *, streaming: bool = True, seed: int = 0) -> None:
        self.served = served
        self.history: list[int] = []
        self._random = random.Random(seed)
        body = {"capacity_of_str_len": 100_000, "streaming": streaming}
        self.id = served.server.post_json("/open_session", body)

    def words(self, length: int) -> list[int]:
        return prompt_ids(length, seed=self._random.randrange(1 << 30), vocab_size=self.served.oracle.vocab_size)

    def ask(
        self, words: list[int], num_tokens: int, *, rid: str | None = None, follow: str | None = None, **params: Any
    ) -> Answer:
        """What the session answers, whatever it takes for the prompt."""
        fields = {"session_params": {"id": self.id, "rid": follow, **params}} | ({"rid": rid} if rid else {})
        return generate(self.served.server, words, num_tokens, self.served.oracle.vocab_size, fields=fields)

    def check(self, answer: Answer, prompt: list[int]) -> int:
        """Hold an answer against the reference's to ``prompt``; returns the tokens that came from the cache."""
        whole = dataclasses.replace(answer, prompt=prompt)
        assert_parity(whole, self.served.oracle, self.served.configuration.tolerance)
        return answer.cached_tokens

    def turn(self, words: list[int], num_tokens: int = 20) -> int:
        answer = self.ask(words, num_tokens)
        self.history += words
        cached = self.check(answer, self.history)
        self.history += answer.tokens
        return cached

    def body(self, rid: str, words: list[int]) -> dict[str, Any]:
        params = {"max_new_tokens": LONG, "temperature": 0, "ignore_eos": True}
        return {"rid": rid, "input_ids": words, "sampling_params": params, "session_params": {"id": self.id}}

    def close(self) -> None:
        self.served.server.post_text("/close_session", {"session_id": self.id})


@pytest.fixture
def talk(served: Served) -> Iterator[Talk]:
    served.server.post_text("/flush_cache?timeout=30", {})
    begin = served.server.log_path.stat().st_size
    talk = Talk(served)
    yield talk
    talk.close()
    assert wait_until_idle(served.server) == (0, [])
    assert complaints(served.server.log_path.read_text()[begin:]) == []


@in_each_configuration
def test_each_turn_starts_from_the_last_state(talk: Talk) -> None:
    cached = [talk.turn(talk.words(90)) for _ in range(4)]
    # The prompts are 90, 200, 310 and 420 long, and the last grid point inside each has a state.
    assert cached == [0, 64, 192, 256]


@pytest.mark.covers("abort", "stream")
@in_each_configuration
def test_a_turn_that_is_given_up_counts_for_nothing(talk: Talk) -> None:
    talk.turn(talk.words(90))
    server = talk.served.server
    stream = server.stream("/generate", {**talk.body("given-up", talk.words(50)), "stream": True})
    next(stream)
    server.post_text("/abort_request", {"rid": "given-up"})
    assert [*stream][-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert talk.turn(talk.words(30)) == 64


@pytest.mark.covers("abort", "stream")
@in_each_configuration
def test_a_turn_that_is_given_up_before_it_runs_counts_for_nothing(talk: Talk) -> None:
    talk.turn(talk.words(90))
    server = talk.served.server
    others = [{**talk.body(f"other-{n}", talk.words(9)), "session_params": None, "stream": True} for n in range(2)]
    streams = [server.stream("/generate", body) for body in others]
    for stream in streams:
        next(stream)  # both run, and there is no room for a third
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.post_json, "/generate", talk.body("waiting", talk.words(50)))
        while not waiting.done():  # an abort that comes before the turn is lost
            server.post_text("/abort_request", {"rid": "waiting"})
            time.sleep(0.2)
        assert waiting.result(60)["meta_info"]["finish_reason"]["type"] == "abort"
    for n, stream in enumerate(streams):
        server.post_text("/abort_request", {"rid": f"other-{n}"})
        assert [*stream][-1]["meta_info"]["completion_tokens"] < LONG, "it ended, and the turn may have run"
    assert talk.turn(talk.words(30)) == 64


@pytest.mark.covers("abort", "stream")
@in_each_configuration
def test_one_turn_at_a_time_and_none_behind_a_close(talk: Talk) -> None:
    talk.turn(talk.words(90))
    server = talk.served.server
    stream = server.stream("/generate", {**talk.body("running", talk.words(50)), "stream": True})
    next(stream)
    for _ in range(2):  # the refusal of one turn does not let the next one in
        with pytest.raises(ResponseError, match="already has an active request"):
            talk.ask([1], 1)
    talk.close()
    with pytest.raises(ResponseError, match="close was requested"):
        talk.ask([1], 1)
    server.post_text("/abort_request", {"rid": "running"})
    list(stream)
    wait_for(lambda: "does not exist" in refusal(talk))


@in_each_configuration
def test_a_session_that_does_not_stream(served: Served) -> None:
    """A turn follows any earlier one, with its answer or without, or a part of it, or puts an end to all of them."""
    served.server.post_text("/flush_cache?timeout=30", {})
    talk = Talk(served, streaming=False)
    first, words = talk.words(130), talk.words(20)
    said = talk.ask(first, 10, rid="first")
    assert talk.check(said, first) == 0
    follows = talk.ask(words, 10, rid="follows", follow="first")
    assert talk.check(follows, [*first, *said.tokens, *words]) == 128
    without = talk.ask(words, 10, follow="first", drop_previous_output=True)
    assert talk.check(without, [*first, *words]) == 128
    cached = [talk.check(talk.ask(words, 10, follow="first", offset=70), [*first[:70], *words]) for _ in range(2)]
    assert cached[1] == 64
    anew = talk.ask(words, 10, rid="anew", replace=True)
    assert talk.check(anew, words) == 0
    with pytest.raises(ResponseError, match="Invalid request session id"):
        talk.ask(words, 10, follow="follows")
    in_place = talk.ask(words, 10, rid="anew", follow="anew", replace=True)
    assert talk.check(in_place, [*words, *anew.tokens, *words]) == 0
    talk.close()
    assert wait_until_idle(served.server) == (0, [])


@pytest.fixture
def pressed(tiny_cache: Path, tmp_path: Path) -> Iterator[Served]:
    """Room for few, and requests are taken back every so many steps."""
    folder = ensure_tiny(tiny_cache)
    configuration = Configuration("sessions-under-pressure", flags=("--enable-streaming-session", *SMALL_POOLS))
    log = tiny_cache / "logs" / "sessions-under-pressure.log"
    command = sglang_command(str(folder), *DEVICE_FLAGS, *configuration.flags)
    env = os.environ | EAGER | install_into(tmp_path / "site", "tests.kit.step_ledger")
    with ServerProcess(command, log_path=log, env=env) as server:
        yield Served(configuration, server, configuration.oracle(folder))
        server.check_alive()


@pytest.mark.covers("k3", "overlap", "chunks", "retract", "abort")
def test_sessions_under_pressure(pressed: Served) -> None:
    """Retracted, given up at any moment, closed beside a turn: what is answered is right, and nothing is left."""
    with ThreadPoolExecutor(TALKERS) as pool:
        talks = list(pool.map(lambda seed: converse(pressed, seed), range(TALKERS)))
    answers = [answer for answered in talks for answer in answered]
    assert len(answers) > 0.5 * TALKERS * SESSIONS * TURNS
    for answer in answers:
        assert_parity(answer, pressed.oracle, pressed.configuration.tolerance)
    assert wait_until_idle(pressed.server) == (0, [])
    log = pressed.server.log_path.read_text()
    assert complaints(log) == [] and count_retractions(log)[0] > 0 and "ledger: 100 checks" in log


def converse(served: Served, seed: int) -> list[Answer]:
    """Sessions one after the other, some of whose turns are given up; the answers, each to all that was said."""
    rng, answers = random.Random(seed), []
    for session in range(SESSIONS):
        talk = Talk(served, seed=1000 * seed + session)
        for turn in range(TURNS):
            words, rid = talk.words(rng.randint(1, 60)), f"{seed}-{session}-{turn}"
            if rng.random() < 0.3:
                killer = threading.Timer(
                    rng.uniform(0.0, 1.5), served.server.post_text, ("/abort_request", {"rid": rid})
                )
                killer.start()
                with contextlib.suppress(ResponseError):
                    served.server.post_json("/generate", talk.body(rid, words))
                killer.join()
                continue
            answer = dataclasses.replace(talk.ask(words, rng.randint(1, 30)), prompt=[*talk.history, *words])
            answers.append(answer)
            talk.history = [*answer.prompt, *answer.tokens]
        talk.close()
    return answers


def refusal(talk: Talk) -> str:
    with pytest.raises(ResponseError) as refused:
        talk.ask([1], 1)
    return str(refused.value)


def wait_for(condition: Any, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        time.sleep(0.1)
