"""What a K3 answer must look like under a tool choice or response format, as an xgrammar structural tag.

The whole assistant turn is described, thinking included: constraints begin only behind the complete end of the
think channel. Control tokens are matched as tokens, so that text which merely spells one does not count, and free
text cannot contain one (fact sheet 4.4.4, 4.5).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from sglang_k3.chat.schema_alternatives import NUL_IN_JSON, Schema, alternatives, check_keywords, rebased
from sglang_k3.chat.segments import CLOSE, END_OF_MESSAGE, OPEN, SEP

Format = dict[str, Any]

MAX_REFERENCES = 1000
_CONTROL = [OPEN, CLOSE, SEP, END_OF_MESSAGE]
_INDEX = {"type": "regex", "pattern": "[1-9][0-9]{0,3}"}
_KEY = {"type": "regex", "pattern": '[^"<&]{1,128}'}
# JSON schema type -> the type attribute of an argument.
_XTML_TYPES = {
    "string": "string",
    "integer": "number",
    "number": "number",
    "boolean": "boolean",
    "null": "null",
    "object": "object",
    "array": "array",
}


def structural_tag(turn: Format) -> Format:
    """The request form of a turn's format."""
    return {"type": "structural_tag", "format": turn}


def json_turn(schema: Schema, *, thinking: bool) -> Format:
    """A turn whose response is one JSON document of ``schema``, without tool calls."""
    return _sequence(*_up_to_response(thinking), _json(schema), *_close("response"), *_close("message"))


def text_turn(*, thinking: bool) -> Format:
    """A turn with free text and no tool calls: ``tool_choice="none"``."""
    return _sequence(*_up_to_response(thinking), _free_text(), *_close("response"), *_close("message"))


def tools_turn(
    tools: Sequence[Mapping[str, Any]],
    *,
    thinking: bool,
    at_least_one: bool,
    parallel: bool,
    strict: Literal["schema", "free"] = "schema",
    response: Schema | None = None,
) -> Format:
    """A turn that may (or must) end with calls of ``tools``.

    Args:
        tools: OpenAI-style functions ``{"name", "parameters"}``; only these can be called.
        at_least_one: calls are required, else the tools channel may be left out.
        parallel: several calls are allowed, else one.
        strict: hold arguments to the schema, or only to the format.
        response: what is said in words is one JSON document of this schema; free text if None.

    Raises:
        ValueError: no tool is given, or a schema cannot be enforced.
    """
    if not tools:
        raise ValueError("tools is empty: a turn with calls needs at least one tool.")
    calls = [_call(tool, strict) for tool in tools]
    one = calls[0] if len(calls) == 1 else {"type": "or", "elements": calls}
    section = _sequence(*_open("tools"), {"type": "plus", "content": one} if parallel else one, *_close("tools"))
    if not at_least_one:
        section = {"type": "optional", "content": section}
    body = _free_text() if response is None else _json(response)
    said = _sequence(*_open("response"), body, *_close("response"))
    if thinking:
        head = [_free_text(), *_close("think"), {"type": "optional", "content": said} if at_least_one else said]
    elif at_least_one:
        head = [_free_text(), *_close("response")]
    else:
        head = [body, *_close("response")]
    return _sequence(*head, section, *_close("message"))


def _up_to_response(thinking: bool) -> list[Format]:
    """The generation prompt has opened the think channel, or with thinking off the response channel."""
    return [_free_text(), *_close("think"), *_open("response")] if thinking else []


def _call(tool: Mapping[str, Any], strict: str) -> Format:
    name = _escaped(tool["name"])
    schema = tool.get("parameters") or {}
    try:
        arguments = _arguments(schema) if strict == "schema" else _any_arguments({}, {})
    except RecursionError:
        raise ValueError(f"The schema of the tool {name!r} cannot be enforced: it is nested too deeply.") from None
    return _sequence(
        _token(OPEN),
        _text(f'call tool="{name}" index="'),
        _INDEX,
        _text('"'),
        _token(SEP),
        arguments,
        *_close("call"),
    )


def _arguments(root: Schema) -> Format:
    choices = [_arguments_of(schema, root) for schema in alternatives(root, root)]
    return _one_of(choices, "The schema of the arguments")


def _arguments_of(schema: Schema, root: Schema) -> Format:
    """One argument per property, in the schema's order; those that are not required may be left out.

    Arguments without a name in the schema are written only where it has no names at all.
    """
    for key in ("minProperties", "maxProperties"):
        if key in schema:
            raise ValueError(f"{key!r} in a schema of arguments cannot be enforced: leave it out.")
    required, more = schema.get("required", ()), schema.get("additionalProperties", True)
    properties = {
        **schema.get("properties", {}),
        **{key: more for key in required if key not in schema.get("properties", {})},
    }
    if not properties and more is not False:
        return _any_arguments(more, root)
    formats = []
    for key, value in properties.items():
        if key in required:
            formats.append(_argument(_text(_escaped(key)), value, root))
        elif value is not False:
            formats.append({"type": "optional", "content": _argument(_text(_escaped(key)), value, root)})
    return _sequence(*formats) if formats else _text("")


def _any_arguments(schema: Any, root: Schema) -> Format:
    return {"type": "star", "content": _argument(_KEY, schema, root)}


def _argument(key: Format, schema: Any, root: Schema) -> Format:
    choices = [
        _typed_argument(key, kind, choice, root) for choice in alternatives(schema, root) for kind in _types_of(choice)
    ]
    return _one_of(choices, f"The schema {json.dumps(schema)} of an argument")


def _one_of(choices: list[Format], what: str) -> Format:
    if not choices:
        raise ValueError(f"{what} cannot be enforced: no value fits it.")
    return choices[0] if len(choices) == 1 else {"type": "or", "elements": choices}


def _typed_argument(key: Format, kind: str, schema: Schema, root: Schema) -> Format:
    return _sequence(
        _token(OPEN),
        _text('argument key="'),
        key,
        _text(f'" type="{_XTML_TYPES[kind]}"'),
        _token(SEP),
        _value(kind, schema, root),
        *_close("argument"),
    )


def _types_of(schema: Schema) -> list[str]:
    """The JSON types that a value of ``schema`` may have; all of them where the schema does not say."""
    if "const" in schema or "enum" in schema:
        return sorted({_type_of_value(value) for value in _values_of(schema)})
    declared = schema.get("type")
    if isinstance(declared, str):
        declared = [declared]
    known = [kind for kind in declared or () if kind in _XTML_TYPES]
    return known or [kind for kind in _XTML_TYPES if kind != "integer"]


def _type_of_value(value: Any) -> str:
    for kind, python_type in (("boolean", bool), ("number", (int, float)), ("string", str), ("array", list)):
        if isinstance(value, python_type):
            return kind
    return "null" if value is None else "object"


def _value(kind: str, schema: Schema, root: Schema) -> Format:
    is_chosen = "enum" in schema or "const" in schema
    values = [value for value in _values_of(schema) if _type_of_value(value) == kind] if is_chosen else []
    if kind == "string":
        # Strings are written raw; of the schema's limits only a choice of values is held to.
        return _one_of([_text(value) for value in values], "An empty choice") if is_chosen else _free_text()
    typed: dict[str, Any] = {"enum": values} if is_chosen else {**rebased(schema, "#/$defs/root"), "type": kind}
    if '"$ref"' in json.dumps(typed):  # any keyword beside the type makes xgrammar take a free array for an empty one
        typed["$defs"] = {"root": rebased(root, "#/$defs/root")}
    return _json(typed)


def _values_of(schema: Schema) -> list[Any]:
    values: list[Any] = schema["enum"] if "enum" in schema else [schema["const"]]
    return values


def _json(schema: Schema) -> Format:
    """JSON with one space behind ``,`` and ``:`` and none elsewhere, as K3 writes values.

    Free white space would be an endless path that a model can fall into and never leave.

    Raises:
        ValueError: the schema cannot be held to.
    """
    from xgrammar import Grammar

    check_keywords(schema)
    text = json.dumps(dict(schema))
    # xgrammar follows references without an end to its stack, and reads past the end of a pattern with a NUL.
    if (count := text.count('"$ref"')) > MAX_REFERENCES:
        raise ValueError(f"A schema with {count} references cannot be enforced: it may have {MAX_REFERENCES}.")
    if NUL_IN_JSON.search(text):
        raise ValueError("A schema with a NUL character cannot be enforced: leave it out.")
    try:
        grammar = Grammar.from_json_schema(text, any_whitespace=False)
    except RuntimeError as error:
        raise ValueError(f"This JSON schema cannot be enforced: {error}") from None
    return {"type": "grammar", "grammar": str(grammar)}


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace('"', "&quot;")


def _free_text() -> Format:
    return {"type": "any_tokens", "exclude_tokens": _CONTROL}


def _open(name: str) -> list[Format]:
    return [_token(OPEN), _text(name), _token(SEP)]


def _close(name: str) -> list[Format]:
    return [_token(CLOSE), _text(name), _token(SEP)]


def _token(spelling: str) -> Format:
    return {"type": "token", "token": spelling}


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}


def _sequence(*elements: Format) -> Format:
    return {"type": "sequence", "elements": list(elements)}
