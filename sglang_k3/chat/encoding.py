"""Messages to token ids in K3's XTML format (fact sheet 4.4).

A conversation is rendered to segments and each segment is tokenised on its own, so that no BPE merge crosses
a border. Control tokens are looked up by spelling and only come from this module: text of a message is
ordinary text whatever it spells.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

OPEN, CLOSE, SEP = "<|open|>", "<|close|>", "<|sep|>"
END_OF_MESSAGE = "<|end_of_msg|>"
DEFAULT_EFFORT = "max"
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_EFFORT_BODY = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={effort}`."
)


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


def render(
    messages: Sequence[Mapping[str, Any]], *, thinking: bool = True, effort: str | None = DEFAULT_EFFORT
) -> list[Segment]:
    """The segments of a conversation, up to the point where the model is to continue.

    Args:
        messages: OpenAI-style ``{"role", "content"}``; content is a string or a list of text parts.
        thinking: open the think channel for the answer; otherwise the response channel.
        effort: announced to the model when thinking; None for no announcement.

    Raises:
        ValueError: a role or content part that this encoding does not know.
    """
    segments: list[Segment] = []
    if thinking and effort is not None:
        segments += _message(
            [("role", "system"), ("type", "thinking-effort")], [Segment(_EFFORT_BODY.format(effort=effort))]
        )
    for message in messages:
        segments += _render_message(message, thinking)
    segments += _open("message", [("role", "assistant")])
    segments += _open("think" if thinking else "response")
    return segments


def _render_message(message: Mapping[str, Any], thinking: bool) -> Iterator[Segment]:
    role = _ROLES.get(message["role"])
    if role is None:
        raise ValueError(f"role {message['role']!r} is not one of {', '.join(_ROLES)}.")
    attributes = [("role", role)]
    if message.get("name"):
        attributes.append(("name", message["name"]))
    text = _text_of(message.get("content"))
    if role != "assistant":
        yield from _message(attributes, [Segment(text)])
        return
    body: list[Segment] = []
    if thinking:
        body += _channel("think", message.get("reasoning_content") or message.get("reasoning") or "")
    body += _channel("response", text)
    yield from _message(attributes, body)


def _text_of(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.get("type", "text") != "text":
            raise ValueError(f"content part of type {part['type']!r}: this version of sglang-k3 serves text only.")
    return "".join(part["text"] for part in content)


def _message(attributes: Sequence[tuple[str, str]], body: Iterable[Segment]) -> Iterator[Segment]:
    yield from _open("message", attributes)
    yield from body
    yield from _close("message")
    yield Segment(END_OF_MESSAGE, is_control=True)


def _channel(name: str, text: str) -> Iterator[Segment]:
    yield from _open(name)
    yield Segment(text)
    yield from _close(name)


def _open(name: str, attributes: Sequence[tuple[str, str]] = ()) -> Iterator[Segment]:
    yield Segment(OPEN, is_control=True)
    yield Segment(name)
    for key, value in attributes:
        escaped = value.replace("&", "&amp;").replace('"', "&quot;")
        yield from (Segment(f" {key}"), Segment('="'), Segment(escaped), Segment('"'))
    yield Segment(SEP, is_control=True)


def _close(name: str) -> Iterator[Segment]:
    yield Segment(CLOSE, is_control=True)
    yield Segment(name)
    yield Segment(SEP, is_control=True)
