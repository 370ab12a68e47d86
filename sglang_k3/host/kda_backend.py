"""SGLang's linear-attention backend for KDA: short conv, gate and recurrence over the host's state pool.

The pool is ``[slot, ...]`` per layer: ``conv [S, W-1, 3HK]`` and ``temporal [S, H, V, K]``. Snapshots for the
prefix cache are written where the state is at the wanted depth, inside prefill and after a decode step, on the
forward stream (laws I1 and I4).

A CUDA graph of a decode step holds the pool, and static buffers of slots that are filled before each replay.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.hybrid_linear_attn_backend import MambaAttnBackendBase
from sglang.srt.layers.attention.mamba.mamba2_metadata import ForwardMetadata

from sglang_k3.kernels import OpContext, bind

if TYPE_CHECKING:
    from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner


@dataclasses.dataclass(frozen=True)
class KDAMetadata:
    """What every KDA layer of one forward pass shares.

    Attributes:
        cache_indices: working slot per request ``[B]``, -1 for a padding row.
        cu_seqlens: token offsets of the extend ``[B + 1]`` int32; None when decoding.
        has_initial_state: False where the request starts from zero ``[B]``; None when decoding.
        track_lens: tokens of this extend after which to snapshot ``[B]``, -1 for none; None without snapshots.
        track_sources: the working slot where a snapshot is due after this decode step, else -1 ``[B]``; likewise.
        track_indices: slot that receives the snapshot ``[B]``.
    """

    cache_indices: torch.Tensor
    cu_seqlens: torch.Tensor | None = None
    has_initial_state: torch.Tensor | None = None
    track_lens: torch.Tensor | None = None
    track_sources: torch.Tensor | None = None
    track_indices: torch.Tensor | None = None


class K3KDABackend(MambaAttnBackendBase):
    """KDA through this package's ops, on every device."""

    needs_cpu_seq_lens = False

    def __init__(self, model_runner: ModelRunner) -> None:
        super().__init__(model_runner)
        args = model_runner.server_args
        # The host's tree rounds a depth that it wants down to its chunk, and adds one to ask for an inner one. K3's own
        # cache asks for exact depths.
        self.depth_unit = args.mamba_cache_chunk_size if args.enable_mamba_extra_buffer() else 1
        state = model_runner.req_to_token_pool.mamba_pool.mamba_cache
        context = OpContext.of(state.temporal, K=state.temporal.shape[-1], V=state.temporal.shape[-2])
        self.short_conv_prefill = bind("short_conv_prefill", context)
        self.short_conv_decode = bind("short_conv_decode", context)
        self.kda_gate = bind("kda_gate", context)
        self.kda_prefill = bind("kda_prefill", context)
        self.kda_decode = bind("kda_decode", context)
        self.state_copy = bind("state_copy", context)
        self.last_layer = max(self.req_to_token_pool.mamba_map, default=None)
        self.metadata: KDAMetadata

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        cache_indices = self._slots(forward_batch)
        # What the host's own code reads of it; the snapshots of its kernels would make it wait for the device.
        self.forward_metadata = ForwardMetadata(query_start_loc=None, mamba_cache_indices=cache_indices)
        if forward_batch.forward_mode.is_decode_or_idle():
            self.metadata = self._decode_metadata(forward_batch, cache_indices, forward_batch.mamba_track_indices)
        else:
            self.metadata = self._extend_metadata(forward_batch, cache_indices)

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """The slots that the host puts into its static buffers before the capture, and before every replay."""
        self.metadata = self._decode_metadata(
            forward_batch,
            self.forward_metadata.mamba_cache_indices,
            self.mamba_track_indices_buf[: forward_batch.batch_size],
        )

    def _slots(self, forward_batch: ForwardBatch) -> torch.Tensor:
        """Working slots ``[B]``, -1 where the host has padded the batch."""
        slots = self._translate_mamba_indices(self.req_to_token_pool.get_mamba_indices(forward_batch.req_pool_indices))
        real = forward_batch._original_batch_size
        if real is not None:
            slots = slots.clone()
            slots[real:] = -1
        return slots

    def _decode_metadata(
        self, forward_batch: ForwardBatch, cache_indices: torch.Tensor, track_indices: torch.Tensor | None
    ) -> KDAMetadata:
        mask = forward_batch.mamba_track_mask
        if mask is None:
            return KDAMetadata(cache_indices)
        return KDAMetadata(
            cache_indices, track_sources=torch.where(mask, cache_indices, -1), track_indices=track_indices
        )

    def _extend_metadata(self, forward_batch: ForwardBatch, cache_indices: torch.Tensor) -> KDAMetadata:
        lens = forward_batch.extend_seq_lens
        cu_seqlens = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).int()
        track_lens = None
        if forward_batch.mamba_track_mask is not None:
            wanted = forward_batch.mamba_track_seqlens - forward_batch.extend_prefix_lens
            wanted = wanted // self.depth_unit * self.depth_unit
            # One integer type, whichever the host has: each would be a kernel of its own.
            track_lens = torch.where(forward_batch.mamba_track_mask, wanted, -1).int()
        return KDAMetadata(
            cache_indices,
            cu_seqlens=cu_seqlens,
            has_initial_state=forward_batch.extend_prefix_lens > 0,
            track_lens=track_lens,
            track_indices=forward_batch.mamba_track_indices if track_lens is not None else None,
        )

    def forward_extend(
        self,
        layer: RadixLinearAttention,
        forward_batch: ForwardBatch,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        """``o [T, H, V]`` for a batch of prompts or prompt chunks; states end in the working slots."""
        meta, pool = self.metadata, self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        where = {
            "cu_seqlens": meta.cu_seqlens,
            "cache_indices": meta.cache_indices,
            "has_initial_state": meta.has_initial_state,
            "track_lens": meta.track_lens,
            "track_indices": meta.track_indices,
        }
        mixed_qkv = self.short_conv_prefill(mixed_qkv, layer.conv_weights, conv_states=pool.conv[0], **where)
        q, k, v, g, beta = self._recurrence_inputs(layer, mixed_qkv, a, b)
        options = {"scale": layer.head_k_dim**-0.5, "lower_bound": layer.lower_bound}
        return self.kda_prefill(q, k, v, g, beta, ssm_states=pool.temporal, **options, **where)

    def forward_decode(
        self,
        layer: RadixLinearAttention,
        forward_batch: ForwardBatch,
        mixed_qkv: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        **kwargs: Any,
    ) -> torch.Tensor:
        """``o [B, H, V]`` for one token per request."""
        meta, pool = self.metadata, self.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
        mixed_qkv = self.short_conv_decode(
            mixed_qkv, layer.conv_weights, conv_states=pool.conv[0], cache_indices=meta.cache_indices
        )
        q, k, v, g, beta = self._recurrence_inputs(layer, mixed_qkv, a, b)
        o = self.kda_decode(
            q, k, v, g, beta, ssm_states=pool.temporal, cache_indices=meta.cache_indices, scale=layer.head_k_dim**-0.5
        )
        if meta.track_sources is not None and layer.layer_id == self.last_layer:
            # All layers at once, as most steps have nothing to copy and a launch for each layer would cost more.
            state = self.req_to_token_pool.mamba_pool.mamba_cache
            for states in (state.conv[0], state.temporal):
                self.state_copy(states, src_indices=meta.track_sources, dst_indices=meta.track_indices)
        return o

    def _recurrence_inputs(
        self, layer: RadixLinearAttention, mixed_qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """Per-head q, k, v, the log decay ``[T, H, K]`` and the write strength ``[T, H]``, both fp32."""
        q, k, v = mixed_qkv.split([layer.q_dim, layer.k_dim, layer.v_dim], dim=-1)
        q, k = (x.unflatten(-1, (-1, layer.head_k_dim)) for x in (q, k))
        v = v.unflatten(-1, (-1, layer.head_v_dim))
        g, beta = self.kda_gate(
            a.unflatten(-1, (-1, layer.head_k_dim)), b, layer.A_log, layer.dt_bias, lower_bound=layer.lower_bound
        )
        return q, k, v, g, beta
