"""Turns of a model for the parser's tests: written marker by marker, with what a parser must make of them.

A turn is described first and rendered second, so the expectation comes from the description and no parser has a part
in it. The renderer is the tests' own and shares nothing with ``sglang_k3.chat.encoding``.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections.abc import Iterator
from typing import Any

from sglang_k3.chat.channels import ChannelParser, Event, Message
from sglang_k3.chat.scanners import Control, MarkedText, TextScanner, TokenScanner

CONTROLS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
CONTROL_IDS = {256 + i: Control(spelling) for i, spelling in enumerate(CONTROLS)}
HOSTILE = (
    *(
        "",
        " ",
        "\n",
        '"',
        "\\",
        '\\"',
        "{}",
        "{",
        "}]",
        '{"a": 1}',
        "42",
        "-0.5e3",
        "true",
        "null",
        "[1, 2",
        '"quoted"',
    ),
    *("line\nline\r\n", "&quot;&amp;", "a & b", 'say "hi"', "tab\there", "\x00", "\u2028", "snow \u2603", "\U0001f600"),
    *(
        "<",
        "<|",
        "<|op.",
        "<|close|.",
        "|>",
        "<|open.",
        "a < b",
        "</think>",
        "<tool_call>",
        "`<|`",
        "think",
        "response",
    ),
    *('key="k" type="t"', "x" * 40, "\ud7ff", "'", "${x}", "%s"),
)
HOSTILE_IDS = (
    *CONTROLS,
    "<|open|>think<|sep|>",
    "<|close|>argument<|sep|>",
    "a<|end_of_msg|>b",
    "<|close|>call<|sep|>",
)
NAMES = ("f", "get_weather", "mcp-server.read-file_2", "A.B-c", "0", "tool" * 16)

Marked = list[str | Control]


@dataclasses.dataclass(frozen=True)
class Call:
    name: str
    arguments: dict[str, Any] | str  # a str is a json block
    closed: bool = True
    arguments_closed: bool = True


@dataclasses.dataclass(frozen=True)
class Channel:
    kind: str
    text: str = ""
    calls: tuple[Call, ...] = ()
    opened: bool = True
    closed: bool = True


@dataclasses.dataclass(frozen=True)
class Turn:
    """``ending``: 0 nothing, 1 the message is closed, 2 it is also ended, 3 it is ended only."""

    thinking: bool
    channels: tuple[Channel, ...]
    ending: int = 2

    @property
    def thinking_skipped(self) -> bool:
        first = self.channels[0] if self.channels else Channel("think")
        return self.thinking and first.kind == "response" and not first.opened


# Rendering


def marker(control: str, tag: str) -> Marked:
    return [Control(control), tag, Control.SEP]


def escape(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;")


def json_type(value: Any) -> str:
    kinds = {str: "string", bool: "boolean", int: "number", float: "number", dict: "object", list: "array"}
    return kinds.get(type(value), "null")


def render(turn: Turn) -> Marked:
    out: Marked = []
    for channel in turn.channels:
        if channel.opened:
            out += marker("<|open|>", channel.kind)
        out.append(channel.text)
        for i, call in enumerate(channel.calls, 1):
            out += marker("<|open|>", f'call tool="{escape(call.name)}" index="{i}"')
            out += _arguments(call)
            if call.closed:
                out += marker("<|close|>", "call")
        if channel.closed:
            out += marker("<|close|>", channel.kind)
    if turn.ending in (1, 2):
        out += marker("<|close|>", "message")
    if turn.ending in (2, 3):
        out.append(Control.END_OF_MESSAGE)
    return [item for item in out if item != ""]


def _arguments(call: Call) -> Iterator[str | Control]:
    if isinstance(call.arguments, str):
        yield from (*marker("<|open|>", 'json type="object"'), call.arguments)
        if call.arguments_closed:
            yield from marker("<|close|>", "json")
        return
    for key, value in call.arguments.items():
        yield from marker("<|open|>", f'argument key="{escape(key)}" type="{json_type(value)}"')
        yield value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if call.arguments_closed:
            yield from marker("<|close|>", "argument")


def as_text(marked: Marked) -> str:
    return "".join(item if isinstance(item, str) else item.value for item in marked)


def as_ids(marked: Marked) -> list[int]:
    """One id per byte of text, one per control token."""
    ids = {control: token for token, control in CONTROL_IDS.items()}
    runs = [item.encode() if isinstance(item, str) else [ids[item]] for item in marked]
    return [token for run in runs for token in run]


# What is expected


def check(turn: Turn, message: Message) -> None:
    """The message is what the turn's description says."""
    texts = {kind: "".join(c.text for c in turn.channels if c.kind == kind) for kind in ("think", "response")}
    assert message.reasoning == texts["think"]
    assert message.content == texts["response"]
    calls = [(call, _is_confirmed(turn, c, k)) for c, k, call in _numbered(turn)]
    assert [call.name for call, _ in calls] == [call.name for call in message.tool_calls]
    for number, ((call, confirmed), parsed) in enumerate(zip(calls, message.tool_calls, strict=True)):
        assert parsed.id == f"{call.name}:{number}"
        assert parsed.is_complete == confirmed
        if not confirmed:
            continue
        if isinstance(call.arguments, str):
            assert parsed.arguments == block(call.arguments)
        else:
            assert list(json.loads(parsed.arguments).items()) == list(call.arguments.items())
    assert [report.index for report in message.malformed] == [i for i, (_, ok) in enumerate(calls) if not ok]
    for report in message.malformed:
        assert report.raw.startswith("<|open|>call tool=")


def block(text: str) -> str:
    """The arguments that a json block of this text amounts to."""
    return text if text.strip() else text + "{}"


def _numbered(turn: Turn) -> Iterator[tuple[int, int, Call]]:
    for c, channel in enumerate(turn.channels):
        for k, call in enumerate(channel.calls):
            yield c, k, call


def _is_confirmed(turn: Turn, c: int, k: int) -> bool:
    """Whether something after the call, or its own closer, says that the call is over."""
    channel = turn.channels[c]
    return (
        channel.calls[k].closed
        or k + 1 < len(channel.calls)
        or channel.closed
        or any(later.opened for later in turn.channels[c + 1 :])
        or turn.ending in (1, 2)
    )


# Parsing, whole and in chunks


def parse_text(turn: Turn, *chunks: str) -> list[Event]:
    parser = ChannelParser(TextScanner(), thinking=turn.thinking)
    return [event for chunk in chunks for event in parser.feed(chunk)] + parser.finish()


def parse_ids(turn: Turn, *chunks: list[int]) -> list[Event]:
    parser = ChannelParser(TokenScanner(CONTROL_IDS, lambda token: bytes([token])), thinking=turn.thinking)
    return [event for chunk in chunks for event in parser.feed(chunk)] + parser.finish()


def parse_marked(turn: Turn, *chunks: list[int]) -> list[Event]:
    """As ``parse_ids``, but through a text."""
    written = MarkedText(TokenScanner(CONTROL_IDS, lambda token: bytes([token])))
    return parse_text(turn, *(written.feed(chunk) for chunk in chunks), written.finish())


def joined(events: list[Event]) -> list[Event]:
    """Neighbouring pieces of one text as one event: what must not depend on the chunks."""
    out: list[Event] = []
    for event in events:
        last = out[-1] if out else None
        key = {"Reasoning": "text", "Content": "text", "CallArguments": "fragment"}.get(type(event).__name__)
        if key and type(last) is type(event) and getattr(last, "index", 0) == getattr(event, "index", 0):
            out[-1] = dataclasses.replace(event, **{key: getattr(last, key) + getattr(event, key)})
        else:
            out.append(event)
    return out


# Generating


def orders(longest: int) -> list[tuple[str, ...]]:
    kinds = ("think", "response", "tools")
    return [order for n in range(longest + 1) for order in itertools.product(kinds, repeat=n)]


class Generator:
    """Random turns. With ``ids`` texts may also spell control tokens."""

    def __init__(self, seed: int, *, ids: bool = False) -> None:
        self.random = random.Random(seed)
        self._strings = HOSTILE + (HOSTILE_IDS if ids else ())

    def turn(self, order: tuple[str, ...], *, thinking: bool) -> Turn:
        chance = self.random.random
        channels: list[Channel] = []
        for i, kind in enumerate(order):
            opened = i > 0 or kind != ("think" if thinking else "response") or chance() < 0.3
            calls = tuple(self.call() for _ in range(self.random.choice((1, 1, 2, 3)))) if kind == "tools" else ()
            text = "" if kind == "tools" else self.text()
            channels.append(Channel(kind, text, calls, opened, closed=chance() < 0.6))
        if thinking and order and order[0] == "response" and chance() < 0.5:
            channels[0] = dataclasses.replace(channels[0], opened=False, closed=True)
        return Turn(thinking, tuple(channels), self.random.randrange(4))

    def call(self) -> Call:
        chance = self.random.random
        arguments: dict[str, Any] | str
        if chance() < 0.1:
            arguments = self.text()
        else:
            keys = [self.random.choice(("a", "path", "x-y", "", 'quo"te', "a&amp;b", "k" * 50)) for _ in range(3)]
            arguments = {key: self.value() for key in keys[: self.random.randrange(4)]}
        return Call(self.random.choice(NAMES), arguments, closed=chance() < 0.7, arguments_closed=chance() < 0.7)

    def text(self) -> str:
        return "".join(self.random.choice(self._strings) for _ in range(self.random.randrange(3)))

    def value(self, depth: int = 0) -> Any:
        pick = self.random.randrange(9 if depth < 2 else 7)
        if pick < 4:
            return self.text()
        if pick < 7:
            return self.random.choice((0, -7, 10**30, 0.1, -2.5e-8, True, False, None))
        if pick == 7:
            return [self.value(depth + 1) for _ in range(self.random.randrange(3))]
        return {self.text(): self.value(depth + 1) for _ in range(self.random.randrange(3))}
