"""The published tokenizer file ``tiktoken.model`` as a ``tokenizers`` object with the same ids (fact sheet 4.3).

The file lists byte strings with their ranks, which are their ids. tiktoken splits a text by a pattern, takes a piece
that is in the list as it is, and else merges, again and again, the two neighbours whose joint has the lowest rank
(the leftmost ones if several have). ``tokenizers`` wants pairs to merge instead of ranks, so they are recovered:
a merge into a given token is always preceded by the very merges that this token would see on its own, hence each
token has at most one pair that it is ever made of. A token with none is only ever found whole.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

FILE_NAME = "tiktoken.model"
NUM_RESERVED_IDS = 256

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

# Longer texts are tokenised in slices, as in training: at most so many characters, and runs of nothing but white
# space, or without any, no longer than that.
MAX_SLICE = 400_000
MAX_RUN = 25_000
_RUN = re.compile(r"\s+|\S+")


def slices(text: str) -> Iterator[str]:
    """The parts of a text that are tokenised one by one; a short text is one part."""
    for begin in range(0, len(text), MAX_SLICE):
        part = text[begin : begin + MAX_SLICE]
        at = 0
        for run in _RUN.finditer(part) if len(part) > MAX_RUN else ():
            for cut in range(run.start() + MAX_RUN, run.end(), MAX_RUN):
                yield part[at:cut]
                at = cut
        yield part[at:]


def load_tokenizer(path: Path, special_tokens: Mapping[int, str]) -> Tokenizer:
    """The tokenizer of a ``tiktoken.model``.

    Args:
        path: the file.
        special_tokens: id -> spelling, the ``added_tokens_decoder`` of ``tokenizer_config.json``.

    Raises:
        ValueError: the file or the special tokens cannot be what they are taken for.
    """
    ranks = read_ranks(path)
    symbols = byte_symbols()
    spelled = {token: "".join([symbols[byte] for byte in token]) for token in ranks}
    tokenizer = Tokenizer(
        models.BPE(
            vocab={spelled[token]: rank for token, rank in ranks.items()},
            merges=[(spelled[left], spelled[right]) for left, right in recover_merges(ranks)],
            ignore_merges=True,  # a piece that is in the list is taken as it is
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    names = name_reserved_ids(len(ranks), special_tokens)
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    for token_id, name in enumerate(names, len(ranks)):
        if tokenizer.token_to_id(name) != token_id:
            raise ValueError(f"The special token {name!r} of id {token_id} has a second id: spell each one once.")
    return tokenizer


def read_ranks(path: Path) -> dict[bytes, int]:
    """Byte string -> rank, in the order of the ranks, which count from 0 without a gap."""
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except ValueError:
            raise ValueError(
                f"{path}, line {number}: {line[:60]!r} is not a token in base64 and its rank. Fetch the file again."
            ) from None
    ranks = dict(sorted(ranks.items(), key=lambda item: item[1]))
    if list(ranks.values()) != list(range(len(ranks))) or any(bytes([byte]) not in ranks for byte in range(256)):
        raise ValueError(
            f"{path}: {len(ranks)} tokens, which must have the ranks 0 to {len(ranks) - 1} and include every byte. "
            "Fetch the file again."
        )
    return ranks


def recover_merges(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """The pairs that are merged, lowest rank of the joint first; ``ranks`` in their order."""
    split = (_last_two_parts(token, ranks) for token in ranks if len(token) > 1)
    return [(parts[0], parts[1]) for parts in split if len(parts) == 2]


def _last_two_parts(token: bytes, ranks: Mapping[bytes, int]) -> Sequence[bytes]:
    """What is left of a token's bytes before the merge that makes it; more than two parts if there is none."""
    parts = [token[i : i + 1] for i in range(len(token))]
    joints = [ranks.get(token[i : i + 2]) for i in range(len(token) - 1)]
    while len(parts) > 2:
        known = [rank for rank in joints if rank is not None]
        if not known:
            break
        at = joints.index(min(known))
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
        del joints[at]
        if at > 0:
            joints[at - 1] = ranks.get(parts[at - 1] + parts[at])
        if at < len(joints):
            joints[at] = ranks.get(parts[at] + parts[at + 1])
    return parts


def name_reserved_ids(num_ranks: int, special_tokens: Mapping[int, str]) -> list[str]:
    """Spelling of each id behind the ranks; one without a name of its own is ``<|reserved_token_{id}|>``."""
    ids = range(num_ranks, num_ranks + NUM_RESERVED_IDS)
    strangers = sorted(set(special_tokens) - set(ids))
    if strangers:
        raise ValueError(
            f"added_tokens_decoder of tokenizer_config.json has the id {strangers[0]}, {FILE_NAME} leaves {ids.start} "
            f"to {ids.stop - 1}: the two files are not of one tokenizer."
        )
    return [special_tokens.get(i, f"<|reserved_token_{i}|>") for i in ids]


def byte_symbols() -> list[str]:
    """One printable character per byte, as byte-level BPE spells them (byte 32 is U+0120)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    stand_ins = {byte: chr(0x100 + i) for i, byte in enumerate(others)}
    return [stand_ins.get(byte, chr(byte)) for byte in range(256)]
