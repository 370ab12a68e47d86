"""The grammar backend that a scheduler of K3 creates compiles with control tokens apart from text."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from sglang.srt.constrained.base_grammar_backend import create_grammar_backend
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammarBackend
from transformers import PreTrainedTokenizerFast

from sglang_k3.chat.grammar import json_turn, structural_tag
from sglang_k3.integration.seam_parsers import _whole_turn_grammar
from sglang_k3.testing.tokenizer import build_tokenizer

pytestmark = pytest.mark.sglang


def test_a_control_token_ends_a_string_in_no_grammar_of_the_backend() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=build_tokenizer(384))
    close, end = tokenizer.convert_tokens_to_ids(["<|close|>", "<|end_of_msg|>"])
    args = SimpleNamespace(
        grammar_backend="xgrammar", constrained_json_disable_any_whitespace=True, reasoning_parser="kimi-k3"
    )
    backend = _whole_turn_grammar(create_grammar_backend, args, tokenizer, 384, {end}, think_end_id=close)
    assert type(backend) is XGrammarGrammarBackend
    tag = structural_tag(json_turn({"enum": ["a<|close|>"]}, thinking=False))
    text = tokenizer.encode('"a', split_special_tokens=True)
    for grammar in (backend.dispatch_structural_tag(json.dumps(tag)), backend.dispatch_json('{"type": "string"}')):
        assert all(grammar.matcher.accept_token(token) for token in text)
        assert not grammar.matcher.accept_token(close)
        mask = grammar.allocate_vocab_mask(384, 1, "cpu")
        grammar.fill_vocab_mask(mask, 0)
        assert not int(mask[0, close // 32]) >> (close % 32) & 1
    whole = backend.dispatch_structural_tag(json.dumps(tag)).matcher
    ids = [*tokenizer.encode('"a<|close|>"', split_special_tokens=True), close]
    assert all(whole.accept_token(token) for token in ids)
