"""Tokenizer of the tiny checkpoints: byte-level BPE with a few merges, and K3's control tokens.

Ids follow the published order: first the BPE ranks (the 256 bytes, so that id ``b`` is byte ``b``, then the merges),
then a region of special tokens that fills the vocabulary, ``[UNK]`` and ``[PAD]`` last. There is no
pre-tokenisation, so merges may reach across any border that a control token does not cut. Some of them do: they
join a tag name with what follows it, an attribute with its value, a value with its closing quote. A prompt that is
tokenised as one string therefore gets other ids than one that is tokenised segment by segment, as K3 demands.

A fitted preset appends merges that were learned from what it was fitted on.
"""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

Merges = Sequence[tuple[str, str]]  # pairs of plain texts, best first

END_OF_MESSAGE = "<|end_of_msg|>"
MEDIA_PAD = "<|media_pad|>"

# Distance from the first special id, as in the published table; the rest are "<|reserved_token_{id}|>".
SPECIAL_OFFSETS = {
    "[BOS]": 0,
    "[EOS]": 1,
    END_OF_MESSAGE: 2,
    "<|open|>": 3,
    "<|close|>": 4,
    "<|sep|>": 5,
    "[start_header_id]": 6,
    "[end_header_id]": 7,
    "[EOT]": 9,
    "<|media_begin|>": 18,
    "<|media_content|>": 19,
    "<|media_end|>": 20,
    MEDIA_PAD: 21,
}
TRAILING_SPECIALS = ("[UNK]", "[PAD]")

# Each string becomes one token by merging from the left: "message" needs me, mes, mess, messa, messag, message.
_MERGED_STRINGS = (
    " the",
    "message",
    " role",
    "user",
    "system",
    "assistant",
    "think",
    "response",
    "tools",
    "call",
    "ing",
)
# Pairs of the strings above that K3 keeps in separate segments.
_BORDER_MERGES = (
    ("message", " role"),
    (" role", '="'),
    ('="', "user"),
    ('="', "system"),
    ("user", '"'),
    ("system", '"'),
)
BASE_MERGES: tuple[tuple[str, str], ...] = (
    ("=", '"'),
    *dict.fromkeys((text[:i], text[i]) for text in _MERGED_STRINGS for i in range(1, len(text))),
    *_BORDER_MERGES,
)


def special_token_ids(vocab_size: int, learned_merges: Merges = ()) -> dict[str, int]:
    """Spelling -> id of every special token, reserved ones included, for a vocabulary of this size.

    Args:
        vocab_size: of everything, ranks and special tokens.
        learned_merges: ranked after the usual ones; each adds one rank.
    Raises:
        ValueError: the vocabulary has no room for the control tokens.
    """
    first = 256 + len(BASE_MERGES) + len(learned_merges)
    minimum = first + max(SPECIAL_OFFSETS.values()) + 1 + len(TRAILING_SPECIALS)
    if vocab_size < minimum:
        raise ValueError(
            f"vocab_size={vocab_size} is too small for {first} byte-pair ranks and K3's control tokens: "
            f"use at least {minimum}."
        )
    names = {first + offset: name for name, offset in SPECIAL_OFFSETS.items()}
    names |= {vocab_size - len(TRAILING_SPECIALS) + i: name for i, name in enumerate(TRAILING_SPECIALS)}
    return {names.get(i, f"<|reserved_token_{i}|>"): i for i in range(first, vocab_size)}


def build_tokenizer(vocab_size: int, learned_merges: Merges = ()) -> Tokenizer:
    """The tokenizer of a tiny checkpoint; it names every id below ``vocab_size`` and prepends nothing."""
    specials = special_token_ids(vocab_size, learned_merges)
    merges = [(_as_symbols(left), _as_symbols(right)) for left, right in (*BASE_MERGES, *learned_merges)]
    ranks = [*_byte_symbols(), *(left + right for left, right in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(ranks)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in specials])
    return tokenizer


def _as_symbols(text: str) -> str:
    symbols = _byte_symbols()
    return "".join(symbols[byte] for byte in text.encode())


def _byte_symbols() -> list[str]:
    """One printable character per byte, as byte-level BPE files spell them (byte 32 is U+0120)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    stand_ins = {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    return [stand_ins.get(byte, chr(byte)) for byte in range(256)]
