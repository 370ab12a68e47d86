"""Compile Triton kernels in many processes at once, into Triton's cache on disk.

Triton compiles a kernel when it is first launched, one after the other. Here launches are held back and noted
(``held_back``), processes that share the machine's cores compile what is noted while the noting goes on
(``CompileFarm``), and the first real launch then finds its kernel in the cache. Needs the C compiler that Triton itself
needs; neither nvcc nor a GPU.

    python -m sglang_k3.kernels.compile_farm 16 $$    # 16 processes that end with this shell; on stdin 90 for sm_90,
                                                      # then a line for each kernel
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from concurrent.futures import Future, ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PR_SET_PDEATHSIG = 1  # of linux/prctl.h
PACKAGE = __name__.split(".")[0]


@contextlib.contextmanager
def held_back(on_new: Callable[[str], None] | None = None) -> Iterator[list[str]]:
    """Inside, kernels of this package that are not compiled yet are noted and not launched; others run.

    Args:
        on_new: told each kernel when it is noted, as ``CompileFarm.submit`` takes it.

    Yields:
        All that were noted, each once.
    """
    from triton import knobs

    noted: list[str] = []
    stand_ins: list[tuple[dict[Any, Any], Any]] = []

    def note(*, key: Any, fn: Any, compile: dict[str, Any], **_: Any) -> bool:  # noqa: A002  the name that Triton passes
        if not fn.module.startswith(f"{PACKAGE}."):
            return False
        # Triton works out what to compile at each launch that finds nothing, which takes longer than a launch does.
        kernels = fn.jit_function.device_caches[compile["device"]][0]
        kernels[key] = _StandIn()
        stand_ins.append((kernels, key))
        noted.append(json.dumps({"module": fn.module, "name": fn.name, "data": compile["specialization_data"]}))
        if on_new is not None:
            on_new(noted[-1])
        return True

    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = note
    try:
        yield noted
    finally:
        knobs.runtime.jit_cache_hook = before
        for kernels, key in stand_ins:
            kernels.pop(key, None)


class _StandIn:
    """What Triton launches in place of a kernel that was noted: nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, *_: Any) -> None:
        return None


class CompileFarm:
    """The processes, started early so that they are ready when there is work; ``close`` ends them.

    Args:
        processes: how many compile at once.
    """

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self._submitted = 0
        self._child = subprocess.Popen(
            [sys.executable, "-m", __name__, str(processes), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def begin(self, capability: int) -> None:
        """Compile for a GPU of this capability, as one number: 90 for sm_90."""
        self._tell(str(capability))

    def submit(self, job: str) -> None:
        """Compile what ``held_back`` has noted, without waiting for it."""
        self._submitted += 1
        self._tell(job)

    def wait(self, on_progress: Callable[[int, int], None]) -> None:
        """Until every kernel that was submitted is in the cache; nothing can be submitted any more.

        Args:
            on_progress: told how many of how many are done, after each.

        Raises:
            RuntimeError: one cannot be compiled; its error is on the server's log already.
        """
        assert self._child.stdin is not None and self._child.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.close()
        done, of = 0, self._submitted
        for line in self._child.stdout:
            if line.startswith("done"):
                done += 1
                on_progress(done, of)
        code = self._child.wait()
        if code or done < of:
            what = (
                f"{of - done} of {of} Triton kernels could not be compiled" if done < of else "The compiler did not end"
            )
            raise RuntimeError(
                f"{what} (exit code {code}); the reason is above. K3PLUGIN_KERNELS=reference serves without them."
            )

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        if self._child.poll() is None:
            self._child.kill()
            self._child.wait()

    def _tell(self, line: str) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died: ``wait`` says what to do
            self._child.stdin.write(f"{line}\n")
            self._child.stdin.flush()


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


def main(processes: int, parent: int) -> int:
    """Fork the processes when the modules are loaded; each takes the next line of what the parent reads.

    Args:
        parent: the id of the process that started this one.
    """
    _end_with_parent(parent)
    from triton.runtime.driver import driver

    from sglang_k3.kernels import OPS

    for op in OPS.values():
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(f"{op}.triton_impl")
    capability = sys.stdin.readline()
    if not capability:  # the server ended before it knew its kernels
        return 0
    driver.set_active(CompileOnlyDriver(int(capability)))
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes, context, initializer=_end_with_parent, initargs=(os.getpid(),)) as pool:
        compiled = []
        for job in sys.stdin:
            compiled.append(pool.submit(compile_one, job))
            compiled[-1].add_done_callback(_say_done)
        for future in compiled:
            future.result()
    return 0


def _end_with_parent(parent: int) -> None:
    """Let the kernel end this process with the thread that started it, however that ends: its own children would wait
    for work for ever, and hold the server's log open. Where it has ended already no signal comes, so this one goes.

    Args:
        parent: the id of the process that started this one, as that one knows it.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _say_done(compiled: Future[None]) -> None:
    if not compiled.cancelled() and compiled.exception() is None:
        sys.stdout.write("done\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
