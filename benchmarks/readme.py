"""Rewrite the generated tables of README.md; a test holds them equal to what this writes.

    .venv/bin/python benchmarks/readme.py

A table stands between ``<!-- rows: TOPIC -->`` (figures of ``benchmarks/results/TOPIC.json``), ``<!-- slice -->``
(those of the unit slice, the two routings side by side), ``<!-- cache -->`` (hit rates of the cache traces) or
``<!-- seams -->`` (the ledger of the plugin) and ``<!-- end -->``; nothing in between is written by hand. The plot of
the cache traces is drawn anew beside them.
"""

from __future__ import annotations

import re

from cache_plot import FILE, TITLES, svg
from rows import ROOT, load

from sglang_k3.integration.seams import SEAMS

_BLOCK = re.compile(r"(<!-- (rows|seams|slice|cache)(?:: (\w+))? -->\n).*?(<!-- end -->)", re.DOTALL)


def with_tables(text: str) -> str:
    """A document with the tables between its markers written anew."""

    def rewritten(block: re.Match[str]) -> str:
        start, kind, topic, end = block.groups()
        table = _rows(topic) if kind == "rows" else {"seams": _seams, "slice": _slice, "cache": _cache}[kind]()
        return start + table + end

    return _BLOCK.sub(rewritten, text)


def _rows(topic: str) -> str:
    lines = ["| | measured | limit | on | date |", "| --- | --- | --- | --- | --- |"]
    for row in load(topic):
        limit = "" if row["baseline"] is None else f"{row['baseline']:g} {row['unit']}"
        figure = f"{row['value']:g} {row['unit']}"
        lines.append(f"| {row['case']} | {figure} | {limit} | {row['hardware']} | {row['date']} |")
    return "\n".join(lines) + "\n"


def _slice() -> str:
    """A line per shape: milliseconds and the ratio to the floor."""
    lines = ["| step | distinct routing | x floor | collapsed routing | x floor |", "| --- | --- | --- | --- | --- |"]
    figures: dict[str, dict[str, str]] = {}
    for row in load("unit_slice"):
        shape, _, routing = str(row["case"]).rpartition("/")
        figures.setdefault(shape, {})[routing] = f"{row['value']:.2f} ms | {row['ratio']:.2f}"
    for shape, by_routing in figures.items():
        lines.append(f"| `{shape}` | {by_routing.get('distinct', ' | ')} | {by_routing.get('collapsed', ' | ')} |")
    return "\n".join(lines) + "\n"


def _cache() -> str:
    """Means over the four pools, a line per policy; then what one mechanism less does to ours."""
    rows = [row for row in load("cache_traces") if row["metric"] == "token_hit_rate"]
    figures = {str(row["case"]): float(str(row["value"])) for row in rows}
    means = {case.removeprefix("mean/"): mean for case, mean in figures.items() if case.startswith("mean/")}
    lines = [f"| | {' | '.join(TITLES)} | mean |", "| --- |" + " --- |" * (len(TITLES) + 1)]
    for name, mean in means.items():
        by_trace = [[figures[f"{trace}/pool{pool}/{name}"] for pool in ("0.25", "0.5", "1", "2")] for trace in TITLES]
        cells = " | ".join(f"{sum(values) / len(values):.3f}" for values in by_trace)
        lines.append(f"| {name} | {cells} | {mean:.4f} |")
    lines += ["", "| ours, at 0.1 and 0.25 of the working set | mean |", "| --- | --- |"]
    for case, mean in figures.items():
        if case.startswith("ablation/"):
            lines.append(f"| {case.removeprefix('ablation/')} | {mean:.4f} |")
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
    FILE.write_text(svg(), encoding="utf-8")
