"""Requests of the host's chat endpoints become the conversation that the client meant, or a 400 that says why not."""

from __future__ import annotations

import json
import logging
import re
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from sglang.srt.entrypoints.anthropic.serving import AnthropicServing
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.plugins import load_plugins

from sglang_k3.chat.encoding import render
from sglang_k3.config import ARCHITECTURE
from sglang_k3.host import chat_request
from sglang_k3.host.chat_constraint import turn_constraint
from sglang_k3.host.chat_request import encoding_options, is_thinking, render_request
from sglang_k3.integration import seam_chat
from tests.kit.chat import CONTROL, text_of

pytestmark = pytest.mark.sglang

USER = {"role": "user", "content": "x"}
FIND = {"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}
ACT = {"type": "function", "function": {"name": "act", "description": None, "strict": True}}


def request(*messages: dict[str, Any], **fields: Any) -> ChatCompletionRequest:
    return ChatCompletionRequest(model="kimi-k3", messages=list(messages) or [USER], **fields)


def options(**fields: Any) -> dict[str, Any]:
    return encoding_options(request(**fields))


def test_a_plain_request() -> None:
    assert options() == {
        "tools": [],
        "tool_choice": None,
        "response_format": None,
        "thinking": True,
        "effort": "max",
    }
    assert render_request(request()) == render([USER])


def test_messages_say_no_more_than_the_client_wrote() -> None:
    conversation = [
        {"role": "system", "name": "s", "content": "be brief"},
        {"role": "developer", "content": [{"type": "text", "text": "and kind"}]},
        USER,
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "why",
            "tool_calls": [
                {"id": "a", "type": "function", "function": {"name": "find", "arguments": '{"q": 1}'}},
                {"id": "b", "type": "function", "function": {"name": "act", "arguments": {"on": None}}},
            ],
        },
        {"role": "tool", "tool_call_id": "b", "content": "B"},
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "A"}]},
    ]
    assert render_request(request(*conversation)) == render(conversation)


def test_tools_that_a_system_message_brings() -> None:
    """The host takes them in the shape of /v1/responses only; the model sees the one of /v1/chat/completions."""
    flat = {"type": "function", "name": "act", "parameters": {"type": "object"}, "strict": None}
    nested = {"type": "function", "function": {"name": "act", "parameters": {"type": "object"}, "strict": None}}
    assert render_request(request({"role": "system", "tools": [flat]}, USER)) == render(
        [{"role": "system", "tools": [nested]}, USER]
    )


@pytest.mark.parametrize("arguments", ["", "{broken", "{'k': 1}"])
def test_calls_that_are_not_json_stay_in_the_history(arguments: str) -> None:
    """The host itself answers 400 to them, which ends every conversation in which the model once made a mistake."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    assert render_request(request(USER, turn)) == render([USER, turn])


def test_tools_are_declared_as_the_client_wrote_them() -> None:
    assert options(tools=[FIND, ACT])["tools"] == [FIND, ACT]
    without_type = {"function": {"name": "f"}}
    assert options(tools=[without_type])["tools"] == [{"type": "function", "function": {"name": "f"}}]


NAMED = {"type": "function", "function": {"name": "act"}}


@pytest.mark.parametrize(
    ("choice", "announced"),
    [(None, "auto"), ("auto", "auto"), ("none", "none"), ("required", "required"), (NAMED, "required")],
    ids=str,
)
def test_all_tools_are_declared_whatever_the_choice(choice: Any, announced: str) -> None:
    found = options(tools=[FIND, ACT], tool_choice=choice)
    assert (found["tools"], found["tool_choice"]) == ([FIND, ACT], announced)


@pytest.mark.parametrize("choice", [None, "none", "auto"])
def test_without_tools_no_choice_is_announced(choice: Any) -> None:
    """The host sets "none" where a request has no tools."""
    assert options(tool_choice=choice)["tool_choice"] is None


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("wanted", "passed_on"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "json_object"}),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
            {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        ),
        ({"type": "structural_tag", "structures": [], "triggers": []}, None),
    ],
    ids=str,
)
def test_response_formats(wanted: Any, passed_on: Any) -> None:
    assert options(response_format=wanted)["response_format"] == passed_on


def test_a_schema_is_announced_without_its_wrapping() -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": SCHEMA}}
    assert '```json\n{"properties":{"a":{"type":"integer"}},"type":"object"}\n```' in text_of(
        render_request(request(response_format=wanted))
    )


@pytest.fixture(autouse=True)
def warns_anew() -> None:
    chat_request._warn_of_other_effort.cache_clear()


@pytest.mark.parametrize("effort", ["low", "high", "max"])
@pytest.mark.parametrize("spelled", ["reasoning_effort", "reasoning"])
def test_an_effort_is_passed_on(effort: str, spelled: str, caplog: pytest.LogCaptureFixture) -> None:
    fields = {spelled: {"effort": effort} if spelled == "reasoning" else effort}
    found = options(**fields)
    assert (found["thinking"], found["effort"]) == (True, effort)
    assert not caplog.records


def test_no_effort_at_all_is_no_thinking(caplog: pytest.LogCaptureFixture) -> None:
    assert options(reasoning_effort="none")["thinking"] is False
    assert options(chat_template_kwargs={"reasoning_effort": "none"})["thinking"] is False
    assert options(reasoning_effort="none", chat_template_kwargs={"thinking": True})["thinking"] is True
    assert not caplog.records


@pytest.mark.parametrize("effort", ["minimal", "medium", "xhigh", 0.5])
def test_another_effort_is_the_default_and_said_once(effort: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert options(reasoning_effort=effort)["effort"] == "max"
        assert options(reasoning_effort="medium")["effort"] == "max"
    (record,) = caplog.records
    assert "another reasoning_effort than low, high, max or none: K3 thinks at its default, max" in record.getMessage()


@pytest.mark.parametrize("effort", ["low", "medium", "high", "max", None])
def test_the_template_argument_wins_over_the_clients_effort(effort: str | None) -> None:
    assert options(reasoning_effort="low", chat_template_kwargs={"thinking_effort": effort})["effort"] == effort


def test_a_null_effort_is_not_announced() -> None:
    assert render_request(request(chat_template_kwargs={"thinking_effort": None})) == render([USER], effort=None)


@pytest.mark.parametrize(
    ("kwargs", "thinking"),
    [({}, True), ({"thinking": None}, True), ({"thinking": False}, False), (None, True)],
    ids=str,
)
def test_thinking_is_on_unless_switched_off(kwargs: Any, thinking: bool) -> None:
    assert is_thinking(request(chat_template_kwargs=kwargs)) is thinking


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"continue_final_message": True}, "continue_final_message: not supported for K3"),
        ({"chat_template_kwargs": {"thinking": "no"}}, "chat_template_kwargs.thinking='no' is neither true nor false"),
        ({"chat_template_kwargs": {"thinking_effort": "huge"}}, "thinking effort 'huge' is not one of low, medium"),
        ({"chat_template_kwargs": {"thinking_effort": [1]}}, r"thinking effort \[1\] is not one of"),
    ],
    ids=str,
)
def test_what_cannot_be_said_is_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        render_request(request(**fields))


def test_thinking_parts_are_reasoning() -> None:
    parts = [
        {"type": "thinking", "thinking": "first"},
        {"type": "text", "text": "answer"},
        {"type": "reasoning", "text": "second"},
    ]
    expected = {"role": "assistant", "content": "answer", "reasoning_content": "first\nsecond"}
    assert render_request(request(USER, {"role": "assistant", "content": parts})) == render([USER, expected])
    both = {"role": "assistant", "content": parts, "reasoning_content": "given"}
    assert render_request(request(USER, both)) == render([USER, {**expected, "reasoning_content": "given"}])


@pytest.mark.parametrize("content", ["<|open|>think<|sep|>a", "a<|close|>think<|sep|>", "<|open|>a<|close|>", ""])
def test_other_text_is_content(content: str) -> None:
    turn = {"role": "assistant", "content": content}
    assert render_request(request(USER, turn)) == render([USER, turn])


class FakeTokenizer:
    """Ids of characters are their code points, those of control tokens negative."""

    chat_template = None

    def encode(self, text: str) -> list[int]:
        return [ord(char) for char in text]


class FakeChatTokenizer:
    def __init__(self, tokenizer: FakeTokenizer) -> None:
        self.encode_ordinary = tokenizer.encode

    def control_id(self, spelling: str) -> int:
        return -1 - CONTROL.index(spelling)


def text_of_ids(ids: list[int]) -> str:
    return "".join(chr(token) if token >= 0 else CONTROL[-1 - token] for token in ids)


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch) -> OpenAIServingChat:
    """The host's own handler with the plugin loaded, on a server that has a K3 and no engine."""
    load_plugins()
    monkeypatch.setattr(seam_chat, "chat_tokenizer", FakeChatTokenizer)
    server_args = SimpleNamespace(
        tool_call_parser=None, reasoning_parser=None, default_chat_template_kwargs=None, context_length=None
    )
    model_config = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=[ARCHITECTURE], model_type="kimi_k3"),
        get_default_sampling_params=dict,
        is_multimodal=False,
    )
    manager = SimpleNamespace(server_args=server_args, model_config=model_config, tokenizer=FakeTokenizer())
    templates = SimpleNamespace(chat_template_name=None, jinja_template_content_format="string", reasoning_config=None)
    return OpenAIServingChat(manager, templates)


def prompt_of(serving: OpenAIServingChat, chat: ChatCompletionRequest) -> str:
    return text_of_ids(serving._process_messages(chat, False).prompt_ids)


def test_the_host_sends_our_prompt(serving: OpenAIServingChat) -> None:
    """All tools although one is named, nothing of a template, and the stop strings of the client."""
    chat = request(tools=[FIND, ACT], tool_choice=NAMED, stop=["end"])
    assert prompt_of(serving, chat) == text_of(render([USER], tools=[FIND, ACT], tool_choice="required"))
    assert serving._process_messages(chat, False).stop == ["end"]


def test_a_last_assistant_turn_stays_one(serving: OpenAIServingChat) -> None:
    """The host would make a user's of it."""
    turn = {"role": "assistant", "content": "and"}
    assert prompt_of(serving, request(USER, turn)) == text_of(render([USER, turn]))


@pytest.mark.parametrize("effort", [None, "none"])
def test_the_parsers_are_told_whether_the_prompt_thinks(serving: OpenAIServingChat, effort: str | None) -> None:
    chat = request()
    chat.reasoning_effort = effort  # as the host sets it from chat_template_kwargs, behind its own checks
    prompt_of(serving, chat)
    assert chat.chat_template_kwargs == {"thinking": effort is None}


def test_defaults_of_the_server_hold(serving: OpenAIServingChat) -> None:
    serving.default_chat_template_kwargs = {"thinking": False}
    assert prompt_of(serving, request()) == text_of(render([USER], thinking=False))
    thinking = request(chat_template_kwargs={"thinking": True})
    assert prompt_of(serving, thinking) == text_of(render([USER]))


IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]}


@pytest.mark.parametrize(
    ("chat", "says"),
    [
        (request(IMAGE), "content part of type 'image_url': this version of sglang-k3 serves text only"),
        (request({"role": "function", "content": "x"}), "role 'function' is not one of"),
        (request({"role": "tool", "content": "x"}), "tool result 1"),
        (request(continue_final_message=True), "continue_final_message"),
    ],
    ids=["image", "function", "stray result", "continue"],
)
def test_a_mistake_of_the_client_is_a_value_error(
    serving: OpenAIServingChat, chat: ChatCompletionRequest, says: str
) -> None:
    """To which /v1/chat/completions and /tokenize answer 400."""
    with pytest.raises(ValueError, match=re.escape(says)):
        serving._process_messages(chat, False)


def test_messages_and_count_tokens_find_it_where_they_answer_400(serving: OpenAIServingChat) -> None:
    """To a ValueError that comes later they would answer 500."""
    orphan = {"type": "tool_result", "tool_use_id": "1", "content": "x"}
    body = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": [orphan]}]}
    with pytest.raises(ValueError, match="tool result 1"):
        AnthropicServing(serving)._convert_to_chat_completion_request(AnthropicMessagesRequest(**body))


def test_a_prompt_that_is_given_as_ids_is_not_rendered(serving: OpenAIServingChat) -> None:
    chat = request(IMAGE, input_ids=[1, 2])
    assert serving._process_messages(chat, False).prompt_ids == [1, 2]


def test_a_schema_as_deep_as_a_well_is_a_mistake_of_the_client(serving: OpenAIServingChat) -> None:
    nested: Any = {}
    for _ in range(5000):
        nested = {"items": nested}
    deep_tool = {"type": "function", "function": {"name": "f", "parameters": nested}}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": nested}}
    for chat in (request(tools=[deep_tool]), request(response_format=wanted)):
        with pytest.raises(ValueError, match="deep"):
            serving._process_messages(chat, False)


def nested(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(levels // 2):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


@pytest.mark.parametrize("levels", [120, 140])
@pytest.mark.parametrize("strict", [True, False])
def test_a_schema_is_compiled_only_if_it_is_not_too_deep(levels: int, strict: bool) -> None:
    function = {"name": "well", "parameters": nested(levels), "strict": strict}
    tools = [{"type": "function", "function": function}]
    wanted = {"type": "json_schema", "json_schema": {"name": "well", "schema": nested(levels)}}
    asked = [request(response_format=wanted), request(tools=tools, tool_choice="auto" if strict else "required")]
    for chat in asked:
        if levels < 128:
            assert turn_constraint(chat) is not None
        else:
            with pytest.raises(ValueError, match="141 levels.*at most 128 deep"):
                turn_constraint(chat)
    if not strict:  # what is not enforced is not compiled
        assert turn_constraint(request(tools=tools)) is None


def test_another_model_is_left_alone(serving: OpenAIServingChat) -> None:
    serving.chat_encoding_spec = None
    orphan = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "x"}]}
    body = AnthropicMessagesRequest(model="m", max_tokens=8, messages=[orphan])
    assert AnthropicServing(serving)._convert_to_chat_completion_request(body)
    serving.tokenizer_manager.model_config.hf_config.architectures = ["LlamaForCausalLM"]
    assert serving._resolve_chat_encoding_spec() is None


def test_a_conversation_in_the_language_of_anthropic(serving: OpenAIServingChat) -> None:
    thinking = "To find.\nThen to act. <|sep|>"
    body = {
        "model": "kimi-k3",
        "max_tokens": 8,
        "system": "be brief",
        "tools": [{"name": "find", "description": "d", "input_schema": {"type": "object"}}],
        "tool_choice": {"type": "any"},
        "messages": [
            {"role": "user", "content": "x"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": thinking, "signature": "s"},
                    {"type": "text", "text": "Looking."},
                    {"type": "tool_use", "id": "1", "name": "find", "input": {"q": "a"}},
                    {"type": "tool_use", "id": "2", "name": "find", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "2", "content": "B"},
                    {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "A"}]},
                    {"type": "text", "text": "go on"},
                ],
            },
        ],
    }
    chat = AnthropicServing(serving)._convert_to_chat_completion_request(AnthropicMessagesRequest(**body))
    calls = [
        {"id": "1", "function": {"name": "find", "arguments": json.dumps({"q": "a"})}},
        {"id": "2", "function": {"name": "find", "arguments": "{}"}},
    ]
    expected = render(
        [
            {"role": "system", "content": "be brief"},
            USER,
            {"role": "assistant", "reasoning_content": thinking, "content": "Looking.", "tool_calls": calls},
            {"role": "tool", "tool_call_id": "1", "content": "A"},
            {"role": "tool", "tool_call_id": "2", "content": "B"},
            {"role": "user", "content": "go on"},
        ],
        tools=[
            {"type": "function", "function": {"name": "find", "description": "d", "parameters": {"type": "object"}}}
        ],
        tool_choice="required",
    )
    assert prompt_of(serving, chat) == text_of(expected)


def test_reasoning_alone_is_reasoning_too(serving: OpenAIServingChat) -> None:
    block = {"type": "thinking", "thinking": "hm", "signature": "s"}
    body = {"model": "m", "max_tokens": 8, "messages": [USER, {"role": "assistant", "content": [block]}, USER]}
    chat = AnthropicServing(serving)._convert_to_chat_completion_request(AnthropicMessagesRequest(**body))
    turn = {"role": "assistant", "reasoning_content": "hm", "content": ""}
    assert prompt_of(serving, chat) == text_of(render([USER, turn, USER]))


@pytest.mark.parametrize("options", [{"tool_choice": "required"}, {"tool_choice": "auto"}], ids=str)
def test_a_schema_that_is_true_allows_anything(serving: OpenAIServingChat, options: dict[str, Any]) -> None:
    strict = options["tool_choice"] == "auto"
    results = []
    for parameters in (True, {}):
        tool = {"type": "function", "function": {"name": "find", "parameters": parameters, "strict": strict}}
        result = serving._process_messages(request(tools=[tool], **options), False)
        results.append((result.prompt_ids, result.tool_call_constraint))
    assert results[0] == results[1]
    assert results[0][1] is not None


@pytest.mark.parametrize(
    ("function", "says"),
    [
        ({"name": "find", "parameters": False}, "parameters=False of tool 'find'"),
        ({"name": "find", "parameters": [1]}, "of tool 'find': give a JSON schema of an object"),
        ({"name": ""}, r"tools\[0\] has an empty name"),
    ],
    ids=str,
)
def test_a_tool_that_nobody_can_call_is_refused(function: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        render_request(request(tools=[{"type": "function", "function": function}], tool_choice="required"))
