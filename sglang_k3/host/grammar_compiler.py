"""Constrained decoding in which control tokens are tokens of their own, and never the text that they spell."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from xgrammar import CompiledGrammar, GrammarCompiler, StructuralTag, TokenizerInfo, VocabType

# No UTF-8 text holds this byte, so what begins with it matches no string of a grammar. (A spelling of "" would not
# either, but xgrammar passes over such a token even where a grammar names it.)
_NOT_TEXT = b"\xff"
_FIELDS_OF_TOKENS = ("token", "exclude_tokens", "trigger_tokens")


def build_compiler(tokenizer: Any, vocab_size: int, stop_token_ids: Collection[int] | None) -> ControlTokenCompiler:
    """The compiler for a Hugging Face tokenizer whose special tokens, the reserved ones included, are control tokens.

    ``stop_token_ids`` end a turn; the tokenizer's own if there are none.
    """
    stops = sorted(stop_token_ids) if stop_token_ids else None
    info = TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size, stop_token_ids=stops)
    added = tokenizer.added_tokens_decoder.items()
    return ControlTokenCompiler(info, {token.content: i for i, token in added if token.special})


class ControlTokenCompiler(GrammarCompiler):
    """Matches ``control_ids``, spelling -> id, where a structural tag names the token and nowhere else."""

    def __init__(self, info: TokenizerInfo, control_ids: Mapping[str, int]) -> None:
        controls = set(control_ids.values())
        super().__init__(
            TokenizerInfo(
                [_NOT_TEXT + spelling if i in controls else spelling for i, spelling in enumerate(info.decoded_vocab)],
                VocabType.RAW,
                vocab_size=info.vocab_size,
                stop_token_ids=info.stop_token_ids,
                add_prefix_space=info.add_prefix_space,
            )
        )
        self._control_ids = control_ids

    # The deprecated second form, of tags and triggers, is left out: the host has its own way from it to the first.
    def compile_structural_tag(  # type: ignore[override]
        self, structural_tag: StructuralTag | str | dict[str, Any]
    ) -> CompiledGrammar:
        """xgrammar looks tokens up by the spellings that it was given, so they are named by id.

        Raises:
            RuntimeError: the tag cannot be compiled.
        """
        if isinstance(structural_tag, StructuralTag):
            structural_tag = structural_tag.model_dump()
        elif isinstance(structural_tag, str):
            structural_tag = json.loads(structural_tag)
        try:
            named_by_id = json.dumps(self._by_id(structural_tag))
        except RecursionError:
            raise RuntimeError("The structural tag is nested too deeply: flatten it.") from None
        return super().compile_structural_tag(named_by_id)

    def _by_id(self, part: Any) -> Any:
        if isinstance(part, list):
            return [self._by_id(item) for item in part]
        if not isinstance(part, dict):
            return part
        return {
            key: self._ids(value) if key in _FIELDS_OF_TOKENS else value if key == "json_schema" else self._by_id(value)
            for key, value in part.items()
        }

    def _ids(self, named: Any) -> Any:
        if isinstance(named, list):
            return [self._ids(name) for name in named]
        return self._control_ids.get(named, named) if isinstance(named, str) else named
