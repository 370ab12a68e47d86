"""The tiny tokenizer: published order of ids, and merges that punish tokenising a prompt in one go."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from sglang_k3.testing.presets import PRESETS
from sglang_k3.testing.tokenizer import build_tokenizer, special_token_ids

# Fact sheet 4.3: distance from [BOS], the first special id.
PUBLISHED_OFFSETS = {
    "[BOS]": 0,
    "[EOS]": 1,
    "<|end_of_msg|>": 2,
    "<|open|>": 3,
    "<|close|>": 4,
    "<|sep|>": 5,
    "[start_header_id]": 6,
    "[end_header_id]": 7,
    "[EOT]": 9,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    "<|media_pad|>": 21,
}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return build_tokenizer(PRESETS["default"].vocab_size)


@pytest.mark.parametrize("preset", PRESETS)
def test_file_and_config_agree(preset: str, tiny_folder: Callable[[str], Path]) -> None:
    folder = tiny_folder(preset)
    config = json.loads((folder / "config.json").read_text())
    text = config["text_config"]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for key, spelling in (
        ("bos_token_id", "[BOS]"),
        ("eos_token_id", "<|end_of_msg|>"),
        ("pad_token_id", "[PAD]"),
        ("media_placeholder_token_id", "<|media_pad|>"),
    ):
        assert config[key] == tokenizer.token_to_id(spelling), key
    assert {key: text[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}.items() <= config.items()
    assert tokenizer.get_vocab_size() == text["vocab_size"], "every id that the model can produce has a spelling"


def test_special_ids_follow_the_published_order(tokenizer: Tokenizer) -> None:
    first = tokenizer.token_to_id("[BOS]")
    assert {name: tokenizer.token_to_id(name) - first for name in PUBLISHED_OFFSETS} == PUBLISHED_OFFSETS
    assert [tokenizer.id_to_token(i) for i in (382, 383)] == ["[UNK]", "[PAD]"]
    reserved = first + 8
    assert tokenizer.id_to_token(reserved) == f"<|reserved_token_{reserved}|>"


@pytest.mark.parametrize(
    "text", ["message role", "the user thinks", "caf\u00e9 \u4e2d\u6587 \U0001f600\n\ttab", "\x00\x7f", ""]
)
def test_text_survives_a_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_id_of_a_byte_is_the_byte(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("\u00e9Z ~").ids == [0xC3, 0xA9, 0x5A, 0x20, 0x7E]


def test_nothing_is_prepended(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("Z").ids == [ord("Z")]


@pytest.mark.parametrize(
    "segments",
    [
        ["message", " role"],
        [" role", '="', "user", '"'],
        ['="', "system", '"'],
    ],
)
def test_merges_cross_segment_borders(tokenizer: Tokenizer, segments: list[str]) -> None:
    apart = [i for segment in segments for i in tokenizer.encode(segment).ids]
    together = tokenizer.encode("".join(segments)).ids
    assert len(apart) == len(segments), "each segment is one token"
    assert together != apart


def test_control_tokens_are_one_token_or_plain_text_on_request(tokenizer: Tokenizer) -> None:
    marker = tokenizer.token_to_id("<|open|>")
    assert tokenizer.encode("a<|open|>b").ids == [ord("a"), marker, ord("b")]
    plain = build_tokenizer(PRESETS["default"].vocab_size)
    plain.encode_special_tokens = True
    ids = plain.encode("a<|open|>b").ids
    assert marker not in ids
    assert plain.decode(ids) == "a<|open|>b"


def test_a_vocabulary_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="use at least 336"):
        special_token_ids(335)
    assert special_token_ids(336)["[PAD]"] == 335
