"""The cache report says where the bytes are, and its picture can be read."""

from __future__ import annotations

import json
import random
import re
import xml.etree.ElementTree as ET
from typing import Any

import pytest

from sglang_k3.mem import cache_report
from sglang_k3.mem.cache_report import as_svg, as_text, describe, history, spending
from sglang_k3.mem.replay_cost import ReplayCost
from tests.kit.mem_scheduler import small_server

COST = ReplayCost(linear_flops=1, pair_flops=0, state_bytes=50_000_000, kv_bytes=10_000)
SVG = "{http://www.w3.org/2000/svg}"


def node(node_id: int, parent: int, start: int, depth: int, **rest: Any) -> dict[str, Any]:
    return {
        "id": node_id, "parent": parent, "start": start, "depth": depth,
        "locks": 0, "used_at": 0, "state": None, **rest,
    }  # fmt: skip


def state(uses: int = 0, *, is_fork: bool = False) -> dict[str, Any]:
    return {"uses": uses, "used_at": 1, "is_fork": is_fork}


@pytest.fixture
def hand_made() -> dict[str, Any]:
    """Two conversations of one prefix, one with KV behind its last state; one whose state is gone; one that runs."""
    return {
        "state_bytes": 50_000_000,
        "kv_bytes": 10_000,
        "slots": {"free": 2, "working": 3, "snapshot": 1, "cached": 3, "protected": 1},
        "counts": {
            "starts": 12, "state_hits": 8, "state_hit_tokens": 9000,
            "kv_only_hits": 2, "kv_only_tokens": 1300, "replayed_tokens": 1200,
            "planted": 9, "planted_forks": 1, "duplicates": 1,
            "skipped": {"no slot": 3, "path is full": 0}, "evicted": {"for bytes": 5},
        },
        "nodes": [
            node(1, 0, 0, 1000, state=state(7, is_fork=True)),
            node(2, 1, 1000, 3000, state=state()),
            node(3, 2, 3000, 3100, state=state(1)),
            node(4, 3, 3100, 3200),
            node(5, 1, 1000, 1500, state=state()),
            node(6, 0, 0, 4000),
            node(7, 0, 0, 600, locks=1),
        ],
    }  # fmt: skip


def test_the_words_say_what_the_pool_is_spent_on(hand_made: dict[str, Any]) -> None:
    text = "\n".join(spending(hand_made))
    assert "0.05 GB  1 state at forks" in text
    assert "0.10 GB  2 states at ends of conversations, for their next turn (1 not used yet)" in text
    assert "0.05 GB  1 state in between: chunks of long prompts and ends of earlier turns (1 not used yet)" in text
    assert "0.20 GB  4 states of running requests" in text
    assert "KV of 4,200 tokens that a state makes usable or that is in use" in text  # 1000 + 2100 + 500 + 600
    assert (
        "KV of 4,100 tokens that no request can start from" in text
    )  # the gone one, and what is behind the last state


def test_the_shares_are_of_all_that_is_held_and_fall(hand_made: dict[str, Any]) -> None:
    shares = [int(line[:4].rstrip("% ").strip().rstrip("%")) for line in spending(hand_made)]
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(100, abs=len(shares))


def test_reasons_are_told(hand_made: dict[str, Any]) -> None:
    assert history(hand_made) == [
        "began 12 requests, 8 of them from a state, which saved 9,000 tokens",
        "2 found KV behind their state: 1,300 tokens, 1,200 of them computed again",
        "planted 9 states, 1 of them at forks",
        "skipped 3: no slot",
        "evicted 5 for bytes",
        "dropped 1: the tree had a state there by then",
    ]


def test_a_line_per_branch_indented_below_its_fork(hand_made: dict[str, Any]) -> None:
    text = as_text(hand_made)
    assert "0 .. 4,000 tokens, no state\n" in text
    assert "0 .. 3,200 tokens, 3 states, used 8 x\n  1,000 .. 1,500 tokens, 1 state, used 0 x\n" in text
    assert "0 .. 600 tokens, no state, 1 running\n" in text


def test_a_description_of_two_moments_is_refused(hand_made: dict[str, Any]) -> None:
    hand_made["nodes"][1]["start"] = 900
    with pytest.raises(ValueError, match=r"node 2 begins at 900 tokens, but its parent 1 ends at 1000.*Take it again"):
        as_svg(hand_made)


def random_tree(seed: int, count: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    nodes = [node(0, 0, 0, 0)]
    for node_id in range(1, count):
        parent = rng.choice(nodes)
        length = rng.choice([1, 64, 2048, 30_000])
        found = rng.choice([None, state(rng.randrange(5), is_fork=rng.random() < 0.2)])
        start = parent["depth"]
        nodes.append(node(node_id, parent["id"], start, start + length, state=found, locks=rng.random() < 0.1))
    return nodes[1:]


@pytest.mark.parametrize("count", [1, 2, 30, 800])
def test_everything_in_the_picture_is_inside_and_no_text_meets_another(hand_made: dict[str, Any], count: int) -> None:
    """At the widest a character can be; a bar may carry dots, but no text lies on a bar or on a text."""
    drawing = ET.fromstring(as_svg({**hand_made, "nodes": random_tree(count, count)}))
    width, height = (float(drawing.get(name)) for name in ("width", "height"))
    texts = []
    for text in drawing.iter(f"{SVG}text"):
        size = float(text.get("font-size", 11))
        x, y = float(text.get("x")), float(text.get("y"))
        texts.append((x, y - 0.8 * size, x + len(text.text) * size * 0.62, y + 0.2 * size))
    bars = [
        (x, y, x + float(bar.get("width")), y + float(bar.get("height")))
        for bar in [*drawing.iter(f"{SVG}rect")][1:]
        for x, y in [(float(bar.get("x")), float(bar.get("y")))]
    ]
    dots = [(float(dot.get("cx")), float(dot.get("cy"))) for dot in drawing.iter(f"{SVG}circle")]
    for left, top, right, bottom in texts + bars:
        assert 0 <= left < right <= width and 0 <= top < bottom <= height
    assert all(4 <= x <= width - 4 and 4 <= y <= height - 4 for x, y in dots)
    for number, box in enumerate(texts):
        for other in texts[:number] + bars:
            assert not (box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]), (
                box,
                other,
            )


def test_of_many_branches_the_largest_are_drawn(hand_made: dict[str, Any]) -> None:
    hand_made["nodes"] = [node(n, 0, 0, 64 * n, state=state()) for n in range(1, 101)]
    assert "0 .. 6,400 tokens" in as_text(hand_made) and "0 .. 64 tokens" not in as_text(hand_made)
    assert f"and {100 - cache_report.MOST_ROWS} smaller branches" in as_svg(hand_made)


def test_a_cache_describes_itself_in_json() -> None:
    server = small_server(chunk=256)
    prompt = [random.Random(1).randrange(1000) for _ in range(700)]
    server.serve(prompt)
    server.serve(prompt[:400] + [7] * 90)
    server.serve(prompt[:400] + [8] * 90)
    description = describe(server.engine, COST)
    assert json.loads(json.dumps(description)) == description
    assert description["slots"]["cached"] == sum(one["state"] is not None for one in description["nodes"])
    assert sum(one["depth"] - one["start"] for one in description["nodes"]) == server.tree.num_tokens
    assert sum(one["state"]["uses"] for one in description["nodes"] if one["state"]) == 2
    assert re.search(r"planted \d+ states, [1-9]", as_text(description))
