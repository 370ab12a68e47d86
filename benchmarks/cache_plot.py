"""Draw the hit rates of ``results/cache_traces.json`` as an SVG, a panel per trace; ``readme.py`` writes it."""

from __future__ import annotations

import math

from rows import RESULTS, load

FILE = RESULTS / "cache_traces.svg"
TITLES = {
    "T1": "chat", "T2": "agents", "T3": "jittering prefix", "T4": "trunks and branches",
    "T5": "shared-prefix groups", "T6": "nothing shared", "T7": "bursts of equal prompts", "T8": "mixture",
}  # fmt: skip
STYLES = {
    "oracle": ("#8a8f98", "5 3"),
    "every_chunk_lru": ("#c98a00", ""),
    "sglang": ("#1f77b4", ""),
    "marconi": ("#7b3fa0", ""),
    "ours": ("#c0271f", ""),
}
PANEL, HEIGHT, GAP, LEFT, TOP = 230, 150, 46, 50, 60  # pixels
COLUMNS = 4


def svg() -> str:
    """The drawing; the same rows give the same bytes."""
    curves: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in load("cache_traces"):
        trace, _, rest = str(row["case"]).partition("/pool")
        pool, _, name = rest.partition("/")
        if row["metric"] == "token_hit_rate" and trace in TITLES and name in STYLES:
            curves.setdefault((trace, name), []).append((float(pool), float(str(row["value"]))))
    pools = sorted({pool for points in curves.values() for pool, _ in points})
    lines = -(-len(TITLES) // COLUMNS)
    width, height = LEFT + COLUMNS * (PANEL + GAP), TOP + lines * (HEIGHT + GAP) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
        'font-family="sans-serif" font-size="11" fill="#222222">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        *_legend(),
    ]
    for number, trace in enumerate(TITLES):
        x, y = LEFT + number % COLUMNS * (PANEL + GAP), TOP + number // COLUMNS * (HEIGHT + GAP)
        parts += _panel(trace, {name: curves.get((trace, name), []) for name in STYLES}, pools, x, y)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _legend() -> list[str]:
    parts, x = (
        [f'<text x="{LEFT}" y="20">token hit rate, by pool size in multiples of the working set</text>'],
        LEFT + 360,
    )
    for name, (colour, dashes) in STYLES.items():
        parts.append(f'<path d="M{x} 16 h24" stroke="{colour}" stroke-width="2.2" stroke-dasharray="{dashes}"/>')
        parts.append(f'<text x="{x + 30}" y="20">{name}</text>')
        x += 145
    return parts


def _panel(
    trace: str, curves: dict[str, list[tuple[float, float]]], pools: list[float], left: int, top: int
) -> list[str]:
    values = [value for points in curves.values() for _, value in points]
    low = math.floor(min(values, default=0) * 20) / 20
    high = max(low + 0.05, math.ceil(max(values, default=1) * 20) / 20)
    span = math.log(pools[-1] / pools[0]) or 1.0

    def x(pool: float) -> float:
        return left + PANEL * math.log(pool / pools[0]) / span

    def y(value: float) -> float:
        return top + HEIGHT * (high - value) / (high - low)

    parts = [f'<text x="{left}" y="{top - 8}" font-weight="bold">{trace}: {TITLES[trace]}</text>']
    for value in (low, (low + high) / 2, high):
        parts.append(f'<path d="M{left} {y(value):.1f} h{PANEL}" stroke="#e3e6ea"/>')
        parts.append(f'<text x="{left - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{value:.3g}</text>')
    for pool in pools:
        parts.append(f'<path d="M{x(pool):.1f} {top} v{HEIGHT}" stroke="#f0f2f4"/>')
        parts.append(f'<text x="{x(pool):.1f}" y="{top + HEIGHT + 14}" text-anchor="middle">{pool:g}</text>')
    for name, points in curves.items():
        if points:
            colour, dashes = STYLES[name]
            path = " L".join(f"{x(pool):.1f} {y(value):.1f}" for pool, value in sorted(points))
            style = f'stroke="{colour}" stroke-width="1.8" stroke-dasharray="{dashes}"'
            parts.append(f'<path d="M{path}" fill="none" {style}/>')
    return parts
