"""What a K3 server needs and its user should not have to say.

Only fields that are still unset are filled, before the host resolves its own defaults; what cannot work is
refused here, before a process is started.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sglang_k3.checkpoint.audit import audit_folder, read_config
from sglang_k3.errors import ConfigError
from sglang_k3.integration.names import resolve

if TYPE_CHECKING:
    from sglang_k3.integration.server_args import K3ServerArgs

ATTENTION_BACKEND = "k3_mla"
CPU_RUNNING_REQUESTS = 16
# The host keeps up to five recurrent states per running request: working slot, ping-pong pair, two in the tree.
STATES_PER_REQUEST = 5
CPU_STATE_BYTES = 1 << 30
CPU_KV_BYTES = 512 << 20
CPU_CHUNKED_PREFILL_TOKENS = 2048


def prepare_model(args: K3ServerArgs) -> None:
    """Follow the model's alias and hold a local checkpoint against its config.

    Raises:
        K3Error: the checkpoint or its config cannot be served.
    """
    source = resolve(args.model_path)
    if source.path != args.model_path:
        args.served_model_name = args.served_model_name or args.model_path
        args.model_path = source.path
        args.revision = args.revision or source.revision
    if Path(args.model_path).is_dir():
        audit_folder(Path(args.model_path))


def fill_defaults(args: K3ServerArgs) -> None:
    """Set what the user left open."""
    _refuse_unsupported(args)
    if args.device is None and not _has_accelerator():
        args.device = "cpu"
    on_cpu = (args.device or "").startswith("cpu")
    args.attention_backend = ATTENTION_BACKEND
    if args.dtype == "auto":
        # The host would serve a float32 checkpoint in half precision.
        args.dtype = _config_dtype(args.model_path)
    if args.page_size is None:
        args.page_size = 1 if on_cpu else 64
    if args.enable_multimodal is None:
        args.enable_multimodal = False
    # One tensor of host memory at a time: the host's threaded reader holds several shards.
    extra = json.loads(args.model_loader_extra_config)
    if not {"enable_multithread_load", "num_threads"} & extra.keys():
        args.model_loader_extra_config = json.dumps({**extra, "enable_multithread_load": False})
    # The ops run eagerly for now; graphs come with their Triton implementations.
    args.disable_cuda_graph = True
    if on_cpu:
        _size_cpu_pools(args)


def _refuse_unsupported(args: K3ServerArgs) -> None:
    for flag in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        value = getattr(args, flag)
        if value not in (None, ATTENTION_BACKEND):
            raise ConfigError(
                f"--{flag.replace('_', '-')} {value} does not run K3: its MLA has no positions and an output gate. "
                f"Leave the flag out; {ATTENTION_BACKEND} is used."
            )
    if args.quantization not in (None, "unquant", "compressed-tensors"):
        raise ConfigError(
            f"--quantization {args.quantization} is not supported for K3: MXFP4 and bf16 experts are recognised from "
            "the checkpoint itself. Leave the flag out."
        )
    if args.enable_multimodal:
        raise ConfigError("--enable-multimodal: this version of sglang-k3 serves text only. Leave the flag out.")


def _has_accelerator() -> bool:
    return torch.cuda.is_available()


def _config_dtype(model_path: str) -> str:
    """The run dtype that a local ``config.json`` names, or the host's choice for a repository."""
    if not Path(model_path).is_dir():
        return "auto"
    config = read_config(Path(model_path))
    for values in (config, config["text_config"]):
        name = values.get("dtype") or values.get("torch_dtype")
        if name:
            return str(name).removeprefix("torch.")
    return "bfloat16"


def _size_cpu_pools(args: K3ServerArgs) -> None:
    """Pools for a machine without an accelerator, bounded in bytes whatever the model's size."""
    config = args.get_model_config().hf_config.k3
    kda, mla = config.kda, config.mla
    if args.max_running_requests is None:
        args.max_running_requests = CPU_RUNNING_REQUESTS
    if args.max_mamba_cache_size is None:
        conv = 3 * kda.width * (kda.short_conv_kernel_size - 1)
        state_bytes = 4 * len(config.kda_layers) * (conv + kda.width * kda.head_dim)
        wanted = STATES_PER_REQUEST * args.max_running_requests
        args.max_mamba_cache_size = max(STATES_PER_REQUEST, min(wanted, CPU_STATE_BYTES // state_bytes))
    if args.max_total_tokens is None:
        row_bytes = 4 * len(config.full_attention_layers) * mla.latent_dim
        wanted = args.max_running_requests * config.max_position_embeddings
        args.max_total_tokens = max(1, min(wanted, CPU_KV_BYTES // row_bytes))
    if args.chunked_prefill_size is None:
        args.chunked_prefill_size = CPU_CHUNKED_PREFILL_TOKENS
