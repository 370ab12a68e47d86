"""What a chat request demands of the shape of its answer, as a constraint for the host's grammar backend."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang_k3.chat import grammar
from sglang_k3.host.chat_request import is_thinking
from sglang_k3.host.request_limits import check_depth

if TYPE_CHECKING:
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest


def turn_constraint(request: ChatCompletionRequest) -> dict[str, Any] | None:
    """The structural tag of the whole assistant turn, or None where the model is free.

    A tool choice of "auto" leaves the model free unless a tool is strict or parallel calls are off.

    Raises:
        ValueError: a schema is too deep, or cannot be held to. Schemas are compiled here, in the process that answers
            everyone, and not only in the scheduler.
    """
    thinking, schema = is_thinking(request), _response_schema(request)
    if request.tools:
        if request.tool_choice == "none":
            turn = (
                grammar.text_turn(thinking=thinking) if schema is None else grammar.json_turn(schema, thinking=thinking)
            )
            return grammar.structural_tag(turn)
        if (turn_with_tools := _turn_with_tools(request, thinking, schema)) is not None:
            return grammar.structural_tag(turn_with_tools)
    return None if schema is None else grammar.structural_tag(_turn_without_tools(thinking, schema))


def _turn_without_tools(thinking: bool, schema: dict[str, Any] | None) -> dict[str, Any]:
    return grammar.text_turn(thinking=thinking) if schema is None else grammar.json_turn(schema, thinking=thinking)


def _turn_with_tools(
    request: ChatCompletionRequest, thinking: bool, schema: dict[str, Any] | None
) -> dict[str, Any] | None:
    functions = [tool.function for tool in request.tools or ()]
    if not isinstance(request.tool_choice, str):
        functions = [function for function in functions if function.name == request.tool_choice.function.name]
    required = request.tool_choice != "auto"
    strict = required or any(function.strict for function in functions)
    if not strict and request.parallel_tool_calls and schema is None:
        return None
    for function in functions:
        check_depth(f"parameters of tool {function.name!r}", function.parameters)
    return grammar.tools_turn(
        [{"name": function.name, "parameters": function.parameters} for function in functions],
        thinking=thinking,
        at_least_one=required,
        parallel=request.parallel_tool_calls,
        strict="schema" if strict else "free",
        response=schema,
    )


def _response_schema(request: ChatCompletionRequest) -> dict[str, Any] | None:
    wanted = request.response_format
    if wanted is None or wanted.type not in ("json_object", "json_schema"):
        return None
    if wanted.type == "json_object":
        return {"type": "object"}
    schema: dict[str, Any] = wanted.json_schema.schema_
    check_depth("response_format", schema)
    return schema
