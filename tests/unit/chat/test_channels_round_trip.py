"""What a well-behaved model writes comes back: rendered by the tests' own renderer, parsed, compared."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_k3.chat.channels import Message, collect
from tests.unit.chat.turns import (
    CONTROLS,
    Call,
    Channel,
    Turn,
    as_ids,
    as_text,
    block,
    joined,
    parse_ids,
    parse_text,
    render,
)

any_text = st.text() | st.lists(st.sampled_from([*CONTROLS, "<|op", "|>", '"', "\n", "x", "think", "call"])).map(
    "".join
)
plain_text = st.text().filter(lambda text: "|>" not in text)
names = st.text("abcXYZ019_.-", min_size=1)


def json_values(text: st.SearchStrategy[str]) -> st.SearchStrategy[Any]:
    scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | text
    return st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(text, inner), max_leaves=8)


def turns(text: st.SearchStrategy[str]) -> st.SearchStrategy[Turn]:
    calls = st.builds(Call, names, st.dictionaries(text, json_values(text), max_size=4) | text)
    tools = st.lists(calls, min_size=1, max_size=4).map(lambda made: Channel("tools", calls=tuple(made)))

    def turn(thinking: bool, reasoning: str, content: str, last: Channel | None) -> Turn:
        think = (Channel("think", reasoning, opened=False),) if thinking else ()
        response = Channel("response", content, opened=thinking)
        return Turn(thinking, (*think, response, *([last] if last else [])))

    return st.builds(turn, st.booleans(), text, text, st.none() | tools)


def check_round_trip(turn: Turn, message: Message) -> None:
    *think, response = (channel for channel in turn.channels if channel.kind != "tools")
    assert message.reasoning == "".join(channel.text for channel in think)
    assert message.content == response.text
    assert message.malformed == ()
    written = [call for channel in turn.channels for call in channel.calls]
    assert [parsed.name for parsed in message.tool_calls] == [call.name for call in written]
    for call, parsed in zip(written, message.tool_calls, strict=True):
        assert parsed.is_complete
        if isinstance(call.arguments, str):
            assert parsed.arguments == block(call.arguments)
        else:
            assert json.loads(parsed.arguments) == call.arguments
            assert [*json.loads(parsed.arguments)] == [*call.arguments]


@given(turn=turns(plain_text), data=st.data())
@settings(max_examples=150, deadline=None)
def test_text(turn: Turn, data: st.DataObject):
    text = as_text(render(turn))
    events = parse_text(turn, text)
    check_round_trip(turn, collect(events))
    at = data.draw(st.integers(0, len(text)))
    assert joined(parse_text(turn, text[:at], text[at:])) == joined(events)


@given(turn=turns(any_text), data=st.data())
@settings(max_examples=150, deadline=None)
def test_ids_of_texts_that_may_spell_control_tokens(turn: Turn, data: st.DataObject):
    ids = as_ids(render(turn))
    events = parse_ids(turn, ids)
    check_round_trip(turn, collect(events))
    at = data.draw(st.integers(0, len(ids)))
    assert joined(parse_ids(turn, ids[:at], ids[at:])) == joined(events)
