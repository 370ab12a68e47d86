"""Tool calls of past turns and their results, as K3 reads them (fact sheet 4.4.4)."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sglang_k3.chat.bodies import to_json
from sglang_k3.chat.segments import Segment, defuse, element

Call = Mapping[str, Any]
Result = Mapping[str, Any]


def render_calls(calls: Sequence[Call]) -> Iterator[Segment]:
    """The body of a turn's tools channel."""
    for index, call in enumerate(calls, 1):
        attributes = [("tool", name_of(call)), ("index", str(index))]
        yield from element("call", _render_arguments(call["function"].get("arguments"), name_of(call)), attributes)


def name_of(call: Call) -> str:
    function = call.get("function")
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise ValueError(f"tool call {call.get('id')!r} has no name: give it as function.name.")
    return name


def order_results(results: Sequence[Result], calls: Sequence[Call], first_index: int) -> list[tuple[Result, str]]:
    """A run of consecutive tool messages in the order of the calls that they answer, each with its tool's name.

    If a result answers none of the calls, the run keeps its order and each result its own name.

    Args:
        results: the tool messages of the run.
        calls: the tool calls of the last assistant turn.
        first_index: how many results since that turn the run's first one is, counted from 1.

    Raises:
        ValueError: a result says neither which call it answers nor which tool it is from.
    """
    positions = _positions_of_calls(results, calls)
    if positions is not None:
        answered = sorted(zip(positions, results, strict=True), key=lambda pair: pair[0])
        return [(result, name_of(calls[position])) for position, result in answered]
    named = []
    for index, result in enumerate(results, first_index):
        name = result.get("tool") or result.get("name")
        if not name and index <= len(calls):
            name = name_of(calls[index - 1])
        if not isinstance(name, str) or not name:
            raise ValueError(
                f"tool result {index} ({result.get('tool_call_id')!r}) answers no call of the last assistant turn and "
                "has no name: give it the tool_call_id of such a call, or a name."
            )
        named.append((result, name))
    return named


def _positions_of_calls(results: Sequence[Result], calls: Sequence[Call]) -> list[int] | None:
    """For each result the position of its call, or None if one has none. Calls may share an id: first come first."""
    waiting: dict[str, deque[int]] = {}
    for position, call in enumerate(calls):
        if call.get("id"):
            waiting.setdefault(call["id"], deque()).append(position)
    positions = []
    for result in results:
        candidates = waiting.get(result.get("tool_call_id") or "")
        if candidates is None:
            return None
        positions.append(candidates.popleft() if len(candidates) > 1 else candidates[0])
    return positions


def _render_arguments(arguments: Any, name: str) -> Iterator[Segment]:
    if isinstance(arguments, str):
        if not arguments.strip():
            return
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            yield from element("json", defuse(arguments), [("type", "object")])
            return
    if arguments is None:
        return
    if not isinstance(arguments, Mapping):
        raise ValueError(f"arguments of a call of {name!r} are {type(arguments).__name__}: they must be an object.")
    for key, value in arguments.items():
        kind, text = _typed(value)
        yield from element("argument", defuse(text), [("key", defuse(key)), ("type", kind)])


def _typed(value: Any) -> tuple[str, str]:
    """The type that K3 knows a value by, and its text: strings are raw, all else is JSON."""
    match value:
        case str():
            return "string", value
        case None:
            kind = "null"
        case bool():
            kind = "boolean"
        case int() | float():
            kind = "number"
        case Mapping():
            kind = "object"
        case _:
            kind = "array"
    return kind, to_json(value)
