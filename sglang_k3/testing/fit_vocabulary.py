"""Byte-pair merges for a fitted preset: whole words, and the long fixed bodies of the internal system messages.

Short sequences are what makes fitting on a CPU possible: the announcement of the thinking effort alone has 250 bytes.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Mapping, Sequence

from sglang_k3.testing.tokenizer import BASE_MERGES

# Word merges stay within these units. A capitalised word takes no space in front, and digits stay apart, so that names
# and numbers are the same tokens in a question, in an argument and in an answer: copying is then copying.
_UNIT = re.compile(r" ?[a-z_]+|[A-Z][a-z]*|[0-9]|[^A-Za-z0-9\s]+|\s")

Pair = tuple[str, str]


def learn_merges(texts: Mapping[str, int], fixed_texts: Sequence[str], *, num_word_merges: int) -> list[Pair]:
    """Merges to rank after ``BASE_MERGES``.

    Args:
        texts: how often each segment occurs; frequent units of them become tokens.
        fixed_texts: each becomes one token (or few, if it repeats its own beginning), by about as many merges more as
            it has tokens.
        num_word_merges: for the units; fewer if the texts have no more.
    """
    units: collections.Counter[str] = collections.Counter()
    for text, times in texts.items():
        for unit in _UNIT.findall(text):
            if len(unit) > 1 and unit.isascii():
                units[unit] += times
    merges = _word_merges(units, num_word_merges)
    for text in fixed_texts:
        tokens = _split(text, merges)
        joined = tokens[0]
        for token in tokens[1:]:
            merges.append((joined, token))
            joined += token
    return merges


def _word_merges(units: collections.Counter[str], count: int) -> list[Pair]:
    """Plain byte-pair encoding: again and again the most frequent pair, the first in the alphabet of equals."""
    words = [(_split(unit, []), times) for unit, times in units.items()]
    merges: list[Pair] = []
    while len(merges) < count:
        pairs: collections.Counter[Pair] = collections.Counter()
        for tokens, times in words:
            for pair in itertools.pairwise(tokens):
                pairs[pair] += times
        if not pairs:
            break
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        words = [(_merge(tokens, best), times) for tokens, times in words if len(tokens) > 1]
    return merges


def _merge(tokens: list[str], pair: Pair) -> list[str]:
    merged: list[str] = []
    for token in tokens:
        if merged and (merged[-1], token) == pair:
            merged[-1] += token
        else:
            merged.append(token)
    return merged


def _split(text: str, merges: Sequence[Pair]) -> list[str]:
    """ASCII text as the tokenizer splits it that has these merges after ``BASE_MERGES``."""
    ranks = {pair: rank for rank, pair in enumerate([*BASE_MERGES, *merges])}
    tokens = list(text)
    while known := [pair for pair in itertools.pairwise(tokens) if pair in ranks]:
        tokens = _merge(tokens, min(known, key=ranks.__getitem__))
    return tokens
