"""Values of arguments between XTML and JSON, tool schemas, ids of calls."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_k3.chat.tool_calls import (
    ArgumentsWriter,
    ToolSchema,
    call_id,
    count_calls,
    encode_value,
    is_text,
    value_as_json,
)

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
json_values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        ("a \u2603\n", "string", "a \u2603\n"),
        ("", "string", ""),
        (4, "number", "4"),
        (4.0, "number", "4.0"),
        (0.5, "number", "0.5"),
        (True, "boolean", "true"),
        (None, "null", "null"),
        ({"a": [1, "\u2603"]}, "object", '{"a": [1, "\u2603"]}'),
        ([], "array", "[]"),
        ((1, 2), "array", "[1, 2]"),
    ],
)
def test_a_value_is_written_by_its_type(value: Any, kind: str, text: str):
    assert encode_value(value) == (kind, text)


@pytest.mark.parametrize("value", [object(), {1, 2}, b"x"])
def test_what_is_no_json_is_refused(value: Any):
    with pytest.raises(ValueError, match="tool arguments are JSON values"):
        encode_value(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), [float("nan")]])
def test_a_number_that_json_cannot_write_is_refused(value: Any):
    with pytest.raises(ValueError, match="not JSON compliant"):
        encode_value(value)


@given(json_values)
def test_values_come_back(value: Any):
    kind, text = encode_value(value)
    decoded = json.loads(value_as_json(text, kind))
    assert decoded == value
    assert type(decoded) is type(value)


@pytest.mark.parametrize(
    ("text", "declared", "allowed", "expected"),
    [
        ("42", "string", set(), "42"),
        ("42", "string", {"string", "number"}, "42"),
        ("42", "string", {"number"}, 42),
        ("42", "string", {"integer"}, 42),
        ("4.5", "string", {"integer"}, "4.5"),
        ("forty", "string", {"number"}, "forty"),
        ('"42"', "string", {"number"}, '"42"'),
        ("true", "string", {"boolean"}, True),
        ("null", "string", {"null", "number"}, None),
        ('{"a": 1}', "string", {"object"}, {"a": 1}),
        ('{"a": 1}', "string", {"array"}, '{"a": 1}'),
        ("42", "number", {"string"}, "42"),
        ('{"a": 1}', "object", {"string"}, '{"a": 1}'),
        ("null", "null", {"string", "null"}, None),
        ("42", None, {"string", "null"}, "42"),
        ("null", None, {"string", "null"}, None),
        ("{}", "object", {"number"}, {}),
        ("42", None, set(), 42),
        ("x", None, set(), "x"),
        (" 42\n", "number", set(), 42),
        ("NaN", "number", set(), "NaN"),
        ("Infinity", "number", set(), "Infinity"),
        ("1e999", "number", set(), "1e999"),
        ("9" * 5000, "number", set(), "9" * 5000),
        ('"\\ud800"', "object", set(), '"\\ud800"'),
        ("[" * 100_000, "array", set(), "[" * 100_000),
        ("[" * 100_000 + "]" * 100_000, "array", set(), "[" * 100_000 + "]" * 100_000),
        ('{"a": "x\ty\n"}', "object", set(), {"a": "x\ty\n"}),
        ("", "object", {"object"}, ""),
    ],
)
def test_reading_is_directed_by_schema_then_type_and_falls_back_to_text(
    text: str, declared: str | None, allowed: set[str], expected: Any
):
    decoded = json.loads(value_as_json(text, declared, frozenset(allowed)))
    assert decoded == expected
    assert type(decoded) is type(expected)


@given(
    st.text(), st.sampled_from([None, "string", "number"]), st.frozensets(st.sampled_from(["string", "number", "null"]))
)
def test_a_value_that_is_its_text_may_be_streamed(text: str, declared: str | None, allowed: frozenset[str]):
    encoded = value_as_json(text, declared, allowed)
    if is_text(declared, allowed):
        assert json.loads(encoded) == text
    encoded.encode()


PROPERTY_SCHEMAS = {
    "plain": ({"type": "integer"}, {"integer"}),
    "several": ({"type": ["string", "null"]}, {"string", "null"}),
    "nothing": ({}, set()),
    "optional": ({"anyOf": [{"type": "string"}, {"type": "null"}]}, {"string", "null"}),
    "either": ({"oneOf": [{"type": "string"}, {"enum": [1]}]}, {"string", "number", "integer"}),
    "open_end": ({"anyOf": [{"type": "string"}, {}]}, set()),
    "both": ({"allOf": [{"type": ["string", "null"]}, {"minLength": 1}, {"type": "string"}]}, {"string"}),
    "choice": ({"enum": ["a", None]}, {"string", "null"}),
    "fixed": ({"const": True}, {"boolean"}),
    "referred": ({"$ref": "#/$defs/a~1b"}, {"array"}),
    "referred_twice": ({"anyOf": [{"$ref": "#/$defs/a~1b"}, {"$ref": "#/$defs/a~1b"}]}, {"array"}),
    "circular": ({"$ref": "#/$defs/loop"}, set()),
    "dangling": ({"$ref": "#/$defs/nowhere/at/all"}, set()),
    "elsewhere": ({"$ref": "other.json"}, set()),
    "nonsense": ({"type": 3, "anyOf": "x"}, set()),
    "mixed_nonsense": ({"type": ["string", 3, None]}, {"string"}),
    "no_schema": (True, set()),
}
DEFINITIONS = {"a/b": {"type": "array"}, "loop": {"$ref": "#/$defs/loop"}}


@pytest.mark.parametrize("key", PROPERTY_SCHEMAS)
def test_types_by_schema(key: str):
    properties = {name: schema for name, (schema, _) in PROPERTY_SCHEMAS.items()}
    tool = ToolSchema("f", {"properties": properties, "$defs": DEFINITIONS})
    assert tool.types_of(key) == PROPERTY_SCHEMAS[key][1]
    assert tool.types_of("absent") == set()


@pytest.mark.parametrize("parameters", [None, {}, [], "x", {"properties": None}, {"properties": ["a"]}])
def test_a_tool_without_a_usable_schema_allows_anything(parameters: Any):
    assert ToolSchema("f", parameters).types_of("a") == set()


def test_references_are_followed_once_each():
    """2 ** 60 paths lead through these definitions."""
    levels = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
    definitions = {**levels, "d60": {"type": "null"}}
    tool = ToolSchema("f", {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": definitions})
    assert tool.types_of("a") == {"null"}


def test_a_tool_of_a_request():
    function = {"name": "f", "parameters": {"properties": {"a": {"type": "null"}}}}
    assert ToolSchema.from_openai({"type": "function", "function": function}).types_of("a") == {"null"}
    assert ToolSchema.from_openai({"type": "function", "function": {"name": "f"}}) == ToolSchema("f", None)


@given(st.lists(st.tuples(st.text(), json_values)), st.integers(1, 5))
def test_the_written_arguments_are_json(arguments: list[tuple[str, Any]], size: int):
    writer = ArgumentsWriter()
    pieces = []
    for key, value in arguments:
        kind, text = encode_value(value)
        pieces.append(writer.open(key, kind))
        pieces += [writer.write(text[i : i + size]) for i in range(0, len(text), size)]
        pieces.append(writer.close())
    pieces.append(writer.finish())
    assert json.loads("".join(pieces), object_pairs_hook=list) == [(key, _as_pairs(value)) for key, value in arguments]


def _as_pairs(value: Any) -> Any:
    if isinstance(value, dict):
        return [(key, _as_pairs(inner)) for key, inner in value.items()]
    return [_as_pairs(inner) for inner in value] if isinstance(value, list) else value


def test_ids_count_the_calls_of_the_conversation():
    two = {"role": "assistant", "tool_calls": [{"id": "f:0"}, {"id": "f:1"}]}
    history = [
        {"role": "user", "content": "hi", "tool_calls": [{}]},
        two,
        {"role": "tool", "content": "1", "tool_call_id": "f:0"},
        {"role": "assistant", "content": "so", "tool_calls": None},
        {"role": "assistant", "content": "so"},
        two,
    ]
    assert count_calls(history) == 4
    assert call_id("get-weather", 4) == "get-weather:4"
