"""The server's Hugging Face tokenizer as the chat encoding needs it."""

from __future__ import annotations

from typing import Any


class HFChatTokenizer:
    """See ``chat.encoding.ChatTokenizer``."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def control_id(self, spelling: str) -> int:
        token_id = self._tokenizer.convert_tokens_to_ids(spelling)
        if token_id is None or self._tokenizer.convert_ids_to_tokens(token_id) != spelling:
            raise ValueError(
                f"The tokenizer of this checkpoint has no control token {spelling}: chat needs it. "
                "Use /generate or /v1/completions, or a tokenizer with K3's control tokens."
            )
        return int(token_id)

    def encode_ordinary(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return ids
