"""What a machine has not, GPUs, kernels or memory, ends the start with the numbers and a remedy."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_k3.config import K3Config
from sglang_k3.errors import K3Error
from sglang_k3.integration.machine import refuse_missing_gpus, refuse_what_does_not_fit, refuse_without_kernels
from sglang_k3.testing.presets import GPU_PRESETS, K3_SIZES, PRESETS, TinyPreset, published_config
from tests.kit.start import start

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("plugin")]
H200 = 143771 * 2**20


def config_of(sizes: TinyPreset) -> K3Config:
    return K3Config.from_dict(published_config(sizes, dtype="bfloat16", packed_experts=True, vision=False))


def ranks(**given: object) -> SimpleNamespace:
    one = {
        "device": "cuda",
        "tp_size": 1,
        "pp_size": 1,
        "nnodes": 1,
        "node_rank": 0,
        "base_gpu_id": 0,
        "gpu_id_step": 1,
    }
    return SimpleNamespace(**{**one, **given})


def test_a_gpu_without_kernels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    capabilities = [(9, 0), (7, 5), (9, 0)]
    monkeypatch.setattr("torch.cuda.device_count", lambda: len(capabilities))
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: capabilities[device.index])
    config = config_of(K3_SIZES)
    says = (
        "On GPU 1 .* sm_80 or newer, got sm_75. Use another GPU or model, --device cpu, or K3PLUGIN_KERNELS=reference"
    )
    for taken in (
        {"tp_size": 2},
        {"base_gpu_id": 1},
        {"tp_size": 4, "nnodes": 2, "node_rank": 1},
        {"pp_size": 2, "gpu_id_step": 2},
    ):
        with pytest.raises(K3Error, match=says):
            refuse_without_kernels(ranks(**taken), config)
    for taken in ({}, {"base_gpu_id": 2}, {"tp_size": 2, "gpu_id_step": 2}):
        refuse_without_kernels(ranks(**taken), config)
    monkeypatch.setenv("K3PLUGIN_KERNELS", "reference")
    refuse_without_kernels(ranks(tp_size=2), config)


@pytest.mark.parametrize("preset", [*PRESETS, *GPU_PRESETS])
def test_what_is_tested_on_a_gpu_has_all_its_kernels(preset: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one_gpu(monkeypatch)
    sizes = (PRESETS | GPU_PRESETS)[preset]
    refuse_without_kernels(ranks(), config_of(sizes))


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"kda_head_dim": 256}, "no kernel for kda_decode, which takes K up to 128, got 256"),
        ({"kv_lora_rank": 1024}, "no kernel for mla_decode, which takes D up to 576, got 1088"),
        ({"v_head_dim": 256}, "no kernel for mla_prefill, which takes V up to 128, got 256"),
    ],
)
def test_head_sizes_without_kernels_are_refused_on_a_gpu(
    sizes: dict[str, int], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_gpu(monkeypatch)
    config = config_of(dataclasses.replace(K3_SIZES, **sizes))
    with pytest.raises(K3Error, match=says):
        refuse_without_kernels(ranks(), config)
    on_cpu = ranks()
    on_cpu.device = "cpu"
    refuse_without_kernels(on_cpu, config)


def one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))


def test_a_gpu_that_is_not_there_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(K3Error, match="--device cuda needs a GPU, and torch finds none. Leave it out, or give --dev"):
        start(checkpoint, device="cuda")


def sizes_of(**given: object) -> SimpleNamespace:
    eight = {
        **{"device": "cuda", "dtype": "bfloat16", "mamba_ssm_dtype": "float32", "mem_fraction_static": 0.9},
        "kv_cache_dtype": "auto",
        **{"max_mamba_cache_size": None, "max_total_tokens": None, "chunked_prefill_size": 8192},
        **{"tp_size": 8, "dp_size": 1, "pp_size": 1, "nnodes": 1, "node_rank": 0, "radix_cache_backend": "k3"},
    }
    return SimpleNamespace(**{**eight, **given})


def test_a_model_that_does_not_fit_is_refused_with_the_numbers() -> None:
    config = config_of(K3_SIZES)
    args = sizes_of()
    with pytest.raises(K3Error) as refused:
        refuse_what_does_not_fit(args, config, H200)
    numbers = re.fullmatch(
        r"The model does not fit: it needs ([\d.]+) GB on each rank: ([\d.]+) of weights, ([\d.]+) of 4 states, "
        r"([\d.]+) of 8192 cached tokens, but --mem-fraction-static 0.9 of this GPU's 150.8 GB is 135.7. "
        r"Spread it over (\d+) GPUs or more with --tp-size and --pp-size.",
        str(refused.value),
    )
    assert numbers is not None, refused.value
    total, *parts, gpus = (float(number) for number in numbers.groups())
    assert sum(parts) == pytest.approx(total, abs=0.2) and 135.7 < total < 250
    refuse_what_does_not_fit(args, config, None)  # nobody knows
    args.tp_size = 32
    assert gpus <= 32 and 96 % gpus == 0, "a number over which the heads can be split"
    refuse_what_does_not_fit(args, config, H200)
    args.max_total_tokens = 10**9
    with pytest.raises(K3Error, match="Ask for fewer with --max-mamba-cache-size and --max-total-tokens"):
        refuse_what_does_not_fit(args, config, H200)


def test_a_model_that_does_not_fit_however_few_are_asked_for_needs_more_gpus() -> None:
    args = sizes_of(max_mamba_cache_size=1000, max_total_tokens=10**7)
    with pytest.raises(K3Error, match=r"of 1000 states, .* of 10000000 cached tokens, .*\. Spread it over"):
        refuse_what_does_not_fit(args, config_of(K3_SIZES), H200)


ALONE = {"device": "cpu", "tp_size": 1}


@pytest.mark.parametrize(
    ("given", "machine_gb", "says"),
    [
        (
            ALONE,
            1500,
            r"it needs 156\d\.\d GB on each rank: .*, but this machine has 1500\.0 GB\. Take a machine with more",
        ),
        (
            {**ALONE, "max_total_tokens": 10**7},
            1600,
            r"but this machine has 1600\.0 GB\. Ask for fewer with --max-mamba",
        ),
        ({**ALONE, "max_total_tokens": 10**7}, 64, r"but this machine has 64\.0 GB\. Take a machine with more memory"),
        ({**ALONE, "tp_size": 2}, 1500, r"cached tokens, 157\d\.\d GB for the 2 ranks here, but this machine has"),
        ({**ALONE, "pp_size": 2}, 1500, r"cached tokens, 156\d\.\d GB for the 2 ranks here, but this machine has"),
    ],
    ids=["one rank", "pool", "both", "ranks", "stages"],
)
def test_ranks_on_a_cpu_share_the_memory_of_the_machine(given: dict[str, object], machine_gb: int, says: str) -> None:
    """Whose remedy is not more of them."""
    with pytest.raises(K3Error, match=says):
        refuse_what_does_not_fit(sizes_of(**given), config_of(K3_SIZES), machine_gb * 1e9)


@pytest.mark.parametrize(
    ("given", "machine_gb"),
    [(ALONE, 1600), ({**ALONE, "pp_size": 2}, 1600), ({**ALONE, "tp_size": 2, "nnodes": 2, "node_rank": 1}, 1000)],
)
def test_what_fits_a_machine_is_served(
    given: dict[str, object], machine_gb: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages may be unequal, and ranks on other machines take nothing of this one."""
    monkeypatch.setenv("SGLANG_PP_LAYER_PARTITION", "23,70" if "pp_size" in given else "93")
    refuse_what_does_not_fit(sizes_of(**given), config_of(K3_SIZES), machine_gb * 1e9)


@pytest.mark.parametrize(
    ("given", "same"),
    [
        ({"max_mamba_cache_size": 4000, "dp_size": 2, "tp_size": 2}, {"max_mamba_cache_size": 2000}),
        ({"max_total_tokens": 10**7, "dtype": "float32"}, {"max_total_tokens": 10**7, "kv_cache_dtype": "float32"}),
        ({"max_total_tokens": 10**7}, {"max_total_tokens": 10**7, "dtype": "float32", "kv_cache_dtype": "bfloat16"}),
    ],
    ids=["data-parallel ranks share states", "rows of the run dtype", "rows of their own dtype"],
)
def test_pools_take_what_their_ranks_hold(given: dict[str, object], same: dict[str, object]) -> None:
    """A rank's states and rows, as the refusal gives them."""
    pools = []
    for one in (given, same):
        with pytest.raises(K3Error) as refused:
            refuse_what_does_not_fit(sizes_of(**{**ALONE, **one}), config_of(K3_SIZES), 1e9)
        pools.append(re.search(r"[\d.]+ of \d+ states, ([\d.]+ of \d+ cached tokens)", str(refused.value)))
    group = 0 if "max_mamba_cache_size" in given else 1  # beside a state, a conv history has the run dtype
    assert pools[0] and pools[1] and pools[0][group] == pools[1][group]


def test_a_pool_larger_than_this_machine_is_refused(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever GPU it has beside."""
    monkeypatch.setattr("sglang_k3.integration.machine.get_device_memory_capacity", lambda device: 10**12)
    with pytest.raises(
        K3Error, match=r"The model does not fit: .* of 1000000000000 cached tokens, but this machine has"
    ):
        start(checkpoint, device="cpu", max_total_tokens=10**12)


@pytest.mark.parametrize(("limit", "fits"), [("max", True), (str(2**40), True), ("1000000", False)])
def test_a_container_has_less_than_its_machine(
    checkpoint: Path, tmp_path: Path, limit: str, fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "memory.max").write_text(f"{limit}\n")
    monkeypatch.setattr("sglang_k3.integration.machine.CGROUP_LIMIT", tmp_path / "memory.max")
    if fits:
        start(checkpoint, device="cpu")
    else:
        with pytest.raises(K3Error, match=r"but this machine has 0\.0 GB"):
            start(checkpoint, device="cpu")


@pytest.mark.parametrize(
    ("given", "takes"),
    [
        ({"tp_size": 4}, "0, 1, 2, 3"),
        ({"tp_size": 2, "pp_size": 2}, "0, 1, 2, 3"),
        ({"base_gpu_id": 2}, "2"),
        ({"tp_size": 2, "gpu_id_step": 2}, "0, 2"),
    ],
)
def test_gpus_that_are_not_there_are_refused(
    given: dict[str, int], takes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    says = (
        f"ranks of this machine take GPUs {takes}, but torch finds 2, numbered from zero. Lower --tp-size, --pp-size, "
        r"--base-gpu-id or --gpu-id-step, show it more of them \(CUDA_VISIBLE_DEVICES\), or spread .* with --nnodes"
    )
    with pytest.raises(K3Error, match=says):
        refuse_missing_gpus(ranks(**given))


def test_gpus_that_are_there_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for given in ({}, {"tp_size": 2}, {"base_gpu_id": 1}, {"tp_size": 4, "nnodes": 2, "node_rank": 1}):
        refuse_missing_gpus(ranks(**given))
    refuse_missing_gpus(ranks(device="cpu", tp_size=4))
