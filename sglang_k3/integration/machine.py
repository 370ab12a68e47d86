"""Whether this machine can serve a model, asked before anything is loaded: its GPUs, their kernels, and its memory."""

from __future__ import annotations

import importlib
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from sglang.srt.distributed.utils import get_pp_indices
from sglang.srt.utils import get_device_memory_capacity

from sglang_k3.config import K3Config
from sglang_k3.env import kernel_mode
from sglang_k3.errors import ConfigError
from sglang_k3.integration.defaults import CPU_CHUNKED_PREFILL_TOKENS, states_per_request
from sglang_k3.kernels import OPS, OpContext
from sglang_k3.planner import MemoryPlan, Ranks, plan_stages

if TYPE_CHECKING:
    from sglang_k3.integration.server_args import K3ServerArgs


CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")
FEWER = "Ask for fewer with --max-mamba-cache-size and --max-total-tokens"


def refuse_what_it_cannot_serve(args: K3ServerArgs, config: K3Config) -> None:
    """Check what a server is to run against what this machine has.

    Raises:
        ConfigError: says what is missing, and what would help.
    """
    refuse_missing_gpus(args)
    refuse_without_kernels(args, config)
    refuse_what_does_not_fit(args, config, _device_bytes(args.device))


def _device_bytes(device: str) -> float | None:
    """Memory of the smallest GPU; on a CPU that of the machine, or of the container that this runs in."""
    if device == "cpu":  # where there is a GPU as well, the host speaks of that
        limit = CGROUP_LIMIT.read_text().strip() if CGROUP_LIMIT.exists() else "max"
        machine = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        return machine if limit == "max" else min(machine, float(limit))
    memory = get_device_memory_capacity(device)
    return None if memory is None else memory * 2**20


def refuse_missing_gpus(args: K3ServerArgs) -> None:
    """A rank without a GPU would end the start from its own process.

    Raises:
        ConfigError: names the GPUs that the ranks take and how many there are.
    """
    if args.device != "cuda":
        return
    gpus, found = _gpus(args), torch.cuda.device_count()
    if gpus[-1] >= found:
        raise ConfigError(
            f"The ranks of this machine take GPUs {', '.join(map(str, gpus))}, but torch finds {found}, numbered from "
            "zero. Lower --tp-size, --pp-size, --base-gpu-id or --gpu-id-step, show it more of them "
            "(CUDA_VISIBLE_DEVICES), or spread the ranks over more machines with --nnodes."
        )


def refuse_without_kernels(args: K3ServerArgs, config: K3Config) -> None:
    """On a GPU an op without a kernel would run by its reference, which is for a bisection, not for service.

    Raises:
        ConfigError: a GPU that a rank would take, or the model's head sizes, have no kernel of an op; on any device,
            K3PLUGIN_KERNELS is none of its values.
    """
    if kernel_mode() == "reference" or args.device != "cuda":
        return
    kda, mla = config.kda, config.mla
    of_kda = {"K": kda.head_dim, "V": kda.head_dim}
    of_mla = {
        "K": mla.qk_nope_head_dim,
        "R": mla.qk_rope_head_dim,
        "V": mla.v_head_dim,
        "D": mla.latent_dim,
        "L": mla.kv_lora_rank,
    }
    for gpu in _gpus(args):
        for op, module in OPS.items():
            context = OpContext(torch.device("cuda", gpu), sizes=of_mla if op.startswith("mla") else of_kda)
            *kernels, _ = importlib.import_module(module).IMPLS
            reasons = [kernel.supports(context) for kernel in kernels]
            if None not in reasons:
                raise ConfigError(
                    f"On GPU {gpu} there is no kernel for {op}, which {reasons[-1]}. Use another GPU or model, "
                    "--device cpu, or K3PLUGIN_KERNELS=reference for a slow run by the plain PyTorch references."
                )


def _gpus(args: K3ServerArgs) -> list[int]:
    """Those that the ranks of this machine take, as the host deals them out."""
    stages, ranks, stages_here, ranks_here = _ranks_here(args)
    dealt = {
        args.base_gpu_id + stage % stages_here * ranks_here + rank % ranks_here * args.gpu_id_step
        for stage in stages
        for rank in ranks
    }
    return sorted(dealt)


def _ranks_here(args: K3ServerArgs) -> tuple[range, range, int, int]:
    """Pipeline stages and tensor-parallel ranks of this machine, and how many of either a machine has."""
    from sglang.srt.entrypoints.engine import _calculate_rank_ranges  # of the main process alone

    here: tuple[range, range, int, int] = _calculate_rank_ranges(
        args.nnodes, args.pp_size, args.tp_size, args.node_rank
    )
    return here


def refuse_what_does_not_fit(args: K3ServerArgs, config: K3Config, device_bytes: float | None) -> None:
    """Predict, before anything is loaded, that the weights and the pools have no room.

    Args:
        device_bytes: memory of the smallest GPU, or of a machine whose ranks are all on the CPU; None if nobody knows.

    Raises:
        ConfigError: says what is needed, what there is, and what would help.
    """
    if device_bytes is None:
        return
    stages = [get_pp_indices(config.num_hidden_layers, rank, args.pp_size) for rank in range(args.pp_size)]
    ranks = Ranks(args.tp_size, args.dp_size, tuple(stages))
    itemsize = 4 if args.dtype == "float32" else 2
    sizes = {
        "itemsize": itemsize,
        "row_itemsize": {"auto": itemsize, "float32": 4}.get(args.kv_cache_dtype, 2),
        "state_itemsize": 2 if args.mamba_ssm_dtype in ("bfloat16", "float16") else 4,
    }
    num_states = states_per_request(args)
    num_tokens = max(args.chunked_prefill_size or 0, 0) or CPU_CHUNKED_PREFILL_TOKENS
    least = plan_stages(config, ranks, num_states=num_states, num_tokens=num_tokens, **sizes)
    if args.max_mamba_cache_size:
        num_states = args.max_mamba_cache_size // args.dp_size  # which share it
    num_tokens = args.max_total_tokens or num_tokens
    asked = plan_stages(config, ranks, num_states=num_states, num_tokens=num_tokens, **sizes)
    if args.device == "cpu":
        _refuse_more_than_the_machine(args, asked, least, device_bytes)
    else:
        heads = math.gcd(config.kda.num_heads, config.mla.num_heads)
        _refuse_more_than_a_gpu(args, _fullest(asked), _fullest(least), device_bytes, heads)


def _fullest(stages: list[MemoryPlan]) -> MemoryPlan:
    return max(stages, key=lambda plan: plan.total)


def _refuse_more_than_a_gpu(
    args: K3ServerArgs, asked: MemoryPlan, least: MemoryPlan, device_bytes: float, heads: int
) -> None:
    """A rank has a GPU of its own, of which the host takes a part for weights and pools."""
    room = device_bytes * (args.mem_fraction_static or 1.0)
    if asked.total <= room:
        return
    remedy = FEWER
    if least.total > room:
        weights = args.tp_size * args.pp_size * least.weights
        gpus = -(-weights // max(1, int(room) - least.total + least.weights))
        gpus = next((ranks for ranks in range(gpus, heads + 1) if heads % ranks == 0), gpus)
        remedy = f"Spread it over {gpus} GPUs or more with --tp-size and --pp-size"
    raise ConfigError(
        f"The model does not fit: it needs {asked}, but --mem-fraction-static {args.mem_fraction_static} of this "
        f"GPU's {device_bytes / 1e9:.1f} GB is {room / 1e9:.1f}. {remedy}."
    )


def _refuse_more_than_the_machine(
    args: K3ServerArgs, asked: list[MemoryPlan], least: list[MemoryPlan], machine_bytes: float
) -> None:
    """On a CPU the ranks of a machine share its memory, whatever each of them takes."""
    stages, ranks, *_ = _ranks_here(args)
    needed, enough = (len(ranks) * sum(plans[stage].total for stage in stages) for plans in (asked, least))
    if needed <= machine_bytes:
        return
    remedy = FEWER if enough <= machine_bytes else "Take a machine with more memory, or a smaller model"
    num_ranks = len(ranks) * len(stages)
    together = f", {needed / 1e9:.1f} GB for the {num_ranks} ranks here" if num_ranks > 1 else ""
    raise ConfigError(
        f"The model does not fit: it needs {_fullest(asked)}{together}, but this machine has "
        f"{machine_bytes / 1e9:.1f} GB. {remedy}."
    )
