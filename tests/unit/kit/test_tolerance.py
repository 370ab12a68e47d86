import pytest
import torch

from tests.kit.tolerance import MAX_ULP, RATIO, assert_close

BOUNDS = {
    # class, dtype: an error of 1.0 that is inside the class, and one that is outside
    ("bitwise", torch.float32): (0.0, 2**-23),
    ("bitwise", torch.bfloat16): (0.0, 2**-7),
    ("ulp", torch.float32): (2 * 2**-23, 3 * 2**-23),
    ("ulp", torch.bfloat16): (2**-7, 2 * 2**-7),
    ("ratio", torch.float32): (0.9e-5, 1.1e-5),
    ("ratio", torch.bfloat16): (0.0, 2**-7),
    ("rounded", torch.float32): (1.9e-3, 2.1e-3),
}


@pytest.mark.parametrize(("numerics", "dtype"), BOUNDS)
def test_the_bounds_of_each_class(numerics, dtype):
    inside, outside = BOUNDS[numerics, dtype]
    expected = torch.ones(8, dtype=dtype)
    assert_close((expected.double() + inside).to(dtype), expected, numerics)
    with pytest.raises(AssertionError):
        assert_close((expected.double() + outside).to(dtype), expected, numerics)


def test_the_table_is_the_one_of_the_style_guide():
    assert {torch.float32: 2, torch.bfloat16: 1} == MAX_ULP
    assert {dtype: (r.rms_ratio, r.cosine_deficit) for dtype, r in RATIO.items()} == {
        torch.float32: (1e-5, 1e-5),
        torch.bfloat16: (5e-3, 1e-5),
    }


def test_an_unknown_class_is_refused():
    with pytest.raises(ValueError, match="numerics='close' must be bitwise, ulp, ratio or rounded"):
        assert_close(torch.zeros(1), torch.zeros(1), "close")
