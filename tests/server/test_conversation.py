"""A conversation as an OpenAI client has it, with the tiny model that has learned the format."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from tokenizers import Tokenizer

from sglang_k3.chat.segments import CLOSE, END_OF_MESSAGE, OPEN, SEP
from sglang_k3.testing.server import ServerProcess
from tests.kit.openai_chat import Chat, Reply

pytestmark = [pytest.mark.server, pytest.mark.covers("chat")]
MARKERS = (OPEN, CLOSE, SEP, END_OF_MESSAGE)


def tool(name: str, description: str, **properties: str) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": {key: {"type": kind} for key, kind in properties.items()},
        "required": list(properties),
    }
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


NOT_THINKING = {"chat_template_kwargs": {"thinking": False}}
GET_WEATHER = tool("get_weather", "Get the current weather for a city.", city="string")
ADD = tool("add", "Add two numbers.", a="number", b="number")
TOOLS = [GET_WEATHER, ADD]
both_ways = pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])


@pytest.fixture(scope="module")
def chat(tiny_server: ServerProcess) -> Chat:
    return Chat(tiny_server, "kimi-k3-tiny")


def assert_no_marker(reply: Reply) -> None:
    text = reply.content + reply.reasoning + "".join(call.arguments for call in reply.calls)
    assert not any(marker in text for marker in MARKERS), text


@both_ways
def test_reasoning_and_answer_are_apart(chat: Chat, stream: bool) -> None:
    reply = chat("Hello! Who are you?", stream=stream)
    assert reply.reasoning == "The user asks who I am, so I say my name."
    assert reply.content == "I am Kimi, a tiny K3 model."
    assert (reply.calls, reply.finish_reason) == ([], "stop")


@both_ways
def test_effort_and_thinking_off(chat: Chat, stream: bool) -> None:
    low = chat("What is 2 plus 3?", stream=stream, reasoning_effort="low")
    off = chat("What is 2 plus 3?", stream=stream, extra_body={"chat_template_kwargs": {"thinking": False}})
    assert (low.reasoning, low.content) == ("A sum.", "2 plus 3 is 5.")
    assert (off.reasoning, off.content) == ("", "2 plus 3 is 5.")


@both_ways
def test_turns_follow_each_other(chat: Chat, stream: bool) -> None:
    messages: list[dict[str, Any]] = [{"role": "system", "content": "You are a helpful assistant."}]
    for question, answer in (
        ("Hello!", "Hello! How can I help?"),
        ("What colour is the sky?", "The sky is blue."),
        ("What is the capital of France?", "Paris is the capital."),
    ):
        messages.append({"role": "user", "content": question})
        reply = chat(messages, stream=stream)
        assert (reply.content, reply.finish_reason) == (answer, "stop")
        messages.append(reply.as_history())


@both_ways
@pytest.mark.parametrize(
    "choice", ["auto", "required", {"type": "function", "function": {"name": "get_weather"}}], ids=str
)
def test_a_tool_loop(chat: Chat, stream: bool, choice: Any) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Paris?"}]
    asked = chat(messages, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False, stream=stream)
    assert asked.finish_reason == "tool_calls"
    assert asked.named_arguments == [("get_weather", {"city": "Paris"})]
    assert [call.id for call in asked.calls] == ["get_weather:0"]
    assert_no_marker(asked)
    result = {"role": "tool", "tool_call_id": asked.calls[0].id, "content": "sunny, 21 C"}
    told = chat([*messages, asked.as_history(), result], tools=TOOLS, stream=stream)
    assert told.content == "It is sunny in Paris, 21 degrees."
    assert (told.calls, told.finish_reason) == ([], "stop")


@both_ways
def test_parallel_calls_and_results_in_another_order(chat: Chat, stream: bool) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Rome and Oslo?"}]
    asked = chat(messages, tools=TOOLS, stream=stream)
    assert asked.named_arguments == [("get_weather", {"city": "Rome"}), ("get_weather", {"city": "Oslo"})]
    assert [call.id for call in asked.calls] == ["get_weather:0", "get_weather:1"]
    assert asked.finish_reason == "tool_calls"
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": text}
        for call, text in zip(asked.calls, ("sunny, 21 C", "snowy, 3 C"), strict=True)
    ]
    in_order = chat([*messages, asked.as_history(), *results], tools=TOOLS, stream=stream)
    turned = chat([*messages, asked.as_history(), *results[::-1]], tools=TOOLS, stream=stream)
    assert in_order == turned, "results are put in the order of their calls"


@pytest.mark.covers("grammar")
def test_one_call_at_most_where_parallel_ones_are_off(chat: Chat) -> None:
    question = "What is the weather in Rome and Oslo?"
    asked = chat(question, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert asked.named_arguments == [("get_weather", {"city": "Rome"})]


def test_numbers_are_numbers(chat: Chat) -> None:
    assert chat("What is 12 plus 30?", tools=[ADD]).named_arguments == [("add", {"a": 12, "b": 30})]


def test_none_means_no_call(chat: Chat) -> None:
    reply = chat("What is the weather in Paris?", tools=TOOLS, tool_choice="none")
    assert (reply.calls, reply.finish_reason) == ([], "stop")
    assert reply.content


@both_ways
@pytest.mark.covers("grammar")
def test_json_validates(chat: Chat, stream: bool) -> None:
    schema = {"type": "object", "properties": {"answer": {"type": "string"}}, "required": ["answer"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "reply", "schema": schema}}
    reply = chat("Hello!", response_format=wanted, stream=stream)
    verdict = json.loads(reply.content)
    assert list(verdict) == ["answer"] and isinstance(verdict["answer"], str)
    assert reply.reasoning and reply.finish_reason == "stop"


@pytest.mark.parametrize("options", [{}, {"tools": TOOLS}, {"reasoning_effort": "low"}], ids=str)
@pytest.mark.covers("stream")
def test_streamed_is_whole(chat: Chat, options: dict[str, Any]) -> None:
    for question in ("Hello!", "What is the weather in Tokyo?", "Write a poem about love."):
        assert chat(question, stream=True, **options) == chat(question, **options)


def test_usage_counts_every_token(chat: Chat, tiny_server: ServerProcess) -> None:
    reply = chat("Hello!")
    written = f"{reply.reasoning}{CLOSE}think{SEP}{OPEN}response{SEP}{reply.content}{CLOSE}response{SEP}"
    tokenizer = Tokenizer.from_file(tiny_server.get_json("/server_info")["model_path"] + "/tokenizer.json")
    assert reply.usage[1] == len(tokenizer.encode(f"{written}{CLOSE}message{SEP}{END_OF_MESSAGE}").ids)


@both_ways
def test_an_answer_that_is_cut_says_so(chat: Chat, stream: bool) -> None:
    reply = chat("Hello! Who are you?", max_tokens=3, stream=stream)
    assert (reply.finish_reason, reply.usage[1], reply.content) == ("length", 3, "")
    assert "The user asks who I am, so I say my name.".startswith(reply.reasoning)


@both_ways
def test_a_stop_token_is_left_out(chat: Chat, tiny_server: ServerProcess, stream: bool) -> None:
    tokenizer = Tokenizer.from_file(tiny_server.get_json("/server_info")["model_path"] + "/tokenizer.json")
    whole = chat("What colour is the sky?", extra_body=NOT_THINKING).content
    *_, (last, _) = tokenizer.encode(whole).offsets
    stop = tokenizer.encode(whole).ids[-1]
    for options, content in (({}, whole[:last]), ({"no_stop_trim": True}, whole)):
        reply = chat(
            "What colour is the sky?", stream=stream, extra_body={**NOT_THINKING, "stop_token_ids": [stop], **options}
        )
        assert (reply.content, reply.finish_reason) == (content, "stop")


@both_ways
def test_a_stop_string_is_left_out(chat: Chat, stream: bool) -> None:
    whole = chat("What colour is the sky?", extra_body=NOT_THINKING).content
    reply = chat("What colour is the sky?", stream=stream, stop=[whole[-4:]], extra_body=NOT_THINKING)
    assert (reply.content, reply.finish_reason) == (whole[:-4], "stop")


@both_ways
def test_an_answer_may_be_asked_to_have_a_length(chat: Chat, stream: bool) -> None:
    """The end of the turn is held back until then."""
    short = chat("Hello!", extra_body=NOT_THINKING).usage[1]
    long = chat("Hello!", stream=stream, max_tokens=short + 20, extra_body={**NOT_THINKING, "min_tokens": short + 10})
    assert short + 10 <= long.usage[1] <= short + 20


def respond(server: ServerProcess, *, stream: bool = False, **options: Any) -> list[tuple[str, ...]]:
    """The items of an answer of /v1/responses, without their random ids."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    response = client.responses.create(model="kimi-k3-tiny", temperature=0, stream=stream, **options)
    if stream:
        *_, last = response
        response = last.response
    return [
        (item.type, item.name, item.arguments)
        if item.type == "function_call"
        else (item.type, "".join(part.text for part in item.content))
        for item in response.output
    ]


@both_ways
@pytest.mark.parametrize("choice", ["auto", "required", "none"])
def test_responses_are_split_like_chat(chat: Chat, tiny_server: ServerProcess, stream: bool, choice: Any) -> None:
    question = "What is the weather in Rome and Oslo?"
    tools = [{"type": "function", **tool["function"]} for tool in TOOLS]
    output = respond(tiny_server, stream=stream, input=question, tools=tools, tool_choice=choice)
    reply = chat(question, tools=TOOLS, tool_choice=choice)
    expected = [("reasoning", reply.reasoning)] + ([("message", reply.content)] if reply.content else [])
    assert output == [*expected, *(("function_call", call.name, call.arguments) for call in reply.calls)]
    assert bool(reply.calls) == (choice != "none")


@both_ways
def test_a_response_where_no_call_can_be(tiny_server: ServerProcess, stream: bool) -> None:
    asked = {"input": "What is 2 plus 3?", "tools": [{"type": "web_search"}], "reasoning": {"effort": "low"}}
    assert respond(tiny_server, stream=stream, **asked) == [("reasoning", "A sum."), ("message", "2 plus 3 is 5.")]


def test_a_response_without_thinking(tiny_server: ServerProcess) -> None:
    asked = {"input": "What is 2 plus 3?", "reasoning": {"effort": "none"}}
    assert respond(tiny_server, **asked) == [("message", "2 plus 3 is 5.")]
    with pytest.raises(openai.BadRequestError, match="reasoning.effort='none' cannot be streamed"):
        respond(tiny_server, stream=True, **asked)


def test_a_response_in_a_format_is_refused(tiny_server: ServerProcess) -> None:
    with pytest.raises(openai.BadRequestError, match="response_format of /v1/chat/completions"):
        respond(tiny_server, input="Hello!", text={"format": {"type": "json_object"}})
