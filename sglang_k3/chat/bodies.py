"""Literal bodies of the system messages that K3's chat format writes by itself (fact sheet 4.4.5)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

EFFORTS = ("low", "medium", "high", "max")

_TOOLS = """\
# Tools
Here are the available tools, described in JSONSchema.

```json
{json}
```"""
_MORE_TOOLS = """\
## New Tools Available
The system dynamically extends the toolset via lazy-loading.
You have access to all existing and extended tools.
Here are the specs for the extended tools.

```json
{json}
```"""
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={effort}`."
)
_TOOL_CHOICES = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_JSON_OBJECT = (
    "The system is invoked with `response_format=json_object`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting."
)
_JSON_SCHEMA = (
    "The system is invoked with `response_format=json_schema`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional formatting.\n"
    "The JSON data must match the following schema:\n"
    "```json\n"
    "{json}\n"
    "```"
)


def tool_declaration(tools: Sequence[Mapping[str, Any]], *, lazily_loaded: bool = False) -> str:
    """The declaration of an OpenAI-style list of tools, or of the further tools that a system message brings."""
    return (_MORE_TOOLS if lazily_loaded else _TOOLS).replace("{json}", canonical_json(tools))


def thinking_effort(effort: str) -> str:
    if effort not in EFFORTS:
        raise ValueError(f"thinking effort {effort!r} is not one of {', '.join(EFFORTS)}.")
    return _EFFORT.replace("{effort}", effort)


def tool_choice(choice: str | Mapping[str, Any] | None) -> str | None:
    """None where nothing is said: the model may choose. A named tool is announced as a call that is required."""
    if choice is None or choice == "auto":
        return None
    if isinstance(choice, Mapping):
        choice = "required"
    if choice not in _TOOL_CHOICES:
        raise ValueError(f"tool_choice {choice!r} is not auto, none, required or a tool.")
    return _TOOL_CHOICES[choice]


def response_format(wanted: Mapping[str, Any] | None) -> str | None:
    """None for plain text."""
    kind = "text" if wanted is None else wanted.get("type")
    if wanted is None or kind == "text":
        return None
    if kind == "json_object":
        return _JSON_OBJECT
    if kind != "json_schema":
        raise ValueError(f"response_format of type {kind!r} is not one of text, json_object, json_schema.")
    holder = wanted.get("json_schema")
    if not isinstance(holder, Mapping):
        raise ValueError("response_format of type 'json_schema' has no schema: give it as json_schema.schema.")
    candidates = (holder.get("schema"), holder.get("json_schema"), holder)
    schema = next(candidate for candidate in candidates if candidate is not None)
    return _JSON_SCHEMA.replace("{json}", canonical_json(schema))


def canonical_json(value: Any) -> str:
    """Compact JSON with sorted keys; non-ASCII characters as they are."""
    return to_json(value, sort_keys=True, separators=(",", ":"))


def to_json(value: Any, *, sort_keys: bool = False, separators: tuple[str, str] | None = None) -> str:
    """JSON with non-ASCII characters as they are.

    Raises:
        ValueError: the value is nested too deeply, or is none of JSON's.
    """
    try:
        return json.dumps(value, ensure_ascii=False, sort_keys=sort_keys, separators=separators)
    except RecursionError:
        raise ValueError("A tool, schema or tool call is nested too deeply: make it flatter.") from None
    except TypeError as error:
        raise ValueError(f"A tool, schema or tool call cannot be written as JSON: {error}.") from None
