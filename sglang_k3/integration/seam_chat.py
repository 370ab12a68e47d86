"""Seam: chat messages of a K3 server become token ids through our XTML encoding, not a Jinja template.

All chat endpoints of the host come through here: /v1/chat/completions, /v1/messages, /v1/responses and /tokenize.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_k3.chat.segments import encode
from sglang_k3.config import ARCHITECTURE
from sglang_k3.host.chat_request import is_thinking, render_request, wrap_reasoning
from sglang_k3.host.chat_tokenizer import HFChatTokenizer

SPEC = "kimi_k3"

chat_tokenizer = functools.lru_cache(maxsize=1)(HFChatTokenizer)


def install() -> None:
    chat = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat."
    HookRegistry.register(f"{chat}_resolve_chat_encoding_spec", _resolve_spec, HookType.AROUND)
    HookRegistry.register(f"{chat}_apply_jinja_template", _encode, HookType.AROUND)
    HookRegistry.register(f"{chat}wrap_reasoning_history", _wrap_reasoning, HookType.AROUND)
    messages = "sglang.srt.entrypoints.anthropic.serving.AnthropicServing."
    HookRegistry.register(f"{messages}_convert_to_chat_completion_request", _convert, HookType.AROUND)


def _resolve_spec(original: Callable[..., str | None], serving_chat: Any) -> str | None:
    architectures = serving_chat.tokenizer_manager.model_config.hf_config.architectures or []
    return SPEC if ARCHITECTURE in architectures else original(serving_chat)


def _convert(original: Callable[..., Any], serving: Any, request: Any) -> Any:
    """Rendered once more than needed: /v1/messages and count_tokens answer 400 to what is raised here, 500 later."""
    chat_request = original(serving, request)
    if serving.openai_serving_chat.chat_encoding_spec == SPEC:
        render_request(chat_request)
    return chat_request


def _encode(
    original: Callable[..., Any],
    serving_chat: Any,
    request: Any,
    tools: list[dict[str, Any]] | None,
    is_multimodal: bool,
) -> Any:
    """In place of the whole step around the template, which refuses tool calls that are not JSON.

    The host's ``tools`` are not used: of a named choice they hold only that tool, of "none" nothing.
    """
    if serving_chat.chat_encoding_spec != SPEC:
        return original(serving_chat, request, tools, is_multimodal)
    from sglang.srt.entrypoints.openai.protocol import MessageProcessingResult

    prompt_ids = encode(render_request(request), chat_tokenizer(serving_chat.tokenizer_manager.tokenizer))
    # The host's own default is read off a template: the parsers are told what the prompt opened.
    request.chat_template_kwargs = {**(request.chat_template_kwargs or {}), "thinking": is_thinking(request)}
    return MessageProcessingResult(
        prompt="",
        prompt_ids=prompt_ids,
        image_data=None,
        audio_data=None,
        video_data=None,
        modalities=[],
        stop=request.stop,
    )


def _wrap_reasoning(original: Callable[..., str], serving_chat: Any, text: str) -> str:
    """The host would put it between the detector's marks, which are single tokens."""
    return wrap_reasoning(text) if serving_chat.chat_encoding_spec == SPEC else original(serving_chat, text)
