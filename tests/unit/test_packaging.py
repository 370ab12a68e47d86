"""The metadata tells the truth: window, entry points, version and lock agree with the code."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path

import pytest
import tomllib
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import sglang_k3
from sglang_k3.integration import compat, plugin

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def pyproject() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def locked() -> dict[str, str]:
    lines = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if not line.startswith("#")]
    pairs = [line.split("==") for line in lines]
    assert all(len(pair) == 2 for pair in pairs), "every line of the lock is NAME==VERSION"
    return {canonicalize_name(name): version for name, version in pairs}


def test_the_window_of_the_host_is_the_one_in_the_code(pyproject: dict):
    windows = [r.specifier for r in map(Requirement, pyproject["project"]["dependencies"]) if r.name == "sglang"]
    assert windows == [SpecifierSet(compat.SUPPORTED)]


def test_the_lock_holds_what_the_metadata_asks_for(pyproject: dict, locked: dict[str, str]):
    project = pyproject["project"]
    extras = [line for extra in project["optional-dependencies"].values() for line in extra]
    asked = [Requirement(line) for line in [*project["dependencies"], *extras, *pyproject["build-system"]["requires"]]]
    for requirement in asked:
        if requirement.name != "sglang-k3":
            assert locked[canonicalize_name(requirement.name)] in requirement.specifier, requirement


def test_this_environment_is_the_locked_one(locked: dict[str, str]):
    assert compat.host_version() == locked["sglang"]
    assert importlib.metadata.version("torch").split("+")[0] == locked["torch"]


def test_version_has_one_source(pyproject: dict):
    assert "version" not in pyproject["project"]
    assert pyproject["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "sglang_k3.__version__"}
    assert importlib.metadata.version("sglang-k3") == sglang_k3.__version__


def test_sglang_finds_the_plugin():
    (found,) = importlib.metadata.entry_points(group="sglang.srt.plugins", name="k3")
    assert found.load() is plugin.register


def test_the_readme_names_the_tested_host(locked: dict[str, str]):
    readme = (ROOT / "README.md").read_text()
    row = re.search(r"^\| SGLang \| (\S+) \|", readme, re.MULTILINE)
    assert row is not None and row[1] == locked["sglang"]
    versions = ", ".join(locked[name] for name in ("torch", "triton", "transformers"))
    assert f"| torch, triton, transformers | {versions} |" in readme


def test_ci_runs_the_test_command():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111, "it must be executable"
    assert "make test" in script.read_text().splitlines()
