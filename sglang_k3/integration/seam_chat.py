"""Seam: chat messages of a K3 server become token ids through our XTML encoding, not a Jinja template."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_k3.chat.encoding import encode, render
from sglang_k3.config import ARCHITECTURE
from sglang_k3.host.chat_tokenizer import HFChatTokenizer

SPEC = "kimi_k3"


def install() -> None:
    chat = "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat."
    HookRegistry.register(f"{chat}_resolve_chat_encoding_spec", _resolve_spec, HookType.AROUND)
    HookRegistry.register(f"{chat}_encode_messages", _encode_messages, HookType.AROUND)


def _resolve_spec(original: Callable[..., str | None], serving_chat: Any) -> str | None:
    architectures = serving_chat.tokenizer_manager.model_config.hf_config.architectures or []
    return SPEC if ARCHITECTURE in architectures else original(serving_chat)


def _encode_messages(
    original: Callable[..., list[int] | None],
    serving_chat: Any,
    messages: list[dict[str, Any]],
    request: Any,
    thinking_mode: Any,
    tools: list[dict[str, Any]] | None = None,
) -> list[int] | None:
    if serving_chat.chat_encoding_spec != SPEC:
        return original(serving_chat, messages, request, thinking_mode, tools=tools)
    if tools:
        raise ValueError("tools: this version of sglang-k3 renders text messages only; send the request without tools.")
    if request.continue_final_message:
        raise ValueError("continue_final_message: not supported for K3, whose assistant turns are split into channels.")
    options = request.chat_template_kwargs or {}
    segments = render(messages, thinking=options.get("thinking", True))
    return encode(segments, HFChatTokenizer(serving_chat.tokenizer_manager.tokenizer))
