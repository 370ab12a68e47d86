"""The plugin reads its environment in one module, and the list of its variables does not grow by accident."""

import ast
import re
from pathlib import Path

import pytest

import sglang_k3
from sglang_k3 import env

PACKAGE = Path(sglang_k3.__file__).parent
# Three at most, all for debugging (style.md, rule 8). Anything else a user sets is a --k3-* flag.
FROZEN = {"K3PLUGIN_KERNELS"}


def sources():
    return sorted(PACKAGE.rglob("*.py"))


def touches_environment(tree):
    """Lines that use ``os.environ`` or ``os.getenv``, however ``os`` was imported."""
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Attribute):
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            names = [alias.name for alias in node.names]
        if {"environ", "environb", "getenv", "getenvb"}.intersection(names):
            yield node.lineno


def test_the_list_of_variables_is_frozen():
    assert set(env.VARIABLES) == FROZEN
    assert len(FROZEN) <= 3


def test_no_other_variable_of_ours_is_named_anywhere():
    named = {name for path in sources() for name in re.findall(r"K3PLUGIN_[A-Z_]+", path.read_text())}
    assert named == FROZEN


def test_only_env_py_reads_the_environment():
    """``integration/`` sets variables of the host before it starts; ``doctor`` reports the host's own plugin filter."""
    allowed = {PACKAGE / "env.py", PACKAGE / "doctor.py", *(PACKAGE / "integration").rglob("*.py")}
    found = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sources()
        if path not in allowed
        for line in touches_environment(ast.parse(path.read_text()))
    ]
    assert not found, f"these read the environment: {found}. Add a function to sglang_k3/env.py or a --k3-* flag."


@pytest.mark.parametrize(
    "code",
    [
        "import os\nos.environ.get('A')",
        "import os as o\no.getenv('A')",
        "from os import environ",
        "from os import getenv",
    ],
)
def test_the_check_sees_every_way_to_read(code):
    assert list(touches_environment(ast.parse(code)))


def test_the_kernel_mode_is_auto_unless_set(monkeypatch):
    monkeypatch.delenv("K3PLUGIN_KERNELS", raising=False)
    assert env.kernel_mode() == "auto"
    for mode in env.KERNEL_MODES:
        monkeypatch.setenv("K3PLUGIN_KERNELS", mode)
        assert env.kernel_mode() == mode


@pytest.mark.parametrize("value", ["", "Reference", "torch", "1"])
def test_a_bad_kernel_mode_is_refused_with_the_good_ones(monkeypatch, value):
    monkeypatch.setenv("K3PLUGIN_KERNELS", value)
    with pytest.raises(ValueError, match="is not one of auto, triton, reference. Set one of these or unset it"):
        env.kernel_mode()
