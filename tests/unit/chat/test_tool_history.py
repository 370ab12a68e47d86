"""Tool calls of past turns and their results, as fact sheet 4.4.4 writes them."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from sglang_k3.chat.encoding import render
from tests.kit.chat import text_of

Message = dict[str, Any]
THINK = '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'


def call(name: str, arguments: Any = None, call_id: str | None = None) -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def turn(*calls: Message) -> Message:
    return {"role": "assistant", "content": "", "tool_calls": list(calls)}


def result(content: str, call_id: str | None = None, **fields: Any) -> Message:
    return {"role": "tool", "content": content, "tool_call_id": call_id, **fields}


def silent(*messages: Message) -> str:
    return text_of(render(messages, effort=None)).removesuffix(THINK)


def channel(*calls: Message) -> str:
    """What stands in the tools channel."""
    text = silent(turn(*calls))
    return text.partition("<|open|>tools<|sep|>")[2].partition("<|close|>tools<|sep|>")[0]


def arguments_of(arguments: Any) -> str:
    text = channel(call("f", arguments))
    head, tail = '<|open|>call tool="f" index="1"<|sep|>', "<|close|>call<|sep|>"
    assert text.startswith(head) and text.endswith(tail)
    return text.removeprefix(head).removesuffix(tail)


def results_of(*messages: Message) -> list[tuple[str, str, str]]:
    """Tool, index and text of every result, in the order in which they are written."""
    return re.findall(r'role="tool" tool="([^"]*)" index="(\d+)"<\|sep\|>(.*?)<\|close\|>message', silent(*messages))


def argument(key: str, kind: str, value: str) -> str:
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'


def test_a_turn_with_calls() -> None:
    message = {
        "role": "assistant",
        "content": "Let me look.",
        "reasoning_content": "Two calls.",
        "tool_calls": [call("find", {"q": "a & b"}, "1"), call('say "hi"', "", "2")],
    }
    assert silent(message) == (
        '<|open|>message role="assistant"<|sep|>'
        "<|open|>think<|sep|>Two calls.<|close|>think<|sep|>"
        "<|open|>response<|sep|>Let me look.<|close|>response<|sep|>"
        "<|open|>tools<|sep|>"
        '<|open|>call tool="find" index="1"<|sep|>'
        '<|open|>argument key="q" type="string"<|sep|>a & b<|close|>argument<|sep|>'
        "<|close|>call<|sep|>"
        '<|open|>call tool="say &quot;hi&quot;" index="2"<|sep|><|close|>call<|sep|>'
        "<|close|>tools<|sep|>"
        "<|close|>message<|sep|><|end_of_msg|>"
    )


@pytest.mark.parametrize("calls", [None, []])
def test_without_calls_there_is_no_tools_channel(calls: Any) -> None:
    assert "tools" not in silent({"role": "assistant", "content": "x", "tool_calls": calls})


def test_calls_are_shown_with_thinking_off() -> None:
    text = text_of(render([turn(call("f", {}))], thinking=False))
    assert '<|open|>tools<|sep|><|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|>' in text


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        ("", "string", ""),
        ('raw "text"\n</\u00e9>', "string", 'raw "text"\n</\u00e9>'),
        ("12", "string", "12"),
        (12, "number", "12"),
        (-1.5e300, "number", "-1.5e+300"),
        (True, "boolean", "true"),
        (False, "boolean", "false"),
        (None, "null", "null"),
        ({"b": 1, "a": ["\u00e9", {}]}, "object", '{"b": 1, "a": ["\u00e9", {}]}'),
        ([], "array", "[]"),
        ([1, "x"], "array", '[1, "x"]'),
    ],
    ids=repr,
)
@pytest.mark.parametrize("as_json", [False, True])
def test_types_of_arguments(value: Any, kind: str, text: str, as_json: bool) -> None:
    arguments: Any = {"k": value}
    assert arguments_of(json.dumps(arguments) if as_json else arguments) == argument("k", kind, text)


def test_arguments_keep_their_order_and_escape_their_keys() -> None:
    expected = argument("z", "number", "1") + argument("&quot;&amp;&quot;", "string", '"&"')
    assert arguments_of({"z": 1, '"&"': '"&"'}) == expected


@pytest.mark.parametrize("arguments", [None, "", " \n", "null", {}, "{}", " { } "], ids=repr)
def test_no_arguments(arguments: Any) -> None:
    assert arguments_of(arguments) == ""


def test_a_missing_arguments_field_is_no_arguments() -> None:
    assert channel({"function": {"name": "f"}}) == '<|open|>call tool="f" index="1"<|sep|><|close|>call<|sep|>'


@pytest.mark.parametrize(
    "raw", ['{"k": ', "k=1", "{'k': 1}", "[" * 100_000, "<|open|>", "1" * 5000], ids=lambda raw: raw[:9]
)
def test_arguments_that_do_not_parse_are_shown_as_they_are(raw: str) -> None:
    assert arguments_of(raw) == f'<|open|>json type="object"<|sep|>{raw}<|close|>json<|sep|>'


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [("[]", "list"), ('"x"', "str"), ("1", "int"), ([1], "list"), (1, "int")],
    ids=repr,
)
def test_arguments_that_are_no_object_are_refused(arguments: Any, kind: str) -> None:
    with pytest.raises(ValueError, match=f"arguments of a call of 'f' are {kind}: they must be an object"):
        channel(call("f", arguments))


@pytest.mark.parametrize(
    "nameless",
    [{}, {"function": None}, {"function": {}}, {"function": {"name": ""}}, {"function": {"name": 1}}],
    ids=str,
)
def test_a_call_without_a_name_is_refused(nameless: Message) -> None:
    with pytest.raises(ValueError, match="tool call 'c7' has no name: give it as function.name"):
        channel({"id": "c7", **nameless})


def test_a_value_that_is_nested_too_deeply_is_refused() -> None:
    nested: Any = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(ValueError, match="nested too deeply"):
        channel(call("f", {"k": nested}))


def test_a_result() -> None:
    assert silent(turn(call("find", {}, "c1")), result("42", "c1")).endswith(
        '<|open|>message role="tool" tool="find" index="1"<|sep|>42<|close|>message<|sep|><|end_of_msg|>'
    )


def test_results_are_put_into_the_order_of_the_calls() -> None:
    asked = turn(call("a", {}, "1"), call("b", {}, "2"), call("c", {}, "3"))
    answers = [result("C", "3"), result("A", "1"), result("B", "2")]
    assert results_of(asked, *answers) == [("a", "1", "A"), ("b", "2", "B"), ("c", "3", "C")]


def test_the_name_of_the_call_wins() -> None:
    assert results_of(turn(call("a", {}, "1")), result("A", "1", name="x", tool="y")) == [("a", "1", "A")]


def test_a_missing_result_leaves_no_gap() -> None:
    asked = turn(call("a", {}, "1"), call("b", {}, "2"), call("c", {}, "3"))
    assert results_of(asked, result("C", "3"), result("B", "2")) == [("b", "1", "B"), ("c", "2", "C")]


def test_calls_that_share_an_id_are_answered_in_turn() -> None:
    asked = turn(call("a", {}, "1"), call("b", {}, "1"))
    answers = [result("A", "1"), result("B", "1"), result("B again", "1")]
    assert results_of(asked, *answers) == [("a", "1", "A"), ("b", "2", "B"), ("b", "3", "B again")]


@pytest.mark.parametrize("stranger", ["9", "", None])
def test_one_id_that_does_not_match_leaves_the_run_as_it_is(stranger: str | None) -> None:
    """Names then come from the message, ``tool`` before ``name``, and last from the call at that position."""
    asked = turn(call("a", {}, "1"), call("b", {}, "2"), call("c", {}, "3"), call("d", {}, ""))
    answers = [result("C", "3", name="x", tool="y"), result("A", "1", name="z"), result("?", stranger)]
    assert results_of(asked, *answers) == [("y", "1", "C"), ("z", "2", "A"), ("c", "3", "?")]


def test_a_result_without_a_call_or_name_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tool result 1 \('9'\) answers no call .* or a name"):
        silent(result("x", "9"))
    with pytest.raises(ValueError, match="tool result 2"):
        silent(turn(call("a", {}, "1")), result("A", "1"), result("x", "9"))


def test_a_name_is_enough() -> None:
    assert results_of(result("x", "9", name="f")) == [("f", "1", "x")]


def test_results_are_counted_from_the_last_assistant_turn() -> None:
    """A message between them starts another run, but not another count."""
    asked = turn(call("a", {}, "1"), call("b", {}, "2"), call("c", {}, "3"))
    user = {"role": "user", "content": "wait"}
    apart = results_of(asked, result("B", "2"), user, result("C", "3"), result("A", "1"))
    assert apart == [("b", "1", "B"), ("a", "2", "A"), ("c", "3", "C")]
    assert results_of(asked, result("B", "2"), asked, result("A", "1")) == [("b", "1", "B"), ("a", "1", "A")]
    plain = {"role": "assistant", "content": "done"}
    with pytest.raises(ValueError, match="answers no call of the last assistant turn"):
        silent(asked, plain, result("A", "1"))


def test_a_result_of_parts() -> None:
    parts = [{"type": "text", "text": "4"}, {"type": "text", "text": "2"}]
    assert results_of(turn(call("a", {}, "1")), {**result("", "1"), "content": parts}) == [("a", "1", "42")]
