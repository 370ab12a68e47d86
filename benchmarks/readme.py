"""Rewrite the generated tables of README.md; a test holds them equal to what this writes.

    .venv/bin/python benchmarks/readme.py

A table stands between ``<!-- rows: TOPIC -->`` (figures of ``benchmarks/results/TOPIC.json``) or ``<!-- seams -->``
(the ledger of the plugin) and ``<!-- end -->``; nothing in between is written by hand.
"""

from __future__ import annotations

import re

from rows import ROOT, load

from sglang_k3.integration.seams import SEAMS

_BLOCK = re.compile(r"(<!-- (?:rows: (\w+)|seams) -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(text: str) -> str:
    """A document with the tables between its markers written anew."""
    return _BLOCK.sub(lambda match: match[1] + (_rows(match[2]) if match[2] else _seams()) + match[3], text)


def _rows(topic: str) -> str:
    lines = ["| | measured | limit | on | date |", "| --- | --- | --- | --- | --- |"]
    for row in load(topic):
        limit = "" if row["baseline"] is None else f"{row['baseline']:g} {row['unit']}"
        figure = f"{row['value']:g} {row['unit']}"
        lines.append(f"| {row['case']} | {figure} | {limit} | {row['hardware']} | {row['date']} |")
    return "\n".join(lines) + "\n"


def _seams() -> str:
    lines = ["| seam | where in SGLang | why | until |", "| --- | --- | --- | --- |"]
    for seam in SEAMS:
        targets = ", ".join(f"`{target.rpartition('.')[2]}`" for target in seam.targets)
        lines.append(f"| {seam.name} ({seam.scope}) | {targets} | {seam.why} | {seam.until} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(with_tables(readme.read_text(encoding="utf-8")), encoding="utf-8")
