"""The sizes of Kimi K3 at which kernels are timed: for each op, named arguments of the ``Case`` in its ``cases.py``.

One GPU holds a whole layer here, except for the experts, of which it holds an eighth. ``decode`` sizes are one token of
each of some sequences, ``prefill`` sizes one chunk of tokens.
"""

from __future__ import annotations

from typing import Any

import torch

BF16 = torch.bfloat16
HIDDEN, LATENT, EXPERT_WIDTH, EXPERTS, TOP_K = 7168, 3584, 3072, 896, 16
HEADS, HEAD_DIM, CONV_CHANNELS = 96, 128, 3 * 96 * 128
KV_WIDTH, KV_LATENT, KV_ROPE = 576, 512, 64
MLA_HEAD = {"key_dim": 128, "shared_dim": KV_ROPE, "value_dim": 128}
BATCHES = (1, 32, 256)
CHUNK = 8192

_ROWS = {f"decode-{n}": n for n in BATCHES} | {f"prefill-{CHUNK}": CHUNK}
_BATCHES = {f"decode-{n}": n for n in BATCHES}

SIZES: dict[str, dict[str, dict[str, Any]]] = {
    "rms_norm": {name: {"tokens": n, "width": HIDDEN} for name, n in _ROWS.items()},
    "gated_rms_norm": {
        name: {"tokens": n, "heads": HEADS, "value_dim": HEAD_DIM, "o_dtype": BF16} for name, n in _ROWS.items()
    },
    "sigmoid_gate": {name: {"tokens": n, "width": HEADS * HEAD_DIM} for name, n in _ROWS.items()},
    "situ_and_mul": {name: {"tokens": n, "width": EXPERT_WIDTH} for name, n in _ROWS.items()},
    "depth_mix": {
        name: {"rows": 8, "tokens": n, "width": HIDDEN, "normed": True, "added": True} for name, n in _ROWS.items()
    },
    "kda_gate": {name: {"tokens": n, "heads": HEADS, "key_dim": HEAD_DIM} for name, n in _ROWS.items()},
    "short_conv_prefill": {
        "prefill-1x8192": {"lens": (CHUNK,), "channels": CONV_CHANNELS},
        "prefill-16x512": {"lens": (512,) * 16, "channels": CONV_CHANNELS},
    },
    "short_conv_decode": {name: {"batch": n, "channels": CONV_CHANNELS} for name, n in _BATCHES.items()},
    "state_copy": {
        "1-slot": {"layers": 69, "copies": 1, "shape": (HEADS, HEAD_DIM, HEAD_DIM), "dtype": torch.float32},
        "4-conv-slots": {"layers": 69, "copies": 4, "shape": (3, CONV_CHANNELS)},
    },
    "kv_scatter": {name: {"tokens": n, "width": KV_WIDTH, "rows_dtype": BF16} for name, n in _ROWS.items()},
    "kv_gather": {f"rows-{n}": {"rows": n, "width": KV_WIDTH} for n in (CHUNK, 131072)},
    "attn_merge": {
        name: {"tokens": n, "heads": HEADS, "value_dim": KV_LATENT, "dtype": torch.float32}
        for name, n in _BATCHES.items()
    },
    "router_topk": {
        name: {"tokens": n, "width": HIDDEN, "experts": EXPERTS, "top_k": TOP_K, "weight_dtype": BF16}
        for name, n in _ROWS.items()
    },
    "mxfp4_dequant": {"16-experts": {"shape": (16, 2 * EXPERT_WIDTH, LATENT)}},
    "kda_decode": {
        name: {"batch": n, "heads": HEADS, "key_dim": HEAD_DIM, "value_dim": HEAD_DIM} for name, n in _BATCHES.items()
    },
    "kda_prefill": {
        "prefill-1x8192": {"lens": (CHUNK,), "heads": HEADS, "key_dim": HEAD_DIM, "value_dim": HEAD_DIM},
        "prefill-16x512": {"lens": (512,) * 16, "heads": HEADS, "key_dim": HEAD_DIM, "value_dim": HEAD_DIM},
    },
    "mla_decode": {
        f"decode-{n}x{length}": {
            "lens": (length,) * n,
            "heads": HEADS,
            "latent": KV_LATENT,
            "rope": KV_ROPE,
            "page": 64,
        }
        for n, length in ((1, 8192), (1, 131072), (32, 8192), (256, 2048))
    },
    "mla_prefill": {
        "prefill-1x8192": {"lens_q": (CHUNK,), "lens_k": (CHUNK,), "heads": HEADS, **MLA_HEAD},
        "prefill-2048-of-8192": {
            "lens_q": (2048,),
            "lens_k": (CHUNK,),
            "heads": HEADS,
            **MLA_HEAD,
        },
    },
    "latent_experts": {
        name: {
            "tokens": n,
            "latent": LATENT,
            "width": EXPERT_WIDTH,
            "experts": EXPERTS,
            "top_k": TOP_K,
            "packed": True,
            "local": (0, EXPERTS // 8),
        }
        for name, n in _ROWS.items()
    },
}
