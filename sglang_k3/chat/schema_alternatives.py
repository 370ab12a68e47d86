"""A JSON schema as the list of its alternatives: ``$ref``, ``anyOf``, ``oneOf`` and ``allOf`` at its top are resolved.

Arguments are not one JSON document, so xgrammar's reader of schemas cannot be asked for the top two levels of one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import product
from typing import Any
from urllib.parse import unquote

Schema = Mapping[str, Any]

MAX_ALTERNATIVES = 64
NUL_IN_JSON = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")
_NOTES = ("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment", "$schema")
_RESOLVED = ("$id", "$defs", "definitions", "$ref", "anyOf", "oneOf", "allOf")
_REFUSED = ("not", "if", "dependentRequired", "dependentSchemas", "dependencies", "$dynamicRef", "$recursiveRef")
_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_DATA = ("enum", "const", "default", "examples")


def alternatives(schema: Any, root: Schema) -> list[dict[str, Any]]:
    """Schemas of which a value must fit one, each without references, combinations and notes at its top.

    ``oneOf`` is read as ``anyOf``. ``root`` is the whole schema, in which references are looked up.

    Raises:
        ValueError: the schema cannot be resolved or held to; the message names the keyword.
    """
    return _alternatives(schema, root, {})


def _alternatives(schema: Any, root: Schema, known: dict[str, list[dict[str, Any]] | None]) -> list[dict[str, Any]]:
    """``known`` has what each reference stands for, so that none is followed twice, and None while it is followed."""
    if isinstance(schema, bool):
        return [{}] if schema else []
    if not isinstance(schema, Mapping):
        raise ValueError(f"The schema {schema!r} cannot be enforced: it must be an object or a boolean.")
    _refuse_keywords(schema)
    found = [{key: value for key, value in schema.items() if key not in _RESOLVED + _NOTES}]
    if "$ref" in schema:
        found = _both(found, _referenced(schema["$ref"], root, known))
    for part in schema.get("allOf", ()):
        found = _both(found, _alternatives(part, root, known))
    for key in ("anyOf", "oneOf"):
        if key in schema:
            choices = [choice for part in schema[key] for choice in _alternatives(part, root, known)]
            found = _both(found, choices)
    return found


def _referenced(ref: Any, root: Schema, known: dict[str, list[dict[str, Any]] | None]) -> list[dict[str, Any]]:
    target = _target(ref, root)
    if ref not in known:
        known[ref] = None
        known[ref] = _alternatives(target, root, known)
    if (found := known[ref]) is None:
        raise ValueError(f"$ref={ref!r} cannot be enforced: it leads back to itself.")
    return found


def check_keywords(part: Any) -> None:
    """Refuse, at any depth of a schema, keywords that xgrammar would pass over.

    Raises:
        ValueError: there is one; the message names it.
    """
    if isinstance(part, list):
        for item in part:
            check_keywords(item)
    elif isinstance(part, Mapping):
        _refuse_keywords(part)
        for key, value in part.items():
            if key in _MAPS_OF_SCHEMAS and isinstance(value, Mapping):
                check_keywords([*value.values()])
            elif key not in _DATA:
                check_keywords(value)


def _refuse_keywords(schema: Schema) -> None:
    if refused := [key for key in _REFUSED if key in schema]:
        raise ValueError(f"{refused[0]!r} in a schema cannot be enforced: leave it out.")


def rebased(part: Any, base: str) -> Any:
    """``part`` of a schema with the references into that schema looking for it at ``base``."""
    if isinstance(part, list):
        return [rebased(item, base) for item in part]
    if not isinstance(part, Mapping):
        return part
    moved: dict[str, Any] = {}
    for key, value in part.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = base + value[1:]
        elif key in _MAPS_OF_SCHEMAS and isinstance(value, Mapping):
            moved[key] = {name: rebased(item, base) for name, item in value.items()}
        else:
            moved[key] = value if key in _DATA else rebased(value, base)
    return moved


def _target(ref: Any, root: Schema) -> Any:
    if not isinstance(ref, str) or (ref != "#" and not ref.startswith("#/")):
        raise ValueError(f"$ref={ref!r} cannot be enforced: it must point into the same schema, as '#/$defs/name'.")
    target: Any = root
    for name in ref.split("/")[1:]:
        name = unquote(name).replace("~1", "/").replace("~0", "~")
        try:
            target = target[int(name)] if isinstance(target, list) else target[name]
        except (KeyError, IndexError, TypeError, ValueError):
            raise ValueError(f"$ref={ref!r} cannot be enforced: the schema has nothing there.") from None
    return target


def _both(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if (count := len(some) * len(others)) > MAX_ALTERNATIVES:
        raise ValueError(f"A schema of {count} alternatives cannot be enforced: it may have {MAX_ALTERNATIVES}.")
    return [_merged(one, other) for one, other in product(some, others)]


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """What both demand; only what is simple to say in one schema is."""
    merged = {**one, **other}
    for key in one.keys() & other.keys():
        mine, theirs = one[key], other[key]
        if key == "required":
            merged[key] = list(dict.fromkeys([*mine, *theirs]))
        elif key == "properties" and not any(theirs[name] != mine[name] for name in mine.keys() & theirs.keys()):
            merged[key] = {**mine, **theirs}
        elif mine != theirs:
            raise ValueError(f"{key!r} of combined schemas cannot be enforced: {mine!r} and {theirs!r} differ.")
    return merged
