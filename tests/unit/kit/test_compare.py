import pytest
import torch

from tests.kit.compare import assert_bitwise, assert_ratio, assert_ulp

NAN, INF = float("nan"), float("inf")
RATIO = {"rms_ratio": 1e-3, "cosine_deficit": 1e-5}
COMPARISONS = [
    assert_bitwise,
    lambda a, e: assert_ulp(a, e, max_ulp=1),
    lambda a, e: assert_ratio(a, e, **RATIO),
]


@pytest.mark.parametrize("compare", COMPARISONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_passes_nan_and_infinity_included(compare, dtype):
    x = torch.tensor([[1.0, -2.5, 0.0], [NAN, INF, -INF]], dtype=dtype)
    compare(x, x.clone())
    compare(x[:0], x[:0].clone())


@pytest.mark.parametrize("compare", COMPARISONS)
@pytest.mark.parametrize(
    ("actual", "expected"),
    [([1.0, NAN], [1.0, 1.0]), ([1.0, 1.0], [1.0, NAN]), ([1.0, INF], [1.0, -INF]), ([1.0, 3.4e38], [1.0, INF])],
)
def test_special_values_must_be_the_same(compare, actual, expected):
    with pytest.raises(AssertionError, match=r"1 of 2 elements, first at \[1\]"):
        compare(torch.tensor(actual), torch.tensor(expected))


@pytest.mark.parametrize("compare", COMPARISONS)
def test_shapes_and_dtypes_must_be_the_same(compare):
    with pytest.raises(AssertionError, match=r"actual is \(2,\) torch.float32, expected \(1, 2\) torch.float32"):
        compare(torch.zeros(2), torch.zeros(1, 2))
    with pytest.raises(AssertionError, match="expected .* torch.bfloat16"):
        compare(torch.zeros(2), torch.zeros(2).bfloat16())


def test_bitwise_tells_the_count_the_first_index_and_both_values():
    actual = torch.zeros(2, 3)
    actual[0, 2], actual[1, 1] = 1.0, 2.0
    with pytest.raises(AssertionError, match=r"state: .* 2 of 6 elements, first at \[0, 2\]: actual 1.0, expected 0.0"):
        assert_bitwise(actual, torch.zeros(2, 3), "state")


def test_bitwise_tells_zero_from_minus_zero_and_compares_integers():
    with pytest.raises(AssertionError, match=r"actual -0.0, expected 0.0"):
        assert_bitwise(torch.tensor([-0.0]), torch.tensor([0.0]))
    assert_bitwise(torch.tensor([3]), torch.tensor([3]))
    with pytest.raises(AssertionError, match="actual 3, expected 4"):
        assert_bitwise(torch.tensor([3]), torch.tensor([4]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ulp_counts_representable_numbers_across_zero(dtype):
    zero, one = torch.zeros(1, dtype=dtype), torch.ones(1, dtype=dtype)
    tiny = torch.nextafter(zero, one)
    assert_ulp(torch.nextafter(one, 2 * one), one, max_ulp=1)
    assert_ulp(tiny, zero, max_ulp=1)
    assert_ulp(-tiny, tiny, max_ulp=3)  # -tiny, -0, 0, tiny
    with pytest.raises(AssertionError, match=r"more than 2 ulp apart, 1 of 1 elements, worst at \[0\].*off by 3"):
        assert_ulp(-tiny, tiny, max_ulp=2)


def test_ulp_names_the_worst_element():
    expected = torch.ones(4)
    actual = expected.clone()
    actual[1], actual[3] = 1.0 + 3 * 2**-23, 1.0 + 9 * 2**-23
    with pytest.raises(AssertionError, match=r"2 of 4 elements, worst at \[3\].*off by 9"):
        assert_ulp(actual, expected, max_ulp=2)


def test_ratio_bounds_the_rms_of_the_error():
    expected = torch.randn(1000)
    noise = torch.randn(1000)
    assert_ratio(expected + 0.5e-3 * noise, expected, **RATIO)
    with pytest.raises(AssertionError, match=r"RMS error .* exceeds 1.0e-03; 1 of 1000 elements, worst at"):
        assert_ratio(expected + 2e-3 * noise, expected, **RATIO)


def test_ratio_bounds_a_single_bad_element():
    """Too rare to move the RMS beyond its bound, yet wrong."""
    expected = torch.ones(100_000)
    actual = expected.clone()
    actual[7] += 0.06
    with pytest.raises(AssertionError, match=r"one element is off by more than 50 x .* worst at \[7\]"):
        assert_ratio(actual, expected, **RATIO)


def test_ratio_bounds_the_angle():
    expected = torch.randn(1000)
    with pytest.raises(AssertionError, match="cosine deficit"):
        assert_ratio(expected + 0.1 * torch.randn(1000), expected, rms_ratio=1.0, cosine_deficit=1e-5)


def test_ratio_against_zero_and_nothing_but_zero():
    assert_ratio(torch.zeros(3), torch.zeros(3), **RATIO)
    with pytest.raises(AssertionError, match="RMS error"):
        assert_ratio(torch.tensor([0.0, 1e-20]), torch.zeros(2), **RATIO)
