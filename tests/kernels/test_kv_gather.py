import pytest
import torch

from sglang_k3.kernels.kv_gather import kv_gather
from sglang_k3.kernels.kv_gather.cases import CASES, TOLERANCE, make_inputs
from sglang_k3.kernels.kv_scatter import kv_scatter
from tests.kit.compare import assert_bitwise
from tests.kit.ops import over_cases
from tests.kit.tolerance import assert_close


@over_cases(CASES)
def test_reads_each_owned_row_and_zero_elsewhere(case, device):
    inputs = make_inputs(case, device)
    (pool,) = inputs.args
    owned = [True] * case.rows if case.owners == 1 else inputs.kwargs["owner_mask"].tolist()
    expected = torch.zeros(case.rows, case.width, dtype=case.dtype)
    for n, slot in enumerate(inputs.kwargs["loc"].tolist()):
        if slot >= 0 and owned[n]:
            expected[n] = pool[slot].cpu()
    assert_close(kv_gather(pool, **inputs.kwargs), expected, TOLERANCE)


def test_reads_back_what_was_scattered():
    rows, pool, loc = torch.randn(6, 5), torch.full((9, 5), torch.nan), torch.randperm(9)[:6]
    kv_scatter(rows, pool, loc=loc)
    assert_bitwise(kv_gather(pool, loc=loc), rows)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_ranks_of_context_parallelism_add_up_to_the_whole(ranks):
    pool, loc = torch.randn(9, 5), torch.randperm(9)
    parts = [kv_gather(pool, loc=loc, owner_mask=torch.arange(9) % ranks == rank) for rank in range(ranks)]
    assert_bitwise(sum(parts), pool[loc])


def test_a_mask_of_another_length_is_refused():
    with pytest.raises(ValueError, match=r"owner_mask has shape \(3,\), but \[N\] is needed with S=4, D=5, N=2"):
        kv_gather(torch.zeros(4, 5), loc=torch.arange(2), owner_mask=torch.ones(3, dtype=torch.bool))
