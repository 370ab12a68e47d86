"""The three rings: arrows point inward only, the host is met in rings 2 and 3 only, and importing does nothing."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "sglang_k3"

# The ring of each folder and module directly under sglang_k3. The command line stands outside the rings (4): it may
# call all of them and nobody may import it. It asks about the host through ring 3 and does not import it either.
RINGS = {
    "__init__": 1,
    "chat": 1,
    "weights": 1,
    "config": 1,
    "dcp": 1,
    "env": 1,
    "errors": 1,
    "kernels": 1,
    "mem": 1,
    "options": 1,
    "planner": 1,
    "spec": 1,
    "testing": 1,
    "host": 2,
    "lora": 2,
    "models": 2,
    "integration": 3,
    "cli": 4,
    "doctor": 4,
    "report": 4,
}
RINGS_THAT_MEET_THE_HOST = (2, 3)

# Kernels, what they share, and what compiles them.
MAY_IMPORT_TRITON = ("triton_impl.py", "triton_math.py", "compile_farm.py", "flashmla_impl.py")
# Kernels that come with the host as a library, called through torch.ops: nothing of the host itself is imported.
MAY_LOAD_HOST_KERNELS = ("flashmla.py",)

# Not even inside a function: what testing/ finds out by itself must not come from what it tests.
REFERENCE_MUST_NOT_USE = ("sglang_k3.kernels", "sglang_k3.models", "sglang_k3.host", "sglang_k3.integration")

FILES = sorted(PACKAGE.rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def ring_of(module: str) -> int:
    top = (module.split(".") + ["__init__"])[1]
    assert top in RINGS, f"sglang_k3/{top} has no ring: give it one in RINGS, see README.md (How it is built)"
    return RINGS[top]


def imports_of(path: Path, source: str | None = None) -> set[str]:
    """The absolute names of all modules that a file imports, also inside functions and ``if TYPE_CHECKING``."""
    module = module_name(path)
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(source if source is not None else path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*base, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" for alias in node.names}
    return found


def is_within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def violations(path: Path, source: str | None = None) -> list[str]:
    """What a file imports although its ring forbids it."""
    module = module_name(path)
    ring = ring_of(module)
    found = []
    for imported in sorted(imports_of(path, source)):
        if is_within(imported, "sglang_k3") and imported != "sglang_k3.__version__" and ring_of(imported) > ring:
            found.append(f"{module} (ring {ring}) imports {imported} (ring {ring_of(imported)})")
        if is_within(imported, "sglang") and ring not in RINGS_THAT_MEET_THE_HOST:
            found.append(f"{module} (ring {ring}) imports {imported}: only rings 2 and 3 know the host")
        if is_within(imported, "triton") and path.name not in MAY_IMPORT_TRITON:
            found.append(f"{module} imports triton: only {', '.join(MAY_IMPORT_TRITON)} do")
        if is_within(imported, "sgl_kernel") and path.name not in MAY_LOAD_HOST_KERNELS:
            found.append(f"{module} imports sgl_kernel: only {', '.join(MAY_LOAD_HOST_KERNELS)} do")
        if is_within(module, "sglang_k3.testing") and is_within(imported, *REFERENCE_MUST_NOT_USE):
            found.append(f"{module} imports {imported}: the oracle shares no code with what it judges")
    return found


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_arrows_point_inward(path: Path):
    assert violations(path) == []


@pytest.mark.parametrize(
    ("file", "source", "message"),
    [
        ("kernels/a.py", "import sglang.srt.layers", "only rings 2 and 3 know the host"),
        ("config.py", "def f():\n    from sglang import x", "only rings 2 and 3 know the host"),
        ("cli.py", "import sglang", "only rings 2 and 3 know the host"),
        ("mem/a.py", "from sglang_k3.host import pools", "imports sglang_k3.host.pools (ring 2)"),
        ("models/a.py", "from ..integration import seams", "imports sglang_k3.integration.seams (ring 3)"),
        ("integration/a.py", "from sglang_k3 import cli", "imports sglang_k3.cli (ring 4)"),
        ("kernels/a/__init__.py", "import triton", "imports triton: only triton_impl.py, triton_math.py"),
        ("kernels/a/triton_impl.py", "from sgl_kernel import flashmla_ops", "imports sgl_kernel: only flashmla.py"),
        ("testing/a.py", "from sglang_k3.kernels.a import b", "the oracle shares no code"),
    ],
)
def test_the_checker_sees_a_violation(file: str, source: str, message: str):
    (found,) = violations(PACKAGE / file, source)
    assert message in found


def test_the_checker_allows_what_the_rings_allow():
    assert violations(PACKAGE / "host/a.py", "import sglang\nfrom ..kernels import bind\nimport sglang_k3.errors") == []
    assert violations(PACKAGE / "kernels/a/triton_impl.py", "import triton.language as tl\nimport torch") == []


def test_only_env_reads_the_environment():
    """``integration`` may set what the host reads, ``doctor`` reports what the host will read."""
    readers = {
        module_name(path)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "putenv")
    }
    readers = {module for module in readers if not is_within(module, "sglang_k3.integration")}
    assert readers == {"sglang_k3.env", "sglang_k3.doctor"}


@pytest.mark.parametrize(
    "module", ["sglang_k3", "sglang_k3.cli", "sglang_k3.config", "sglang_k3.report", "sglang_k3.testing.server"]
)
def test_importing_brings_nothing_heavy(module: str):
    """``--help``, a process that only asks a server, and SGLang's own start must not pay for torch."""
    program = f"import json, sys, {module}; print(json.dumps(sorted(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    loaded = set(json.loads(output))
    heavy = {"torch", "triton", "sglang", "transformers", "tokenizers", "safetensors", "numpy", "packaging"}
    assert loaded & heavy == set()


def test_importing_the_package_imports_no_module_of_it():
    program = "import sys, sglang_k3; print([m for m in sys.modules if m.startswith('sglang_k3')])"
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert output.strip() == "['sglang_k3']"
