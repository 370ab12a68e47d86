"""Many requests at once against a small server, each answer held against the reference's.

Prompts share prefixes, some answers are streamed, some requests are given up halfway, and the pools of ``SMALL_POOLS``
are too small for what is admitted, so that running requests are retracted and begun again. Whatever happens, a finished
answer is the reference's, an aborted one begins like it, and in the end every slot is back.

    sequences = ensure_continuations(folder, SequenceSet(), cache)
    with ServerProcess(sglang_command(str(folder), *SMALL_POOLS), log_path=log, env=os.environ | EAGER) as server:
        report = soak(server, log, plan(sequences, 1000, seed=0), concurrency=24)
        assert not report.faults
"""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import random
import re
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, Literal

from tqdm import tqdm

from sglang_k3.testing.client import Client, ResponseError
from sglang_k3.testing.continuations import Sequence as Continuation

# Requests of up to 550 tokens, of which two fit, and the host hardly reserves room for what they will write: what they
# share of their prefixes lets more of them in. After a retraction it reserves more, and must come back from that soon
# to retract again. States are kept often, and a prompt needs several chunks.
SMALL_POOLS = (
    *("--max-total-tokens", "1280", "--max-running-requests", "12", "--chunked-prefill-size", "128"),
    *("--schedule-conservativeness", "0.2", "--mamba-track-interval", "64"),
)
# Beside that the host's own test switch takes a request back every so many steps, room or not.
EAGER = {
    "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS": "1",
    "SGLANG_RETRACT_DECODE_STEPS": "1",
    "SGLANG_TEST_RETRACT": "1",
    "SGLANG_TEST_RETRACT_INTERVAL": "40",
}
MAX_NEW_TOKENS = 64
ABORTED_SHARE = 0.1
MAX_LOGPROB_ERROR = 2e-3
ANSWER_LIMIT_S = 300.0
IDLE_LIMIT_S = 60.0
POLL_S = 0.2

_RETRACTED = re.compile(r"(KV cache pool is full|Testing retraction)\..* #retracted_reqs: (\d+)")
_COMPLAINT = re.compile(r"leak|Traceback|use-after-free", re.IGNORECASE)

Way = Literal["disconnect", "abort_request"]


@dataclasses.dataclass(frozen=True)
class Request:
    """One request whose answer is known.

    Attributes:
        prompt, answer: tokens.
        logprobs: of the answer, if the server is to return its own.
        given_up: how the client ends the request before its answer is complete; None to let it finish.
        patience: when: after so many tokens of a stream, or so many seconds for a whole answer.
    """

    rid: str
    prompt: list[int]
    answer: list[int]
    logprobs: list[float] | None
    streamed: bool
    given_up: Way | None
    patience: float


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What came of a request.

    Attributes:
        tokens: how many were answered.
        finished: whether the answer is complete.
        retractions: how often the server took the request back while it was running.
        fault: what is wrong; None if all is right.
    """

    tokens: int
    finished: bool
    retractions: int
    fault: str | None


@dataclasses.dataclass(frozen=True)
class Report:
    """A soak in figures.

    Attributes:
        retractions: requests that the server took back while they were running, by its log; a request that comes back
            twice counts twice.
        for_room: those of them that went because the pool was full.
        retracted_answers: finished answers that were retracted on their way.
        leaked_tokens: cached tokens that nobody owns once all is over.
        faults: one line each, wrong answers first, then what the server complains about; empty if all is right.
    """

    requests: int
    finished: int
    aborted: int
    wrong: int
    retractions: int
    for_room: int
    retracted_answers: int
    tokens: int
    leaked_tokens: int
    wall_s: float
    faults: tuple[str, ...]


def plan(sequences: Sequence[Continuation], count: int, *, seed: int) -> Iterable[Request]:
    """``count`` requests, the same ones for the same seed."""
    rng = random.Random(seed)
    for n in range(count):
        sequence = rng.choice(sequences)
        cut = rng.randint(sequence.given, len(sequence.ids) - 1)
        end = min(len(sequence.ids), cut + rng.randint(1, MAX_NEW_TOKENS))
        streamed = rng.random() < 0.5
        given_up: Way | None = rng.choice(("disconnect", "abort_request")) if rng.random() < ABORTED_SHARE else None
        patience = float(rng.randint(1, end - cut)) if streamed else rng.uniform(0.0, 2.0)
        wants_logprobs = rng.random() < 0.5
        yield Request(
            rid=f"soak-{seed}-{n:06}",  # none begins with another: an abort of the host ends all that begin so
            prompt=sequence.ids[:cut],
            answer=sequence.ids[cut:end],
            logprobs=sequence.logprobs[cut - sequence.given : end - sequence.given] if wants_logprobs else None,
            streamed=streamed,
            given_up=given_up,
            patience=patience,
        )


def soak(client: Client, log: Path, requests: Iterable[Request], *, concurrency: int) -> Report:
    """Send the requests, ``concurrency`` at a time, check what comes back, and wait until the server is idle.

    Args:
        log: the log that the server writes; only what is added from now on counts.
    """
    begin = log.stat().st_size
    outcomes: list[Outcome] = []
    started = time.monotonic()
    with ThreadPoolExecutor(concurrency) as pool:
        pending = [pool.submit(send, client, request) for request in requests]
        try:
            for done in tqdm(as_completed(pending), total=len(pending), desc="soak", unit="request"):
                outcomes.append(done.result())
        finally:
            for future in pending:
                future.cancel()
    wall_s = time.monotonic() - started
    faults = [outcome.fault for outcome in outcomes if outcome.fault is not None]
    wrong = len(faults)
    leaked, late = wait_until_idle(client)
    text = log.read_bytes()[begin:].decode("utf-8", errors="replace")
    faults += [*late, *complaints(text)]
    finished = [outcome for outcome in outcomes if outcome.finished]
    retractions, for_room = count_retractions(text)
    return Report(
        requests=len(outcomes),
        finished=len(finished),
        aborted=len(outcomes) - len(finished),
        wrong=wrong,
        retractions=retractions,
        for_room=for_room,
        retracted_answers=sum(outcome.retractions > 0 for outcome in finished),
        tokens=sum(outcome.tokens for outcome in outcomes),
        leaked_tokens=leaked,
        wall_s=wall_s,
        faults=tuple(faults),
    )


def send(client: Client, request: Request) -> Outcome:
    """One request from its begin to its end."""
    body = {
        "rid": request.rid,
        "input_ids": request.prompt,
        "sampling_params": {"max_new_tokens": len(request.answer), "temperature": 0, "ignore_eos": True},
        "return_logprob": request.logprobs is not None,
        "stream": request.streamed,
    }
    try:
        reply = (_stream if request.streamed else _whole)(client, request, body)
    except (ResponseError, OSError, http.client.HTTPException) as error:
        fault = None if request.given_up else f"{request.rid}: {error!r}"
        return Outcome(tokens=0, finished=False, retractions=0, fault=fault)
    return judge(request, reply)


def _whole(client: Client, request: Request, body: dict[str, Any]) -> dict[str, Any]:
    """The answer in one piece; a client that leaves closes its connection without one."""
    limit_s = request.patience if request.given_up == "disconnect" else ANSWER_LIMIT_S
    killer = threading.Timer(request.patience, _abort, (client, request.rid))
    if request.given_up == "abort_request":
        killer.start()
    try:
        reply: dict[str, Any] = client.post_json("/generate", body, timeout_s=max(0.01, limit_s))
    finally:
        killer.cancel()
    return reply


def _stream(client: Client, request: Request, body: dict[str, Any]) -> dict[str, Any]:
    """The last event of a stream; each holds all tokens so far."""
    reply: dict[str, Any] = {}
    given_up = False
    with contextlib.closing(client.stream("/generate", body, timeout_s=ANSWER_LIMIT_S)) as events:
        for event in events:
            reply = event
            if request.given_up is None or given_up or len(reply.get("output_ids", ())) < request.patience:
                continue
            if request.given_up == "disconnect":
                break
            _abort(client, request.rid)
            given_up = True
    return reply


def _abort(client: Client, rid: str) -> None:
    client.post_text("/abort_request", {"rid": rid})


def judge(request: Request, reply: dict[str, Any]) -> Outcome:
    """Hold a reply of ``/generate`` against the known answer."""
    meta = reply.get("meta_info", {})
    reason = meta.get("finish_reason") or {}
    ids, answer = reply.get("output_ids", []), request.answer
    finished = reason.get("type") == "length"
    fault = None
    if ids != answer[: len(ids)]:
        first = next(n for n, token in enumerate(ids) if n >= len(answer) or token != answer[n])
        fault = f"token {first} of {len(answer)} is {ids[first]}, but {answer[first : first + 1]} is right"
    elif finished and len(ids) < len(answer):
        fault = f"{len(ids)} tokens of {len(answer)}"
    elif not finished and request.given_up is None:
        fault = f"not finished: {reason or reply}"
    elif request.logprobs is not None:
        fault = _judge_logprobs(meta.get("output_token_logprobs") or [], request.logprobs, len(ids))
    if fault is not None:
        fault = f"{request.rid} (prompt of {len(request.prompt)}, retracted {meta.get('num_retractions')}x): {fault}"
    return Outcome(len(ids), finished, int(meta.get("num_retractions") or 0), fault)


def _judge_logprobs(served: list[Any], expected: list[float], num_tokens: int) -> str | None:
    if len(served) != num_tokens:
        return f"{len(served)} log-probs for {num_tokens} tokens"
    for n, ((value, *_), right) in enumerate(zip(served, expected, strict=False)):
        if not abs(value - right) <= MAX_LOGPROB_ERROR:
            return f"log-prob {n} is {value:.5f}, but {right:.5f} is right"
    return None


def wait_until_idle(client: Client) -> tuple[int, list[str]]:
    """Wait until the server has nothing to do and has looked its pools over; tokens without an owner, and faults.

    The host does so in every idle turn of its loop, and publishes its loads at the end of the turn: the second idle
    one that is seen was published behind a check.
    """
    deadline = time.monotonic() + IDLE_LIMIT_S
    first = None
    while True:
        try:
            loads = client.get_json("/v1/loads")["loads"]
        except (ResponseError, OSError, http.client.HTTPException) as error:
            return 0, [f"the server does not say what it is doing: {error!r}"]
        busy = sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)
        stamps = [load["timestamp"] for load in loads]
        if busy:
            first = None
        elif first is None:
            first = stamps
        elif all(now > then for now, then in zip(stamps, first, strict=True)):
            leaked = sum(load["num_used_tokens"] for load in loads)
            return leaked, [f"{leaked} cached tokens have no owner: {loads}"] if leaked else []
        if time.monotonic() > deadline:
            return 0, [f"not idle {IDLE_LIMIT_S:.0f} s after the last request: {loads}"]
        time.sleep(POLL_S)


def complaints(log: str) -> list[str]:
    """Lines of a server's log that speak of a leak or an exception."""
    return [line.strip() for line in log.splitlines() if _COMPLAINT.search(line)]


def count_retractions(log: str) -> tuple[int, int]:
    """Requests that the server took back, by its log, and those of them for want of room."""
    taken = [(why.startswith("KV"), int(number)) for why, number in _RETRACTED.findall(log)]
    return sum(number for _, number in taken), sum(number for full, number in taken if full)
