"""Kernels are compiled by other processes, without a GPU, and a first launch then finds them in the cache."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_k3.env import triton_interprets

pytestmark = pytest.mark.skipif(triton_interprets(), reason="the interpreter compiles nothing")

MODULE = "sglang_k3.kernels.compile_farm"

SCRIPT = """
import json
import torch
from triton import knobs
from triton.runtime.driver import driver
from sglang_k3.kernels.compile_farm import CompileFarm, CompileOnlyDriver, compile_one, held_back
from sglang_k3.kernels.mla_decode.triton_impl import mla_decode
from sglang_k3.kernels.state_copy.triton_impl import state_copy

driver.set_active(CompileOnlyDriver(90))
meta = dict(device="meta")

def copy():
    states = torch.empty(2, 5, 3, 64, **meta)
    slots = torch.empty(4, dtype=torch.int32, **meta)
    state_copy(states, src_indices=slots, dst_indices=slots.long())

def attend():
    q, pool = (torch.empty(*shape, dtype=torch.bfloat16, **meta) for shape in ((3, 16, 576), (100, 576)))
    spans, table = torch.empty(3, 2, dtype=torch.int64, **meta), torch.empty(300, dtype=torch.int32, **meta)
    mla_decode(q, pool, kv_spans=spans, kv_indices=table, max_len=100, scale=0.1, v_dim=512)

submitted = []
with held_back(submitted.append) as jobs:
    for call in (copy, attend, copy, attend):
        call()
names = sorted(json.loads(job)["name"] for job in jobs)
assert names == ["_attend", "_merge", "_state_copy"], names
assert submitted == jobs
farm, progress = CompileFarm(2), []
farm.begin(90)
for job in submitted:
    farm.submit(job)
farm.wait(lambda done, of: progress.append((done, of)))
assert progress == [(1, 3), (2, 3), (3, 3)], progress

hits = []
knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
for call in (copy, attend):  # the second kernel of an op is never reached: there is no GPU to launch the first
    try:
        call()
    except Exception:
        pass
assert hits == [True] * 2, hits
for job in jobs:
    compile_one(job)
assert hits == [True] * 5, hits
print("HITS")
"""


def run(script: str, cache: Path) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    return subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)


def test_what_was_held_back_is_compiled_elsewhere_and_found(tmp_path: Path) -> None:
    done = run(SCRIPT, tmp_path)
    assert done.returncode == 0 and done.stdout == "HITS\n", done.stdout + done.stderr


def test_a_kernel_that_cannot_be_compiled_ends_the_wait(tmp_path: Path) -> None:
    broken = SCRIPT.replace("farm.submit(job)", "farm.submit(job.replace('_state_copy', '_gone'))")
    done = run(broken, tmp_path)
    assert done.returncode == 1
    assert "1 of 3 Triton kernels could not be compiled (exit code 1); the reason is above" in done.stderr
    assert "has no attribute '_gone'" in done.stderr


def test_processes_that_died_early_are_an_error_with_a_remedy(tmp_path: Path) -> None:
    dead = SCRIPT.replace("farm.begin(90)", "farm.close(); farm.begin(90)")
    done = run(dead, tmp_path)
    assert done.returncode == 1
    assert "3 of 3 Triton kernels could not be compiled" in done.stderr
    assert "BrokenPipeError" not in done.stderr


RELAUNCHED = """
import importlib
import torch
from triton import knobs
from triton.runtime.driver import driver
from sglang_k3.kernels.compile_farm import CompileOnlyDriver, held_back

triton_impl = importlib.import_module("sglang_k3.kernels.state_copy.triton_impl")

driver.set_active(CompileOnlyDriver(90))
states = torch.empty(2, 5, 3, 64, device="meta")
slots = torch.empty(4, dtype=torch.int32, device="meta")

with held_back() as jobs:
    note, asked = knobs.runtime.jit_cache_hook, []
    knobs.runtime.jit_cache_hook = lambda **given: asked.append(1) or note(**given)
    for _ in range(5):
        triton_impl.state_copy(states, src_indices=slots, dst_indices=slots)
    assert len(jobs) == len(asked) == 1, asked
with held_back() as again:  # nothing is left of the first time
    triton_impl.state_copy(states, src_indices=slots, dst_indices=slots)
assert again == jobs
print("ONCE")
"""


def test_a_kernel_is_worked_out_once_however_often_it_is_launched(tmp_path: Path) -> None:
    done = run(RELAUNCHED, tmp_path)
    assert done.returncode == 0 and done.stdout == "ONCE\n", done.stdout + done.stderr


INTERRUPTED = """
import sys
import psutil
from sglang_k3.kernels.compile_farm import CompileFarm

farm = CompileFarm(3)
farm.begin(90)
for _ in range(3):
    farm.submit('{"module": "time", "name": "sleep", "data": ""}')
main = psutil.Process(farm._child.pid)
while len(children := main.children()) < 3:
    pass
if sys.argv[1] == "closed":
    farm.close()
else:
    main.kill()
    try:
        farm.wait(lambda *_: None)
    except RuntimeError as error:
        print(error)
gone, alive = psutil.wait_procs(children, timeout=10)
print(len(gone), len(alive))
"""


@pytest.mark.parametrize(
    ("how", "says"),
    [("closed", "3 0"), ("killed", "3 of 3 Triton kernels could not be compiled (exit code -9); the reason is above.")],
)
def test_no_process_outlives_the_farm(how: str, says: str) -> None:
    """Nor does anybody wait for ever for one that is gone."""
    command = [sys.executable, "-c", INTERRUPTED, how]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0 and done.stdout.startswith(says), done.stdout + done.stderr
    assert done.stdout.endswith("3 0\n")


ORPHANED = """
import os
from sglang_k3.kernels.compile_farm import _end_with_parent

reader, writer = os.pipe()
parent = os.fork()
if parent == 0:
    dying = os.getpid()
    if os.fork() == 0:
        os.close(reader)
        while os.getppid() == dying:
            pass
        _end_with_parent(dying)
        os.write(writer, b"lives on")
    os._exit(0)
os.close(writer)
os.waitpid(parent, 0)
print(os.read(reader, 100))
"""


def test_a_process_whose_parent_ended_before_it_could_ask_ends_too() -> None:
    command = [sys.executable, "-c", ORPHANED]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0 and done.stdout == "b''\n", done.stdout + done.stderr


def test_a_farm_whose_server_ended_before_it_could_ask_ends_too() -> None:
    """Also where another process that the server has forked still holds its stdin open."""
    server = str(os.getppid())  # of which this process is not
    with subprocess.Popen([sys.executable, "-m", MODULE, "1", server], stdin=subprocess.PIPE) as farm:
        assert farm.wait(timeout=100) == -signal.SIGKILL


FAILING = """
import importlib
import torch
from triton import knobs
from triton.runtime.driver import driver
from sglang_k3.kernels.compile_farm import CompileOnlyDriver, held_back

driver.set_active(CompileOnlyDriver(90))
module = importlib.import_module("sglang_k3.kernels.state_copy.triton_impl")
states, slots = torch.empty(2, 5, 3, 64, device="meta"), torch.empty(4, dtype=torch.int32, device="meta")
try:
    with held_back(lambda job: 1 / 0):
        module.state_copy(states, src_indices=slots, dst_indices=slots)
except ZeroDivisionError:
    print("RAISED")
assert knobs.runtime.jit_cache_hook is None
assert all(not caches[0] for caches in module._state_copy.device_caches.values())
"""


def test_a_listing_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    done = run(FAILING, tmp_path)
    assert done.returncode == 0 and done.stdout == "RAISED\n", done.stdout + done.stderr
