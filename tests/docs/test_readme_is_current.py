"""What the README says is what was measured and what the code has."""

from __future__ import annotations

import ast
import json
import re
import runpy
from pathlib import Path

import pytest

from sglang_k3.testing.tiny import find_preset
from tests.kit import pairs

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
ROW_KEYS = {"case", "metric", "value", "unit", "baseline", "ratio", "hardware", "versions", "date", "command"}


def test_the_tables_are_those_of_the_code_and_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    with_tables = runpy.run_path(str(ROOT / "benchmarks" / "readme.py"))["with_tables"]
    assert with_tables(README) == README, "run: .venv/bin/python benchmarks/readme.py"


def test_the_tests_that_show_pairs_are_there() -> None:
    rows = pairs.load()
    assert rows
    for row in rows:
        path, _, function = row.test.partition("::")
        names = {
            node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef)
        }
        assert function in names, f"{row.test} is gone: record its file again, and remove the row from {pairs.FILE}"
        assert pairs.in_order(row.features) == row.features and row.count > 0 and row.date


def test_hit_rates_are_shares() -> None:
    table = README.partition("<!-- cache -->")[2].partition("<!-- end -->")[0]
    rates = [float(cell) for cell in re.findall(r"\d+\.\d+(?= \|)", table)]
    assert len(rates) > 50 and max(rates) <= 1


def test_the_plot_is_that_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    plot = runpy.run_path(str(ROOT / "benchmarks" / "cache_plot.py"))
    assert plot["FILE"].read_text() == plot["svg"](), "run: .venv/bin/python benchmarks/readme.py"


@pytest.mark.parametrize("path", sorted((ROOT / "benchmarks" / "results").glob("*.json")), ids=lambda path: path.stem)
def test_every_row_says_where_it_comes_from(path: Path) -> None:
    rows = json.loads(path.read_text())
    assert rows
    for row in rows:
        assert set(row) == ROW_KEYS
        assert row["hardware"] and row["command"] and row["date"] and row["versions"]["sglang"] == "0.5.16"


def test_nothing_is_left_to_fill_in() -> None:
    assert "measured:" not in README


def test_json_bodies_of_the_examples_parse() -> None:
    bodies = re.findall(r"-d '(\{.*?\})'", README, re.DOTALL)
    assert bodies
    for body in bodies:
        json.loads(body)


def test_python_examples_parse() -> None:
    examples = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    assert examples
    for example in examples:
        ast.parse(example)


def test_presets_named_exist() -> None:
    for name in re.findall(r"--preset (\w+)", README):
        find_preset(name)
