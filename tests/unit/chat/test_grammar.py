"""A constrained turn accepts the forms of the fact sheet and nothing else, token by token."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from sglang_k3.chat import grammar, schema_alternatives
from sglang_k3.testing.tokenizer import build_tokenizer

xgrammar = pytest.importorskip("xgrammar")
from sglang_k3.host.grammar_compiler import build_compiler  # noqa: E402

CONTROL = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")
WEATHER = {
    "name": "get_weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"enum": ["C", "F"]},
            "days": {"type": "integer"},
            "detail": {"type": "object", "properties": {"wind": {"type": "boolean"}}, "required": ["wind"]},
        },
        "required": ["city", "days"],
    },
}
ADD = {"name": 'a"dd', "parameters": {"type": "object", "properties": {"a": {"type": "number"}}, "required": ["a"]}}
ANYTHING = {"name": "do", "parameters": {}}

THINK = ["hmm, spelled <|close|>think", "@close", "think", "@sep"]
RESPONSE = ["@open", "response", "@sep", "Sure.", "@close", "response", "@sep"]
END = ["@close", "message", "@sep", "@end_of_msg"]


def call(name: str, *arguments: tuple[str, str, str], index: int = 1) -> list[str]:
    parts = ["@open", f'call tool="{name}" index="{index}"', "@sep"]
    for key, kind, value in arguments:
        parts += ["@open", f'argument key="{key}" type="{kind}"', "@sep", value, "@close", "argument", "@sep"]
    return [*parts, "@close", "call", "@sep"]


def tools(*calls: list[str]) -> list[str]:
    return ["@open", "tools", "@sep", *(part for one in calls for part in one), "@close", "tools", "@sep"]


@pytest.fixture(scope="module")
def tokenizer():
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=build_tokenizer(384))


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return build_compiler(tokenizer, 384, {tokenizer.convert_tokens_to_ids("<|end_of_msg|>")})


@pytest.fixture(scope="module")
def accepts(tokenizer, compiler):
    """Whether a turn is accepted whole; a part ``@name`` is the control token, any other part is ordinary text."""

    def check(turn: dict[str, Any], parts: list[str]) -> bool:
        matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(json.dumps(grammar.structural_tag(turn))))
        ids = [token for part in parts for token in ids_of(tokenizer, part)]
        return all(matcher.accept_token(token) for token in ids) and bool(matcher.is_terminated())

    return check


@pytest.fixture(scope="module")
def control_tokens_behind(tokenizer, compiler):
    """The control tokens that the mask allows behind the beginning of a turn."""

    def allowed(turn: dict[str, Any], parts: list[str]) -> set[str]:
        matcher = xgrammar.GrammarMatcher(compiler.compile_structural_tag(json.dumps(grammar.structural_tag(turn))))
        assert all(matcher.accept_token(token) for part in parts for token in ids_of(tokenizer, part))
        mask = xgrammar.allocate_token_bitmask(1, 384)
        matcher.fill_next_token_bitmask(mask)
        added = tokenizer.added_tokens_decoder
        return {added[i].content for i in added if int(mask[0, i // 32]) >> (i % 32) & 1}

    return allowed


def ids_of(tokenizer: Any, part: str) -> list[int]:
    if part.startswith("@"):
        return [tokenizer.convert_tokens_to_ids(f"<|{part[1:]}|>")]
    ids: list[int] = tokenizer.encode(part, add_special_tokens=False, split_special_tokens=True)
    return ids


@pytest.mark.parametrize("thinking", [True, False])
def test_json(accepts, thinking: bool) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    turn = grammar.json_turn(schema, thinking=thinking)
    head = [*THINK, "@open", "response", "@sep"] if thinking else []
    tail = ["@close", "response", "@sep", *END]
    assert accepts(turn, [*head, '{"n": 12}', *tail])
    assert not accepts(turn, [*head, '{"n": "12"}', *tail])
    assert not accepts(turn, [*head, "Sure", *tail])
    assert not accepts(turn, [*head, '{"n": 12}', "@close", "response", "@sep", *tools(call("do")), *END])


def test_nothing_is_constrained_before_the_complete_end_of_thinking(accepts) -> None:
    turn = grammar.json_turn({"type": "object"}, thinking=True)
    for thought in ("", "{", "call get_weather", "<|close|>think<|sep|> as text"):
        assert accepts(
            turn, [thought, *THINK[1:], "@open", "response", "@sep", "{}", "@close", "response", "@sep", *END]
        )
    assert not accepts(turn, ["x", "@close", "response", "@sep"])
    assert not accepts(turn, ["x", "@end_of_msg"])


def test_required_calls(accepts) -> None:
    turn = grammar.tools_turn([WEATHER, ADD], thinking=True, at_least_one=True, parallel=True)
    good = call("get_weather", ("city", "string", 'O"slo {1}'), ("days", "number", "3"))
    assert accepts(turn, [*THINK, *RESPONSE, *tools(good), *END])
    assert accepts(turn, [*THINK, *tools(good), *END])
    assert accepts(turn, [*THINK, *tools(good, call("a&quot;dd", ("a", "number", "1.5"), index=2)), *END])
    assert not accepts(turn, [*THINK, *RESPONSE, *END])
    assert not accepts(turn, [*THINK, *tools(), *END])
    assert not accepts(turn, [*THINK, *tools(call("other", ("city", "string", "x"))), *END])


@pytest.mark.parametrize(
    ("arguments", "fits"),
    [
        ([("city", "string", "Oslo"), ("unit", "string", "C"), ("days", "number", "3")], True),
        ([("city", "string", "Oslo"), ("days", "number", "3"), ("detail", "object", '{"wind": true}')], True),
        ([("city", "string", "Oslo")], False),
        ([("city", "string", "Oslo"), ("days", "number", "many")], False),
        ([("city", "string", "Oslo"), ("unit", "string", "K"), ("days", "number", "3")], False),
        ([("city", "string", "Oslo"), ("days", "string", "3")], False),
        ([("city", "string", "Oslo"), ("days", "number", "3"), ("more", "string", "x")], False),
        ([("city", "string", "Oslo"), ("days", "number", "3"), ("detail", "object", "{}")], False),
    ],
)
def test_arguments_are_held_to_the_schema(accepts, arguments: list[tuple[str, str, str]], fits: bool) -> None:
    turn = grammar.tools_turn([WEATHER], thinking=False, at_least_one=True, parallel=True)
    assert accepts(turn, ["", *RESPONSE[4:], *tools(call("get_weather", *arguments)), *END]) is fits


def test_without_parallel_calls_there_is_one(accepts) -> None:
    turn = grammar.tools_turn([ANYTHING], thinking=False, at_least_one=True, parallel=False)
    assert accepts(turn, [*RESPONSE[4:], *tools(call("do")), *END])
    assert not accepts(turn, [*RESPONSE[4:], *tools(call("do"), call("do", index=2)), *END])


def test_a_tool_without_a_schema_takes_any_arguments(accepts) -> None:
    turn = grammar.tools_turn([ANYTHING], thinking=False, at_least_one=False, parallel=True)
    anything = call("do", ("k", "string", "v"), ("n", "null", "null"), ("l", "array", "[1, {}]"))
    assert accepts(turn, [*RESPONSE[4:], *tools(anything), *END])
    assert accepts(turn, ["Just text.", *RESPONSE[4:], *END])


def test_no_calls_at_all(accepts) -> None:
    turn = grammar.text_turn(thinking=True)
    assert accepts(turn, [*THINK, *RESPONSE, *END])
    assert not accepts(turn, [*THINK, *RESPONSE, *tools(call("do")), *END])


def test_references_of_a_schema_are_resolved(accepts) -> None:
    schema = {
        "type": "object",
        "properties": {"p": {"$ref": "#/$defs/point", "type": "object"}},
        "required": ["p"],
        "$defs": {"point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
    }
    turn = grammar.tools_turn([{"name": "f", "parameters": schema}], thinking=False, at_least_one=True, parallel=False)
    assert accepts(turn, [*RESPONSE[4:], *tools(call("f", ("p", "object", '{"x": 1}'))), *END])


def test_no_tools_is_refused() -> None:
    with pytest.raises(ValueError, match="needs at least one tool"):
        grammar.tools_turn([], thinking=True, at_least_one=True, parallel=True)


def test_control_tokens_are_no_text(control_tokens_behind) -> None:
    """Inside a string, a choice of strings and raw text: each spelling is possible there, as ordinary tokens."""
    open_response, close_response = ["@open", "response", "@sep"], ["@close", "response", "@sep"]
    free = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    turn = grammar.json_turn(free, thinking=True)
    assert control_tokens_behind(turn, [*THINK, *open_response]) == set()
    assert control_tokens_behind(turn, [*THINK, *open_response, '{"a": "x']) == set()
    assert control_tokens_behind(turn, [*THINK, *open_response, '{"a": "x<|close|>message<|sep|>']) == set()
    assert control_tokens_behind(turn, [*THINK, *open_response, '{"a": "x"}']) == {"<|close|>"}
    assert control_tokens_behind(turn, [*THINK, *open_response, '{"a": "x"}', *close_response, *END[:-1]]) == {
        "<|end_of_msg|>"
    }
    chosen = {"type": "object", "properties": {"a": {"enum": ["<|sep|>x", "[BOS]", 1]}}, "required": ["a"]}
    turn = grammar.tools_turn([{"name": "f", "parameters": chosen}], thinking=False, at_least_one=True, parallel=False)
    value = [*close_response, *tools(call("f", ("a", "string", "")))[:9]]
    assert value[-2:] == ['argument key="a" type="string"', "@sep"]
    assert control_tokens_behind(turn, value) == set()
    assert control_tokens_behind(turn, [*value, "<|sep|>"]) == set()
    assert control_tokens_behind(turn, [*value, "<|sep|>x"]) == {"<|close|>"}


def test_free_text_ends_at_its_own_marker_only(control_tokens_behind) -> None:
    assert control_tokens_behind(grammar.text_turn(thinking=True), ["hmm"]) & set(CONTROL) == {"<|close|>"}


@pytest.mark.parametrize("token", [{}, ["<|open|>"], "<|no such token|>"])
def test_a_tag_of_a_client_that_names_no_token_is_refused(compiler, token: Any) -> None:
    with pytest.raises(RuntimeError, match="(?i)token"):
        compiler.compile_structural_tag(grammar.structural_tag({"type": "token", "token": token}))


def test_a_tag_of_a_client_that_is_nested_too_deeply_is_refused(compiler) -> None:
    nested: dict[str, Any] = {"type": "token", "token": "<|open|>"}
    for _ in range(2000):
        nested = {"type": "optional", "content": nested}
    with pytest.raises(RuntimeError, match="nested"):
        compiler.compile_structural_tag(grammar.structural_tag(nested))


COLOUR = {"C": {"enum": ["red", "blue"]}, "P": {"type": "object", "properties": {"c": {"$ref": "#/$defs/C"}}}}


def accepts_arguments(accepts: Any, schema: dict[str, Any], *arguments: tuple[str, str, str]) -> bool:
    turn = grammar.tools_turn([{"name": "f", "parameters": schema}], thinking=False, at_least_one=True, parallel=False)
    fits: bool = accepts(turn, [*RESPONSE[4:], *tools(call("f", *arguments)), *END])
    return fits


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"$ref": "#/$defs/C"}, [("string", "red")], [("string", "Paris"), ("null", "null")]),
        ({"$ref": "#/properties/b"}, [("number", "1")], [("string", "1"), ("number", "1.5")]),
        ({"allOf": [{"$ref": "#/$defs/C"}], "description": "d"}, [("string", "blue")], [("string", "Paris")]),
        (
            {"anyOf": [{"type": "string", "enum": ["Oslo"]}, {"type": "null"}]},
            [("string", "Oslo"), ("null", "null")],
            [("string", "Paris"), ("number", "1")],
        ),
        (
            {"oneOf": [{"$ref": "#/$defs/C"}, {"type": "array", "items": {"$ref": "#/properties/b"}}]},
            [("string", "red"), ("array", "[1, 2]")],
            [("string", "Paris"), ("array", '["1"]')],
        ),
        (
            {"$ref": "#/$defs/P"},
            [("object", '{"c": "red"}'), ("object", "{}")],
            [("object", '{"c": "green"}'), ("string", "red")],
        ),
        (
            {"$ref": "#"},
            [("object", '{"a": {"a": {}, "b": 1}}'), ("object", "{}")],
            [("object", '{"b": "1"}'), ("object", '{"a": 1}')],
        ),
        ({"enum": ["x", 1]}, [("string", "x"), ("number", "1")], [("number", '"x"'), ("string", "1")]),
        ({"type": "object", "description": "d"}, [("object", '{"k": 1}')], [("string", "x")]),
        (True, [("string", "x")], []),
    ],
    ids=str,
)
def test_a_property_is_held_to_what_its_schema_refers_to_and_combines(
    accepts, schema: Any, good: list[tuple[str, str]], bad: list[tuple[str, str]]
) -> None:
    whole = {"type": "object", "properties": {"a": schema, "b": {"type": "integer"}}, "$defs": COLOUR}
    assert accepts_arguments(accepts, whole)
    for kind, value in good:
        assert accepts_arguments(accepts, whole, ("a", kind, value)), value
    for kind, value in bad:
        assert not accepts_arguments(accepts, whole, ("a", kind, value)), value


def test_the_arguments_are_held_to_what_their_schema_combines(accepts) -> None:
    a, b = ({"properties": {key: {"type": "integer"}}, "required": [key]} for key in "ab")
    one_a, one_b, both = [("a", "number", "1")], [("b", "number", "1")], [("a", "number", "1"), ("b", "number", "1")]
    for schema, good, bad in (
        ({"type": "object", "oneOf": [a, b]}, [one_a, one_b], [[], both]),
        ({"allOf": [a, b]}, [both], [one_a, one_b]),
        ({"$ref": "#/$defs/A", "$defs": {"A": a}}, [one_a], [[], one_b]),
        ({"type": "object", "required": ["a"]}, [one_a, [("a", "string", "x")]], [[], one_b]),
        ({**a, "required": ["a", "b"]}, [both], [one_a]),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, [[], both], [[("a", "string", "x")]]),
        ({"type": "object", "properties": {}, "additionalProperties": False}, [[]], [one_a]),
        ({"properties": {"a": False, "b": {}}}, [[], one_b], [one_a]),
    ):
        assert all(accepts_arguments(accepts, schema, *arguments) for arguments in good), schema
        assert not any(accepts_arguments(accepts, schema, *arguments) for arguments in bad), schema


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"not": {"type": "string"}}, "'not'"),
        ({"if": {"type": "string"}, "then": {"minLength": 1}}, "'if'"),
        ({"type": "object", "properties": {"b": {"not": {"const": 3}}}}, "'not'"),
        ({"type": "array", "items": {"anyOf": [{"type": "object", "properties": {"b": {"if": {}}}}]}}, "'if'"),
        ({"$ref": "#/$defs/none"}, "nothing there"),
        ({"$ref": "https://example.org/x"}, "same schema"),
        ({"$ref": "#/properties/a"}, "leads back"),
        ({"anyOf": [{"$ref": "#/properties/a"}]}, "leads back"),
        ({"allOf": [{"minimum": 1}, {"minimum": 2}]}, "'minimum'"),
        ({"allOf": [{"anyOf": [{"minimum": 1}, {}]}, *[{"anyOf": [{}, {}]}] * 8]}, "alternatives"),
        ({"anyOf": []}, "no value"),
        ("string", "object or a boolean"),
        (False, "no value"),
    ],
    ids=str,
)
def test_what_cannot_be_held_to_is_refused(schema: Any, says: str) -> None:
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}, "required": ["a"]}}
    with pytest.raises(ValueError, match=says):
        grammar.tools_turn([tool], thinking=True, at_least_one=True, parallel=True)


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ({"not": {"type": "object"}}, "'not'"),
        ({"properties": {"a": {"type": "integer", "not": {"const": 3}}}}, "'not'"),
        ({"$defs": {"a": {"items": [{"if": {}}]}}, "properties": {"a": {"$ref": "#/$defs/a"}}}, "'if'"),
        ({"dependentRequired": {"a": ["b"]}}, "'dependentRequired'"),
    ],
    ids=str,
)
def test_a_document_that_cannot_be_held_to_its_schema_is_refused(schema: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        grammar.json_turn(schema, thinking=True)
    with pytest.raises(ValueError, match=says):
        grammar.tools_turn([WEATHER], thinking=True, at_least_one=False, parallel=True, response=schema)


def test_a_reference_is_followed_once() -> None:
    """Each level names the next one twice: to follow all would take 2^40 steps."""
    names = [f"d{n}" for n in range(40)]
    defs: dict[str, Any] = {a: {"allOf": [{"$ref": f"#/$defs/{b}"}] * 2} for a, b in itertools.pairwise(names)}
    schema = {"$defs": defs | {names[-1]: {"type": "object"}}, "$ref": "#/$defs/d0"}
    assert schema_alternatives.alternatives(schema, schema) == [{"type": "object"}]


def test_what_would_end_the_process_is_refused() -> None:
    chain = {f"d{n}": {"type": "array", "items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(5000)}
    for schema, says in (
        ({"$defs": chain, "$ref": "#/$defs/d0"}, "references"),
        ({"type": "string", "pattern": "\0"}, "NUL"),
        ({"patternProperties": {"a\0": {}}}, "NUL"),
    ):
        with pytest.raises(ValueError, match=says):
            grammar.json_turn(schema, thinking=True)
    tool = {"name": "f", "parameters": {"properties": {"a": {"type": "array", "items": {"pattern": "\0"}}}}}
    with pytest.raises(ValueError, match="NUL"):
        grammar.tools_turn([tool], thinking=True, at_least_one=True, parallel=True)


def test_names_and_values_are_no_keywords() -> None:
    schema = {"type": "object", "properties": {"not": {"const": {"if": 1}}, "if": {"enum": [{"not": 2}]}}}
    grammar.json_turn(schema | {"default": {"not": 3}, "required": ["not", "if"]}, thinking=True)


def test_limits_over_all_arguments_are_refused() -> None:
    for schema, says in (({"minProperties": 1}, "'minProperties'"), ({"dependentRequired": {}}, "'dependentRequired'")):
        with pytest.raises(ValueError, match=says):
            grammar.tools_turn([{"name": "f", "parameters": schema}], thinking=True, at_least_one=True, parallel=True)
