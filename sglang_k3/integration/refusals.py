"""Options of the host that do not work with K3 yet, and values that no server could run with: refused at start, each
with what to do.

A server that ignored them, or died of them in a child process, would be worse than none (law I10). An entry goes
when the feature comes, together with its test.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from sglang_k3.errors import ConfigError

ATTENTION_BACKEND = "k3_mla"
PARSER = "kimi_k3"
PREFIX_CACHE = "k3"
LEAVE_OUT = "Leave the flag out."


@dataclasses.dataclass(frozen=True)
class Refusal:
    """One field of the server's arguments and the values that K3 can do.

    Attributes:
        works: whether a value is fine.
        why: what is wrong with any other.
        remedy: what to do instead.
    """

    field: str
    works: Callable[[Any], bool]
    why: str
    remedy: str = LEAVE_OUT


def _only(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def _at_least(least: int) -> Callable[[Any], bool]:
    return lambda value: value >= least


_UNSET = _only(None, False, 0, "", "null", "none")
_ONE = _only(1)
_OWN_BACKEND = "K3's MLA has no positions and an output gate, and only this package's own backend computes it"
_KERNELS = "K3's KDA runs on this package's own kernels, which this option would not reach"
_PLUGINS = "the host starts these processes without loading plugins, so that they do not know K3"

REFUSALS: tuple[Refusal, ...] = (
    *(
        Refusal(field, _at_least(1), "ranks, nodes and steps between GPUs are counted from one", "Give 1 or more.")
        for field in ("tp_size", "pp_size", "ep_size", "dp_size", "nnodes", "gpu_id_step")
    ),
    *(
        Refusal(field, _at_least(0), "nodes and GPUs are numbered from zero", "Give 0 or more.")
        for field in ("base_gpu_id", "node_rank")
    ),
    Refusal(
        "mem_fraction_static",
        lambda value: value is None or 0 < value <= 1,
        "it is the part of the memory that weights and pools take",
        "Give a number between 0 and 1, or leave it out.",
    ),
    *(
        Refusal(
            field, _only(None, ATTENTION_BACKEND), _OWN_BACKEND, f"Leave the flag out; {ATTENTION_BACKEND} is used."
        )
        for field in ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    ),
    Refusal("linear_attn_backend", _only("triton"), _KERNELS),
    *(
        Refusal(field, _only(None, "triton"), _KERNELS)
        for field in ("linear_attn_decode_backend", "linear_attn_prefill_backend")
    ),
    Refusal(
        "quantization",
        _only(None, "unquant", "compressed-tensors"),
        "MXFP4 and bf16 experts are recognised from the checkpoint itself, and nothing else is implemented",
    ),
    Refusal("kv_cache_dtype", _only("auto", "bfloat16", "bf16", "float16", "float32"), "latent rows are not quantised"),
    Refusal("load_format", _only("auto", "safetensors", "dummy"), "only safetensors are read and checked"),
    Refusal("enable_multimodal", _UNSET, "this version serves text only"),
    Refusal("is_embedding", _UNSET, "K3 is served as a generating model only"),
    *(
        Refusal(
            field, _only(None, "auto", PARSER), "K3's channels need its own parser", f"Leave it out; {PARSER} is used."
        )
        for field in ("reasoning_parser", "tool_call_parser")
    ),
    Refusal("chat_template", _UNSET, "K3's conversation format is tokenised segment by segment, not by a template"),
    Refusal(
        "grammar_backend",
        _only(None, "xgrammar", "none"),
        "a constraint of a chat answer names control tokens, which only xgrammar is given",
        "Use xgrammar, or none on a server that constrains no answers.",
    ),
    Refusal("enable_mixed_chunk", _UNSET, "the host loses the state snapshots of mixed batches"),
    Refusal("speculative_algorithm", _UNSET, "the recurrent state is not rolled back after a rejected draft yet"),
    Refusal("dcp_size", _ONE, "decode context parallelism is not implemented yet"),
    Refusal("attn_cp_size", _ONE, "context parallelism is not implemented yet"),
    Refusal("enable_lora", _UNSET, "adapters are not implemented yet"),
    Refusal("lora_paths", _UNSET, "adapters are not implemented yet"),
    Refusal(
        "disaggregation_mode",
        _UNSET,
        "the recurrent state is not transferred yet",
        "Serve prefill and decode together.",
    ),
    Refusal("enable_hierarchical_cache", _UNSET, "recurrent states are not offloaded yet"),
    Refusal("enable_lmcache", _UNSET, "recurrent states are not offloaded yet"),
    Refusal(
        "radix_cache_backend",
        _only(None, PREFIX_CACHE),
        "other trees do not keep K3's states",
        f"Use {PREFIX_CACHE}, or leave the flag out.",
    ),
    Refusal(
        "strip_thinking_cache",
        _UNSET,
        "the host frees KV behind the prompt itself, which the prefix cache may have by then",
    ),
    Refusal("enable_unified_memory", _UNSET, "the unified pool has no MLA side yet"),
    Refusal("enable_page_major_kv_layout", _UNSET, "the page-major layout has no MLA side yet"),
    Refusal("enable_int8_mamba_checkpoint", _UNSET, "states are kept in full precision"),
    Refusal("enable_linear_replayssm", _UNSET, _KERNELS),
    Refusal("enable_gdn_replayssm_spec", _UNSET, _KERNELS),
    Refusal("enable_two_batch_overlap", _UNSET, "batches are not split for K3 yet"),
    Refusal("enable_single_batch_overlap", _UNSET, "batches are not split for K3 yet"),
    Refusal("enable_pdmux", _UNSET, "batches are not split for K3 yet"),
    Refusal("enable_torch_compile", _UNSET, "the model runs eagerly"),
    Refusal(
        "cuda_graph_config",
        _UNSET,
        "decode steps are captured whole and prompts never, so that a few flags say all there is to say",
        "Use --cuda-graph-backend-decode, --cuda-graph-max-bs-decode or --cuda-graph-bs-decode.",
    ),
    *(
        Refusal(
            field,
            lambda sizes: sizes is None or min(sizes if isinstance(sizes, list) else [sizes], default=1) >= 1,
            "a graph is of 1 request or more",
            "Leave the flag out, or give --cuda-graph-backend-decode disabled instead for no graphs.",
        )
        for field in ("cuda_graph_max_bs_decode", "cuda_graph_bs_decode")
    ),
    Refusal("cuda_graph_backend_decode", _only(None, "full", "disabled"), "a decode step is captured whole or not"),
    *(
        Refusal(field, _only(None, False, "disabled"), "prompts are not captured")
        for field in ("cuda_graph_backend_prefill", "cuda_graph_max_bs_prefill", "cuda_graph_bs_prefill")
    ),
    Refusal("debug_cuda_graph", _UNSET, "the host debugs only graphs that it has broken into pieces"),
    Refusal("moe_a2a_backend", _UNSET, "experts are split by rank with one reduction, without an all-to-all"),
    Refusal("enable_eplb", _UNSET, "experts stay on their rank"),
    Refusal("ep_num_redundant_experts", _UNSET, "experts stay on their rank"),
    Refusal("cpu_offload_gb", _UNSET, "weights stay on the device"),
    Refusal("tokenizer_worker_num", _ONE, _PLUGINS),
    Refusal("detokenizer_worker_num", _ONE, _PLUGINS),
    Refusal("use_ray", _UNSET, _PLUGINS),
    Refusal("encoder_only", _UNSET, "this version serves text only"),
    Refusal("model_impl", _only("auto", "sglang"), "K3 has one implementation, this package's"),
)


def refuse_unsupported(args: Any) -> None:
    """Raise for the first option that K3 cannot do.

    Raises:
        ConfigError: names the flag, its value, why, and the remedy.
    """
    for refusal in REFUSALS:
        value = getattr(args, refusal.field)
        if not refusal.works(value):
            flag = "--" + refusal.field.replace("_", "-")
            shown = flag if value is True else f"{flag} {value}"
            raise ConfigError(f"{shown} does not work with K3: {refusal.why}. {refusal.remedy}")
