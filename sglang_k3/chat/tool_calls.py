"""Tool calls between XTML and JSON: values by type, the arguments object as it is written, ids (fact sheet 4.4.4, 4.5).

XTML writes a value as bare text beside its type: a string is its text, anything else is JSON. Models get the type
wrong, or write no JSON where JSON is due, so reading is directed by the tool's schema first, by the type attribute
second, and a value that cannot be read otherwise is a string. No value makes a call fail.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

ANYTHING: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True)
class ToolSchema:
    """What the parser needs to know of a tool.

    ``parameters`` is the JSON schema of the arguments object, as the client sent it: nothing in it is trusted.
    """

    name: str
    parameters: Any = None

    @classmethod
    def from_openai(cls, tool: Mapping[str, Any]) -> ToolSchema:
        """From ``{"type": "function", "function": {"name", "parameters"}}``."""
        function = tool["function"]
        return cls(function["name"], function.get("parameters"))

    def types_of(self, key: str) -> frozenset[str]:
        """JSON schema types that an argument may have; ``ANYTHING`` (empty) where the schema does not say."""
        properties = self.parameters.get("properties") if isinstance(self.parameters, Mapping) else None
        if not isinstance(properties, Mapping):
            return ANYTHING
        return self._types(properties.get(key), {})

    def _types(self, schema: Any, resolved: dict[str, frozenset[str]]) -> frozenset[str]:
        if not isinstance(schema, Mapping):
            return ANYTHING
        match schema:
            case {"type": str(name)}:
                return frozenset({name})
            case {"type": [*names]}:
                return frozenset(name for name in names if isinstance(name, str))
            case {"enum": [*values]}:
                return frozenset().union(*map(_kinds, values))
            case {"const": value}:
                return _kinds(value)
            case {"$ref": str(path)}:
                if path not in resolved:
                    resolved[path] = ANYTHING  # for a reference to itself
                    resolved[path] = self._types(self._lookup(path), resolved)
                return resolved[path]
            case {"anyOf": [*branches]} | {"oneOf": [*branches]}:
                alternatives = [self._types(branch, resolved) for branch in branches]
                return frozenset().union(*alternatives) if all(alternatives) else ANYTHING
            case {"allOf": [*branches]}:
                constraints = [types for branch in branches if (types := self._types(branch, resolved))]
                return frozenset.intersection(*constraints) if constraints else ANYTHING
        return ANYTHING

    def _lookup(self, path: str) -> Any:
        node = self.parameters
        for part in path.removeprefix("#").split("/")[1:]:
            node = node.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
        return node


def encode_value(value: Any) -> tuple[str, str]:
    """The ``type`` attribute and the text of an argument.

    Raises:
        ValueError: not a value that JSON knows.
    """
    if isinstance(value, str):
        return "string", value
    kind = next((name for name in ("number", "boolean", "null", "object", "array") if name in _kinds(value)), None)
    if kind is None:
        raise ValueError(f"argument of type {type(value).__name__}: tool arguments are JSON values.")
    return kind, json.dumps(value, ensure_ascii=False, allow_nan=False)


def is_text(declared: str | None, allowed: frozenset[str] = ANYTHING) -> bool:
    """Whether a value is its own text whatever that text says, so that it may be passed on as it comes.

    Args:
        declared: the ``type`` attribute; None if there is none.
        allowed: types by the tool's schema.
    """
    if declared == "string":
        return not allowed or "string" in allowed
    return allowed == {"string"}


def value_as_json(text: str, declared: str | None, allowed: frozenset[str] = ANYTHING) -> str:
    """JSON text of an argument; see ``is_text`` for the parameters. Never raises."""
    if not is_text(declared, allowed):
        try:
            # not strict: raw newlines in the strings of an object are frequent and their meaning is plain
            value = json.loads(text, strict=False, parse_constant=_refuse, parse_float=_finite)
            encoded = json.dumps(value, ensure_ascii=False)
            encoded.encode()  # half a surrogate pair has no UTF-8
        except (ValueError, RecursionError):
            pass
        else:
            string_will_do = declared == "string" or "string" in allowed
            if not allowed or _kinds(value) & allowed or not string_will_do:
                return encoded
    return json.dumps(text, ensure_ascii=False)


class ArgumentsWriter:
    """The ``arguments`` of one call as JSON text, in pieces that concatenate to the whole.

    ``open`` (or ``open_verbatim``), ``write`` and ``close`` once for every argument, then ``finish``. Strings are
    handed on as they come. Other values wait for ``close``: only the whole text shows what they are.
    """

    def __init__(self, tool: ToolSchema | None = None) -> None:
        self._tool = tool
        self._is_empty = True
        self._declared: str | None = None
        self._allowed = ANYTHING
        self._waiting: io.StringIO | None = None
        self._verbatim = False

    @property
    def is_empty(self) -> bool:
        """Whether nothing has been written that would make an object."""
        return self._is_empty

    @property
    def is_verbatim(self) -> bool:
        """Whether the arguments came as one block of text (``open_verbatim``)."""
        return self._verbatim

    def open(self, key: str, declared: str | None) -> str:
        self._declared = declared
        self._allowed = self._tool.types_of(key) if self._tool else ANYTHING
        self._waiting = None if is_text(declared, self._allowed) else io.StringIO()
        prefix = "{" if self._is_empty else ", "
        self._is_empty = False
        return f"{prefix}{json.dumps(key, ensure_ascii=False)}: " + ('"' if self._waiting is None else "")

    def open_verbatim(self) -> None:
        """All arguments follow as one text that is passed on as it is (the ``json`` block)."""
        self._verbatim = True

    def write(self, text: str) -> str:
        if self._verbatim:
            self._is_empty = self._is_empty and not text.strip()
            return text
        if self._waiting is not None:
            self._waiting.write(text)
            return ""
        return json.dumps(text, ensure_ascii=False)[1:-1]

    def close(self) -> str:
        if self._verbatim:
            return ""
        if self._waiting is not None:
            return value_as_json(self._waiting.getvalue(), self._declared, self._allowed)
        return '"'

    def finish(self) -> str:
        if self._is_empty:
            return "{}"
        return "" if self._verbatim else "}"


def call_id(name: str, number: int) -> str:
    """Id of a call; ``number`` counts the calls of the whole conversation from 0."""
    return f"{name}:{number}"


def count_calls(messages: Iterable[Mapping[str, Any]]) -> int:
    """How many calls the assistant has made: the number of the next one."""
    return sum(len(message.get("tool_calls") or ()) for message in messages if message.get("role") == "assistant")


def _kinds(value: Any) -> frozenset[str]:
    """JSON schema types that a value has: a whole number is an integer and a number."""
    return frozenset(_kinds_of(value))


def _kinds_of(value: Any) -> Iterator[str]:
    match value:
        case None:
            yield "null"
        case bool():
            yield "boolean"
        case int() | float():
            yield "number"
            if isinstance(value, int) or value.is_integer():
                yield "integer"
        case str():
            yield "string"
        case dict():
            yield "object"
        case list() | tuple():
            yield "array"


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text} does not fit a float")
    return value
