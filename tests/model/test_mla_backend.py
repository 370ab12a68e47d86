"""The MLA backend against attention written out: prefixes in pieces, absorbed decode, scattered rows, in fp64."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from torch import Tensor

from sglang_k3.config import K3Config, MLAConfig
from sglang_k3.host import mla_backend
from sglang_k3.host.mla_backend import K3MLABackend
from sglang_k3.kernels import OpContext
from tests.kit.compare import assert_bitwise
from tests.kit.tolerance import assert_close
from tests.model.fakes import FakeRunner, Request
from tests.model.harness import tiny_k3

pytestmark = pytest.mark.sglang

LAYER = 3  # an MLA layer of both presets

# Prefix and extend length of each request.
BATCHES = {
    "no prefix": [(0, 5), (0, 1), (0, 8)],
    "one of one": [(1, 1)],
    "mixed": [(17, 4), (0, 5), (3, 1), (64, 2), (1, 7)],
    "as long as a piece": [(5, 5), (10, 1)],
    "one more than a piece": [(65, 3), (6, 2)],
}


@dataclasses.dataclass(frozen=True)
class Attention:
    """One layer's geometry, its half weights, and what ``forward`` takes of them."""

    mla: MLAConfig
    w_uk: Tensor
    w_uv: Tensor

    @classmethod
    def random(cls, config: K3Config) -> Attention:
        mla = config.mla
        w_uk = torch.randn(mla.num_heads, mla.qk_nope_head_dim, mla.kv_lora_rank) / mla.kv_lora_rank**0.5
        w_uv = torch.randn(mla.num_heads, mla.v_head_dim, mla.kv_lora_rank) / mla.kv_lora_rank**0.5
        return cls(mla, w_uk, w_uv)

    @property
    def w_kv(self) -> Tensor:
        return torch.cat([self.w_uk, self.w_uv], dim=1)

    @property
    def layer(self) -> RadixAttention:
        mla = self.mla
        return RadixAttention(
            num_heads=mla.num_heads,
            head_dim=mla.latent_dim,
            scaling=mla.scale,
            num_kv_heads=1,
            layer_id=LAYER,
            v_head_dim=mla.kv_lora_rank,
        )

    def query(self, num_tokens: int) -> Tensor:
        return torch.randn(num_tokens, self.mla.num_heads, self.mla.qk_head_dim)

    def rows(self, num_tokens: int) -> Tensor:
        return torch.randn(num_tokens, self.mla.latent_dim)

    def explicit(self, q: Tensor, rows: Tensor) -> Tensor:
        """Causal attention of the last ``len(q)`` positions over all rows, per-head keys and values, in fp64."""
        latent, shared = rows.double().split([self.mla.kv_lora_rank, self.mla.qk_rope_head_dim], dim=-1)
        out = torch.empty(len(q), self.mla.num_heads, self.mla.v_head_dim, dtype=torch.float64)
        for t in range(len(q)):
            seen = len(rows) - len(q) + t + 1
            for h in range(self.mla.num_heads):
                keys = torch.cat([latent[:seen] @ self.w_uk[h].double().T, shared[:seen]], dim=-1)
                probabilities = torch.softmax(keys @ q[t, h].double() * self.mla.scale, dim=0)
                out[t, h] = probabilities @ (latent[:seen] @ self.w_uv[h].double().T)
        return out


def set_up(preset: str, prefix_lens: list[int]) -> tuple[Attention, FakeRunner, list[Request], list[Tensor]]:
    """A runner whose requests have random rows of these lengths cached, and those rows."""
    config = tiny_k3(preset).config
    attention, runner = Attention.random(config), FakeRunner(config)
    requests = [runner.new_request() for _ in prefix_lens]
    cached = [attention.rows(n) for n in prefix_lens]
    for request, rows in zip(requests, cached, strict=True):
        runner.cache_prefix(request, rows, LAYER)
    return attention, runner, requests, cached


@pytest.mark.parametrize("piece", [1, 5, 64, mla_backend.PREFIX_CHUNK_TOKENS])
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("preset", ["default", "odd"])
def test_extend_is_full_causal_attention(preset: str, batch: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_backend, "PREFIX_CHUNK_TOKENS", piece)
    prefix_lens, lens = (list(column) for column in zip(*BATCHES[batch], strict=True))
    attention, runner, requests, cached = set_up(preset, prefix_lens)
    backend = K3MLABackend(runner)
    forward_batch = runner.extend(requests, lens)
    q, new = attention.query(sum(lens)), attention.rows(sum(lens))
    backend.init_forward_metadata(forward_batch)
    out = backend.forward(q, new, None, attention.layer, forward_batch, w_kv=attention.w_kv)
    pieces = zip(q.split(lens), cached, new.split(lens), strict=True)
    expected = torch.cat([attention.explicit(q_b, torch.cat([old, new_b])) for q_b, old, new_b in pieces])
    assert_close(out, expected.float(), "ratio")


@pytest.mark.parametrize("preset", ["default", "odd"])
def test_decode_is_the_last_row_of_full_attention(preset: str) -> None:
    """Absorbed equals explicit; requests of all lengths share the batch."""
    attention, runner, requests, cached = set_up(preset, [0, 1, 17, 64, 3])
    backend = K3MLABackend(runner)
    for _ in range(2):
        forward_batch = runner.decode(requests)
        q, new = attention.query(5), attention.rows(5)
        backend.init_forward_metadata(forward_batch)
        out = backend.forward(q, new, None, attention.layer, forward_batch, w_kv=attention.w_kv)
        cached = [torch.cat([old, row]) for old, row in zip(cached, new.split(1), strict=True)]
        expected = torch.cat([attention.explicit(q_b, rows) for q_b, rows in zip(q.split(1), cached, strict=True)])
        assert_close(out, expected.float(), "ratio")


def test_a_prompt_in_any_pieces_is_one_prompt() -> None:
    """Each piece finds the earlier ones in the pool; the last token may come by decode."""
    config = tiny_k3().config
    attention = Attention.random(config)
    q, rows = attention.query(30), attention.rows(30)
    outputs = []
    for lens in ([30], [1, 29], [7, 16, 7], [29, 1]):
        runner = FakeRunner(config)
        backend, request, parts = K3MLABackend(runner), runner.new_request(), []
        for q_part, new in zip(q.split(lens), rows.split(lens), strict=True):
            batch = (
                runner.decode([request])
                if (len(new), request.length) == (1, 29)
                else runner.extend([request], [len(new)])
            )
            backend.init_forward_metadata(batch)
            parts.append(backend.forward(q_part, new, None, attention.layer, batch, w_kv=attention.w_kv))
        outputs.append(torch.cat(parts))
    for other in outputs[1:]:
        assert_close(other, outputs[0], "ratio")


@pytest.mark.parametrize("mode", ["extend", "decode"])
def test_only_the_new_rows_of_the_pool_change(mode: str) -> None:
    """Bit for bit: the new rows are stored as they are, and every other element of every layer stays."""
    attention, runner, requests, _ = set_up("default", [4, 0, 9])
    lens = [3, 2, 1] if mode == "extend" else [1, 1, 1]
    before = {layer: pool.clone() for layer, pool in runner.kv.items()}
    batch = runner.extend(requests, lens) if mode == "extend" else runner.decode(requests)
    q, new = attention.query(sum(lens)), attention.rows(sum(lens))
    backend = K3MLABackend(runner)
    backend.init_forward_metadata(batch)
    backend.forward(q, new, None, attention.layer, batch, w_kv=attention.w_kv)
    before[LAYER][batch.out_cache_loc, 0] = new
    for layer, pool in runner.kv.items():
        assert_bitwise(pool, before[layer], f"pool of layer {layer}")


@pytest.mark.parametrize("piece", [1, 5, 64])
@pytest.mark.parametrize("batch", BATCHES)
def test_prefix_pieces_are_bounded_and_miss_nothing(batch: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is expanded at once stays under the bound, or at one token of each request where the bound is less."""
    monkeypatch.setattr(mla_backend, "PREFIX_CHUNK_TOKENS", piece)
    prefix_lens, lens = (list(column) for column in zip(*BATCHES[batch], strict=True))
    _, runner, requests, _ = set_up("default", prefix_lens)
    prefix_slots = [runner.kv_slots(request) for request in requests]
    backend = K3MLABackend(runner)
    backend.init_forward_metadata(runner.extend(requests, lens))
    chunks = backend.metadata.prefix_chunks
    assert all(0 < len(chunk.kv_indices) <= max(piece, len(requests)) for chunk in chunks)
    for b, slots in enumerate(prefix_slots):
        spans = [chunk.kv_indices[chunk.cu_seqlens[b] : chunk.cu_seqlens[b + 1]] for chunk in chunks]
        assert torch.cat([torch.empty(0, dtype=torch.int64), *spans]).tolist() == slots.tolist()


def test_results_come_in_the_dtype_of_the_query() -> None:
    attention, runner, requests, _ = set_up("default", [4, 0])
    backend = K3MLABackend(runner)
    for batch, n in ((runner.extend(requests, [2, 1]), 3), (runner.decode(requests), 2)):
        backend.init_forward_metadata(batch)
        q, new = attention.query(n).bfloat16(), attention.rows(n).bfloat16()
        out = backend.forward(q, new, None, attention.layer, batch, w_kv=attention.w_kv.bfloat16())
        assert (out.dtype, out.shape) == (torch.bfloat16, (n, attention.mla.num_heads, attention.mla.v_head_dim))


def test_kernels_are_chosen_by_the_sizes_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a head that a kernel has no tile for would be noticed by the first request."""
    asked: dict[str, OpContext] = {}
    monkeypatch.setattr(mla_backend, "bind", lambda op, context: asked.setdefault(op, context))
    config = tiny_k3("odd").config
    K3MLABackend(FakeRunner(config))
    mla = config.mla
    sizes = {"K": mla.qk_nope_head_dim, "R": mla.qk_rope_head_dim, "V": mla.v_head_dim, "D": mla.latent_dim}
    sizes |= {"L": mla.kv_lora_rank, "H": mla.num_heads, "page": 1}
    assert asked["mla_decode"].sizes == asked["mla_prefill"].sizes == sizes
