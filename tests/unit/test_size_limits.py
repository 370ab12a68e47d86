"""Small and flat: a file fits in a head, a function on a screen."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(path for folder in ("sglang_k3", "tests", "examples") for path in (ROOT / folder).rglob("*.py"))

FILE_LIMIT = 600
FUNCTION_LIMIT = 60
KERNEL_LIMIT = 150  # a launcher and a kernel in triton_impl.py hold their tile arithmetic in one place


def long_functions(source: str, limit: int) -> list[str]:
    """Name and length of every function longer than ``limit`` lines; its docstring, a contract, does not count."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            docstring = node.body[0] if ast.get_docstring(node) is not None else None
            length = lines_of(node) - (lines_of(docstring) if docstring else 0)
            if length > limit:
                found.append(f"{node.name} (line {node.lineno}): {length} lines, limit {limit}")
    return found


def lines_of(node: ast.stmt) -> int:
    return (node.end_lineno or node.lineno) - node.lineno + 1


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_sizes(path: Path):
    source = path.read_text()
    lines = len(source.splitlines())
    assert lines <= FILE_LIMIT, f"{path.name} has {lines} lines, limit {FILE_LIMIT}: split it by noun"
    assert long_functions(source, KERNEL_LIMIT if path.name == "triton_impl.py" else FUNCTION_LIMIT) == []


def test_the_counter_counts():
    body = "    x = 1\n" * 3
    assert long_functions(f"def short():\n{body}", limit=4) == []
    assert long_functions(f'def documented():\n    """One.\n\n    Two.\n    """\n{body}', limit=4) == []
    assert long_functions(f"class A:\n  async def long():\n{body}", limit=3) == ["long (line 2): 4 lines, limit 3"]
