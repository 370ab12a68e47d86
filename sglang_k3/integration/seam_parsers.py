"""Seam: a K3 answer is split into reasoning, content and calls by our parser, and constrained turn by turn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_k3.host.answer_text import AnswerText
from sglang_k3.integration.refusals import PARSER
from sglang_k3.integration.seam_chat import SPEC, chat_tokenizer


def install() -> None:
    """The parsers' names, in every process that parses the command line or builds a parser."""
    from sglang.srt.function_call.function_call_parser import FunctionCallParser
    from sglang.srt.parser.reasoning_parser import ReasoningParser

    from sglang_k3.host.detectors import KimiK3ReasoningDetector, KimiK3ToolCallDetector

    ReasoningParser.DetectorMap[PARSER] = KimiK3ReasoningDetector
    FunctionCallParser.ToolCallParserEnum[PARSER] = KimiK3ToolCallDetector


def install_main() -> None:
    chat = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat."
    HookRegistry.register(f"{chat}_process_messages", _process_messages, HookType.AROUND)
    HookRegistry.register(f"{chat}_get_reasoning_from_request", _is_thinking, HookType.AROUND)
    HookRegistry.register(f"{chat}_process_tool_call_id", _call_id, HookType.AROUND)
    HookRegistry.register(f"{chat}_build_chat_response", _from_ids, HookType.AROUND)
    HookRegistry.register(f"{chat}_process_reasoning_stream", _stream_from_ids, HookType.AROUND)
    HookRegistry.register(
        "sglang.srt.parser.reasoning_parser.ReasoningParser.__init__", _tell_detector, HookType.AROUND
    )


def install_scheduler() -> None:
    HookRegistry.register(
        "sglang.srt.constrained.base_grammar_backend.create_grammar_backend", _whole_turn_grammar, HookType.AROUND
    )
    HookRegistry.apply_hooks()


def _process_messages(original: Callable[..., Any], serving_chat: Any, request: Any, is_multimodal: bool) -> Any:
    """The constraint of the whole turn takes the place of the host's, which knows neither thinking nor channels."""
    if serving_chat.chat_encoding_spec != SPEC:
        return original(serving_chat, request, is_multimodal)
    from xgrammar import StructuralTag

    from sglang_k3.host.chat_constraint import turn_constraint
    from sglang_k3.host.chat_request import check_tools

    if not request.separate_reasoning:
        raise ValueError("separate_reasoning=false: not supported for K3, whose reasoning has a channel of its own.")
    check_tools(request)  # the host reads their schemas before it renders
    request.skip_special_tokens = False  # the parsers read the markers
    result = original(serving_chat, request, is_multimodal)
    tag = turn_constraint(request)
    result.tool_call_constraint = None if tag is None else ("structural_tag", StructuralTag.model_validate(tag))
    if request.response_format is not None and request.response_format.type in ("json_object", "json_schema"):
        request.response_format = None  # it is in the prompt and in the constraint by now
    return result


def _is_thinking(original: Callable[..., bool], serving_chat: Any, request: Any) -> bool:
    from sglang_k3.host.chat_request import is_thinking

    return is_thinking(request) if serving_chat.chat_encoding_spec == SPEC else original(serving_chat, request)


def _call_id(original: Callable[..., str], serving_chat: Any, call_item: Any, history_tool_calls_cnt: int) -> str:
    from sglang_k3.chat.tool_calls import call_id

    if serving_chat.chat_encoding_spec != SPEC:
        return original(serving_chat, call_item, history_tool_calls_cnt)
    return call_id(call_item.name, history_tool_calls_cnt + call_item.tool_index)


def is_read_from_ids(serving: Any, *stops: Any) -> bool:
    """Whether the parsers may see what the ids say; what stops at a string was found in the text, and cut from it."""
    return serving.reasoning_parser == PARSER and not any(stops)


def answer_text(serving: Any, *, is_incremental: bool, keeps_stop_token: bool) -> AnswerText:
    """For a new answer of a chat endpoint; arguments as in ``AnswerText``."""
    writer = chat_tokenizer(serving.tokenizer_manager.tokenizer).marked_text()
    return AnswerText(writer, is_incremental=is_incremental, keeps_stop_token=keeps_stop_token)


def _from_ids(original: Callable[..., Any], serving_chat: Any, request: Any, ret: list[Any], created: int) -> Any:
    if is_read_from_ids(serving_chat, request.stop, request.stop_regex):
        keeps = request.no_stop_trim
        texts = [answer_text(serving_chat, is_incremental=False, keeps_stop_token=keeps) for _ in ret]
        ret = [item | {"text": text.add(item)} for text, item in zip(texts, ret, strict=True)]
    return original(serving_chat, request, ret, created)


def _stream_from_ids(
    original: Callable[..., Any],
    serving_chat: Any,
    index: int,
    delta: str,
    parsers: dict[Any, Any],
    content: dict[str, Any],
    request: Any,
    finish_reason_type: str | None = None,
) -> Any:
    if is_read_from_ids(serving_chat, request.stop, request.stop_regex):
        # The host keeps what belongs to a choice of a stream in this dictionary, so it ends with the stream.
        key = ("marked", index)
        if key not in parsers:
            is_incremental = serving_chat.tokenizer_manager.server_args.incremental_streaming_output
            keeps = request.no_stop_trim
            parsers[key] = answer_text(serving_chat, is_incremental=is_incremental, keeps_stop_token=keeps)
        delta = parsers[key].add(content)
    return original(serving_chat, index, delta, parsers, content, request, finish_reason_type)


def _tell_detector(original: Callable[..., None], parser: Any, *args: Any, **kwargs: Any) -> None:
    """The host builds the reasoning detector without the request that says whether calls are to be parsed after it."""
    from sglang_k3.host.detectors import KimiK3ReasoningDetector

    original(parser, *args, **kwargs)
    request = kwargs.get("request") or (args[3] if len(args) > 3 else None)
    if isinstance(parser.detector, KimiK3ReasoningDetector):
        tools, choice = getattr(request, "tools", None), getattr(request, "tool_choice", None)
        # /v1/responses lists tools of other types too, which its host does not parse calls of.
        parser.detector.hands_on = choice != "none" and any(tool.type == "function" for tool in tools or ())


def _whole_turn_grammar(
    original: Callable[..., Any],
    server_args: Any,
    tokenizer: Any,
    vocab_size: int,
    eos_token_ids: set[int] | None = None,
    think_end_id: int | None = None,
) -> Any:
    """Our grammars begin with the thinking, so the host must not hold them back until it ends."""
    from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend

    from sglang_k3.host.grammar_compiler import build_compiler

    backend = original(server_args, tokenizer, vocab_size, eos_token_ids)
    if isinstance(backend, XGrammarGrammarBackend):
        backend.grammar_compiler = build_compiler(tokenizer, vocab_size, eos_token_ids)
    return backend
