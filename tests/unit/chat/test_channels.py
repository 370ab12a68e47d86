"""The channel parser: the literal forms of fact sheet 4.5, the faults of the field, what is reported and dropped."""

from __future__ import annotations

import json

import pytest

from sglang_k3.chat.channels import (
    CUT_OFF,
    CallArguments,
    CallEnd,
    CallStart,
    ChannelParser,
    Content,
    MalformedCall,
    MessageEnd,
    Reasoning,
    ReasoningWithdrawn,
    parse,
)
from sglang_k3.chat.scanners import Control, MarkedText, TextScanner, TokenScanner
from sglang_k3.chat.tool_calls import ToolSchema
from tests.unit.chat.turns import CONTROL_IDS, CONTROLS, Marked, as_ids, as_text, joined, marker

THINK_END, THINK = "<|close|>think<|sep|>", "<|open|>think<|sep|>"
RESPONSE, RESPONSE_END = "<|open|>response<|sep|>", "<|close|>response<|sep|>"
TOOLS, TOOLS_END = "<|open|>tools<|sep|>", "<|close|>tools<|sep|>"
MESSAGE_END = "<|close|>message<|sep|>"
END = MESSAGE_END + "<|end_of_msg|>"
CALL_END = "<|close|>call<|sep|>"


def call(name: str, *body: str, index: int = 1) -> str:
    return f'<|open|>call tool="{name}" index="{index}"<|sep|>{"".join(body)}{CALL_END}'


def argument(key: str, kind: str, value: str) -> str:
    return f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'


def tools(*calls: str) -> str:
    return TOOLS + "".join(calls) + TOOLS_END


def split(text: str, *, thinking: bool = True) -> tuple[str, str]:
    message = parse(text, thinking=thinking)
    assert message.tool_calls == () == message.malformed
    return message.reasoning, message.content


def arguments_of(text: str, *schemas: ToolSchema) -> list[tuple[str, str]]:
    message = parse(text, thinking=False, tools=schemas)
    assert message.malformed == ()
    assert all(found.is_complete for found in message.tool_calls)
    return [(found.name, found.arguments) for found in message.tool_calls]


# Literal forms


def test_a_whole_turn():
    text = f"2 + 2{THINK_END}{RESPONSE}4{RESPONSE_END}" + tools(call("f", argument("x", "number", "4"))) + END
    parser = ChannelParser(TextScanner(), thinking=True, calls_before=3)
    assert parser.feed(text) + parser.finish() == [
        Reasoning("2 + 2"),
        Content("4"),
        CallStart(0, "f", "f:3"),
        CallArguments(0, '{"x": '),
        CallArguments(0, "4"),
        CallArguments(0, "}"),
        CallEnd(0),
        MessageEnd(),
    ]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"why{THINK_END}{RESPONSE}so{RESPONSE_END}{END}", ("why", "so")),
        (f"{THINK}why{THINK_END}{RESPONSE}so{RESPONSE_END}{END}", ("why", "so")),
        (f"{THINK_END}{RESPONSE}{RESPONSE_END}{END}", ("", "")),
        (f"why{RESPONSE}so{END}", ("why", "so")),
        (f"why{THINK_END}so{END}", ("why", "so")),
        (f"so{RESPONSE_END}{END}", ("", "so")),
        (f"{THINK}so{RESPONSE_END}{END}", ("", "so")),
        (f"so{RESPONSE_END}{RESPONSE} and so{END}", ("", "so and so")),
        (f"why{END}", ("why", "")),
        (f"why{THINK_END}{RESPONSE}so{THINK}but{RESPONSE}really{END}", ("whybut", "soreally")),
        (f"why{THINK_END}{RESPONSE}so{THINK}but{RESPONSE_END}{RESPONSE} yes{END}", ("whybut", "so yes")),
        ("why", ("why", "")),
        ("", ("", "")),
    ],
)
def test_thinking(text: str, expected: tuple[str, str]):
    assert split(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        f"so{RESPONSE_END}{END}",
        f"so{END}",
        "so<|end_of_msg|>",
        "so",
        f"{RESPONSE}so",
        f"so{RESPONSE_END}",
        f"so{RESPONSE_END}{RESPONSE_END}{END}",
        f"so{THINK_END}{RESPONSE}{END}",
    ],
)
def test_without_thinking_the_turn_starts_in_the_response(text: str):
    assert split(text, thinking=False) == ("", "so")


@pytest.mark.parametrize("end", [MESSAGE_END, "<|end_of_msg|>", '<|open|>message role="user"<|sep|>', END])
def test_nothing_comes_after_the_end(end: str):
    more = f"more{THINK}more{RESPONSE}more" + tools(call("f")) + END
    assert split(f"why{RESPONSE}so{end}{more}") == ("why", "so")


def test_a_repeated_header_is_no_end():
    assert split(f'<|open|>message role="assistant"<|sep|>{THINK}why{THINK_END}{RESPONSE}so{END}') == ("why", "so")


def test_skipped_thinking_is_taken_back_for_clients_that_have_seen_it():
    parser = ChannelParser(TextScanner(), thinking=True)
    assert parser.feed("so") == [Reasoning("so")]
    assert parser.feed(RESPONSE_END) == [ReasoningWithdrawn(), Content("so")]


def test_blank_text_between_channels_is_layout():
    assert split(f"\nwhy\n{THINK_END}\n \n{RESPONSE}\nso\n{RESPONSE_END}\n{END}\n") == ("\nwhy\n", "\nso\n")
    assert split(f"why{THINK_END}\n so\n {RESPONSE_END}{END}") == ("why", "so\n ")


def test_attributes_are_unescaped():
    body = argument("a &quot;b&quot; &amp;amp;", "string", "&quot;")
    assert arguments_of(tools(call("f&quot;&amp;quot;", body))) == [('f"&quot;', '{"a \\"b\\" &amp;": "&quot;"}')]


@pytest.mark.parametrize(
    ("attributes", "name"),
    [('tool="f"', "f"), ('index="1" tool="f"', "f"), ('index=1 tool="f"', "f"), ('  tool="f"  x="y"  ', "f")],
)
def test_attributes_come_in_any_order(attributes: str, name: str):
    assert arguments_of(f"{TOOLS}<|open|>call {attributes}<|sep|>{CALL_END}") == [(name, "{}")]


def test_calls_are_numbered_by_turn_and_by_conversation():
    message = parse(tools(call("f"), call("g", index=2)) + tools(call("f")), thinking=False, calls_before=7)
    assert [found.id for found in message.tool_calls] == ["f:7", "g:8", "f:9"]


@pytest.mark.parametrize("value", ["{}", '{"a": 1}', '{"a": ', "", "\n", "not json <|", "[1]"])
def test_a_json_block_is_handed_on_as_it_is(value: str):
    text = tools(call("f", f'<|open|>json type="object"<|sep|>{value}<|close|>json<|sep|>'))
    assert arguments_of(text) == [("f", value if value.strip() else value + "{}")]


# Arguments as they come


def test_strings_are_streamed_and_other_values_wait_until_they_are_whole():
    parser = ChannelParser(TextScanner(), thinking=False)
    events = [
        *parser.feed(TOOLS + '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="string"<|sep|>'),
        *parser.feed('x"'),
        *parser.feed("\ny<"),
        *parser.feed('<|close|>argument<|sep|><|open|>argument key="b" type="array"<|sep|>'),
        *parser.feed("[1,"),
        *parser.feed("2]"),
        *parser.feed("<|close|>argument<|sep|>"),
    ]
    assert events == [
        CallStart(0, "f", "f:0"),
        CallArguments(0, '{"a": "'),
        CallArguments(0, 'x\\"'),
        CallArguments(0, "\\ny"),
        CallArguments(0, "<"),
        CallArguments(0, '"'),
        CallArguments(0, ', "b": '),
        CallArguments(0, "[1, 2]"),
    ]


@pytest.mark.parametrize(
    "value",
    [
        "<|sep|>",
        "a<|sep|>b",
        "<|open|>x<|sep|>",
        "<|open|>",
        "<|close|>think<|sep|>",
        "<|open|>a, b",
        "<|close|>json<|sep|>",
        "<|",
        "<|op",
    ],
)
def test_a_marker_that_means_nothing_in_a_value_belongs_to_it(value: str):
    assert arguments_of(tools(call("f", argument("a", "string", value)))) == [("f", json.dumps({"a": value}))]


def test_with_ids_a_value_may_spell_anything():
    for spelled in (*CONTROLS, as_text(marker("<|close|>", "argument")), END):
        marked: Marked = [
            *marker("<|open|>", "tools"),
            *marker("<|open|>", 'call tool="f" index="1"'),
            *marker("<|open|>", f'argument key="{spelled}" type="string"'),
            f"{spelled}\U0001f600",
            *marker("<|close|>", "argument"),
            *marker("<|close|>", "call"),
            *marker("<|open|>", "response"),
            spelled,
        ]
        parser = ChannelParser(TokenScanner(CONTROL_IDS, lambda token: bytes([token])), thinking=False)
        events = [event for token in as_ids(marked) for event in parser.feed([token])] + parser.finish()
        pieces = [event.fragment for event in events if isinstance(event, CallArguments)]
        assert json.loads("".join(pieces)) == {spelled: f"{spelled}\U0001f600"}
        assert "".join(event.text for event in events if isinstance(event, Content)) == spelled


@pytest.mark.parametrize("text", ["<\ufdd0|open|>", "\ufdd0<|open|>", "<<<\ufdd0", "\ufdd0", "a<|sep|>b", ""])
@pytest.mark.parametrize("step", [1, 100])
def test_marked_text_keeps_every_character(text: str, step: int):
    written = MarkedText(TokenScanner(CONTROL_IDS, lambda token: bytes([token])))
    ids = [258, *text.encode(), 256]
    pieces = [written.feed(ids[at : at + step]) for at in range(0, len(ids), step)] + [written.finish()]
    scanner = TextScanner()
    items = [item for piece in pieces for item in scanner.feed(piece)] + [*scanner.finish()]
    assert (items[0], items[-1]) == (Control.SEP, Control.OPEN)
    assert "".join(map(str, items[1:-1])) == text


def test_bytes_that_are_no_text_become_replacement_characters():
    parser = ChannelParser(TokenScanner(CONTROL_IDS, lambda token: bytes([token])), thinking=False)
    ids = [0xE2, 0x82, 258, 0xAC, ord("a"), 0xC3]  # a character in two parts around a stray <|sep|>, half of another
    assert joined(parser.feed(ids) + parser.finish()) == [Content("\ufffd\ufffda\ufffd"), MessageEnd()]


# Faults of the field (spec/field_reports.md)


@pytest.mark.parametrize("value", ["", "42", "true", "null", '{"a": 1}', '"q"', "a\nb", "{", "[]"])
def test_report_22_a_string_is_its_text_whatever_it_looks_like(value: str):
    assert arguments_of(tools(call("f", argument("a", "string", value)))) == [("f", json.dumps({"a": value}))]


@pytest.mark.parametrize(
    ("kind", "value", "expected"),
    [
        ("number", "4", 4),
        ("number", "four", "four"),
        ("number", "", ""),
        ("object", '{"a": "x\ny"}', {"a": "x\ny"}),
        ("object", '{"a": ', '{"a": '),
        ("array", "[1, 2", "[1, 2"),
        ("boolean", "True", "True"),
        ("date", "2026-08-12", "2026-08-12"),
        ("", "[1]", [1]),
    ],
)
def test_report_22_what_cannot_be_read_is_a_string_and_the_call_is_kept(kind: str, value: str, expected: object):
    ((name, arguments),) = arguments_of(tools(call("f", argument("a", kind, value))))
    assert (name, json.loads(arguments)) == ("f", {"a": expected})


def test_report_22_the_schema_of_the_tool_wins_over_the_type_attribute():
    types = {"s": "string", "n": "integer", "o": "object", "u": ["string", "null"]}
    schema = ToolSchema("f", {"properties": {key: {"type": kind} for key, kind in types.items()}})
    body = argument("s", "number", "42"), argument("n", "string", "42"), argument("o", "string", '{"k": "v"}')
    text = tools(call("f", *body, argument("u", "string", "null"), argument("other", "number", "42")))
    ((_, arguments),) = arguments_of(text, schema)
    assert json.loads(arguments) == {"s": "42", "n": 42, "o": {"k": "v"}, "u": "null", "other": 42}


def test_report_23_tools_straight_from_thinking():
    message = parse("why" + tools(call("f", argument("a", "number", "1"))) + END, thinking=True)
    assert (message.reasoning, message.content) == ("why", "")
    assert [(found.name, found.arguments) for found in message.tool_calls] == [("f", '{"a": 1}')]


@pytest.mark.parametrize("thinking", [True, False])
def test_report_23_a_call_without_a_tools_channel(thinking: bool):
    message = parse("so" + call("f") + RESPONSE + "more" + END, thinking=thinking)
    assert [found.name for found in message.tool_calls] == ["f"]
    assert (message.reasoning, message.content) == (("so", "more") if thinking else ("", "somore"))


def test_report_23_a_plain_answer_ends_with_the_message():
    assert split(f"{THINK_END}{RESPONSE}so{END}") == split(f"so{END}", thinking=False) == ("", "so")


def test_report_25_the_end_never_shows_however_it_arrives():
    text = f"so{END}"
    for at in range(len(text) + 1):
        parser = ChannelParser(TextScanner(), thinking=False, tools=[ToolSchema("f")])
        assert joined(parser.feed(text[:at]) + parser.feed(text[at:]) + parser.finish()) == [
            Content("so"),
            MessageEnd(),
        ]


@pytest.mark.parametrize("name", ["mcp-server_read.file", "a-b", "9", "A.b-C_d"])
def test_report_86_names_of_tools(name: str):
    assert arguments_of(tools(call(name))) == [(name, "{}")]


def test_report_86_several_markers_in_one_chunk():
    calls = [call(f"f{i}", argument("i", "number", str(i)), index=i + 1) for i in range(5)]
    assert arguments_of(tools(*calls)) == [(f"f{i}", f'{{"i": {i}}}') for i in range(5)]


def test_the_json_block_is_not_an_empty_call():
    """The fault of fact sheet 4.5: a parser that knows only arguments finds none."""
    text = tools(call("f", '<|open|>json type="object"<|sep|>{"a": 1}<|close|>json<|sep|>'))
    assert arguments_of(text) == [("f", '{"a": 1}')]


# Missing closers within a call


@pytest.mark.parametrize("then", [CALL_END, TOOLS_END, RESPONSE, call("g"), MESSAGE_END, argument("b", "null", "null")])
def test_a_value_without_a_closer_ends_at_the_next_marker(then: str):
    text = (
        f'{TOOLS}<|open|>call tool="f" index="1"<|sep|><|open|>argument key="a" type="string"<|sep|>x{then}{TOOLS_END}'
    )
    name, arguments = arguments_of(text)[0]
    assert (name, json.loads(arguments)["a"]) == ("f", "x")


# Reports


def only_report(text: str) -> MalformedCall:
    message = parse(text, thinking=False)
    (report,) = message.malformed
    assert all(found.is_complete is (i != report.index) for i, found in enumerate(message.tool_calls))
    return report


@pytest.mark.parametrize(
    ("body", "raw", "index", "reason"),
    [
        ('<|open|>call index="1"<|sep|>x<|close|>call<|sep|>', None, None, "without a tool"),
        ('<|open|>call tool=""<|sep|><|close|>call<|sep|>', None, None, "without a tool"),
        ('\n {"name": "f"}', '{"name": "f"}', None, "text outside a call"),
        ("<|open|>invoke<|sep|>x", None, None, "opens no call"),
        (argument("a", "string", "x"), None, None, "argument outside a call"),
        (call("f", ' {"a": 1}'), None, 0, "text outside an argument"),
        (call("f", argument("a", "null", "null"), "x"), None, 0, "text outside an argument"),
        (call("f", "x", argument("a", "null", "null")), None, 0, "text outside an argument"),
        (call("f", '<|open|>argument type="string"<|sep|>x<|close|>argument<|sep|>'), None, 0, "without a key"),
        (call("f", '<|open|>parameter name="a"<|sep|>x'), None, 0, "unknown marker"),
        (call("f", argument("a", "null", "null"), "<|open|>json<|sep|>{}"), None, 0, "beside other arguments"),
        (call("f", "<|open|>json<|sep|>{}", argument("a", "null", "null")), None, 0, "beside other arguments"),
    ],
)
def test_a_malformed_call_is_reported_in_full(body: str, raw: str | None, index: int | None, reason: str):
    report = only_report(TOOLS + body + TOOLS_END + END)
    assert (report.index, report.raw) == (index, raw or body)
    assert reason in report.reason


@pytest.mark.parametrize("marker", ["<|open|>call", '<|open|>call tool="f"'])
@pytest.mark.parametrize("before", ["", TOOLS])
def test_the_marker_of_a_call_that_the_turn_ends_in_is_cut_off(before: str, marker: str):
    report = only_report(before + marker)
    assert (report.index, report.raw, report.reason) == (None, marker, CUT_OFF)


def test_calls_around_a_malformed_one_are_kept():
    message = parse(tools(call("f"), '<|open|>call index="2"<|sep|>x', call("g"), "y", call("h")), thinking=False)
    assert [found.name for found in message.tool_calls] == ["f", "g", "h"]
    assert [report.raw for report in message.malformed] == ['<|open|>call index="2"<|sep|>x', "y"]


@pytest.mark.parametrize("end", ["", "<|end_of_msg|>"])
def test_a_call_that_is_cut_off_anywhere_is_reported(end: str):
    whole = TOOLS + call("f", argument("a", "string", "x<y"), argument("b", "number", "12"))
    first, last = len(TOOLS + "<|open|>c"), len(whole) - 1
    for at in range(first, last):
        if whole[:at].rpartition("<|")[2] in ("", *"ocs"):
            continue  # within the first characters of a marker: covered by the raw text of the characters before
        text = whole[:at]
        message = parse(text + end, thinking=False)
        (report,) = message.malformed
        assert report.raw == text[len(TOOLS) :][: len(report.raw)]
        assert len(report.raw) > len(text) - len(TOOLS) - len("<|close|>"), "no more than part of a marker is missing"
        assert [found.is_complete for found in message.tool_calls] == [False] * len(message.tool_calls)


@pytest.mark.parametrize("thinking", [True, False])
def test_a_call_without_a_tools_channel_that_is_cut_off_in_its_marker_is_reported(thinking: bool):
    message = parse('so<|open|>call tool="f', thinking=thinking)
    assert [report.raw for report in message.malformed] == ['<|open|>call tool="f']
    assert message.reasoning + message.content == "so"


def test_the_arguments_of_a_call_cut_off_are_no_json():
    text = TOOLS + '<|open|>call tool="rm" index="1"<|sep|><|open|>argument key="path" type="string"<|sep|>/tmp'
    message = parse(text, thinking=False)
    assert [found.arguments for found in message.tool_calls] == ['{"path": "/tmp']
    assert [report.index for report in message.malformed] == [0]


# Dangling and stray markers


@pytest.mark.parametrize(
    "dangling",
    [
        "<|open|>",
        "<|close|>think",
        "<|close|>",
        "<|open|>response",
        "<|open|>tools",
        "<|close|>mess",
        "<|sep|>",
        "<|",
        "<|o",
        "<|close|",
    ],
)
@pytest.mark.parametrize("thinking", [True, False])
def test_a_marker_that_the_stream_is_cut_off_in_is_dropped(dangling: str, thinking: bool):
    assert split(f"so{dangling}", thinking=thinking) == (("so", "") if thinking else ("", "so"))


@pytest.mark.parametrize("text", ["a <", "a <|", "a <b", "<", "<|x|>", "<|open", "<|open|", "<|OPEN|>"])
def test_what_only_begins_like_a_marker_is_text(text: str):
    assert split(f"{text} b", thinking=False) == ("", f"{text} b")


@pytest.mark.parametrize("text", ["a <", "<", "a < b", "a <<"])
def test_an_answer_may_end_in_a_less_than(text: str):
    assert split(text, thinking=False) == ("", text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a<|sep|>b", "ab"),
        ("a<|open|>b<|sep|>c", "ac"),
        ("a<|open|><|sep|>c", "ac"),
        ("a<|close|>call<|sep|>c", "ac"),
        ("a<|open|>hello big world", "ahello big world"),
        ("a<|open|>x = y", "ax = y"),
        ("a<|open|>hello, world", "ahello, world"),
        ("a<|close|>" + "b" * 33, "a" + "b" * 33),
        ("a<|open|><|open|>response<|sep|>b", "ab"),
        (f"a<|open|>thi{RESPONSE}b", "ab"),
    ],
)
def test_a_stray_marker_is_dropped_and_the_text_around_it_kept(text: str, expected: str):
    assert split(text, thinking=False) == ("", expected)


@pytest.mark.parametrize("spelling", CONTROLS)
@pytest.mark.parametrize(
    "between", ["<|sep|>", "<|open|>x<|sep|>", RESPONSE, RESPONSE_END + RESPONSE, THINK + RESPONSE]
)
def test_the_text_around_a_dropped_marker_does_not_join_to_another(spelling: str, between: str):
    for at in range(1, len(spelling)):
        _, content = split(f"a{spelling[:at]}{between}{spelling[at:]}>b", thinking=False)
        assert content == f"a{spelling[:-1]}b"


def test_an_endless_tag_is_text():
    text = '<|open|>message name="' + "x" * 5000
    assert split(text, thinking=False) == ("", text.removeprefix("<|open|>"))
    report = only_report(TOOLS + '<|open|>call tool="' + "x" * 5000)
    assert report.raw.endswith("x" * 5000)


# The interface


def test_the_end_comes_once_and_last():
    parser = ChannelParser(TextScanner(), thinking=False)
    assert parser.feed(END + "more") == [MessageEnd()]
    assert parser.feed("more") == parser.finish() == []
