"""The prefix cache in words and as a picture, from a plain description of its tree.

``describe`` makes the description, which goes through JSON; ``as_text`` and ``as_svg`` read nothing else. What is drawn
is the KV: a bar per edge, as long as its tokens, to the right of the edge that it continues. A dot at its end is a
state, a ring a place whose state is gone. What is told is where the bytes are: at forks, at ends of conversations, in
between, in running requests, and in KV that nothing can start from.
"""

from __future__ import annotations

import collections
import dataclasses
import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:  # who only draws needs no torch
    from sglang_k3.mem.engine import CheckpointEngine
    from sglang_k3.mem.replay_cost import ReplayCost

Description = Mapping[str, Any]

ENDPOINT: Final = "/k3/cache_report"  # of a server, where descriptions come from
MOST_ROWS: Final = 60  # of a drawing; of more branches, those that hold the most bytes are drawn
LEFT, RIGHT, TOP, ROW, BAR = 16, 360, 150, 26, 10  # pixels
WIDTH: Final = 1200
CHARACTER: Final = 6.85  # pixels at most, of any monospaced font of 11 pixels

ROLES: Final = {
    "fork": "at forks: where paths part, so that each branch starts there",
    "end": "at ends of conversations, for their next turn",
    "between": "in between: chunks of long prompts and ends of earlier turns",
}
COLOURS: Final = {"fork": "#b3261e", "end": "#1e6b3a", "between": "#b26a00", None: "#ffffff"}


def describe(engine: CheckpointEngine, cost: ReplayCost) -> dict[str, Any]:
    """What the report is made of; nothing but numbers, strings, lists and objects.

    Each node: its ``parent`` (0 is the root), ``start`` and ``depth`` in tokens, ``locks``, ``used_at``, and ``state``,
    which is null or has ``uses``, ``used_at`` and ``is_fork``.
    """
    cache, counts = engine.cache, engine.cache.counts
    nodes = [
        {
            "id": node.node_id,
            "parent": node.parent.node_id if node.parent is not None else 0,
            "start": node.start,
            "depth": node.depth,
            "locks": node.lock_ref,
            "used_at": node.used_at,
            "state": node.checkpoint
            and {
                "uses": node.checkpoint.uses,
                "used_at": node.checkpoint.used_at,
                "is_fork": node.checkpoint.is_fork,
            },
        }
        for node in cache.tree.nodes()
    ]
    return {
        "state_bytes": cost.state_bytes,
        "kv_bytes": cost.kv_bytes,
        "slots": engine.slots_by_owner,
        "counts": {**vars(counts), "skipped": dict(counts.skipped), "evicted": dict(counts.evicted)},
        "nodes": sorted(nodes, key=lambda node: node["id"]),
    }


@dataclasses.dataclass(eq=False)
class _Node:
    """A described node with what follows from the others. Sizes in tokens; ``below`` counts it and all under it."""

    start: int
    depth: int
    locks: int
    state: Mapping[str, Any] | None
    children: list[_Node] = dataclasses.field(default_factory=list)
    states_below: int = 0
    tokens_below: int = 0
    deepest: int = 0

    @property
    def role(self) -> str | None:
        """What its state is for; None if it has none."""
        if self.state is None:
            return None
        if self.state["is_fork"] or len(self.children) > 1:
            return "fork"
        return "between" if self.states_below > 1 else "end"

    @property
    def is_waste(self) -> bool:
        """KV that no state below or at its end makes usable, and no request is using."""
        return not self.states_below and not self.locks


def _tree(description: Description) -> _Node:
    """The root, with all its nodes below it.

    Raises:
        ValueError: a node's parent is not described, or does not end where the node begins.
    """
    root = _Node(0, 0, 0, None)
    nodes: dict[int, _Node] = {0: root}
    for entry in description["nodes"]:
        nodes[entry["id"]] = _Node(entry["start"], entry["depth"], entry["locks"], entry["state"])
    for entry in description["nodes"]:
        node, parent = nodes[entry["id"]], nodes.get(entry["parent"])
        if parent is None or parent.depth != node.start:
            where = "is not described" if parent is None else f"ends at {parent.depth} tokens"
            raise ValueError(
                f"node {entry['id']} begins at {node.start} tokens, but its parent {entry['parent']} {where}: this is "
                "no description of one moment. Take it again from the running server."
            )
        parent.children.append(node)
    for node in _children_first(root):
        node.tokens_below = node.depth - node.start + sum(child.tokens_below for child in node.children)
        node.states_below = (node.state is not None) + sum(child.states_below for child in node.children)
        node.deepest = max([node.depth, *(child.deepest for child in node.children)])
    return root


def _children_first(root: _Node) -> list[_Node]:
    order, stack = [], [root]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(node.children)
    return order[::-1]


def spending(description: Description) -> list[str]:
    """What the pool is spent on, in sentences, the largest part first."""
    nodes = _children_first(_tree(description))[:-1]
    state_bytes, kv_bytes = description["state_bytes"], description["kv_bytes"]
    roles = collections.Counter(node.role for node in nodes if node.role is not None)
    unused = collections.Counter(node.role for node in nodes if node.state is not None and not node.state["uses"])
    tokens = sum(node.depth - node.start for node in nodes)
    waste = sum(node.depth - node.start for node in nodes if node.is_waste)
    held = description["slots"]["working"] + description["slots"]["snapshot"]
    parts = [
        (count * state_bytes, f"{_states(count)} {ROLES[role]}{_never_used(unused[role], count)}")
        for role, count in roles.items()
    ]
    parts.append((held * state_bytes, f"{_states(held)} of running requests"))
    useful = f"KV of {tokens - waste:,} tokens that a state makes usable or that is in use"
    parts.append(((tokens - waste) * kv_bytes, useful))
    if waste:
        parts.append((waste * kv_bytes, f"KV of {waste:,} tokens that no request can start from: no state is below"))
    total = sum(num_bytes for num_bytes, _ in parts) or 1
    ordered = sorted(parts, key=lambda part: -part[0])
    return [f"{num_bytes / total:4.0%}  {_gb(num_bytes):>9}  {text}" for num_bytes, text in ordered if num_bytes]


def history(description: Description) -> list[str]:
    """What has happened since the start, by reason."""
    counts = description["counts"]
    lines = [
        f"began {_of(counts['starts'], 'request')}, {counts['state_hits']:,} of them from a state, which saved "
        f"{counts['state_hit_tokens']:,} tokens",
        f"{counts['kv_only_hits']:,} found KV behind their state: {counts['kv_only_tokens']:,} tokens, "
        f"{counts['replayed_tokens']:,} of them computed again",
        f"planted {_of(counts['planted'], 'state')}, {counts['planted_forks']:,} of them at forks",
    ]
    lines += [f"skipped {count:,}: {reason}" for reason, count in _by_count(counts["skipped"])]
    lines += [f"evicted {count:,} {reason}" for reason, count in _by_count(counts["evicted"])]
    if counts["duplicates"]:
        lines.append(f"dropped {counts['duplicates']:,}: the tree had a state there by then")
    return lines


def as_text(description: Description) -> str:
    """The tree, a line per node, and the words. Indented at forks only: a conversation stays one column."""
    rows, omitted = _rows(_tree(description))
    lines = [_headline(description), "", *spending(description), "", *history(description), ""]
    for row in rows:
        lines.append("  " * row.level + _label(row))
    if omitted:
        lines.append(f"... and {omitted:,} smaller branches")
    return "\n".join(lines) + "\n"


@dataclasses.dataclass
class _Row:
    """A branch: nodes each of which is the only child, or the largest, of the one before.

    Attributes:
        level: forks above it.
        index: of the row in which the branch leaves; None for those at the root.
    """

    nodes: list[_Node]
    level: int
    parent: int | None


def _rows(root: _Node) -> tuple[list[_Row], int]:
    """The largest branches, each behind the row that it leaves, and how many are left out."""
    rows: list[_Row] = []
    stack: list[tuple[_Node, int, int | None]] = [(node, 0, None) for node in sorted(root.children, key=_size)]
    omitted = 0
    while stack:
        node, level, parent = stack.pop()
        if len(rows) == MOST_ROWS:
            omitted += 1
            continue
        nodes = [node]
        branches: list[tuple[_Node, int, int | None]] = []
        while nodes[-1].children:
            *others, largest = sorted(nodes[-1].children, key=_size)
            branches = [(other, level + 1, len(rows)) for other in others] + branches
            nodes.append(largest)
        rows.append(_Row(nodes, level, parent))
        stack.extend(sorted(branches, key=lambda branch: (-branch[0].start, _size(branch[0]))))
    return rows, omitted


def _size(node: _Node) -> tuple[int, int]:
    return (node.tokens_below, node.states_below)


def _label(row: _Row) -> str:
    """What a branch is: from where to where, its states by depth, its use."""
    first, last = row.nodes[0], row.nodes[-1]
    with_state = [node for node in row.nodes if node.state is not None]
    uses = sum(node.state["uses"] for node in with_state if node.state is not None)
    states = f"{_states(len(with_state))}, used {uses} x" if with_state else "no state"
    locked = f", {max(node.locks for node in row.nodes)} running" if first.locks else ""
    return f"{first.start:,} .. {last.depth:,} tokens, {states}{locked}"


def as_svg(description: Description) -> str:
    """The picture; legible at ``WIDTH`` pixels."""
    root = _tree(description)
    rows, omitted = _rows(root)
    spent = [*spending(description), *(f"      {line}" for line in history(description))]
    top = TOP + 16 * len(spent)
    height = top + ROW * (len(rows) + bool(omitted)) + 24
    scale = (WIDTH - LEFT - RIGHT) / max(1, root.deepest)
    title = html.escape(_headline(description))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        'font-family="monospace" font-size="11" fill="#222222">',
        f"<title>{title}</title>",
        f'<rect width="{WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="28" font-size="15" font-weight="bold">{title}</text>',
        *(
            f'<text x="{LEFT}" y="{52 + 16 * number}" xml:space="preserve">{html.escape(line)}</text>'
            for number, line in enumerate(spent)
        ),
        *_legend(top - 62),
        *_axis(root.deepest, scale, top - 22, height - 16),
    ]
    for number, row in enumerate(rows):
        parts += _drawn(row, number, scale, top)
    if omitted:
        parts.append(f'<text x="{LEFT}" y="{top + ROW * len(rows) + 10}">and {omitted:,} smaller branches</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _drawn(row: _Row, number: int, scale: float, top: int) -> list[str]:
    """Bars, then the states on them, then the label in the margin; a line to where the branch leaves."""
    y = top + ROW * number
    parts = []
    if row.parent is not None:
        x, above = LEFT + row.nodes[0].start * scale, top + ROW * row.parent + BAR
        parts.append(f'<path d="M{x:.1f} {above} V{y + BAR // 2}" stroke="#9aa5b1" fill="none"/>')
    for node in row.nodes:
        x, width = LEFT + node.start * scale, max(1.0, (node.depth - node.start) * scale)
        colour = "#f0d9a8" if node.is_waste else "#8fb8de" if node.locks else "#d3dbe4"
        parts.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>')
    for node in sorted(row.nodes, key=lambda node: node.role is not None):  # a ring hides no state
        parts.append(
            f'<circle cx="{LEFT + node.depth * scale:.1f}" cy="{y + BAR // 2}" r="{4 if node.role else 2.5}" '
            f'fill="{COLOURS[node.role]}" stroke="#444444" stroke-width="0.6"/>'
        )
    label = html.escape(_fitted(_label(row)))
    parts.append(f'<text x="{WIDTH - RIGHT + 14}" y="{y + BAR}">{label}</text>')
    return parts


def _legend(y: int) -> list[str]:
    entries: Sequence[tuple[str, str, bool]] = (
        (COLOURS["fork"], "state at a fork", True),
        (COLOURS["end"], "last state of a conversation", True),
        (COLOURS["between"], "state in between", True),
        (COLOURS[None], "state gone, or never kept", True),
        ("#8fb8de", "KV in use", False),
        ("#d3dbe4", "KV", False),
        ("#f0d9a8", "KV of no use", False),
    )
    parts, x = [], float(LEFT)
    for colour, text, is_state in entries:
        shape = (
            f'<circle cx="{x + 5:.1f}" cy="{y - 4}" r="4" fill="{colour}" stroke="#444444" stroke-width="0.6"/>'
            if is_state
            else f'<rect x="{x:.1f}" y="{y - 9}" width="11" height="{BAR}" fill="{colour}"/>'
        )
        parts += [shape, f'<text x="{x + 16:.1f}" y="{y}">{text}</text>']
        x += 16 + CHARACTER * len(text) + 18
    return parts


def _axis(deepest: int, scale: float, y: int, bottom: int) -> list[str]:
    """Depth in tokens, at round numbers."""
    step = 10 ** (len(str(max(1, deepest))) - 1)
    step = next(s for s in (step // 5 or 1, step // 2 or 1, step, 2 * step) if deepest / s <= 8)
    parts = []
    for depth in range(0, deepest + 1, step):
        x = LEFT + depth * scale
        parts.append(f'<path d="M{x:.1f} {y + 4} V{bottom}" stroke="#eceff2"/>')
        parts.append(f'<text x="{x:.1f}" y="{y}">{depth:,}</text>')
    return parts


def _fitted(text: str) -> str:
    most = int((RIGHT - 14 - 8) / CHARACTER)
    return text if len(text) <= most else text[: most - 3] + "..."


def _headline(description: Description) -> str:
    slots, nodes = description["slots"], description["nodes"]
    tokens = sum(node["depth"] - node["start"] for node in nodes)
    states = slots["cached"] + slots["protected"]
    cached = f"{states:,} of {sum(slots.values()):,} state slots and {tokens:,} tokens of KV are cached"
    return f"{cached}, {slots['free']:,} slots are free"


def _states(count: int) -> str:
    return _of(count, "state")


def _of(count: int, noun: str) -> str:
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def _never_used(unused: int, count: int) -> str:
    return f" ({unused:,} not used yet)" if unused and count else ""


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.2f} GB" if num_bytes >= 1e7 else f"{num_bytes / 1e6:,.2f} MB"


def _by_count(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(((reason, count) for reason, count in counts.items() if count), key=lambda item: (-item[1], item[0]))
