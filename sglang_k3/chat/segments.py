"""Segments, the primitives of K3's XTML format (fact sheet 4.4.1 and 4.4.2).

A conversation is a list of segments and each segment is tokenised on its own, so that no BPE merge crosses a
border. Control tokens are looked up by spelling and only come from this module: whatever stands in a field of a
message, be it content, a name or a schema, becomes an ordinary segment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
END_OF_MESSAGE = "<|end_of_msg|>"
IMAGE_PLACEHOLDER = "<|kimi_image_placeholder|>"
_DEFUSED_PLACEHOLDER = "<| kimi_image_placeholder |>"

Attributes = Sequence[tuple[str, str]]


@dataclasses.dataclass(frozen=True)
class Segment:
    """A piece of a rendered conversation that is tokenised by itself."""

    text: str
    is_control: bool = False


class ChatTokenizer(Protocol):
    def control_id(self, spelling: str) -> int:
        """The id of a control token."""

    def encode_ordinary(self, text: str) -> list[int]:
        """The ids of plain text, in which no control token is recognised."""


def encode(segments: Iterable[Segment], tokenizer: ChatTokenizer) -> list[int]:
    ids: list[int] = []
    for segment in segments:
        if segment.is_control:
            ids.append(tokenizer.control_id(segment.text))
        elif segment.text:
            ids += tokenizer.encode_ordinary(segment.text)
    return ids


def open_tag(name: str, attributes: Attributes = ()) -> Iterator[Segment]:
    yield Segment(OPEN, is_control=True)
    yield Segment(name)
    for key, value in attributes:
        escaped = value.replace("&", "&amp;").replace('"', "&quot;")
        yield from (Segment(f" {key}"), Segment('="'), Segment(escaped), Segment('"'))
    yield Segment(SEP, is_control=True)


def close_tag(name: str) -> Iterator[Segment]:
    yield Segment(CLOSE, is_control=True)
    yield Segment(name)
    yield Segment(SEP, is_control=True)


def element(name: str, body: str | Iterable[Segment], attributes: Attributes = ()) -> Iterator[Segment]:
    """A tag with what is between it and its closing tag; text is not escaped."""
    yield from open_tag(name, attributes)
    if isinstance(body, str):
        yield Segment(body)
    else:
        yield from body
    yield from close_tag(name)


def message(body: str | Iterable[Segment], attributes: Attributes) -> Iterator[Segment]:
    yield from element("message", body, attributes)
    yield Segment(END_OF_MESSAGE, is_control=True)


def defuse(text: str) -> str:
    """Text in which the slot that image processors look for is spelled apart."""
    return text.replace(IMAGE_PLACEHOLDER, _DEFUSED_PLACEHOLDER)
