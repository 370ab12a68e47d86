"""Channels in every order, with every closer missing, cut at every place: streaming and whole text agree."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest

from sglang_k3.chat.channels import Content, Reasoning, collect
from tests.unit.chat.turns import (
    CONTROLS,
    Call,
    Channel,
    Generator,
    Marked,
    Turn,
    as_ids,
    as_text,
    check,
    joined,
    orders,
    parse_ids,
    parse_marked,
    parse_text,
    render,
)

THINKING = (True, False)
TURNS_PER_FORM = 100


def every_closer_missing(thinking: bool, order: tuple[str, ...]) -> list[Turn]:
    """All turns of this order of channels: each closer there or not, the first opener there or not, all endings."""
    bodies = {
        "think": Channel("think", 'hm <b>"\n'),
        "response": Channel("response", "a < b\n{"),
        "tools": Channel("tools", "", (Call("f-1", {"x": "1", "y": [1]}), Call("g", {}, closed=False))),
    }
    turns = []
    for closed in itertools.product((True, False), repeat=len(order)):
        channels = [dataclasses.replace(bodies[kind], closed=last) for kind, last in zip(order, closed, strict=True)]
        firsts = [channels]
        if order and order[0] == ("think" if thinking else "response"):
            firsts.append([dataclasses.replace(channels[0], opened=False), *channels[1:]])
        turns += [Turn(thinking, tuple(first), ending) for first in firsts for ending in range(4)]
    return turns


@pytest.mark.parametrize("thinking", THINKING, ids=["thinking", "not_thinking"])
@pytest.mark.parametrize("order", orders(3), ids="-".join)
def test_channels_in_every_order_with_every_closer_missing(order: tuple[str, ...], thinking: bool):
    for turn in every_closer_missing(thinking, order):
        text = as_text(render(turn))
        events = parse_text(turn, text)
        check(turn, collect(events))
        assert joined(parse_text(turn, *text)) == joined(events), text


@pytest.mark.parametrize("closed", [True, False])
@pytest.mark.parametrize("rest", orders(2), ids="-".join)
def test_thinking_skipped(rest: tuple[str, ...], closed: bool):
    """``close response`` before anything else: all of it is content."""
    answer = Channel("response", "so", opened=False, closed=True)
    others = tuple(Channel(kind, "", (Call("f", {}),) if kind == "tools" else (), closed=closed) for kind in rest)
    turn = Turn(True, (answer, *others))
    assert turn.thinking_skipped
    check(turn, collect(parse_text(turn, as_text(render(turn)))))


def generated(seed: int, *, ids: bool) -> list[Turn]:
    generator = Generator(seed, ids=ids)
    forms = itertools.cycle(itertools.product(orders(3), THINKING))
    return [generator.turn(order, thinking=thinking) for order, thinking in itertools.islice(forms, TURNS_PER_FORM)]


@pytest.mark.parametrize("turn", generated(20261, ids=False), ids=lambda turn: "")
def test_text_cut_at_every_place(turn: Turn):
    text = as_text(render(turn))
    whole = joined(parse_text(turn, text))
    check(turn, collect(whole))
    spoken = [event.text for event in whole if isinstance(event, Content | Reasoning)]
    assert not any(spelled in said for said in spoken for spelled in CONTROLS)
    for at in range(len(text) + 1):
        assert joined(parse_text(turn, text[:at], text[at:])) == whole, (text[:at], text[at:])
    assert joined(parse_text(turn, *text)) == whole


@pytest.mark.parametrize("turn", generated(20262, ids=True), ids=lambda turn: "")
def test_ids_cut_at_every_place_with_texts_that_spell_control_tokens(turn: Turn):
    ids = as_ids(render(turn))
    whole = joined(parse_ids(turn, ids))
    check(turn, collect(whole))
    for parse in (parse_ids, parse_marked):
        for at in range(len(ids) + 1):
            assert joined(parse(turn, ids[:at], ids[at:])) == whole, at
        assert joined(parse(turn, *([token] for token in ids))) == whole


def beginnings(marked: Marked) -> Iterator[str]:
    """The text after every character and every control token: a control token is never cut."""
    for i, item in enumerate(marked):
        before = as_text(marked[:i])
        yield from (before + item[:n] for n in range(len(item))) if isinstance(item, str) else [before]
    yield as_text(marked)


@pytest.mark.parametrize("turn", generated(20263, ids=False), ids=lambda turn: "")
def test_a_stream_that_ends_early_says_the_beginning_of_what_it_would_have_said(turn: Turn):
    if turn.thinking_skipped:
        turn = dataclasses.replace(turn, thinking=False)  # until its closer comes it looks like thinking
    marked = render(turn)
    whole = collect(parse_text(turn, as_text(marked)))
    for text in beginnings(marked):
        part = collect(parse_text(turn, text))
        assert whole.reasoning.startswith(part.reasoning)
        assert whole.content.startswith(part.content)
        assert len(part.tool_calls) <= len(whole.tool_calls)
        for long, short in zip(whole.tool_calls, part.tool_calls, strict=False):
            assert (long.name, long.id) == (short.name, short.id)
            assert long.arguments.startswith(short.arguments)
