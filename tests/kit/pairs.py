"""Which features have been seen working together, and which are refused together, by the tests that passed.

``tests/pairs.json`` has a row per test and set of features; ``tests.kit.record_pairs`` writes it, and
``benchmarks/readme.py`` makes the table of it. A new feature is a line of ``FEATURES`` and tests marked with it.
"""

from __future__ import annotations

import collections
import itertools
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "tests" / "pairs.json"
# Names for marks and for the heads of the columns.
FEATURES = {
    "overlap": "overlap schedule",
    "chunks": "prompts prefilled in several chunks",
    "pages": "`--page-size` above 1",
    "tp": "`--tp-size`",
    "ep": "`--ep-size`",
    "pp": "`--pp-size`",
    "dp": "`--enable-dp-attention`",
    "graphs": "CUDA graphs",
    "bf16": "bf16",
    "k3": "K3's prefix cache",
    "host": "the host's prefix cache",
    "retract": "retraction",
    "abort": "abort",
    "stream": "streamed answers",
    "flush": "flush of the cache",
    "salt": "cache salt, `extra_key`",
    "lora": "prefixes by LoRA adapter, which are refused themselves",
    "session": "sessions",
    "chat": "chat, parsed",
    "grammar": "constrained answers",
}

Where = Literal["served on a CPU", "served on a GPU", "in process", "refused"]


class Row(NamedTuple):
    """What one test has shown.

    Attributes:
        test: file and function, as pytest names them, without parameters.
        features: that each of ``count`` parametrisations had together; or, if refused, that cannot be had so.
        date, commit: of the run.
    """

    test: str
    features: tuple[str, ...]
    where: Where
    count: int
    date: str
    commit: str

    @property
    def key(self) -> tuple[str, tuple[str, ...], Where]:
        return self.test, self.features, self.where


def in_order(features: Iterable[str]) -> tuple[str, ...]:
    """The order of ``FEATURES``.

    Raises:
        ValueError: one is not among them.
    """
    given = set(features)
    if unknown := given - FEATURES.keys():
        raise ValueError(f"{sorted(unknown)} are not among {[*FEATURES]}: name one of these, or add it to FEATURES.")
    return tuple(name for name in FEATURES if name in given)


def load() -> list[Row]:
    rows = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else []
    return [Row(**row | {"features": tuple(row["features"])}) for row in rows]


def save(rows: Sequence[Row]) -> None:
    FILE.write_text("[\n" + ",\n".join(json.dumps(row._asdict()) for row in rows) + "\n]\n", encoding="utf-8")


def merged(old: Iterable[Row], new: Iterable[Row], failed: Iterable[Row] = ()) -> list[Row]:
    """A run's rows take the place of what the same tests showed before; what failed shows nothing any more."""
    rows = {row.key: row for row in (*old, *new)}
    for row in failed:
        rows.pop(row.key, None)
    return sorted(rows.values())


def cells(rows: Iterable[Row]) -> dict[frozenset[str], str]:
    """What the table says of each pair of which anything is known."""
    shown: dict[frozenset[str], collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for row in rows:
        pairs = itertools.combinations(row.features, 2)
        if row.where == "refused" and len(row.features) != 2:
            raise ValueError(f"{row.test} refuses {row.features}: the table has pairs.")
        for pair in pairs:
            shown[frozenset(pair)][row.where] += row.count
    return {pair: _cell(counts) for pair, counts in shown.items()}


def _cell(counts: collections.Counter[str]) -> str:
    if counts["refused"]:
        return "refused"
    served = [str(counts["served on a CPU"])] if counts["served on a CPU"] else []
    served += [f"gpu {counts['served on a GPU']}"] if counts["served on a GPU"] else []
    return ", ".join(served) or f"({counts['in process']})"


def table(rows: Iterable[Row]) -> str:
    """Feature by feature, each pair once."""
    names = [*FEATURES]
    known = cells(rows)
    lines = [f"| | {' | '.join(names[:-1])} |", "| --- |" + " --- |" * (len(names) - 1)]
    for n, name in enumerate(names[1:], start=1):
        row = [known.get(frozenset((name, other)), "open") for other in names[:n]] + [""] * (len(names) - 1 - n)
        lines.append(f"| {FEATURES[name]} ({name}) | {' | '.join(row)} |")
    return "\n".join(lines) + "\n"
