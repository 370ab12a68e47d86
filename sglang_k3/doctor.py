"""What ``sglang-k3 doctor`` looks at: whether this machine can serve K3 with this package, and if not, what to do.

Each check prints what it found and returns its problems; a problem is one sentence on what is wrong and one on the
remedy. Nothing is started and nothing is changed. The host is asked for its version before anything of it is
imported, since the seams of another release are not worth looking at.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import logging
import os
import platform
import warnings
from typing import TYPE_CHECKING

import sglang_k3

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    Say = Callable[[str], None]

ENTRY_POINT_GROUP = "sglang.srt.plugins"
ENTRY_POINT = "k3"
REINSTALL = "pip install --force-reinstall --no-deps sglang==0.5.16"


def run(say: Say) -> list[str]:
    """Check everything, print through ``say`` line by line, and return the problems (empty: all is well)."""
    say(f"sglang-k3 {sglang_k3.__version__}")
    host_problems = check_host(say)
    problems = [*host_problems, *check_entry_point(say), *check_kernels(say)]
    if host_problems:
        say("seams     not checked: they exist in the supported release only")
    else:
        problems += check_seams(say)
    say("")
    for problem in problems:
        say(f"PROBLEM   {problem}")
    if not problems:
        say("No problem found. Try: python -m sglang.launch_server --model kimi-k3-tiny")
    return problems


def check_host(say: Say) -> list[str]:
    """The installed SGLang against the window that this package extends, and what it brought along."""
    from sglang_k3.integration.compat import SUPPORTED, host_problem

    problem = host_problem()
    say(f"sglang    {_version('sglang')} ({'supported' if problem is None else 'NOT supported'}: {SUPPORTED})")
    say(f"python    {platform.python_version()} on {platform.system()} {platform.machine()}")
    say("with      " + ", ".join(f"{name} {_version(name)}" for name in ("torch", "triton", "transformers")))
    return [] if problem is None else [problem]


def check_entry_point(say: Say) -> list[str]:
    """Whether SGLang is going to find the plugin and may load it."""
    entry_points = list(importlib.metadata.entry_points(group=ENTRY_POINT_GROUP, name=ENTRY_POINT))
    if not entry_points:
        say("plugin    not installed")
        return [
            f"no installed package has the entry point {ENTRY_POINT!r} in {ENTRY_POINT_GROUP}, so SGLang does not find "
            "the plugin. Install the package instead of only putting it on the path: pip install -e ."
        ]
    say(f"plugin    {ENTRY_POINT} -> {entry_points[0].value}")
    allowed = os.environ.get("SGLANG_PLUGINS", "")
    if allowed and ENTRY_POINT not in [name.strip() for name in allowed.split(",")]:
        return [
            f"SGLANG_PLUGINS={allowed} leaves the plugin {ENTRY_POINT!r} out. "
            f"Unset it, or use SGLANG_PLUGINS={allowed},{ENTRY_POINT}"
        ]
    return []


def check_kernels(say: Say) -> list[str]:
    """The devices, and for each op which implementation runs there and why none before it does."""
    try:
        import torch
    except ImportError as error:
        say("devices   unknown")
        return [f"torch cannot be imported ({error}). It comes with SGLang: pip install --force-reinstall torch"]

    from sglang_k3.env import kernel_mode
    from sglang_k3.kernels import OPS
    from sglang_k3.kernels.dispatch import OpContext, choose

    device = _say_devices(say)
    try:
        mode = kernel_mode()
    except ValueError as error:
        say("kernels   not checked")
        return [str(error)]
    say(f"kernels   on {device}, K3PLUGIN_KERNELS={mode}, for bf16 and a rank with all heads of K3")
    ctx = OpContext(torch.device(device), torch.bfloat16, _sizes())
    problems = []
    for op, module in OPS.items():
        impls = importlib.import_module(module).IMPLS
        try:
            chosen = choose(impls, ctx, mode)
        except ValueError as error:
            say(f"  {op:<20} NONE")
            problems.append(f"{op}: {error}")
        else:
            passed_over = impls[: impls.index(chosen)]
            reasons = [f"{impl.name}: {impl.supports(ctx) or 'not asked for'}" for impl in passed_over]
            say(f"  {op:<20} {chosen.name:<12} {'; '.join(reasons)}".rstrip())
    return problems


def _sizes() -> dict[str, int]:
    """What implementations are chosen by, with pages as they are by default on a GPU."""
    from sglang_k3.testing.presets import K3_SIZES

    latent, heads = K3_SIZES.kv_lora_rank, K3_SIZES.mla_heads
    return {"H": heads, "D": latent + K3_SIZES.qk_rope_head_dim, "L": latent, "page": 64}


def check_seams(say: Say) -> list[str]:
    """Whether every place of the host that the plugin registers at or hooks is still there."""
    from sglang_k3.integration.seams import SEAMS
    from sglang_k3.integration.verify import check_seams as find_problems

    with _quiet():
        problems = find_problems()
    state = "not all in place, see the end" if problems else "all in place"
    say(f"seams     {state}: where the plugin registers with SGLang or hooks into it, and what each makes good")
    width = max(len(seam.name) for seam in SEAMS)
    for seam in SEAMS:
        say(f"  {seam.name:<{width}} {seam.why}")
    return [f"{problem} SGLang looks altered or half-installed; reinstall it: {REINSTALL}" for problem in problems]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Importing the host warns of every device that is not there, which says nothing to the person who asks."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)


def _say_devices(say: Say) -> str:
    """Print the devices; return the type of the one that a server would take."""
    from torch import cuda

    if not cuda.is_available():
        say(f"devices   cpu only ({os.cpu_count()} cores)")
        return "cpu"
    for index in range(cuda.device_count()):
        found = cuda.get_device_properties(index)
        gib = found.total_memory / 2**30
        say(f"devices   cuda:{index} {found.name}, {gib:.0f} GiB, sm_{found.major}{found.minor}")
    return "cuda"


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
