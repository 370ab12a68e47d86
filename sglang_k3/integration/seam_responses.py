"""Seam: /v1/responses, which shares the prompt with /v1/chat/completions but reads the answer by itself."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_k3.host.answer_text import AnswerText
from sglang_k3.integration.seam_chat import SPEC
from sglang_k3.integration.seam_parsers import answer_text, is_read_from_ids

_STREAMED_EFFORTS = ("minimal", "low", "medium", "high")  # of any other, the host's events end the connection


def install() -> None:
    responses = "sglang.srt.entrypoints.openai.serving_responses.OpenAIServingResponses."
    HookRegistry.register(f"{responses}create_responses", _create, HookType.AROUND)
    HookRegistry.register(f"{responses}_generate_with_builtin_tools", _generate, HookType.AROUND)


async def _create(original: Callable[..., Any], serving: Any, request: Any, raw_request: Any = None) -> Any:
    if serving.chat_encoding_spec == SPEC:
        # The host's request has no field for ``text``: a schema would be dropped without a word.
        text = (await raw_request.json()).get("text") if raw_request is not None else None
        wanted = text.get("format") if isinstance(text, dict) else None
        kind = wanted.get("type") if isinstance(wanted, dict) else None
        if kind not in (None, "text"):
            problem = f"text.format of type {kind!r} does not work in /v1/responses"
            return serving.create_error_response(
                f"{problem}: use response_format of /v1/chat/completions.", param="text.format"
            )
        effort = request.reasoning.effort if request.reasoning is not None else None
        if request.stream and effort not in (None, *_STREAMED_EFFORTS):
            problem = f"reasoning.effort={effort!r} cannot be streamed by /v1/responses"
            return serving.create_error_response(
                f"{problem}: leave out stream, or use /v1/chat/completions.", param="reasoning.effort"
            )
    return await original(serving, request, raw_request)


def _generate(
    original: Callable[..., AsyncIterator[Any]],
    serving: Any,
    request_id: str,
    prompt: Any,
    request: Any,
    sampling_params: dict[str, Any],
    context: Any,
    **kwargs: Any,
) -> AsyncIterator[Any]:
    """The text of every output is written anew, so that the parsers see the markers and no other text for one."""
    if serving.chat_encoding_spec == SPEC:
        sampling_params["skip_special_tokens"] = False  # the request has the same dictionary
    outputs = original(serving, request_id, prompt, request, sampling_params, context, **kwargs)
    if not is_read_from_ids(serving, sampling_params.get("stop")):
        return outputs
    is_incremental = bool(request.stream and serving.tokenizer_manager.server_args.incremental_streaming_output)
    keeps = sampling_params.get("no_stop_trim", False)
    answer = answer_text(serving, is_incremental=is_incremental, keeps_stop_token=keeps)
    return _with_text(outputs, answer, is_incremental)


async def _with_text(outputs: AsyncIterator[Any], answer: AnswerText, is_incremental: bool) -> AsyncIterator[Any]:
    text = ""
    async for context in outputs:
        fresh = answer.add(context.last_output)
        text += fresh
        context.last_output = context.last_output | {"text": fresh if is_incremental else text}
        yield context
