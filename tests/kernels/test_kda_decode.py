import pytest
import torch

from sglang_k3.kernels.kda_decode import kda_decode
from sglang_k3.kernels.kda_decode.cases import CASES, TOLERANCE, make_inputs
from tests.kit.compare import assert_bitwise
from tests.kit.kda_oracle import Head, prepared, recurrence
from tests.kit.ops import call_on_copy, fp64, over_cases
from tests.kit.tolerance import assert_close


@over_cases(CASES)
def test_equals_the_recurrence_in_fp64(case, device):
    inputs = make_inputs(case, device)
    pool, slots = inputs.kwargs["ssm_states"], inputs.kwargs["cache_indices"].tolist()
    o, after = call_on_copy(kda_decode, inputs, "ssm_states")
    expected = torch.zeros(o.shape, dtype=torch.float64)
    for b, slot in enumerate(slots):
        for h in range(case.heads if slot >= 0 else 0):
            head = prepared(Head(*fp64(*(x[b : b + 1, h] for x in inputs.args))), inputs.kwargs["scale"])
            outputs, states = recurrence(head, *fp64(pool[slot, h].T))
            expected[b, h] = outputs[0]
            assert_close(after[slot, h], states[-1].T.to(case.state_dtype), TOLERANCE, f"state of row {b}, head {h}")
    assert_close(o, expected.to(case.dtype), TOLERANCE, "output")
    others = [slot for slot in range(pool.shape[0]) if slot not in slots]
    assert_bitwise(after[others], pool[others], "slots that nobody named")


@over_cases([case for case in CASES if case.batch > 1 and not case.padding])
def test_a_row_does_not_depend_on_its_batch(case):
    inputs = make_inputs(case, "cpu")
    together, pool_together = call_on_copy(kda_decode, inputs, "ssm_states")
    for b, slot in enumerate(inputs.kwargs["cache_indices"].tolist()):
        row = inputs._replace(args=tuple(x[b : b + 1] for x in inputs.args))
        alone, pool_alone = call_on_copy(kda_decode, row, "ssm_states", cache_indices=torch.tensor([slot]))
        assert_bitwise(alone, together[b : b + 1], f"row {b}")
        assert_bitwise(pool_alone[slot], pool_together[slot], f"state of row {b}")


def test_the_output_is_read_from_the_state_before_it_is_rounded():
    case = next(case for case in CASES if case.state_dtype == torch.bfloat16 and not case.padding)
    inputs = make_inputs(case, "cpu")
    rounded, _ = call_on_copy(kda_decode, inputs, "ssm_states")
    wide, _ = call_on_copy(kda_decode, inputs, "ssm_states", ssm_states=inputs.kwargs["ssm_states"].float())
    assert_bitwise(rounded, wide)


def test_a_rounded_decay_is_refused():
    inputs = make_inputs(CASES[2], "cpu")
    q, k, v, g, beta = inputs.args
    with pytest.raises(ValueError, match=r"g is torch.bfloat16, but float32 is needed"):
        kda_decode(q, k, v, g.bfloat16(), beta, **inputs.kwargs)
