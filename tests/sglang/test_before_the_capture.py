"""What happens between the pools and the first CUDA graph: a last refusal, and kernels compiled for everyone."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_k3.integration import seam_capture

pytestmark = pytest.mark.sglang


def runner(*, asked: int | None = None, room: int = 8, device: str = "cpu") -> SimpleNamespace:
    return SimpleNamespace(
        device=device,
        req_to_token_pool=SimpleNamespace(size=room),
        server_args=SimpleNamespace(asked_graph_batch=asked),
    )


def capture(model_runner: SimpleNamespace) -> Any:
    return seam_capture._capture(lambda **kwargs: kwargs, model_runner=model_runner, capture_decode_cuda_graph=True)


@pytest.mark.parametrize("asked", [None, 1, 8])
def test_what_fits_is_captured_by_the_host(asked: int | None) -> None:
    model_runner = runner(asked=asked)
    assert capture(model_runner) == {"model_runner": model_runner, "capture_decode_cuda_graph": True}


def test_a_graph_larger_than_the_memory_of_the_gpu_allows_ends_the_start_in_one_line() -> None:
    with pytest.raises(SystemExit) as ended:
        capture(runner(asked=9))
    assert ended.value.code == (
        "sglang-k3: --cuda-graph-max-bs-decode or --cuda-graph-bs-decode asks for graphs of 9 requests, but the memory "
        "of this GPU leaves room for 8 at once. Ask for 8 at most, or leave it out."
    )


def test_kernels_are_compiled_on_a_gpu_only(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(seam_capture, "_compile_kernels", compiled.append)
    capture(runner())
    assert compiled == []
    on_gpu = runner(device="cuda")
    capture(on_gpu)
    assert compiled == [on_gpu]
    monkeypatch.setenv("K3PLUGIN_KERNELS", "reference")
    capture(on_gpu)
    assert compiled == [on_gpu]


@pytest.mark.parametrize(
    ("args", "farms"),
    [
        ({"tp_size": 1, "pp_size": 1, "nnodes": 1}, {0: 31}),
        ({"tp_size": 4, "pp_size": 1, "nnodes": 1}, {0: 28}),
        ({"tp_size": 8, "pp_size": 1, "nnodes": 2}, {0: 28, 4: 28}),
        ({"tp_size": 2, "pp_size": 2, "nnodes": 1}, {0: 14}),
        ({"tp_size": 4, "pp_size": 2, "nnodes": 2}, {0: 28}),
    ],
    ids=str,
)
def test_one_farm_for_the_ranks_of_a_stage_on_a_machine(
    args: dict[str, int], farms: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The processes of all farms of a machine leave a core to each rank."""
    started: list[int] = []
    monkeypatch.setattr("sglang_k3.kernels.compile_farm.CompileFarm", started.append)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(32)))
    monkeypatch.setattr(seam_capture, "_farm", None)
    found = {}
    for rank in range(args["tp_size"]):
        started.clear()
        seam_capture.start_farm(SimpleNamespace(device="cuda", **args), rank)
        if started:
            found[rank] = started[0]
    assert found == farms
    started.clear()
    seam_capture.start_farm(SimpleNamespace(device="cpu", **args), 0)
    assert not started


def test_progress_is_a_line_now_and_then_and_one_at_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = iter([0.5, 2.5, 3.0, 3.5])
    monkeypatch.setattr(seam_capture.time, "monotonic", lambda: next(clock))
    with caplog.at_level("INFO"):
        progress = seam_capture._Progress(16, begin=0.0)
        for done in range(1, 5):
            progress(done, 4)
    assert [record.getMessage() for record in caplog.records] == [
        "K3: 2 of 4 Triton kernels compiled by 16 processes in 2.5 s.",
        "K3: 4 of 4 Triton kernels compiled by 16 processes in 3.5 s.",
    ]


class Farm:
    """What is asked of a farm, in order; it compiles what it is given at once."""

    processes = 3

    def __init__(self, asked: list[Any]) -> None:
        self.asked = asked

    def begin(self, capability: int) -> None:
        self.asked.append(capability)

    def submit(self, job: str) -> None:
        self.asked.append(job)

    def wait(self, on_progress: Any) -> None:
        self.asked.append("wait")
        on_progress(1, 1)

    def close(self) -> None:
        self.asked.append("close")


@pytest.mark.parametrize("has_farm", [True, False])
@pytest.mark.parametrize("fails", [False, True])
def test_kernels_are_compiled_while_they_are_listed(
    has_farm: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks wait for each other at the end; one that shares its machine with another only lists."""
    asked: list[Any] = []
    monkeypatch.setattr(seam_capture, "_farm", Farm(asked) if has_farm else None)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr("torch.cuda.empty_cache", lambda: asked.append("emptied"))
    monkeypatch.setattr("sglang.srt.model_executor.runner.get_batch_sizes_to_capture", lambda _: ([1], None))

    @contextlib.contextmanager
    def held_back(on_new: Any) -> Any:
        assert (on_new is not None) == has_farm
        asked.append("listing")
        if on_new is not None:
            on_new("a kernel")
        yield ["a kernel"]

    def rehearse(*_: Any, **__: Any) -> None:
        if fails:
            raise RuntimeError("out of memory")

    monkeypatch.setattr("sglang_k3.kernels.compile_farm.held_back", held_back)
    monkeypatch.setattr("sglang_k3.host.rehearsal.rehearse", rehearse)
    model_runner = runner(device="cuda")
    model_runner.gpu_id = 0
    model_runner.server_args.radix_cache_backend = "k3"
    model_runner.tp_group = SimpleNamespace(barrier=lambda: asked.append("barrier"))
    if fails:
        with pytest.raises(RuntimeError, match="out of memory"):
            seam_capture._compile_kernels(model_runner)
    else:
        seam_capture._compile_kernels(model_runner)
    begins, waits, closes = ([90], ["wait"], ["close"]) if has_farm else ([], [], [])
    submits = ["a kernel"] if has_farm else []
    ends = [] if fails else ["emptied", *waits]
    assert asked == [*begins, "listing", *submits, *ends, *closes, *([] if fails else ["barrier"])]
    assert seam_capture._farm is None
