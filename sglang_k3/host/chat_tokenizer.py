"""A Hugging Face tokenizer as the chat encoding needs it."""

from __future__ import annotations

from typing import Any

from tokenizers import Tokenizer

from sglang_k3.chat.scanners import Control, MarkedText, TokenScanner
from sglang_k3.chat.tiktoken_file import byte_symbols, slices


class HFChatTokenizer:
    """See ``chat.segments.ChatTokenizer``; a fast tokenizer of any class will do.

    Ordinary text goes through a second tokenizer on the same vocabulary that has no special tokens at all. The flag
    of the first one that would do the same is shared by all threads, and does not hold for added tokens that are not
    declared special.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        backend: Tokenizer = tokenizer.backend_tokenizer
        self._ordinary = Tokenizer(backend.model)
        if backend.normalizer is not None:
            self._ordinary.normalizer = backend.normalizer
        if backend.pre_tokenizer is not None:
            self._ordinary.pre_tokenizer = backend.pre_tokenizer
        self._added = {i: token.content for i, token in backend.get_added_tokens_decoder().items()}
        self._bytes_of_symbol = {symbol: bytes([byte]) for byte, symbol in enumerate(byte_symbols())}

    def control_id(self, spelling: str) -> int:
        token_id = self._tokenizer.convert_tokens_to_ids(spelling)
        if token_id is None or self._tokenizer.convert_ids_to_tokens(token_id) != spelling:
            raise ValueError(
                f"The tokenizer of this checkpoint has no control token {spelling}: chat needs it. "
                "Use /generate or /v1/completions, or a tokenizer with K3's control tokens."
            )
        return int(token_id)

    def encode_ordinary(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:  # half a surrogate pair, as JSON can spell it; tiktoken replaces it likewise
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids: list[int] = []
        for part in slices(text):
            ids += self._ordinary.encode(part, add_special_tokens=False).ids
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """What a token writes; nothing for an id that the tokenizer does not have."""
        if token_id in self._added:
            return self._added[token_id].encode()
        spelled = self._ordinary.id_to_token(token_id) or ""
        return b"".join(self._bytes_of_symbol.get(symbol) or symbol.encode() for symbol in spelled)

    def marked_text(self) -> MarkedText:
        """A writer of output ids as text in which a control token is one, and text that spells one is text."""
        controls = {self.control_id(control.value): control for control in Control}
        return MarkedText(TokenScanner(controls, self.token_bytes))
