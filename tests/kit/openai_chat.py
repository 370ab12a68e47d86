"""One chat turn through the OpenAI client, streamed or whole, told in the same words."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import openai

from sglang_k3.testing.server import ServerProcess


@dataclasses.dataclass(frozen=True)
class Call:
    """A tool call, its arguments still as JSON text."""

    id: str
    name: str
    arguments: str

    def as_history(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclasses.dataclass(frozen=True)
class Reply:
    """What came back; ``usage`` is (prompt, completion) tokens."""

    content: str
    reasoning: str
    calls: list[Call]
    finish_reason: str | None
    usage: tuple[int, int]

    @property
    def named_arguments(self) -> list[tuple[str, Any]]:
        return [(call.name, json.loads(call.arguments)) for call in self.calls]

    def as_history(self) -> dict[str, Any]:
        """The turn as a client sends it back."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content, "reasoning_content": self.reasoning}
        return message | ({"tool_calls": [call.as_history() for call in self.calls]} if self.calls else {})


@dataclasses.dataclass(frozen=True)
class Chat:
    """Asks a server, greedily."""

    server: ServerProcess
    model: str
    max_tokens: int = 400

    def __call__(self, messages: str | list[dict[str, Any]], *, stream: bool = False, **options: Any) -> Reply:
        client = openai.OpenAI(base_url=f"{self.server.url}/v1", api_key="none", max_retries=0)
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        options = {"model": self.model, "temperature": 0, "max_tokens": self.max_tokens} | options
        if stream:
            options["stream_options"] = {"include_usage": True}
            return _added_up(client.chat.completions.create(messages=messages, stream=True, **options))
        return _read(client.chat.completions.create(messages=messages, **options))


def _read(reply: Any) -> Reply:
    (choice,) = reply.choices
    message = choice.message
    calls = [Call(c.id, c.function.name, c.function.arguments) for c in message.tool_calls or ()]
    usage = (reply.usage.prompt_tokens, reply.usage.completion_tokens)
    assert reply.usage.total_tokens == sum(usage)
    return Reply(message.content or "", message.reasoning_content or "", calls, choice.finish_reason, usage)


def _added_up(stream: Any) -> Reply:
    content = reasoning = ""
    calls: dict[int, list[str]] = {}
    finish_reason = usage = None
    for chunk in stream:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            assert finish_reason is None, "nothing comes behind the finish reason"
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                parts = calls.setdefault(call.index, ["", "", ""])
                for i, part in enumerate((call.id, call.function.name, call.function.arguments)):
                    parts[i] += part or ""
            finish_reason = choice.finish_reason
    assert sorted(calls) == list(range(len(calls)))
    assert usage is not None
    counted = (usage.prompt_tokens, usage.completion_tokens)
    return Reply(content, reasoning, [Call(*calls[i]) for i in sorted(calls)], finish_reason, counted)
