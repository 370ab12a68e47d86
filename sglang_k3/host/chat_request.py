"""A chat request of the host as the arguments of K3's chat encoding."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sglang_k3.chat.encoding import DEFAULT_EFFORT, render
from sglang_k3.chat.segments import CLOSE, OPEN, SEP, Segment

if TYPE_CHECKING:
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest

logger = logging.getLogger(__name__)

# What OpenAI clients may ask for by ``reasoning_effort``; "medium" is what they send when nobody chose.
_CLIENT_EFFORTS = ("low", "high", "max")
_THINK_OPEN, _THINK_CLOSE = f"{OPEN}think{SEP}", f"{CLOSE}think{SEP}"


def render_request(request: ChatCompletionRequest) -> list[Segment]:
    """The prompt of a request.

    Raises:
        ValueError: the request asks for something that K3's format cannot say; the client's mistake.
    """
    if request.continue_final_message:
        raise ValueError("continue_final_message: not supported for K3, whose assistant turns are split into channels.")
    check_tools(request)
    messages = [_with_reasoning_apart(_message(message)) for message in request.messages]
    return render(messages, **encoding_options(request))


def wrap_reasoning(text: str) -> str:
    """Past reasoning as a text part of an assistant turn, as /v1/messages passes it on; ``render_request`` knows it."""
    return f"{_THINK_OPEN}{text}{_THINK_CLOSE}"


def encoding_options(request: ChatCompletionRequest) -> dict[str, Any]:
    """The keyword arguments of ``chat.encoding.render`` and ``encode_conversation`` for a request."""
    return {
        "tools": [_tool(tool) for tool in request.tools or ()],
        "tool_choice": _tool_choice(request),
        "response_format": _response_format(request),
        "thinking": is_thinking(request),
        "effort": _effort(request),
    }


def is_thinking(request: ChatCompletionRequest) -> bool:
    """``chat_template_kwargs.thinking`` decides, then a ``reasoning_effort`` of "none"."""
    thinking = _template_options(request).get("thinking")
    if thinking is None:
        return _reasoning_effort(request) != "none"
    if not isinstance(thinking, bool):
        raise ValueError(f"chat_template_kwargs.thinking={thinking!r} is neither true nor false.")
    return thinking


def _effort(request: ChatCompletionRequest) -> str | None:
    options = _template_options(request)
    if "thinking_effort" in options:  # an explicit null suppresses the announcement
        return options["thinking_effort"]
    effort = _reasoning_effort(request)
    if effort in _CLIENT_EFFORTS:
        return effort
    if effort not in (None, "none"):
        _warn_of_other_effort()
    return DEFAULT_EFFORT


@functools.cache
def _warn_of_other_effort() -> None:
    logger.warning(
        "A request has another reasoning_effort than %s or none: K3 thinks at its default, %s. Said once.",
        ", ".join(_CLIENT_EFFORTS),
        DEFAULT_EFFORT,
    )


def _reasoning_effort(request: ChatCompletionRequest) -> Any:
    return request.reasoning_effort or _template_options(request).get("reasoning_effort")


def _template_options(request: ChatCompletionRequest) -> Mapping[str, Any]:
    return request.chat_template_kwargs or {}


def _tool_choice(request: ChatCompletionRequest) -> str | None:
    """The host's own default is "none" where there are no tools: nothing to announce."""
    if not request.tools:
        return None
    return request.tool_choice if isinstance(request.tool_choice, str) else "required"


def _response_format(request: ChatCompletionRequest) -> dict[str, Any] | None:
    """Structural tags constrain the answer without being announced."""
    wanted = request.response_format
    if wanted is None or wanted.type not in ("json_object", "json_schema"):
        return None
    return wanted.model_dump(by_alias=True, exclude_unset=True)


def _message(message: Any) -> dict[str, Any]:
    """A message with no more than its sender wrote.

    Its tools, if it brings any, have the flat shape of /v1/responses: the host takes no other here.
    """
    fields = message.model_dump(exclude_unset=True)
    if fields.get("tools"):
        fields["tools"] = [
            {"type": tool["type"], "function": {key: value for key, value in tool.items() if key != "type"}}
            for tool in fields["tools"]
        ]
    return fields


def check_tools(request: ChatCompletionRequest) -> None:
    """Refuse tools that no call could be of; a schema of ``true`` becomes the ``{}`` that it means."""
    for index, tool in enumerate(request.tools or ()):
        function = tool.function
        if not function.name:
            raise ValueError(f"tools[{index}] has an empty name: give it as function.name.")
        if function.parameters is True:
            function.parameters = {}
        if not isinstance(function.parameters, Mapping | None):
            raise ValueError(
                f"parameters={function.parameters!r} of tool {function.name!r}: give a JSON schema of an object."
            )


def _tool(tool: Any) -> dict[str, Any]:
    """A tool as its sender wrote it; ``defer_loading`` is the host's own."""
    function = tool.function.model_dump(exclude_unset=True, exclude={"defer_loading"})
    return {"type": tool.type, "function": function}


def _with_reasoning_apart(message: dict[str, Any]) -> dict[str, Any]:
    """Reasoning that an assistant turn has among its content parts, moved to where the encoding looks for it."""
    content = message.get("content")
    if message["role"] != "assistant" or not content:
        return message
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    reasoning = [_reasoning_of(part) for part in parts]
    if all(text is None for text in reasoning):
        return message
    return {
        **message,
        "content": [part for part, text in zip(parts, reasoning, strict=True) if text is None],
        "reasoning_content": message.get("reasoning_content") or "\n".join(filter(None, reasoning)),
    }


def _reasoning_of(part: dict[str, Any]) -> str | None:
    if part["type"] in ("thinking", "reasoning"):
        return part.get("thinking") or part.get("text") or ""
    text = part.get("text") or ""
    if text.startswith(_THINK_OPEN) and text.endswith(_THINK_CLOSE):
        return text[len(_THINK_OPEN) : -len(_THINK_CLOSE)]
    return None
