import pytest
import torch

from sglang_k3.kernels.kv_scatter import kv_scatter
from sglang_k3.kernels.kv_scatter.cases import CASES, TOLERANCE, make_inputs
from tests.kit.ops import clone_pool, over_cases
from tests.kit.tolerance import assert_close


@over_cases(CASES)
def test_writes_each_row_to_its_slot_and_nothing_else(case, device):
    inputs = make_inputs(case, device)
    rows, pool = inputs.args
    after = clone_pool(pool)
    kv_scatter(rows, after, **inputs.kwargs)
    owned = [True] * case.tokens if case.owners == 1 else inputs.kwargs["owner_mask"].tolist()
    expected = [row.clone() for row in pool]
    for t, slot in enumerate(inputs.kwargs["loc"].tolist()):
        if slot >= 0 and owned[t]:
            expected[slot] = rows[t].to(case.dtype)
    assert_close(after, torch.stack(expected), TOLERANCE)


def test_the_bytes_between_the_rows_of_a_strided_pool_stay():
    buffer = torch.full((4, 9), 7.0)
    kv_scatter(torch.zeros(4, 5), buffer[:, 2:7], loc=torch.arange(4))
    assert (buffer[:, 2:7] == 0).all()
    assert (buffer[:, [0, 1, 7, 8]] == 7.0).all()


def test_rows_of_another_width_are_refused():
    with pytest.raises(ValueError, match=r"kv_pool has shape \(4, 5\), but \[S, D\] is needed with T=2, D=6"):
        kv_scatter(torch.zeros(2, 6), torch.zeros(4, 5), loc=torch.arange(2))
