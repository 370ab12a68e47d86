"""The messages that the format writes by itself: literal bodies (fact sheet 4.4.5) and their place (4.4.3)."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sglang_k3.chat.encoding import render
from tests.kit.chat import text_of

END = "<|close|>message<|sep|><|end_of_msg|>"
THINK = '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
# Keys out of order at two levels, a list whose order matters, and characters that ASCII lacks.
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "description": "M\u00e9t\u00e9o, \u5929\u6c14",
            "parameters": {
                "type": "object",
                "properties": {"b": {}, "a": {"enum": ["z", "y"]}},
                "required": ["b", "a"],
            },
        },
    },
    {"type": "function", "function": {"name": "act"}},
]
TOOLS_JSON = (
    '[{"function":{"description":"M\u00e9t\u00e9o, \u5929\u6c14","name":"find",'
    '"parameters":{"properties":{"a":{"enum":["z","y"]},"b":{}},"required":["b","a"],"type":"object"}},"type":"function"},{"function":{"name":"act"},"type":"function"}]'
)


def internal(kind: str, body: str) -> str:
    return f'<|open|>message role="system" type="{kind}"<|sep|>{body}{END}'


DECLARATION = internal(
    "tool-declare",
    f"# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n{TOOLS_JSON}\n```",
)
REQUIRED = internal(
    "tool-choice", "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message."
)
NONE = internal(
    "tool-choice", "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message."
)
JSON_OBJECT = internal(
    "response-format",
    "The system is invoked with `response_format=json_object`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting.",
)


def json_schema(schema: str) -> str:
    return internal(
        "response-format",
        "The system is invoked with `response_format=json_schema`.\n"
        "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting.\n"
        f"The JSON data must match the following schema:\n```json\n{schema}\n```",
    )


def rendered(**options: Any) -> str:
    return text_of(render([], **{"effort": None, **options}))


def test_the_declaration_of_tools() -> None:
    assert rendered(tools=TOOLS) == DECLARATION + THINK


@pytest.mark.parametrize("tools", [None, []])
def test_without_tools_nothing_is_declared(tools: Any) -> None:
    assert rendered(tools=tools) == THINK


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_system_message_may_bring_further_tools(role: str) -> None:
    """Where it stands, and instead of its content."""
    conversation = [{"role": "user", "content": "x"}, {"role": role, "content": "ignored", "name": "n", "tools": TOOLS}]
    assert text_of(render(conversation, effort=None)) == (
        f'<|open|>message role="user"<|sep|>x{END}'
        + internal(
            "tool-declare",
            "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
            "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n"
            f"```json\n{TOOLS_JSON}\n```",
        )
        + THINK
    )


@pytest.mark.parametrize("tools", [None, []])
def test_a_system_message_without_tools_is_an_ordinary_one(tools: Any) -> None:
    assert text_of(render([{"role": "system", "content": "x", "tools": tools}], effort=None)) == (
        f'<|open|>message role="system"<|sep|>x{END}{THINK}'
    )


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (None, ""),
        ("auto", ""),
        ("required", REQUIRED),
        ("none", NONE),
        ({"type": "function", "function": {"name": "act"}}, REQUIRED),
    ],
    ids=str,
)
def test_the_choice_of_tools(choice: Any, message: str) -> None:
    assert rendered(tool_choice=choice) == message + THINK


@pytest.mark.parametrize("choice", ["any", "", "Required"])
def test_another_choice_is_refused(choice: str) -> None:
    with pytest.raises(ValueError, match=f"tool_choice {choice!r} is not auto, none, required or a tool"):
        render([], tool_choice=choice)


SCHEMA = {"type": "object", "properties": {"z": {"type": "string"}, "a": {"const": "\u00e9"}}}
SCHEMA_JSON = '{"properties":{"a":{"const":"\u00e9"},"z":{"type":"string"}},"type":"object"}'


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (None, ""),
        ({"type": "text"}, ""),
        ({"type": "json_object"}, JSON_OBJECT),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}, json_schema(SCHEMA_JSON)),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA, "json_schema": {}}}, json_schema(SCHEMA_JSON)),
        ({"type": "json_schema", "json_schema": {"schema": {}, "json_schema": SCHEMA}}, json_schema("{}")),
        ({"type": "json_schema", "json_schema": {"schema": None, "json_schema": SCHEMA}}, json_schema(SCHEMA_JSON)),
        ({"type": "json_schema", "json_schema": {"json_schema": SCHEMA}}, json_schema(SCHEMA_JSON)),
        ({"type": "json_schema", "json_schema": SCHEMA}, json_schema(SCHEMA_JSON)),
    ],
    ids=str,
)
def test_the_format_of_the_response(wanted: Any, message: str) -> None:
    assert rendered(response_format=wanted) == message + THINK


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"type": "yaml"}, "response_format of type 'yaml' is not one of text, json_object, json_schema"),
        ({}, "response_format of type None is not one of"),
        ({"type": "json_schema"}, "has no schema: give it as json_schema.schema"),
        ({"type": "json_schema", "json_schema": "x"}, "has no schema: give it as json_schema.schema"),
    ],
    ids=str,
)
def test_another_format_is_refused(wanted: Any, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        render([], response_format=wanted)


def test_a_schema_that_json_cannot_write_is_refused() -> None:
    nested: Any = {}
    for _ in range(100_000):
        nested = {"items": nested}
    with pytest.raises(ValueError, match="nested too deeply: make it flatter"):
        rendered(tools=[nested])
    with pytest.raises(ValueError, match="cannot be written as JSON: Object of type set"):
        rendered(tools=[{"name": {1}}])


def test_braces_in_a_schema_are_left_alone() -> None:
    """The bodies are templates, the values in them are not."""
    assert '[{"function":{"name":"{json}"}}]' in rendered(tools=[{"function": {"name": "{json}"}}])


def test_the_order_of_a_conversation() -> None:
    everything = render(
        [{"role": "user", "content": "x"}],
        tools=TOOLS,
        tool_choice="required",
        response_format={"type": "json_object"},
        effort="low",
    )
    effort = internal(
        "thinking-effort",
        "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
        "supported values include `low`, `medium`, `high`, and `max`.\n"
        "Now the system is invoked with `thinking_effort=low`.",
    )
    user = f'<|open|>message role="user"<|sep|>x{END}'
    assert text_of(everything) == DECLARATION + effort + user + REQUIRED + JSON_OBJECT + THINK


def test_a_body_is_one_segment() -> None:
    """4.4.2: one segment per contiguous piece of content."""
    texts = [segment.text for segment in render([], tools=TOOLS, effort=None)]
    assert sum(TOOLS_JSON in text for text in texts) == 1
    (body,) = (text for text in texts if TOOLS_JSON in text)
    assert body.startswith("# Tools\n") and body.endswith("\n```")
