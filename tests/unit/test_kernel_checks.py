import pytest
import torch

from sglang_k3.kernels.checks import FP32, check_dtypes, check_shapes, check_together


def test_letters_are_bound_by_the_first_tensor_that_has_them():
    sizes = check_shapes(
        "op",
        x=(torch.zeros(3, 8), "T 2I"),
        packed=(torch.zeros(5, 4), "E 2I/2"),
        scale=(torch.zeros(1), "L/32"),
        window=(torch.zeros(3, 9), "W-1 B+1"),
        free=(torch.zeros(7, 7, 4), "... I"),
    )
    assert sizes == {"T": 3, "I": 4, "E": 5, "L": 32, "W": 4, "B": 8}


@pytest.mark.parametrize(
    ("shape", "pattern"),
    [
        ((4,), "D"),  # another size
        ((3, 3), "D"),  # another rank
        ((), "D"),
        ((4,), "2D"),
        ((7,), "2I"),  # not even
        ((0,), "B+1"),  # B would be -1
        ((), "... D"),
    ],
)
def test_what_does_not_match_is_refused(shape, pattern):
    with pytest.raises(ValueError, match=r"op: x has shape .* is needed with D=3 as in the tensors before it"):
        check_shapes("op", first=(torch.zeros(3), "D"), x=(torch.zeros(shape), pattern))


def test_dtypes_are_named_with_the_remedy():
    check_dtypes("op", FP32, x=torch.zeros(1), absent=None)
    with pytest.raises(ValueError, match=r"op: x is torch.int64, but float32 is needed. Convert it with .to\(\)"):
        check_dtypes("op", FP32, x=torch.zeros(1, dtype=torch.int64))


def test_options_that_belong_together():
    check_together("op", a=None, b=None)
    check_together("op", a=torch.zeros(1), b=torch.zeros(1))
    with pytest.raises(ValueError, match="op: a and b belong together, but b is missing. Pass all or none"):
        check_together("op", a=torch.zeros(1), b=None)
