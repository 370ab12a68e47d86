"""Damaged turns: 100,000 of them never raise, never leak a marker, never lose a call, and streaming equals whole."""

from __future__ import annotations

import random
import re

import pytest

from sglang_k3.chat.channels import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Event,
    MalformedCall,
    MessageEnd,
    Reasoning,
)
from tests.unit.chat.turns import (
    CONTROLS,
    Generator,
    Turn,
    as_text,
    joined,
    orders,
    parse_text,
    render,
)

MUTATIONS = 100_000
BATCHES = 10
INSERTED = (
    *(*CONTROLS, *'<|>" \n{}=', "open", "close", "think", "response", "tools", "call", "argument", "message", "x" * 40),
    *("<|open|>call", '<|open|>argument key="k"<|sep|>', "<|open|>json<|sep|>", "<|close|>call<|sep|>"),
)
CALL = re.compile(r'<\|open\|>call(?: tool="[^"<]*")?(?: index="\d+")?<\|sep\|>')


def mutated(text: str, rng: random.Random) -> str:
    for _ in range(rng.randrange(1, 4)):
        a, b = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
        b = min(b, a + rng.choice((1, 3, 10, 30)))
        match rng.randrange(5):
            case 0:
                text = text[:a] + text[b:]
            case 1:
                text = text[:b] + text[a:]
            case 2:
                text = text[:a] + rng.choice(INSERTED) + text[a:]
            case 3:
                text = text[:a] + rng.choice(INSERTED) + text[b:]
            case 4:
                text = text[:a] + text[b:] + text[a:b]
    return text[: rng.randrange(len(text) + 1)] if rng.random() < 0.2 else text


def check_events(events: list[Event]) -> None:
    """The grammar of events: calls one after the other, each with one end; the end of the message last and once."""
    current, started = None, 0
    for event in events[:-1]:
        match event:
            case CallStart(index):
                assert current is None and index == started
                current, started = index, started + 1
            case CallArguments(index, fragment):
                assert index == current and fragment
            case CallEnd(index):
                assert index == current
                current = None
            case MalformedCall(index, raw, reason):
                assert index == current and raw and reason
                current = None
            case MessageEnd():
                raise AssertionError("an event after the end")
            case Content(text) | Reasoning(text):
                assert current is None and text
    assert current is None
    assert events[-1] == MessageEnd()


def check_mutation(text: str, turn: Turn, rng: random.Random) -> None:
    events = parse_text(turn, text)
    check_events(events)
    whole = joined(events)
    spoken = {kind: "".join(event.text for event in whole if isinstance(event, kind)) for kind in (Content, Reasoning)}
    assert not any(spelled in said for said in spoken.values() for spelled in CONTROLS)
    opened = len(CALL.findall(text)) if "message" not in text and "<|end_of_msg|>" not in text else 0
    assert sum(isinstance(event, CallStart | MalformedCall) for event in events) >= opened
    at, to = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
    assert joined(parse_text(turn, text[:at], text[at:to], text[to:])) == whole


@pytest.mark.parametrize("batch", range(BATCHES))
def test_damaged_turns(batch: int):
    generator = Generator(batch)
    rng = random.Random(1000 + batch)
    turns = [generator.turn(rng.choice(orders(2)[1:]), thinking=rng.random() < 0.5) for _ in range(100)]
    rendered = [(turn, as_text(render(turn))) for turn in turns]
    for _ in range(MUTATIONS // BATCHES):
        turn, text = rng.choice(rendered)
        text = mutated(text, rng)
        try:
            check_mutation(text, turn, rng)
        except Exception as error:
            raise AssertionError(f"thinking={turn.thinking}, text={text!r}") from error
