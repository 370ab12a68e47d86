"""Variables of the host that a K3 server's child processes inherit, so that users set nothing.

One process may start several servers: what was set for one is taken back before the next, and what the user has set
stays.
"""

from __future__ import annotations

import importlib
import os
import pkgutil

from sglang_k3.errors import ConfigError

MODEL_PACKAGE = "sglang_k3.models"
HOST_MODELS = "sglang.srt.models"
_ours: dict[str, str] = {}


def set_for_k3(*, run_dtype: str, device: str, tp_size: int, pp_size: int) -> None:
    """Set what the host reads for a K3 server; an earlier one's is cleared before the host resolves the arguments.

    Raises:
        ConfigError: another package claims the place where the host looks for model classes.
    """
    package = os.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE", MODEL_PACKAGE)
    if package != MODEL_PACKAGE:
        raise ConfigError(
            f"SGLANG_EXTERNAL_MODEL_PACKAGE is {package!r}, but the host takes one package and K3 needs "
            f"{MODEL_PACKAGE!r}. Unset it for this server."
        )
    _default("SGLANG_EXTERNAL_MODEL_PACKAGE", MODEL_PACKAGE)
    # The conv history is exact in the run dtype (design.md 8); the host's own default is bfloat16.
    _default("SGLANG_MAMBA_CONV_DTYPE", run_dtype)
    if device == "cpu":
        _set_for_cpu(tp_size, pp_size)
    else:
        # The host's newer all-reduce is compiled by nvcc at the start; the older one comes as a binary.
        _default("SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2", "0")


def _set_for_cpu(tp_size: int, pp_size: int) -> None:
    cores, num_ranks = sorted(os.sched_getaffinity(0)), tp_size * pp_size
    # One core is left to the processes that tokenise and answer: threads that wait for it stall all others.
    _default("OMP_NUM_THREADS", str(max(1, (len(cores) - 1) // num_ranks)))
    if tp_size > 1:
        # The host would bind one rank to a NUMA node and give up where there are fewer; stages share their cores.
        share = max(1, len(cores) // tp_size)
        groups = (cores[rank * share % len(cores) :][:share] for rank in range(tp_size))
        _default("SGLANG_CPU_OMP_THREADS_BIND", "|".join(",".join(map(str, group)) for group in groups))
    if num_ranks > 1:
        # The host would open NCCL on a device that has none; a path that leads nowhere switches that off.
        _default("SGLANG_NCCL_SO_PATH", "/nonexistent")


def leave_out_host_models() -> None:
    """In a process that serves K3 and nothing else: the host imports all models that it has, to know their names."""
    names = [module.name for module in pkgutil.iter_modules(importlib.import_module(HOST_MODELS).__path__)]
    os.environ.setdefault("SGLANG_DISABLED_MODEL_ARCHS", ",".join(names))


def clear() -> None:
    """Take back what an earlier server of this process was given, where nobody has changed it since."""
    for name, value in _ours.items():
        if os.environ.get(name) == value:
            del os.environ[name]
    _ours.clear()


def _default(name: str, value: str) -> None:
    if name not in os.environ:
        os.environ[name] = _ours[name] = value
