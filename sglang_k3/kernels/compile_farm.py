"""Compile Triton kernels in many processes at once, into Triton's cache on disk.

Triton compiles a kernel when it is first launched, one after the other. Here launches are held back and noted
(``held_back``), processes that share the machine's cores compile what was noted (``CompileFarm``), and the first real
launch then finds its kernel in the cache. Needs the C compiler that Triton itself needs; neither nvcc nor a GPU.

    python -m sglang_k3.kernels.compile_farm 16    # 16 processes; on stdin 90 for sm_90, then a line for each kernel
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PACKAGE = __name__.split(".")[0]


@contextlib.contextmanager
def held_back() -> Iterator[dict[str, str]]:
    """Inside, kernels of this package that are not compiled yet are noted and not launched; others run.

    Yields:
        What ``CompileFarm.compile`` takes: where a kernel is defined and for what it is specialised, by a unique key.
    """
    from triton import knobs

    noted: dict[str, str] = {}

    def note(*, fn: Any, compile: dict[str, Any], **_: Any) -> bool:  # noqa: A002  the name that Triton passes
        if not fn.module.startswith(f"{PACKAGE}."):
            return False
        job = {"module": fn.module, "name": fn.name, "data": compile["specialization_data"]}
        noted[f"{fn.module}.{fn.name} {compile['key']}"] = json.dumps(job)
        return True

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    try:
        yield noted
    finally:
        knobs.runtime.jit_cache_hook = before


class CompileFarm:
    """The processes, started early so that they are ready when there is work; ``close`` ends them.

    Args:
        processes: how many compile at once.
    """

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self._child = subprocess.Popen(
            [sys.executable, "-m", __name__, str(processes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def compile(self, jobs: dict[str, str], capability: int, on_progress: Callable[[int, int], None]) -> None:
        """Wait until every kernel is in the cache.

        Args:
            jobs: as ``held_back`` yields them.
            capability: of the GPU, as one number: 90 for sm_90.
            on_progress: told how many of how many are done, after each.

        Raises:
            RuntimeError: one cannot be compiled; its error is on the server's log already.
        """
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write("\n".join([str(capability), *jobs.values()]))
        self._child.stdin.close()
        done = 0
        for line in self._child.stdout:
            if line.startswith("done"):
                done += 1
                on_progress(done, len(jobs))
        if self._child.wait() or done < len(jobs):
            raise RuntimeError(
                f"{len(jobs) - done} of {len(jobs)} Triton kernels could not be compiled; the reason is above. "
                "K3PLUGIN_KERNELS=reference serves without them."
            )

    def close(self) -> None:
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()


class CompileOnlyDriver:
    """What Triton asks of a GPU before it compiles, answered without one."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        return self._target


def compile_one(job: str) -> None:
    """Compile a noted kernel, and the little C module that launches it, into Triton's cache."""
    from triton.backends.nvidia.driver import CudaLauncher, libcuda_dirs

    spec = json.loads(job)
    kernel = getattr(importlib.import_module(spec["module"]), spec["name"]).preload(spec["data"])
    with contextlib.suppress(AssertionError, subprocess.CalledProcessError, FileNotFoundError):
        libcuda_dirs()  # without a driver on this machine there is nothing to launch with
        CudaLauncher(kernel.src, kernel.metadata)


def main(processes: int) -> int:
    """Fork the processes when the modules are loaded; each takes the next line of what the parent reads."""
    from triton.runtime.driver import driver

    from sglang_k3.kernels import OPS

    for op in OPS.values():
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(f"{op}.triton_impl")
    asked = sys.stdin.read()
    if not asked:  # the server ended before it knew its kernels
        return 0
    capability, *jobs = asked.splitlines()
    driver.set_active(CompileOnlyDriver(int(capability)))
    # The slowest first would be best; the longest description is a good guess of it.
    jobs.sort(key=len, reverse=True)
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("fork")) as pool:
        for compiled in as_completed([pool.submit(compile_one, job) for job in jobs]):
            compiled.result()
            sys.stdout.write("done\n")
            sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
