"""Rewrite the generated tables of README.md; a test holds them equal to what this writes.

    .venv/bin/python benchmarks/readme.py

A table stands between ``<!-- rows: TOPIC -->`` (figures of ``benchmarks/results/TOPIC.json``),
``<!-- impls: TOPIC -->`` (those of several implementations, side by side), ``<!-- metrics: TOPIC -->`` (likewise of
several metrics), ``<!-- slice -->`` (of the unit slice, likewise its two routings), ``<!-- cache -->`` (hit rates of
the cache traces), ``<!-- prometheus -->`` (what the prefix cache adds to ``/metrics``), ``<!-- pairs -->``
(``tests/pairs.json``, features that tests have shown together) or ``<!-- seams -->`` (the ledger of the plugin) and
``<!-- end -->``; nothing in between is written by hand. The plot of the cache traces is drawn anew beside them.
"""

from __future__ import annotations

import argparse
import re
import sys

from cache_plot import FILE, TITLES, svg
from rows import ROOT, load

from sglang_k3.host.prefix_cache_metrics import METRICS
from sglang_k3.integration.seams import SEAMS

sys.path.append(str(ROOT))  # the tests are no package that is installed

from tests.kit import pairs  # noqa: E402

_BLOCK = re.compile(
    r"(<!-- (rows|impls|metrics|seams|slice|cache|prometheus|pairs)(?:: (\w+))? -->\n).*?(<!-- end -->)", re.DOTALL
)


def with_tables(text: str) -> str:
    """A document with the tables between its markers written anew."""

    def rewritten(block: re.Match[str]) -> str:
        start, kind, topic, end = block.groups()
        of_topics = {"rows": _rows, "impls": _impls, "metrics": _metrics}
        others = {"seams": _seams, "slice": _slice, "cache": _cache, "prometheus": _prometheus, "pairs": _pairs}
        return start + (of_topics[kind](topic) if kind in of_topics else others[kind]()) + end

    return _BLOCK.sub(rewritten, text)


def _rows(topic: str) -> str:
    lines = ["| | measured | limit | on | date |", "| --- | --- | --- | --- | --- |"]
    for row in load(topic):
        limit = "" if row["baseline"] is None else f"{row['baseline']:g} {row['unit']}"
        figure = f"{row['value']:g} {row['unit']}"
        lines.append(f"| {row['case']} | {figure} | {limit} | {row['hardware']} | {row['date']} |")
    return "\n".join(lines) + "\n"


def _impls(topic: str) -> str:
    """A line per case: microseconds of each implementation, which the last part of a row's case names."""
    figures: dict[str, dict[str, float]] = {}
    for row in load(topic):
        case, _, impl = str(row["case"]).rpartition("/")
        figures.setdefault(case, {"floor": row["baseline"]})[impl] = row["value"]
    impls = list(dict.fromkeys(impl for by_impl in figures.values() for impl in by_impl))
    lines = [f"| us | {' | '.join(impls)} |", "| --- |" + " --- |" * len(impls)]
    for case, by_impl in sorted(figures.items(), key=lambda item: _natural(item[0])):
        cells = [_three_digits(by_impl[impl]) if impl in by_impl else "" for impl in impls]
        lines.append(f"| `{case}` | {' | '.join(cells)} |")
    return "\n".join([*lines, "", _measured(topic)])


def _measured(topic: str) -> str:
    """On what, when and with which versions, below tables that have no column for it."""
    rows = load(topic)
    hardware = sorted({str(row["hardware"]) for row in rows})
    dates = sorted({str(row["date"]) for row in rows})
    versions = sorted({f"{name} {version}" for row in rows for name, version in dict(row["versions"]).items()})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"({', '.join(hardware)}; {when}; {', '.join(versions)}.)\n"


def _three_digits(us: float) -> str:
    """At least, where there is a tenth of a microsecond to tell."""
    return f"{us:,.0f}" if us >= 100 else f"{us:.1f}"


def _metrics(topic: str) -> str:
    """A line per case and a column per metric; a table for the cases that have the same metrics."""
    figures: dict[str, dict[str, str]] = {}
    for row in load(topic):
        limit = "" if row["baseline"] is None else f" (limit {row['baseline']:g})"
        figures.setdefault(str(row["case"]), {})[str(row["metric"])] = f"{_five_digits(row['value'])}{limit}"
    tables: dict[tuple[str, ...], list[str]] = {}
    for case, by_metric in figures.items():
        metrics = tuple(by_metric)
        head = [f"| | {' | '.join(f'`{metric}`' for metric in metrics)} |", "| --- |" + " --- |" * len(metrics)]
        tables.setdefault(metrics, head).append(f"| {case} | {' | '.join(by_metric.values())} |")
    return "\n\n".join("\n".join(lines) for lines in tables.values()) + f"\n\n{_measured(topic)}"


def _five_digits(value: float) -> str:
    """At most, but for whole numbers of more."""
    return f"{value:,.0f}" if value >= 1e5 else f"{value:,.5g}"


def _slice() -> str:
    """A table for each width, and in it a line per shape: milliseconds and the ratio to the floor."""
    figures: dict[str, dict[str, dict[str, str]]] = {}
    for row in load("unit_slice"):
        kind, width, *shape, routing = str(row["case"]).split("/")
        by_routing = figures.setdefault(width, {}).setdefault("/".join((kind, *shape)), {})
        by_routing[routing] = f"{row['value']:.2f} ms | {row['ratio']:.2f}"
    tables = [_slice_of(by_shape) for _, by_shape in sorted(figures.items())]
    ranks = [width.removeprefix("tp") for width in sorted(figures)]
    folded = [
        f"\n<details><summary>One rank of {number}</summary>\n\n{table}\n</details>\n"
        for number, table in zip(ranks[1:], tables[1:], strict=True)
    ]
    return "".join([*tables[:1], *folded, f"\n{_measured('unit_slice')}"])


def _slice_of(figures: dict[str, dict[str, str]]) -> str:
    lines = ["| step | distinct routing | x floor | collapsed routing | x floor |", "| --- | --- | --- | --- | --- |"]
    for shape, by_routing in sorted(figures.items(), key=lambda item: _natural(item[0])):
        lines.append(f"| `{shape}` | {by_routing.get('distinct', ' | ')} | {by_routing.get('collapsed', ' | ')} |")
    return "\n".join(lines) + "\n"


def _natural(text: str) -> list[tuple[int, str]]:
    """Numbers in a text by their value."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", text)]


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


def _prometheus() -> str:
    """A line per name of the endpoint, with the values of its label."""
    lines = ["| series | label | what it counts |", "| --- | --- | --- |"]
    for metric in METRICS:
        name = metric.name if metric.is_gauge else f"{metric.name}_total"
        values = ", ".join(f"`{value}`" for value in metric.values)
        lines.append(f"| `{name}` | {metric.label}: {values} |" if metric.label else f"| `{name}` | |")
        lines[-1] += f" {metric.documentation} |"
    return "\n".join(lines) + "\n"


def _pairs() -> str:
    return pairs.table(pairs.load())


def _seams() -> str:
    lines = ["| seam | where in SGLang | why | until |", "| --- | --- | --- | --- |"]
    for seam in SEAMS:
        targets = ", ".join(f"`{target.rpartition('.')[2]}`" for target in seam.targets)
        lines.append(f"| {seam.name} ({seam.scope}) | {targets} | {seam.why} | {seam.until} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    readme = ROOT / "README.md"
    readme.write_text(with_tables(readme.read_text(encoding="utf-8")), encoding="utf-8")
    FILE.write_text(svg(), encoding="utf-8")
