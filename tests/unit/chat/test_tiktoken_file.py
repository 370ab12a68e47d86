"""The published tokenizer file gives the ids that tiktoken gives, on any text and for any list of ranks."""

from __future__ import annotations

import base64
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import regex
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from sglang_k3.chat.tiktoken_file import (
    MAX_RUN,
    MAX_SLICE,
    SPLIT_PATTERN,
    byte_symbols,
    load_tokenizer,
    name_reserved_ids,
    read_ranks,
    recover_merges,
    slices,
)
from sglang_k3.host.chat_tokenizer import HFChatTokenizer
from sglang_k3.host.tokenizer import KimiK3TokenizerFast

seeded = settings(max_examples=300, derandomize=True, database=None, deadline=None)
BYTES = [bytes([byte]) for byte in range(256)]

# Everything that the pattern tells apart: scripts, marks, contractions, numbers, punctuation, white space, specials.
FRAGMENTS = (
    "The quick brown fox",
    "don't I'LL we'Ve it'\u017f",
    "HTMLParser fooBar \u01c5",
    "12345 3.14 \u0663\u0664 \u00bd\u2167",
    " !?... --> #$%\r\n",
    "\r\n\n  \n\t x",
    "\u00a0\u2003\u3000  ",
    "\u4f60\u597d\u4e16\u754c\u7684\u3005\u3007\u9f98",
    "\u3053\u3093\u306b\u3061\u306f",
    "\uc548\ub155\ud558\uc138\uc694",
    "\u043f\u0440\u0438\u0432\u0435\u0442 \u041c\u0418\u0420",
    "\u0645\u0631\u062d\u0628\u0627",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "e\u0301 a\u0308\u0302 \u0301",
    "\U0001f44d\U0001f3fd \U0001f469\u200d\U0001f4bb \U0001f1e9\U0001f1ea \u2764\ufe0f",
    "<|open|>message<|sep|> [EOS]",
    "\x00\x7f\u0378\U000e0001",
)
texts = st.lists(
    st.one_of(
        st.sampled_from(FRAGMENTS),
        st.sampled_from("".join(FRAGMENTS)),
        st.text(max_size=8),
        st.builds(lambda char, count: char * count, st.sampled_from("a =\n\u4f60"), st.integers(1, 150)),
    ),
    max_size=8,
).map("".join)


def reference(ranks: dict[bytes, int], special_tokens: dict[str, int] | None = None) -> tiktoken.Encoding:
    return tiktoken.Encoding(
        "k3", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=dict(special_tokens or {})
    )


def write_ranks(path: Path, ranks: dict[bytes, int]) -> Path:
    lines = (b"%s %d\n" % (base64.b64encode(token), rank) for token, rank in ranks.items())
    path.write_bytes(b"".join(lines))
    return path


def trained_ranks(size: int) -> dict[bytes, int]:
    """Ranks as training gives them, on random text in all scripts."""
    rng = random.Random(0)
    pieces = [word for fragment in FRAGMENTS for word in re.findall(r"\s*\S+|\s+", fragment)]
    pieces += [" ".join(rng.choices(pieces, k=2)) for _ in range(200)]
    pieces += ["".join(rng.choices("etaoinshrdlu", k=rng.randint(2, 7))) for _ in range(2000)]
    pieces += ["".join(chr(0x4E00 + min(int(rng.expovariate(0.02)), 5000)) for _ in range(3)) for _ in range(500)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=size, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(("".join(rng.choices(pieces, k=30)) for _ in range(500)), trainer)
    byte_of = {symbol: byte for byte, symbol in enumerate(byte_symbols())}
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return {bytes(byte_of[symbol] for symbol in token): rank for token, rank in vocab}


RESERVED = {2: "<|end_of_msg|>", 3: "<|open|>", 4: "<|close|>", 5: "<|sep|>", 1: "[EOS]", 254: "[UNK]", 255: "[PAD]"}


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    ranks = trained_ranks(4000)
    assert len(ranks) == 4000
    return ranks


@pytest.fixture(scope="module")
def folder(ranks: dict[bytes, int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The published folder as far as it concerns the tokenizer; markers not declared special are the harder case."""
    folder = tmp_path_factory.mktemp("published")
    write_ranks(folder / "tiktoken.model", ranks)
    named = {
        str(len(ranks) + offset): {"content": name, "special": not name.startswith("<|"), "lstrip": True}
        for offset, name in RESERVED.items()
    }
    config = {
        "added_tokens_decoder": named,
        "additional_special_tokens": ["<|end_of_msg|>", "<|open|>"],
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "eos_token": "[EOS]",
        "pad_token": "[PAD]",
        "tokenizer_class": "TikTokenTokenizer",
        "unk_token": "[UNK]",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> KimiK3TokenizerFast:
    return KimiK3TokenizerFast.from_pretrained(folder, clean_up_tokenization_spaces=False)


@pytest.fixture(scope="module")
def encoding(ranks: dict[bytes, int]) -> tiktoken.Encoding:
    names = name_reserved_ids(len(ranks), {len(ranks) + offset: name for offset, name in RESERVED.items()})
    return reference(ranks, {name: token_id for token_id, name in enumerate(names, len(ranks))})


# The alternatives of the fact sheet, written apart from ours: "in this set and not Han" as a look-ahead.
UPPER, LOWER = (rf"(?:(?!\p{{Han}})[{first}\p{{Lm}}\p{{Lo}}\p{{M}}])" for first in (r"\p{Lu}\p{Lt}", r"\p{Ll}"))
SUFFIX = "(?:'[sS\u017f]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?"
ALTERNATIVES = (
    r"\p{Han}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{SUFFIX}",
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{SUFFIX}",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)


def pieces(text: str) -> list[str]:
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated")
    return [piece for piece, _ in split.pre_tokenize_str(text)]


@given(st.lists(st.one_of(st.sampled_from(FRAGMENTS), st.sampled_from("".join(FRAGMENTS))), max_size=10).map("".join))
@seeded
def test_text_is_split_as_the_fact_sheet_says(text: str) -> None:
    assert pieces(text) == regex.findall("|".join(ALTERNATIVES), text)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Hello World's", ["Hello", " World's"]),
        ("HTMLParser", ["HTMLParser"]),
        ("fooBAR", ["foo", "BAR"]),
        ("I'LLbe", ["I'LL", "be"]),
        ("12345", ["123", "45"]),
        ("a  b", ["a", " ", " b"]),
        ("x ->\r\n\r\n y", ["x", " ->\r\n\r\n", " y"]),
        ("a \n \n  b", ["a", " \n \n", " ", " b"]),
        ("ab\u4f60\u597dcd", ["ab", "\u4f60\u597d", "cd"]),
        (" \u4f60!\u4f60", [" ", "\u4f60", "!", "\u4f60"]),
        ("<|open|>", ["<|", "open", "|>"]),
    ],
)
def test_some_splits(text: str, expected: list[str]) -> None:
    assert pieces(text) == expected


@given(texts)
@seeded
def test_ordinary_text_has_the_ids_of_tiktoken(
    tokenizer: KimiK3TokenizerFast, encoding: tiktoken.Encoding, text: str
) -> None:
    ids = HFChatTokenizer(tokenizer).encode_ordinary(text)
    assert ids == encoding.encode_ordinary(text)
    assert tokenizer.decode(ids) == text


@given(texts)
@seeded
def test_text_with_special_tokens_has_the_ids_of_tiktoken(
    tokenizer: KimiK3TokenizerFast, encoding: tiktoken.Encoding, text: str
) -> None:
    """What /generate and /v1/completions do with a text; nothing is put in front of it."""
    ids = tokenizer.encode(text)
    assert ids == encoding.encode(text, allowed_special="all")
    assert tokenizer.decode(ids) == text


def test_the_trained_ranks_make_whole_words(encoding: tiktoken.Encoding) -> None:
    """Otherwise the two properties above would compare single bytes."""
    assert len(encoding.encode_ordinary("The quick brown fox")) <= 8


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", "\ud83d\udc4d", "\ud83d"], ids=ascii)
def test_surrogates_are_mended_as_tiktoken_mends_them(
    tokenizer: KimiK3TokenizerFast, encoding: tiktoken.Encoding, text: str
) -> None:
    assert HFChatTokenizer(tokenizer).encode_ordinary(text) == encoding.encode_ordinary(text)


@st.composite
def any_ranks(draw: st.DrawFn) -> dict[bytes, int]:
    """Strings over a tiny alphabet in an order that no training would give; many cannot be reached by merging."""
    tokens = draw(st.lists(st.binary(min_size=2, max_size=6), max_size=30, unique=True).map(_over_abc))
    ordered = draw(st.permutations([*BYTES[97:100], *tokens]))
    others = [byte for byte in BYTES if byte not in ordered]
    return {token: rank for rank, token in enumerate([*ordered, *others])}


def _over_abc(tokens: list[bytes]) -> list[bytes]:
    return list(dict.fromkeys(bytes(97 + byte % 3 for byte in token) for token in tokens))


@given(ranks=any_ranks(), words=st.lists(st.text("abc", min_size=1, max_size=24), min_size=1, max_size=8))
@settings(seeded, max_examples=200)
def test_any_list_of_ranks_gives_the_ids_of_tiktoken(
    ranks: dict[bytes, int], words: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = write_ranks(tmp_path_factory.getbasetemp() / "any.model", ranks)
    tokenizer, encoding = load_tokenizer(path, {}), reference(ranks)
    for word in [*words, *(token.decode() for token in ranks if token.isalpha())]:
        assert tokenizer.encode(word).ids == encoding.encode_ordinary(word)


def test_a_token_is_made_of_one_pair() -> None:
    """``abc`` is ab + c although bc is a token too; ``cab`` cannot be reached, since ca comes last."""
    tokens = [*BYTES, b"ab", b"bc", b"abc", b"cab", b"ca"]
    ranks = {token: rank for rank, token in enumerate(tokens)}
    assert recover_merges(ranks) == [(b"a", b"b"), (b"b", b"c"), (b"ab", b"c"), (b"c", b"ab"), (b"c", b"a")]
    unreachable = {token: rank for rank, token in enumerate([*BYTES, b"bc", b"abcd", b"xyz"])}
    assert recover_merges(unreachable) == [(b"b", b"c")]


def test_ids_and_names_are_those_of_the_files(tokenizer: KimiK3TokenizerFast, ranks: dict[bytes, int]) -> None:
    first = len(ranks)
    assert len(tokenizer) == first + 256
    assert tokenizer.vocab_size == first
    assert (tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.pad_token_id) == (
        first + 1,
        first + 254,
        first + 255,
    )
    assert tokenizer.convert_ids_to_tokens([first, first + 3, first + 200]) == [
        f"<|reserved_token_{first}|>",
        "<|open|>",
        f"<|reserved_token_{first + 200}|>",
    ]
    chat = HFChatTokenizer(tokenizer)
    assert [chat.control_id(name) for name in RESERVED.values()] == [first + offset for offset in RESERVED]


def test_all_reserved_tokens_are_special(tokenizer: KimiK3TokenizerFast, ranks: dict[bytes, int]) -> None:
    ids = [*tokenizer.encode("x"), *range(len(ranks), len(ranks) + 256)]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "x"
    assert tokenizer.decode(ids).endswith("[UNK][PAD]")
    # Not even "lstrip", as the folder above asks for: tiktoken has no such thing.
    assert tokenizer.encode("a <|open|>")[:-1] == tokenizer.encode("a ")


def test_a_saved_tokenizer_loads_again(tokenizer: KimiK3TokenizerFast, tmp_path: Path) -> None:
    """By then as ``tokenizer.json``, which is preferred to the file it was made from."""
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "tiktoken.model").write_text("of something else")
    again = KimiK3TokenizerFast.from_pretrained(tmp_path, clean_up_tokenization_spaces=False)
    for text in FRAGMENTS:
        assert again.encode(text) == tokenizer.encode(text)
    assert len(again) == len(tokenizer)


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ValueError, match="neither tokenizer.json nor tiktoken.model.*--tokenizer-path"):
        KimiK3TokenizerFast.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"YWI=", "is not a token in base64 and its rank"),
        (b"YWI= x", "is not a token in base64 and its rank"),
        (b"Y*I= 256", "is not a token in base64 and its rank"),
        (b"YWI= 256 1", "is not a token in base64 and its rank"),
        (b"YWI= 257", "must have the ranks 0 to 256"),
        (b"YWI= 255", "must have the ranks 0 to 256"),
        (b"YQ== 256", "must have the ranks 0 to 255"),
    ],
)
def test_a_damaged_file_is_refused(line: bytes, says: str, tmp_path: Path) -> None:
    path = write_ranks(tmp_path / "tiktoken.model", {byte: rank for rank, byte in enumerate(BYTES)})
    path.write_bytes(path.read_bytes() + line + b"\n")
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}.*{says}"):
        read_ranks(path)


def test_a_file_without_all_bytes_is_refused(tmp_path: Path) -> None:
    path = write_ranks(tmp_path / "tiktoken.model", {byte: rank for rank, byte in enumerate(BYTES[:-1])})
    with pytest.raises(ValueError, match="include every byte"):
        read_ranks(path)


def test_the_order_of_the_lines_does_not_matter(tmp_path: Path) -> None:
    ranks = {token: rank for rank, token in enumerate([*BYTES, b"ab", b"abc"])}
    path = write_ranks(tmp_path / "tiktoken.model", dict(reversed(ranks.items())))
    assert list(read_ranks(path).items()) == list(ranks.items())


@pytest.mark.parametrize(("token_id", "first"), [(9, 10), (266, 10)])
def test_a_name_outside_the_reserved_ids_is_refused(token_id: int, first: int) -> None:
    with pytest.raises(ValueError, match=f"has the id {token_id}, tiktoken.model leaves {first} to {first + 255}"):
        name_reserved_ids(first, {token_id: "<|open|>"})


def test_a_name_that_is_used_twice_is_refused(tmp_path: Path) -> None:
    path = write_ranks(tmp_path / "tiktoken.model", {byte: rank for rank, byte in enumerate(BYTES)})
    with pytest.raises(ValueError, match=r"'<\|open\|>' of id \d+ has a second id"):
        load_tokenizer(path, {256: "<|open|>", 300: "<|open|>"})


def slow_slices(text: str) -> Iterator[str]:
    """Character by character: a run that would pass the limit starts a new part."""
    for begin in range(0, len(text), MAX_SLICE):
        part, run, last = "", 0, None
        for char in text[begin : begin + MAX_SLICE]:
            run = run + 1 if char.isspace() is last else 1
            last = char.isspace()
            if run > MAX_RUN:
                yield part
                part, run = "", 1
            part += char
        yield part


@pytest.mark.parametrize(
    "text",
    [
        "a" * MAX_RUN,
        "a" * (MAX_RUN + 1),
        "ab " * MAX_RUN,
        "x " + "a" * (3 * MAX_RUN) + " y",
        " " * (2 * MAX_RUN + 1) + "b" * (MAX_RUN + 7),
        "\u4f60" * (MAX_SLICE + MAX_RUN + 3),
        ("word " * 6000 + "z" * 30_000) * 20,
    ],
    ids=lambda text: f"{len(text)} of {text[:3]!r}",
)
def test_long_text_is_sliced(text: str) -> None:
    parts = list(slices(text))
    assert parts == list(slow_slices(text))
    assert "".join(parts) == text


@pytest.mark.parametrize("text", ["x", " y" * 100, "a" * MAX_RUN])
def test_a_short_text_is_one_slice(text: str) -> None:
    assert list(slices(text)) == [text]


def test_no_text_has_no_slices() -> None:
    assert list(slices("")) == []


def test_slices_reach_the_ids(tmp_path: Path) -> None:
    """The pair that a cut goes through is not merged."""
    ranks = {token: rank for rank, token in enumerate([*BYTES, b"aa"])}
    backend = load_tokenizer(write_ranks(tmp_path / "tiktoken.model", ranks), {})
    x, a, aa = ranks[b"x"], ranks[b"a"], ranks[b"aa"]
    text = "x" + "a" * (MAX_RUN + 1)
    ids = HFChatTokenizer(SimpleNamespace(backend_tokenizer=backend)).encode_ordinary(text)
    assert ids == [x, *[aa] * (MAX_RUN // 2 - 1), a, aa]
    assert backend.encode(text).ids == [x, *[aa] * (MAX_RUN // 2), a]
