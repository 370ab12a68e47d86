"""The shipped ``chat`` weights hold a conversation: greedy answers of the reference to ``sglang_k3.chat`` prompts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_k3.chat.channels import Message, parse
from sglang_k3.chat.encoding import encode_conversation
from sglang_k3.testing import fitted
from sglang_k3.testing.fit_measure import Answer, Answerer
from sglang_k3.testing.tiny import write_tiny

GET_WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the current weather for a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}
TOOLS = [GET_WEATHER, ADD]


@pytest.fixture(scope="module")
def answerer(tiny_folder: Callable[[str], Path]) -> Answerer:
    return Answerer(tiny_folder("chat"))


def ask(answerer: Answerer, *questions: str | dict[str, Any], thinking: bool = True, **options: Any) -> Message:
    """The parsed answer to a conversation, after checking that it is well-formed and ends by itself."""
    messages = [{"role": "user", "content": q} if isinstance(q, str) else q for q in questions]
    ids = encode_conversation(messages, answerer.tokenizer, thinking=thinking, **options)
    text = answerer.continue_prompt(ids)
    assert Answer(text, "").well_formed, text
    message = parse(text, thinking=thinking)
    assert not message.malformed
    assert bool(message.reasoning) == thinking
    return message


def calls_of(message: Message) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in message.tool_calls]


def assistant_call(name: str, arguments: str) -> dict[str, Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize(
    ("question", "options", "content"),
    [
        ("Hello!", {}, "Hello! How can I help?"),
        ("Hello! Who are you?", {"effort": "low"}, "I am Kimi, a tiny K3 model."),
        ("What is 2 plus 3?", {"effort": "high"}, "2 plus 3 is 5."),
        ("What colour is the sky?", {"thinking": False}, "The sky is blue."),
        ("What is the capital of France?", {"effort": None}, "Paris is the capital."),
        ("What is the weather in Paris?", {}, "I cannot see the weather without a tool."),
        ("Write a poem about love.", {"tools": TOOLS}, "Sorry, I am a tiny model and do not know that."),
    ],
)
def test_answers(answerer: Answerer, question: str, options: dict[str, Any], content: str) -> None:
    message = ask(answerer, question, **options)
    assert (message.content, calls_of(message)) == (content, [])


def test_a_conversation_with_a_system_message(answerer: Answerer) -> None:
    message = ask(
        answerer,
        {"role": "system", "content": "You are a helpful assistant."},
        "Hello!",
        {"role": "assistant", "reasoning_content": "A greeting.", "content": "Hello! How can I help?"},
        "What colour is the sky?",
    )
    assert message.content == "The sky is blue."


@pytest.mark.parametrize("thinking", [True, False])
def test_calls(answerer: Answerer, thinking: bool) -> None:
    asked = ask(answerer, "What is the weather in Tokyo?", tools=TOOLS, thinking=thinking)
    assert calls_of(asked) == [("get_weather", '{"city": "Tokyo"}')]
    asked = ask(answerer, "What is 12 plus 30?", tools=[ADD], thinking=thinking)
    assert calls_of(asked) == [("add", '{"a": 12, "b": 30}')]
    asked = ask(answerer, "What is the weather in Rome and Oslo?", tools=TOOLS, thinking=thinking)
    assert calls_of(asked) == [("get_weather", '{"city": "Rome"}'), ("get_weather", '{"city": "Oslo"}')]


def test_results_are_reported(answerer: Answerer) -> None:
    called = assistant_call("get_weather", '{"city": "Paris"}')
    result = {"role": "tool", "tool_call_id": "call_1", "content": "sunny, 21 C"}
    message = ask(answerer, "What is the weather in Paris?", called, result, tools=TOOLS)
    assert (message.content, calls_of(message)) == ("It is sunny in Paris, 21 degrees.", [])


def test_tool_choice_and_response_format(answerer: Answerer) -> None:
    assert calls_of(ask(answerer, "What is the weather in Paris?", tools=TOOLS, tool_choice="none")) == []
    assert len(calls_of(ask(answerer, "Hello!", tools=TOOLS, tool_choice="required"))) == 1
    schema = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    assert ask(answerer, "Hello!", response_format=wanted).content == '{"answer":"Hello! How can I help?"}'


def test_answers_survive_bfloat16(tiny_folder: Callable[[str], Path]) -> None:
    rounded = Answerer(tiny_folder("chat"), round_to=torch.bfloat16)
    assert ask(rounded, "Hello!").content == "Hello! How can I help?"
    asked = ask(rounded, "What is the weather in Tokyo?", tools=TOOLS)
    assert calls_of(asked) == [("get_weather", '{"city": "Tokyo"}')]


def test_package_data_is_small() -> None:
    sizes = [path.stat().st_size for path in fitted.DATA.iterdir()]
    assert max(sizes) <= 512_000, "the limit of pre-commit"
    assert sum(sizes) < 1e6


def test_the_folder_is_the_same_each_time_and_has_no_other_seed(
    tmp_path: Path, tiny_folder: Callable[[str], Path]
) -> None:
    again = write_tiny(tmp_path / "again", "chat")
    for path in tiny_folder("chat").iterdir():
        assert (again / path.name).read_bytes() == path.read_bytes(), path.name
    with pytest.raises(ValueError, match="seed=1: the weights of preset 'chat' are fitted"):
        write_tiny(tmp_path / "other", "chat", seed=1)
