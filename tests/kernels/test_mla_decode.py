import math

import pytest
import torch

from sglang_k3.kernels.attn_merge import attn_merge
from sglang_k3.kernels.mla_decode import cases, mla_decode
from sglang_k3.kernels.mla_decode.cases import CASES, TOLERANCE, make_inputs
from sglang_k3.kernels.mla_prefill import mla_prefill
from tests.kit.compare import assert_bitwise
from tests.kit.ops import fp64, numerics_of, over_cases
from tests.kit.tolerance import assert_close


@over_cases(CASES)
def test_equals_softmax_row_by_row(case, device):
    inputs = make_inputs(case, device)
    out, lse = mla_decode(*inputs.args, **inputs.kwargs)
    q, pool = fp64(*inputs.args)
    spans, indices = inputs.kwargs["kv_spans"].tolist(), inputs.kwargs["kv_indices"].tolist()
    expected, expected_lse = torch.zeros(out.shape).double(), torch.full(lse.shape, -math.inf).double()
    for b in range(len(case.lens)):
        rows = [pool[slot] for slot in indices[slice(*spans[b])] if slot >= 0]
        for h in range(case.heads if rows else 0):
            gains = [math.exp(inputs.kwargs["scale"] * float(q[b, h] @ row)) for row in rows]
            expected[b, h] = sum(g / sum(gains) * row[: case.latent] for g, row in zip(gains, rows, strict=True))
            expected_lse[b, h] = math.log(sum(gains))
    assert_close(out, expected.float(), numerics_of(cases, case), "output")
    assert_close(lse, expected_lse.float(), TOLERANCE, "lse")


def sequence(length, *, heads=3, nope=8, rope=4, latent=16, value=6, dtype=torch.float64):
    """One query and ``length`` cached rows, with the up projections of keys and values."""
    shapes = (
        (1, heads, nope),
        (1, heads, rope),
        (length, latent),
        (length, rope),
        (heads, nope, latent),
        (heads, value, latent),
    )
    return [torch.randn(*shape, dtype=dtype) for shape in shapes]


def explicit_and_absorbed(q_n, q_r, c, k_r, w_uk, w_uv):
    """Inputs of the explicit form (q, k, v) and of the absorbed one (q, rows)."""
    k_n, v = torch.einsum("jl,hnl->jhn", c, w_uk), torch.einsum("jl,hvl->jhv", c, w_uv)
    k = torch.cat([k_n, k_r.unsqueeze(1).expand(-1, k_n.shape[1], -1)], dim=-1)
    absorbed = torch.cat([torch.einsum("bhn,hnl->bhl", q_n, w_uk), q_r], dim=-1)
    return (torch.cat([q_n, q_r], dim=-1), k, v), (absorbed, torch.cat([c, k_r], dim=-1))


def test_the_absorbed_form_is_the_explicit_one():
    """In fp64 by plain softmax first, then both ops."""
    tensors = sequence(21)
    (q, k, v), (absorbed, rows) = explicit_and_absorbed(*tensors)
    scale = 12**-0.5
    explicit = torch.einsum("hj,jhv->hv", (torch.einsum("hd,jhd->hj", q[0], k) * scale).softmax(-1), v)
    latent_out = (absorbed[0] @ rows.T * scale).softmax(-1) @ rows[:, :16]
    torch.testing.assert_close(torch.einsum("hl,hvl->hv", latent_out, tensors[5]), explicit, rtol=1e-12, atol=1e-12)

    lens = torch.tensor([0, 21], dtype=torch.int32)
    out, lse = mla_prefill(
        q.float(), k.float(), v.float(), cu_seqlens_q=lens.clamp(max=1), cu_seqlens_k=lens, scale=scale, causal=True
    )
    pool_out, pool_lse = mla_decode(
        absorbed.float(),
        rows.float(),
        kv_spans=torch.tensor([[0, 21]]),
        kv_indices=torch.arange(21),
        max_len=21,
        scale=scale,
        v_dim=16,
    )
    assert_close(out[0], explicit.float(), TOLERANCE)
    assert_close(torch.einsum("bhl,hvl->bhv", pool_out, tensors[5].float())[0], explicit.float(), TOLERANCE)
    assert_close(pool_lse, lse, TOLERANCE)


def batch(lens, heads=2, width=24):
    """Queries, and a pool that holds the rows of all sequences in random places."""
    slots = torch.randperm(sum(lens))
    ends = torch.tensor(lens).cumsum(0)
    kv_spans = torch.stack([ends - torch.tensor(lens), ends], dim=1)
    return torch.randn(len(lens), heads, width), torch.randn(sum(lens), width), kv_spans, slots


def test_there_are_no_positions():
    q, pool, kv_spans, slots = batch([17])
    kwargs = {"kv_spans": kv_spans, "max_len": 17, "scale": 0.2, "v_dim": 16}
    plain = mla_decode(q, pool, kv_indices=slots, **kwargs)
    shuffled = mla_decode(q, pool, kv_indices=slots[torch.randperm(17)], **kwargs)
    for a, b in zip(shuffled, plain, strict=True):
        assert_close(a, b, TOLERANCE)


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_the_ranks_of_context_parallelism_merge_to_the_whole(ranks):
    lens = [5, 0, 13, 1]
    q, pool, kv_spans, slots = batch(lens)
    kwargs = {"kv_spans": kv_spans, "max_len": 13, "scale": 0.2, "v_dim": 16}
    positions = torch.cat([torch.arange(n) for n in lens])
    merged = (torch.zeros(4, 2, 16), torch.full((4, 2), -torch.inf))
    for rank in range(ranks):
        owned = positions % ranks == rank
        local_pool = torch.full_like(pool, torch.nan)
        local_pool[slots[owned]] = pool[slots[owned]]
        part = mla_decode(q, local_pool, kv_indices=slots.where(owned, -1), owner_mask=owned, **kwargs)
        merged = attn_merge(*merged, *part)
    for a, b in zip(merged, mla_decode(q, pool, kv_indices=slots, **kwargs), strict=True):
        assert_close(a, b, TOLERANCE)


@pytest.mark.parametrize(
    ("lens", "heads", "width", "v_dim", "dtype"),
    [
        ([5, 9, 1, 1600], 2, 24, 16, torch.float32),
        pytest.param([5, 1025, 0, 9000, *[300] * 150], 96, 576, 512, torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_a_row_does_not_depend_on_its_batch(lens, heads, width, v_dim, dtype, device):
    q, pool, kv_spans, slots = (x.to(device) for x in batch(lens, heads, width))
    q, pool = q.to(dtype), pool.to(dtype)
    kwargs = {"scale": 0.2, "v_dim": v_dim}
    out, lse = mla_decode(q, pool, kv_spans=kv_spans, kv_indices=slots, max_len=max(lens), **kwargs)
    for b, length in enumerate(lens):
        mine = slots[slice(*kv_spans[b].tolist())]
        span = torch.tensor([[0, length]], device=device)
        alone = mla_decode(q[b : b + 1], pool, kv_spans=span, kv_indices=mine, max_len=length, **kwargs)
        assert_bitwise(alone[0], out[b : b + 1])
        assert_bitwise(alone[1], lse[b : b + 1])


def test_the_rows_of_a_table_serve_as_lists(device):
    """As the backend passes them: a row per request, lists of which the rest of the row is no part, any bound."""
    lens = [5, 0, 300, 17]
    q, pool, kv_spans, slots = (x.to(device) for x in batch(lens))
    kwargs = {"scale": 0.2, "v_dim": 16}
    expected = mla_decode(q, pool, kv_spans=kv_spans, kv_indices=slots, max_len=300, **kwargs)
    table = torch.full((6, 512), 1 << 30, dtype=torch.int32, device=device)
    rows = torch.tensor([4, 0, 1, 5], device=device)
    for row, span, length in zip(rows, kv_spans.tolist(), lens, strict=True):
        table[row, :length] = slots[slice(*span)].int()
    spans = torch.stack([rows * 512, rows * 512 + torch.tensor(lens, device=device)], dim=1)
    actual = mla_decode(q, pool, kv_spans=spans, kv_indices=table.view(-1), max_len=1 << 20, **kwargs)
    for a, b in zip(actual, expected, strict=True):
        assert_bitwise(a, b)


@pytest.mark.parametrize("max_len", [*range(0, 5000, 61), 4096, 4097, 65536, 65537, 70000, 1 << 20])
def test_memory_is_set_aside_for_every_split_of_any_shorter_list(max_len):
    """Against the rule that the kernel follows, written out."""
    from sglang_k3.kernels.mla_decode.triton_impl import max_splits

    def splits(length):
        span = max(min(-(-length // 4), 1024), -(-length // 64), 256)
        return -(-length // (-(-span // 256) * 256))

    lengths = [n for n in (*range(0, 70000, 127), 4096, 4097, 65536, 65537, 1 << 20, max_len) if n <= max_len]
    assert max(map(splits, lengths)) <= max_splits(max_len) <= 64


def test_a_value_wider_than_a_row_is_refused():
    q, pool, kv_spans, slots = batch([3])
    with pytest.raises(ValueError, match="v_dim=25 must be 1 to 24, the width of a row"):
        mla_decode(q, pool, kv_spans=kv_spans, kv_indices=slots, max_len=3, scale=0.2, v_dim=25)


def test_offsets_in_place_of_spans_are_refused():
    q, pool, _, slots = batch([3])
    with pytest.raises(ValueError, match=r"kv_spans has shape \(1, 4\), but \[B, 2\] is needed"):
        mla_decode(q, pool, kv_spans=torch.zeros(1, 4).long(), kv_indices=slots, max_len=3, scale=0.2, v_dim=16)
