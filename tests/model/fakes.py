"""A model runner's pools, just big enough for a test, and the batches that the host would make of its requests.

Whatever nobody has written is NaN, token slots lie in no order, and no request has the row or the slot that its place
in a batch suggests: a stray read or a mixed-up index shows itself.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import torch
from sglang.srt.layers.attention.hybrid_linear_attn_backend import HybridLinearAttnBackend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_server_args
from torch import Tensor

from sglang_k3.config import K3Config
from sglang_k3.host.kda_backend import K3KDABackend
from sglang_k3.host.mla_backend import K3MLABackend

NUM_KV_SLOTS = 1024
NUM_STATE_SLOTS = 24
NUM_REQUESTS = 8
CONTEXT_LEN = 256


@dataclasses.dataclass
class Request:
    """Where one request's memory is, and how many of its tokens are in it."""

    index: int
    state_slot: int
    length: int = 0


class FakeRunner:
    """What the attention backends read of a ``ModelRunner``; fp32 throughout.

    Attributes:
        kv: latent rows of each MLA layer ``[S, 1, L + R]``.
        conv, temporal: state pools ``[Lyr, S, W - 1, 3 H K]`` and ``[Lyr, S, H, V, K]``.
    """

    device = "cpu"
    is_draft_worker = False
    dtype = kv_cache_dtype = torch.float32

    def __init__(self, config: K3Config, *, tp_size: int = 1, seed: int = 0) -> None:
        kda, mla, layers = config.kda, config.mla, len(config.kda_layers)
        heads = kda.num_heads // tp_size
        self.server_args = get_server_args()
        self.model_config = SimpleNamespace(
            context_len=CONTEXT_LEN, num_attention_heads=mla.num_heads, **dataclasses.asdict(mla)
        )
        generator = torch.Generator().manual_seed(seed)
        self.kv = {
            layer: torch.full((NUM_KV_SLOTS, 1, mla.latent_dim), torch.nan) for layer in config.full_attention_layers
        }
        window = (kda.short_conv_kernel_size - 1, 3 * heads * kda.head_dim)
        self.conv = torch.full((layers, NUM_STATE_SLOTS, *window), torch.nan)
        self.temporal = torch.full((layers, NUM_STATE_SLOTS, heads, kda.head_dim, kda.head_dim), torch.nan)
        self._free_kv = (torch.randperm(NUM_KV_SLOTS - 1, generator=generator) + 1).tolist()
        self._free_states = (torch.randperm(NUM_STATE_SLOTS - 1, generator=generator) + 1).tolist()
        self._free_indices = torch.randperm(NUM_REQUESTS, generator=generator).tolist()
        self._states_of = torch.zeros(NUM_REQUESTS, dtype=torch.int32)
        self.token_to_kv_pool = SimpleNamespace(get_key_buffer=lambda layer: self.kv[layer], page_size=1)
        place = {layer: i for i, layer in enumerate(config.kda_layers)}
        self.req_to_token_pool = SimpleNamespace(
            req_to_token=torch.full((NUM_REQUESTS, CONTEXT_LEN), NUM_KV_SLOTS + 1, dtype=torch.int32),
            mamba_pool=SimpleNamespace(
                mamba_cache=SimpleNamespace(conv=[self.conv], temporal=self.temporal), enable_linear_replayssm=False
            ),
            mamba_map=place,
            get_mamba_indices=lambda indices: self._states_of[indices],
            translate_mamba_indices=lambda indices: indices,
            mamba2_layer_cache=lambda layer: SimpleNamespace(
                conv=[self.conv[place[layer]]], temporal=self.temporal[place[layer]]
            ),
        )

    def new_request(self) -> Request:
        request = Request(self._free_indices.pop(), self.new_state_slot())
        self._states_of[request.index] = request.state_slot
        return request

    def new_state_slot(self) -> int:
        return self._free_states.pop()

    def kv_slots(self, request: Request) -> Tensor:
        """Physical slots of a request's rows, oldest first."""
        return self.req_to_token_pool.req_to_token[request.index, : request.length].long()

    def cache_prefix(self, request: Request, rows: Tensor, layer: int) -> None:
        """Put rows ``[n, L + R]`` where an earlier forward would have left them."""
        self.kv[layer][self._append(request, len(rows)), 0] = rows

    def extend(self, requests: list[Request], lens: list[int]) -> SimpleNamespace:
        """The batch that computes the next ``lens`` tokens of each request."""
        prefix_lens = [request.length for request in requests]
        loc = [self._append(request, n) for request, n in zip(requests, lens, strict=True)]
        extend_lens = torch.tensor(lens)
        return self._batch(
            ForwardMode.EXTEND,
            requests,
            torch.cat(loc),
            extend_start_loc=extend_lens.cumsum(0) - extend_lens,
            extend_seq_lens=extend_lens,
            extend_prefix_lens=torch.tensor(prefix_lens),
            extend_prefix_lens_cpu=prefix_lens,
        )

    def decode(self, requests: list[Request]) -> SimpleNamespace:
        """The batch that computes the next token of each request."""
        none = torch.empty(0, dtype=torch.int64)
        loc = [self._append(request, 1) for request in requests]
        return self._batch(ForwardMode.DECODE, requests, torch.cat([none, *loc]))

    def _append(self, request: Request, num_tokens: int) -> Tensor:
        loc = torch.tensor([self._free_kv.pop() for _ in range(num_tokens)], dtype=torch.int64)
        end = request.length + num_tokens
        self.req_to_token_pool.req_to_token[request.index, request.length : end] = loc.int()
        request.length = end
        return loc

    def _batch(
        self, mode: ForwardMode, requests: list[Request], out_cache_loc: Tensor, **fields: object
    ) -> SimpleNamespace:
        return SimpleNamespace(
            forward_mode=mode,
            batch_size=len(requests),
            req_pool_indices=torch.tensor([request.index for request in requests], dtype=torch.int64),
            seq_lens=torch.tensor([request.length for request in requests], dtype=torch.int64),
            out_cache_loc=out_cache_loc,
            mamba_track_mask=None,
            mamba_track_indices=None,
            mamba_track_seqlens=None,
            _original_batch_size=None,
            **fields,
        )


def hybrid_backend(runner: FakeRunner, config: K3Config) -> HybridLinearAttnBackend:
    """Both backends behind the host's switch, as a server has them."""
    return HybridLinearAttnBackend(K3MLABackend(runner), K3KDABackend(runner), list(config.full_attention_layers))
