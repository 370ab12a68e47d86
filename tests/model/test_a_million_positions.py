"""A context of 1,048,576 tokens: what the MLA backend computes with it stays exact and bounded."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from sglang_k3.host.mla_backend import PREFIX_CHUNK_TOKENS, K3MLABackend

pytestmark = pytest.mark.sglang
CONTEXT = 1_048_576
REQUESTS = 4096  # req_to_token then has 2**32 entries
LAST = torch.tensor([REQUESTS - 1])


@pytest.fixture
def backend(tmp_path: Path) -> K3MLABackend:
    """Over a table of the host's size in a sparse file: the last request has slot ``2 * position``."""
    table = torch.from_file(str(tmp_path / "table"), shared=True, size=REQUESTS * CONTEXT, dtype=torch.int32)
    table = table.view(REQUESTS, CONTEXT)
    table[-1] = 2 * torch.arange(CONTEXT)
    backend = K3MLABackend.__new__(K3MLABackend)
    backend.req_to_token_pool = SimpleNamespace(req_to_token=table)
    return backend


def slots(first: int, last: int) -> Tensor:
    return 2 * torch.arange(first, last)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_decode_reads_every_position_of_the_last_row(backend: K3MLABackend, dtype: torch.dtype) -> None:
    """Its entries begin behind 2**31, whatever integers the host counts requests and tokens with."""
    backend.init_forward_metadata_in_graph(
        SimpleNamespace(req_pool_indices=LAST.to(dtype), seq_lens=torch.tensor([CONTEXT], dtype=dtype))
    )
    ((begin, end),) = backend.metadata.kv_spans.tolist()
    assert torch.equal(backend.req_to_token_pool.req_to_token.view(-1)[begin:end], slots(0, CONTEXT).int())


def test_a_long_prefix_comes_in_bounded_pieces_that_cover_it(backend: K3MLABackend) -> None:
    prefix = CONTEXT - 7
    batch = SimpleNamespace(
        batch_size=2,
        req_pool_indices=torch.cat([LAST, LAST]),
        extend_prefix_lens=torch.tensor([prefix, 3], dtype=torch.int32),
        extend_prefix_lens_cpu=[prefix, 3],
    )
    pieces = backend._prefix_chunks(batch)
    assert all(len(piece.kv_indices) <= PREFIX_CHUNK_TOKENS for piece in pieces)
    for n, end in ((0, prefix), (1, 3)):
        parts = [piece.kv_indices[piece.cu_seqlens[n] : piece.cu_seqlens[n + 1]] for piece in pieces]
        assert torch.equal(torch.cat(parts), slots(0, end))
