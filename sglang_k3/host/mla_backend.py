"""SGLang's full-attention backend for K3's MLA: latent rows in a paged pool, no positions.

Decode attends in latent space with the absorbed query, one pass over the cached rows. It reads the slots of a request
where the host keeps them, in its row of ``req_to_token``, so that a CUDA graph holds the address of that table and
nothing has to be listed before a replay. The host lets the scheduler change the table while a graph runs. Of a request
that goes on, it only appends, or exchanges a slot for another of the same content, and a slot that becomes free is
written by a later step; the rest are rows of requests whose result of this step is thrown away.

Prefill expands keys
and values per head: the new tokens causally, the cached prefix in bounded pieces, merged by log-sum-exp, so
that memory does not grow with the prefix.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.runtime_context import get_parallel

from sglang_k3.kernels import OpContext, bind

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

# Prefix tokens, over the whole batch, whose keys and values are expanded at once.
PREFIX_CHUNK_TOKENS = 16384


@dataclasses.dataclass(frozen=True)
class PrefixChunk:
    """A piece of the cached prefixes of a batch.

    Attributes:
        kv_indices: slots of the rows, sequence after sequence ``[N]`` int64.
        cu_seqlens: offsets into them ``[B + 1]`` int32.
    """

    kv_indices: torch.Tensor
    cu_seqlens: torch.Tensor


@dataclasses.dataclass(frozen=True)
class MLAMetadata:
    """What every MLA layer of one forward pass shares; ids are physical slots of the pool.

    Attributes:
        kv_spans: where the slots of each decoding request begin and end in the flat ``req_to_token``, ``[B, 2]`` int64.
        cu_seqlens: token offsets of the extend ``[B + 1]`` int32.
        prefix_chunks: the cached prefixes of the extend; empty if there is none.
    """

    kv_spans: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    prefix_chunks: tuple[PrefixChunk, ...] = ()


class K3MLABackend(AttentionBackend):
    """MLA through this package's ops, on every device."""

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__()
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.max_context_len = model_runner.model_config.context_len
        self.data_type = model_runner.kv_cache_dtype
        model = model_runner.model_config
        self.key_dim = model.qk_nope_head_dim
        sizes = {
            "K": self.key_dim,
            "R": model.qk_rope_head_dim,
            "V": model.v_head_dim,
            "D": model.kv_lora_rank + model.qk_rope_head_dim,
            "L": model.kv_lora_rank,
            "H": model.num_attention_heads // get_parallel().attn_tp_size,
        }
        if model_runner.dtype == model_runner.kv_cache_dtype:
            sizes["page"] = self.token_to_kv_pool.page_size  # who reads whole pages takes queries of the same dtype
        context = OpContext(torch.device(model_runner.device), model_runner.kv_cache_dtype, sizes)
        self.kv_scatter = bind("kv_scatter", context)
        self.kv_gather = bind("kv_gather", context)
        self.mla_decode = bind("mla_decode", context)
        self.mla_prefill = bind("mla_prefill", context)
        self.attn_merge = bind("attn_merge", context)
        self.metadata = MLAMetadata()

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The host's length of a request that only pads a batch: it attends to nothing."""
        return 0

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Nothing: a graph computes its metadata itself, from the host's static inputs."""

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Where the slots of each request are, of a decode batch that is captured or not."""
        begin = forward_batch.req_pool_indices.long() * self.req_to_token_pool.req_to_token.stride(0)
        self.metadata = MLAMetadata(kv_spans=torch.stack([begin, begin + forward_batch.seq_lens], dim=1))

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        if forward_batch.forward_mode.is_decode_or_idle():
            self.init_forward_metadata_in_graph(forward_batch)
        else:
            self.metadata = MLAMetadata(
                cu_seqlens=_offsets(forward_batch.extend_seq_lens).int(),
                prefix_chunks=tuple(self._prefix_chunks(forward_batch)),
            )

    def _prefix_chunks(self, forward_batch: ForwardBatch) -> list[PrefixChunk]:
        longest = max(forward_batch.extend_prefix_lens_cpu, default=0)
        step = max(1, PREFIX_CHUNK_TOKENS // max(1, forward_batch.batch_size))
        lens = forward_batch.extend_prefix_lens
        chunks = []
        for start in range(0, int(longest), step):
            first, last = (lens.clamp(max=bound) for bound in (start, start + step))
            total = sum(min(max(n - start, 0), step) for n in forward_batch.extend_prefix_lens_cpu)
            kv_indices, offsets = self._rows(forward_batch.req_pool_indices, first, last, total)
            chunks.append(PrefixChunk(kv_indices, offsets.int()))
        return chunks

    def _rows(
        self, req_pool_indices: torch.Tensor, first: torch.Tensor, last: torch.Tensor, total: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Slots of positions ``[first, last)`` of every request, ``total`` of all, and the offsets of each in them."""
        lens = last - first
        offsets = _offsets(lens)
        # Without the total, which the host knows, it would wait for the device.
        owner = torch.repeat_interleave(torch.arange(len(lens), device=lens.device), lens, output_size=total)
        position = torch.arange(len(owner), device=lens.device) - offsets[:-1][owner] + first[owner]
        return self.req_to_token_pool.req_to_token[req_pool_indices[owner], position].long(), offsets

    def _write(self, rows: torch.Tensor, layer: RadixAttention, forward_batch: ForwardBatch) -> torch.Tensor:
        """Store the new rows and return the layer's pool ``[S, L + R]``."""
        pool = self.token_to_kv_pool.get_key_buffer(layer.layer_id)[:, 0]
        self.kv_scatter(rows, pool, loc=forward_batch.out_cache_loc)
        return pool

    def forward_decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        w_kv: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        """``o [B, H, V]``.

        Args:
            q: explicit query ``[B, H, K + R]``.
            k: new latent rows ``[B, L + R]``.
            w_kv: ``kv_b_proj``, of each head what makes its keys and then its values, ``[H, K + V, L]``.
        """
        pool = self._write(k, layer, forward_batch)
        q_nope, q_shared = q.tensor_split([self.key_dim], dim=-1)
        w_uk, w_uv = w_kv.tensor_split([self.key_dim], dim=1)
        absorbed = torch.einsum("bhk,hkl->bhl", q_nope, w_uk)
        out, _ = self.mla_decode(
            torch.cat([absorbed, q_shared], dim=-1),
            pool,
            kv_spans=self.metadata.kv_spans,
            kv_indices=self.req_to_token_pool.req_to_token.view(-1),
            max_len=self.req_to_token_pool.req_to_token.shape[1],
            scale=layer.scaling,
            v_dim=w_kv.shape[-1],
        )
        return torch.einsum("bhl,hvl->bhv", out.to(q.dtype), w_uv)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: None,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        *,
        w_kv: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        """``o [T, H, V]`` for new tokens behind their cached prefixes; arguments as in ``forward_decode``."""
        pool = self._write(k, layer, forward_batch)
        meta = self.metadata
        attend = {"cu_seqlens_q": meta.cu_seqlens, "scale": layer.scaling}
        keys, values, shared = self._expand(k, w_kv)
        out, lse = self.mla_prefill(
            q, keys, values, k_shared=shared, cu_seqlens_k=meta.cu_seqlens, causal=True, **attend
        )
        for chunk in meta.prefix_chunks:
            rows = self.kv_gather(pool, loc=chunk.kv_indices).to(k.dtype)
            keys, values, shared = self._expand(rows, w_kv)
            part = self.mla_prefill(
                q, keys, values, k_shared=shared, cu_seqlens_k=chunk.cu_seqlens, causal=False, **attend
            )
            out, lse = self.attn_merge(out, lse, *part)
        return out.to(q.dtype)

    def _expand(self, rows: torch.Tensor, w_kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of latent rows ``[N, L + R]``: keys ``[N, H, K]`` and values ``[N, H, V]`` of each head, and keys ``[N, R]``
        of all. Keys and values are made by one product."""
        latent, shared = rows.tensor_split([w_kv.shape[-1]], dim=-1)
        both = F.linear(latent, w_kv.flatten(0, 1)).unflatten(-1, w_kv.shape[:2])
        keys, values = both.tensor_split([self.key_dim], dim=-1)
        return keys, values, shared


def _offsets(lens: torch.Tensor) -> torch.Tensor:
    """Prefix sums ``[B + 1]`` int64 of ``lens [B]``."""
    return F.pad(lens.cumsum(0), (1, 0))
