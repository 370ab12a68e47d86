"""FlashMLA behind ``mla_decode``: where it serves, and that it does what the reference does."""

import math
import sys
import types

import pytest
import torch

from sglang_k3.kernels import OpContext
from sglang_k3.kernels.mla_decode import IMPLS, reference
from sglang_k3.kernels.mla_decode.flashmla import FLASHMLA, PAGE
from tests.kit.compare import assert_bitwise
from tests.kit.tolerance import assert_close

SIZES = {"page": 64, "H": 96, "D": 576, "L": 512}
HOPPER = (9, 0)
LIBRARY = types.ModuleType("sgl_kernel.flashmla_ops")


def reason(monkeypatch, capability=HOPPER, dtype=torch.bfloat16, library=LIBRARY, **sizes):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setitem(sys.modules, "sgl_kernel", types.ModuleType("sgl_kernel"))
    monkeypatch.setitem(sys.modules, "sgl_kernel.flashmla_ops", library)
    return FLASHMLA.supports(OpContext(torch.device("cuda"), dtype, SIZES | sizes))


def test_it_serves_many_heads_and_whole_pages_on_a_hopper_gpu(monkeypatch):
    assert reason(monkeypatch) is None
    assert reason(monkeypatch, H=33) is None


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"capability": (10, 0)}, "needs a Hopper GPU (sm_90), got sm_100"),
        ({"capability": (8, 0)}, "needs a Hopper GPU (sm_90), got sm_80"),
        ({"page": 1}, "needs pages of 64 rows, got 1"),
        ({"page": 128}, "needs pages of 64 rows, got 128"),
        ({"page": None}, "needs pages of 64 rows, got no pages"),
        ({"dtype": torch.float32}, "needs rows of 576 torch.bfloat16, 512 of them latent, got 576 torch.float32, 512"),
        ({"L": 256}, "512 of them latent, got 576 torch.bfloat16, 256"),
        ({"D": 512}, "needs rows of 576"),
        ({"H": 32}, "is no faster up to 32 heads, got 32"),
    ],
)
def test_what_it_does_not_serve_is_said(monkeypatch, given, why):
    assert why in reason(monkeypatch, **given)


def test_without_the_library_another_kernel_serves(monkeypatch):
    assert "cannot be loaded (import of sgl_kernel.flashmla_ops halted" in reason(monkeypatch, library=None)
    assert [impl.name for impl in IMPLS] == ["flashmla", "triton", "reference"]


def paged(lens, heads, max_len, device="cuda"):
    """Queries, and lists of pages anywhere in a pool that is NaN elsewhere; the lists are rows of a wider table."""
    generator = torch.Generator().manual_seed(len(lens))
    counts = [math.ceil(n / PAGE) for n in lens]
    pool = torch.full(((sum(counts) + 3) * PAGE, 576), math.nan)
    pages = (torch.randperm(sum(counts) + 2, generator=generator) + 1)[: sum(counts)].split(counts)
    table = torch.full((len(lens) + 2, max_len + 8), 2**30, dtype=torch.int32)
    spans = []
    for b, (n, own) in enumerate(zip(lens, pages, strict=True)):
        slots = (own[:, None] * PAGE + torch.arange(PAGE)).flatten()[:n]
        pool[slots] = torch.randn(n, 576, generator=generator)
        table[b + 1, :n] = slots
        spans.append((table.stride(0) * (b + 1), table.stride(0) * (b + 1) + n))
    q = torch.randn(len(lens), heads, 576, generator=generator)
    spans = torch.tensor(spans, dtype=torch.int64).view(-1, 2)
    kwargs = {"max_len": max_len, "scale": 576**-0.5, "v_dim": 512}
    args = q.bfloat16().to(device), pool.bfloat16().to(device)
    return args, kwargs | {"kv_spans": spans.to(device), "kv_indices": table.view(-1).to(device)}


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [96, 48, 33])
@pytest.mark.parametrize("lens", [(1, 700, 0, 2100, 64), (0,), (0, 0, 0), (63, 65), (5000,), ()], ids=str)
def test_results_are_those_of_the_reference(lens, heads):
    context = OpContext(torch.device("cuda"), torch.bfloat16, SIZES | {"H": heads})
    assert FLASHMLA.supports(context) is None
    args, kwargs = paged(lens, heads, max_len=8192)
    out, lse = FLASHMLA.fn(*args, **kwargs)
    expected, expected_lse = reference.mla_decode(*args, **kwargs)
    assert out.dtype == lse.dtype == torch.float32
    assert_close(out, expected, "ratio", "output", inner=torch.bfloat16)
    assert_close(lse, expected_lse, "ratio", "lse")
    empty = [b for b, n in enumerate(lens) if n == 0]
    assert_bitwise(out[empty], torch.zeros_like(out[empty]))
    assert_bitwise(lse[empty], torch.full_like(lse[empty], -math.inf))


@pytest.mark.gpu
def test_a_captured_call_reads_what_the_tables_hold_at_its_replay():
    (q, pool), kwargs = paged((300, 0, 5000), 96, max_len=8192)
    FLASHMLA.fn(q, pool, **kwargs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = FLASHMLA.fn(q, pool, **kwargs)
    for lens in ((1, 1, 1), (5300, 0, 0), (64, 2000, 3000)):
        (other_q, other_pool), others = paged(lens, 96, max_len=8192)
        pool.fill_(math.nan)[: len(other_pool)] = other_pool[: len(pool)]
        q.copy_(other_q)
        for name in ("kv_spans", "kv_indices"):
            kwargs[name].copy_(others[name])
        graph.replay()
        expected, expected_lse = reference.mla_decode(q, pool, **kwargs)
        assert_close(out, expected, "ratio", f"output of {lens}", inner=torch.bfloat16)
        assert_close(lse, expected_lse, "ratio", f"lse of {lens}")


@pytest.mark.gpu
@pytest.mark.parametrize("lens", [(700, 64, 3000), (64, 65), (5000, 1)], ids=str)
def test_a_broken_row_breaks_its_sequence_alone(lens):
    """Wherever it stands in the sequence, whose output is all NaN. Its log-sum-exp may stay a number, unlike that of
    other kernels; a decode step does not read it."""
    (q, pool), kwargs = paged(lens, 96, max_len=8192)
    before = FLASHMLA.fn(q, pool, **kwargs)
    begin, end = kwargs["kv_spans"][0].tolist()
    for place in (begin, (begin + end) // 2, end - 1):
        broken = pool.clone()
        broken[kwargs["kv_indices"][place]] = math.nan
        out, lse = FLASHMLA.fn(q, broken, **kwargs)
        assert out[0].isnan().all()
        assert_bitwise(out[1:], before[0][1:])
        assert_bitwise(lse[1:], before[1][1:])


@pytest.mark.gpu
def test_the_pool_may_be_a_strided_view():
    (q, pool), kwargs = paged((700, 64), 96, max_len=1024)
    wide = torch.full((len(pool), 3, 576), math.nan, dtype=pool.dtype, device="cuda")
    wide[:, 1] = pool
    for actual, expected in zip(FLASHMLA.fn(q, wide[:, 1], **kwargs), FLASHMLA.fn(q, pool, **kwargs), strict=True):
        assert_bitwise(actual, expected)
