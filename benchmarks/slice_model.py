"""Four layers of K3 at full size, or as one of N ranks holds them, with random weights over pools of their own.

The layers are KDA, KDA, KDA, MLA; the first is dense, the others route to 896 MXFP4 experts. They are the model's own
modules over its own backends; what is missing of a server is its scheduler.
"""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.runtime_context import get_context, get_parallel, get_server_args
from torch import Tensor

from sglang_k3.config import K3Config
from sglang_k3.host.hf_config import K3HFConfig
from sglang_k3.host.kda_backend import K3KDABackend
from sglang_k3.host.mla_backend import K3MLABackend
from sglang_k3.models.kimi_k3 import KimiK3ForConditionalGeneration
from sglang_k3.models.text.latent_moe import LatentMoE
from sglang_k3.options import ServeOptions
from sglang_k3.testing.presets import K3_SIZES, published_config

DEVICE = "cuda"
SLICE_SIZES = dataclasses.replace(K3_SIZES, num_layers=4, full_attention_layers=(4,))
PAGE = 64
WEIGHT_SCALE = 0.02
SCALE_CODES = (118, 122)  # of MXFP4: weights of about the same size


@contextlib.contextmanager
def one_process() -> Iterator[None]:
    """The host's state for one rank, without which its layers do not exist."""
    with tempfile.TemporaryDirectory() as folder, get_context().override_server_args(device=DEVICE) as args:
        for name, value in {**dataclasses.asdict(ServeOptions()), "_mamba_cache_chunk_size": 64}.items():
            object.__setattr__(args, name, value)  # the host guards what it has published
        method = f"file://{Path(folder) / 'rendezvous'}"
        init_distributed_environment(world_size=1, rank=0, local_rank=0, distributed_init_method=method, backend="gloo")
        initialize_model_parallel(backend="gloo")
        yield


class UnitSlice:
    """The slice as rank 0 of ``tp_size``, experts split by expert."""

    def __init__(self, tp_size: int) -> None:
        json = published_config(SLICE_SIZES, dtype="bfloat16", packed_experts=True, vision=False)
        self.config = K3Config.from_dict(json)
        self.tp_size = tp_size
        torch.set_default_dtype(torch.bfloat16)
        with self.as_rank(), torch.device(DEVICE):
            self.model = KimiK3ForConditionalGeneration(K3HFConfig(**json))
        torch.set_default_dtype(torch.float32)
        _draw_weights(self.model)
        self.mixtures = [module for module in self.model.modules() if isinstance(module, LatentMoE)]
        self._routers = [mixture.gate.router_topk for mixture in self.mixtures]

    @contextlib.contextmanager
    def as_rank(self) -> Iterator[None]:
        """Inside, the host takes this process for rank 0 of ``tp_size``."""
        sizes = {"tp_size": self.tp_size, "attn_tp_size": self.tp_size, "moe_ep_size": self.tp_size, "moe_tp_size": 1}
        ranks = {"tp_rank": 0, "attn_tp_rank": 0, "moe_ep_rank": 0, "moe_tp_rank": 0}
        with get_parallel().override(**sizes, **ranks, attn_dp_size=1, attn_dp_rank=0):
            yield

    def route(self, topk_ids: Tensor) -> None:
        """Send the tokens of a batch to these experts, ``[T, k]``; the router still works out its own."""
        for mixture, router in zip(self.mixtures, self._routers, strict=True):

            def routed(*args: Any, _router: Any = router, **kwargs: Any) -> tuple[Tensor, Tensor]:
                return _router(*args, **kwargs)[0], topk_ids

            mixture.gate.router_topk = routed

    def forward(self, batch: Batch) -> Tensor:
        """Logits of the last token of every request."""
        with self.as_rank(), forward_context(ForwardContext(attn_backend=batch.backend)), torch.no_grad():
            hidden = self.model.model(batch.input_ids, batch.forward_batch)
            return hidden[batch.last_tokens] @ self.model.lm_head.weight.T


@dataclasses.dataclass(frozen=True)
class Batch:
    """Requests whose earlier tokens are in the pools, and the tokens that come next."""

    backend: HybridLinearAttnBackend
    forward_batch: SimpleNamespace
    input_ids: Tensor
    last_tokens: Tensor


class Pools:
    """What the backends read of a model runner, for ``num_requests`` of up to ``length`` tokens."""

    is_draft_worker = False
    dtype = kv_cache_dtype = torch.bfloat16

    def __init__(self, unit: UnitSlice, num_requests: int, length: int) -> None:
        config, heads = unit.config, unit.config.kda.num_heads // unit.tp_size
        kda, mla = config.kda, config.mla
        self.device, self.length, self.num_requests = DEVICE, length, num_requests
        self.model_config = SimpleNamespace(
            context_len=length, num_attention_heads=mla.num_heads, **dataclasses.asdict(mla)
        )
        self.server_args = get_server_args()
        num_rows = num_requests * length + PAGE
        kv = torch.empty(num_rows, 1, mla.latent_dim, dtype=torch.bfloat16, device=DEVICE).normal_()
        slots, layers = num_requests + 1, len(config.kda_layers)
        window = (kda.short_conv_kernel_size - 1, 3 * heads * kda.head_dim)
        conv = torch.zeros(layers, slots, *window, dtype=torch.bfloat16, device=DEVICE)
        temporal = torch.zeros(layers, slots, heads, kda.head_dim, kda.head_dim, device=DEVICE)
        self.token_to_kv_pool = SimpleNamespace(get_key_buffer=lambda layer: kv, page_size=PAGE)
        rows = torch.arange(PAGE, num_rows, dtype=torch.int32, device=DEVICE)
        indices = torch.arange(1, slots, dtype=torch.int32, device=DEVICE)
        place = {layer: i for i, layer in enumerate(config.kda_layers)}
        self.req_to_token_pool = SimpleNamespace(
            req_to_token=rows.view(num_requests, length),
            mamba_pool=SimpleNamespace(
                mamba_cache=SimpleNamespace(conv=[conv], temporal=temporal), enable_linear_replayssm=False
            ),
            mamba_map=place,
            get_mamba_indices=lambda requests: indices[requests],
            translate_mamba_indices=lambda requests: requests,
            mamba2_layer_cache=lambda layer: SimpleNamespace(
                conv=[conv[place[layer]]], temporal=temporal[place[layer]]
            ),
        )
        full = list(config.full_attention_layers)
        with unit.as_rank():
            self.backend = HybridLinearAttnBackend(K3MLABackend(self), K3KDABackend(self), full)
        self.vocab_size = config.vocab_size

    def decode(self) -> Batch:
        """One token more for every request, the last that its memory holds."""
        return self._batch(ForwardMode.DECODE, 1)

    def prefill(self) -> Batch:
        """Every request's whole length as one prompt."""
        lens = torch.full((self.num_requests,), self.length, dtype=torch.int64, device=DEVICE)
        return self._batch(
            ForwardMode.EXTEND,
            self.length,
            extend_start_loc=lens.cumsum(0) - lens,
            extend_seq_lens=lens,
            extend_prefix_lens=torch.zeros_like(lens),
            extend_prefix_lens_cpu=[0] * self.num_requests,
        )

    def _batch(self, mode: ForwardMode, new_tokens: int, **fields: object) -> Batch:
        table = self.req_to_token_pool.req_to_token
        forward_batch = SimpleNamespace(
            forward_mode=mode,
            batch_size=self.num_requests,
            req_pool_indices=torch.arange(self.num_requests, device=DEVICE),
            seq_lens=torch.full((self.num_requests,), self.length, dtype=torch.int64, device=DEVICE),
            out_cache_loc=table[:, self.length - new_tokens :].flatten().long(),
            mamba_track_mask=None,
            mamba_track_indices=None,
            mamba_track_seqlens=None,
            _original_batch_size=None,
            **fields,
        )
        self.backend.init_forward_metadata(forward_batch)
        input_ids = torch.randint(self.vocab_size, (self.num_requests * new_tokens,), device=DEVICE)
        last = torch.arange(1, self.num_requests + 1, device=DEVICE) * new_tokens - 1
        return Batch(self.backend, forward_batch, input_ids, last)


def _draw_weights(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("_scale"):
                tensor.random_(*SCALE_CODES)
            elif tensor.dtype == torch.uint8:
                tensor.random_(0, 256)  # random weights in any layout
            elif tensor.ndim == 1 and "norm" in name:
                tensor.fill_(1.0)
            else:
                tensor.normal_(std=WEIGHT_SCALE)
