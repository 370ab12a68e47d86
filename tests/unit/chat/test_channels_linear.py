"""Long output: the work per character does not grow. Counted, not timed."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from sglang_k3.chat.channels import CallArguments, CallEnd, ChannelParser, Content, Event, Reasoning, parse
from sglang_k3.chat.scanners import TextScanner

ARGUMENT = (
    '<|open|>tools<|sep|><|open|>call tool="write_file" index="1"<|sep|><|open|>argument key="text" type="{}"<|sep|>'
)
END = "<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>"
SHAPES = {
    "content": ("", "a < b "),
    "nearly_markers": ("", "<|open|<|op<|"),
    "lone_markers": ("", "<|open|>"),
    "stray_markers": ("", "<|sep|>"),
    "joining_markers": ("<|op<|sep|>", "en|>"),
    "open_tag": ("<|open|>", "message "),
    "endless_tag": ('<|open|>message name="', "x=y "),
    "tags": ("", "<|open|>think<|sep|>x<|open|>response<|sep|>"),
    "string": (ARGUMENT.format("string"), 'x"\n'),
    "array": (ARGUMENT.format("array") + "[1", ", 1"),
    "markers_in_a_value": (ARGUMENT.format("string"), "<|close|>think<|sep|>"),
    "calls": ("<|open|>tools<|sep|>", '<|open|>call tool="f"<|sep|><|close|>call<|sep|>'),
    "malformed_calls": ("<|open|>tools<|sep|>", "<|open|>call<|sep|>x"),
    "text_in_tools": ("<|open|>tools<|sep|>x", " y"),
}


def work(chunks: list[str], thinking: bool) -> int:
    """Calls of Python and C functions made, plus the characters that are held for a second look after each chunk."""
    total = 0

    def count(frame: Any, event: str, arg: Any) -> None:
        nonlocal total
        total += event in ("call", "c_call")

    scanner = TextScanner()
    parser = ChannelParser(scanner, thinking=thinking)
    sys.setprofile(count)
    try:
        for chunk in chunks:
            parser.feed(chunk)
            total += len(scanner._held) + len(parser._tag_text)
        parser.finish()
    finally:
        sys.setprofile(None)
    return total


def chunks(text: str, size: int) -> Iterator[str]:
    return (text[i : i + size] for i in range(0, len(text), size))


@pytest.mark.parametrize("thinking", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_twice_the_output_is_twice_the_work(shape: str, thinking: bool):
    start, piece = SHAPES[shape]
    whole = {n: start + piece * (n // len(piece)) for n in (8_000, 16_000, 32_000)}
    small, middle, large = (work([*chunks(text, 7)], thinking) for text in whole.values())
    # differences: whatever a constant prefix costs (a tag up to its limit) drops out
    assert large - middle < 2.5 * (middle - small) + 1000, (small, middle, large)


def feed(text: str, size: int) -> list[Event]:
    parser = ChannelParser(TextScanner(), thinking=False)
    return [event for chunk in chunks(text, size) for event in parser.feed(chunk)] + parser.finish()


@pytest.mark.parametrize("size", [7, 1000, 10**7])
@pytest.mark.parametrize("kind", ["string", "array"])
def test_an_argument_of_a_megabyte(kind: str, size: int):
    value: Any = 'line "1" <|\n' * 90_000 if kind == "string" else ["<", 1] * 140_000
    text = ARGUMENT.format(kind) + (value if isinstance(value, str) else json.dumps(value)) + END
    assert len(text) > 1_000_000
    events = feed(text, size)
    fragments = [event.fragment for event in events if isinstance(event, CallArguments)]
    assert json.loads("".join(fragments)) == {"text": value}
    assert CallEnd(0) in events
    if kind == "string":
        assert len(fragments) > len(text) // max(size, 14) // 2, "a string is handed on as it comes"


def test_a_megabyte_that_is_cut_off_is_reported_in_full():
    (report,) = parse(ARGUMENT.format("string") + "x" * 10**6, thinking=False).malformed
    assert len(report.raw) > 10**6


@pytest.mark.parametrize("thinking", [True, False])
def test_a_megabyte_of_text_arrives_as_it_comes(thinking: bool):
    parser = ChannelParser(TextScanner(), thinking=thinking)
    for _ in range(1000):
        (event,) = parser.feed("x" * 1000)
        assert isinstance(event, Reasoning if thinking else Content)
        assert event.text == "x" * 1000
