"""A conversation in K3's XTML format: messages to segments to token ids (fact sheet 4.4).

The order is fixed (4.4.3): declared tools, thinking effort, the messages, tool choice, response format, and the
opening of the assistant's turn, up to where the model continues.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from sglang_k3.chat import bodies
from sglang_k3.chat.segments import (
    CLOSE,
    END_OF_MESSAGE,
    OPEN,
    SEP,
    ChatTokenizer,
    Segment,
    defuse,
    element,
    encode,
    message,
    open_tag,
)
from sglang_k3.chat.tool_history import order_results, render_calls

__all__ = [
    "CLOSE",
    "DEFAULT_EFFORT",
    "END_OF_MESSAGE",
    "OPEN",
    "SEP",
    "ChatTokenizer",
    "Segment",
    "encode",
    "encode_conversation",
    "render",
]

DEFAULT_EFFORT = "max"
_ROLES = ("system", "developer", "user", "assistant", "tool")
_IMAGE_PARTS = ("image", "image_url")

Message = Mapping[str, Any]


def encode_conversation(
    messages: Sequence[Message],
    tokenizer: ChatTokenizer,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    response_format: Mapping[str, Any] | None = None,
    thinking: bool = True,
    effort: str | None = DEFAULT_EFFORT,
) -> list[int]:
    """The prompt of a conversation as token ids; the arguments and errors are those of ``render``."""
    segments = render(
        messages,
        tools=tools,
        tool_choice=tool_choice,
        response_format=response_format,
        thinking=thinking,
        effort=effort,
    )
    return encode(segments, tokenizer)


def render(
    messages: Sequence[Message],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    tool_choice: str | Mapping[str, Any] | None = None,
    response_format: Mapping[str, Any] | None = None,
    thinking: bool = True,
    effort: str | None = DEFAULT_EFFORT,
) -> list[Segment]:
    """The segments of a conversation, up to the point where the model is to continue.

    Args:
        messages: OpenAI-style. ``role`` is system, developer, user, assistant or tool; ``content`` a string or a
            list of text parts; ``name`` is optional. An assistant turn may have ``reasoning_content`` (or
            ``reasoning``) and ``tool_calls``, a tool result ``tool_call_id``, a system message ``tools``.
        tools: OpenAI-style ``{"type": "function", "function": {...}}``, as they are to be declared.
        tool_choice: "required" and "none" are announced, a named tool as "required"; "auto" and None are not.
        response_format: OpenAI-style; ``json_object`` and ``json_schema`` are announced.
        thinking: open the think channel for the answer and show past reasoning; otherwise the response channel.
        effort: one of ``bodies.EFFORTS``, announced to the model when thinking; None for no announcement.

    Raises:
        ValueError: something that this format cannot say; the text names the field.
    """
    segments: list[Segment] = []
    if tools:
        segments += _internal("tool-declare", bodies.tool_declaration(tools))
    if thinking and effort is not None:
        segments += _internal("thinking-effort", bodies.thinking_effort(effort))
    segments += _render_messages(messages, thinking)
    if (body := bodies.tool_choice(tool_choice)) is not None:
        segments += _internal("tool-choice", body)
    if (body := bodies.response_format(response_format)) is not None:
        segments += _internal("response-format", body)
    segments += open_tag("message", [("role", "assistant")])
    segments += open_tag("think" if thinking else "response")
    return segments


def _internal(kind: str, body: str) -> Iterator[Segment]:
    return message(body, [("role", "system"), ("type", kind)])


def _render_messages(messages: Sequence[Message], thinking: bool) -> Iterator[Segment]:
    calls: Sequence[Mapping[str, Any]] = ()  # of the last assistant turn
    num_results = 0  # tool messages since then
    for role, run in itertools.groupby(messages, key=_role_of):
        if role == "tool":
            for result, name in order_results(list(run), calls, num_results + 1):
                num_results += 1
                attributes = [("role", role), ("tool", name), ("index", str(num_results))]
                yield from message(_text_of(result), attributes)
            continue
        for turn in run:
            if role == "assistant":
                calls, num_results = turn.get("tool_calls") or (), 0
                yield from message(_render_channels(turn, thinking), _attributes(role, turn))
            elif role == "system" and turn.get("tools"):
                yield from _internal("tool-declare", bodies.tool_declaration(turn["tools"], lazily_loaded=True))
            else:
                yield from message(_text_of(turn), _attributes(role, turn))


def _role_of(turn: Message) -> str:
    role = turn.get("role")
    if role not in _ROLES:
        raise ValueError(f"role {role!r} is not one of {', '.join(_ROLES)}.")
    return "system" if role == "developer" else str(role)


def _attributes(role: str, turn: Message) -> list[tuple[str, str]]:
    name = turn.get("name")
    return [("role", role), ("name", str(name))] if name else [("role", role)]


def _render_channels(turn: Message, thinking: bool) -> Iterator[Segment]:
    if thinking:
        yield from element("think", defuse(turn.get("reasoning_content") or turn.get("reasoning") or ""))
    yield from element("response", _text_of(turn))
    if turn.get("tool_calls"):
        yield from element("tools", render_calls(turn["tool_calls"]))


def _text_of(turn: Message) -> str:
    content = turn.get("content")
    if content is None or isinstance(content, str):
        return defuse(content or "")
    if not isinstance(content, Iterable):
        raise ValueError(f"content {content!r} is neither a string nor a list of parts.")
    return defuse("".join(_text_of_part(part) for part in content))


def _text_of_part(part: Any) -> str:
    kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
    text = part.get("text") if isinstance(part, Mapping) else None
    if kind in _IMAGE_PARTS or not isinstance(text, str):
        raise ValueError(f"content part of type {kind!r}: this version of sglang-k3 serves text only.")
    return text
