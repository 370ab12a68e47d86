import math

import pytest
import torch

from sglang_k3.kernels.mxfp4_dequant import mxfp4_dequant
from sglang_k3.kernels.mxfp4_dequant.cases import CASES, TOLERANCE, make_inputs
from tests.kit.ops import over_cases
from tests.kit.tolerance import assert_close

E2M1 = {0: 0.0, 1: 0.5, 2: 1.0, 3: 1.5, 4: 2.0, 5: 3.0, 6: 4.0, 7: 6.0}


def decode(code, scale_code):
    """One element, exact in a python float."""
    if scale_code == 255:
        return math.nan
    magnitude = math.ldexp(E2M1[code & 7], scale_code - 127)
    return -magnitude if code & 8 else magnitude


def decode_row(packed, scale):
    codes = [code for byte in packed for code in (byte & 15, byte >> 4)]
    return [decode(code, scale[column // 32]) for column, code in enumerate(codes)]


@over_cases(CASES)
def test_equals_a_decoder_by_table(case, device):
    (packed, scale), kwargs = make_inputs(case, device)
    columns = case.shape[-1]
    rows = zip(packed.view(-1, columns // 2).tolist(), scale.view(-1, columns // 32).tolist(), strict=True)
    expected = torch.tensor([decode_row(*row) for row in rows], dtype=torch.float64).view(case.shape)
    assert_close(mxfp4_dequant(packed, scale, **kwargs), expected.to(case.dtype), TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code_with_every_scale_is_exact(dtype):
    """All 16 x 256 products: bf16 loses nothing, not even a subnormal."""
    packed = torch.tensor([[(2 * i % 16) | ((2 * i + 1) % 16) << 4 for i in range(16)]] * 256, dtype=torch.uint8)
    scale = torch.arange(256, dtype=torch.uint8).unsqueeze(1)
    out = mxfp4_dequant(packed, scale, dtype=dtype).double()
    largest = torch.finfo(dtype).max
    for e in range(255):
        for column, value in enumerate(out[e].tolist()):
            exact = decode(column % 16, e)
            expected = math.copysign(math.inf, exact) if abs(exact) > largest else exact
            assert value == expected, f"code {column % 16}, scale {e}: {value} instead of {expected}"
    assert out[255].isnan().all()


@pytest.mark.parametrize(
    ("byte", "scale_code", "expected"),
    [
        (0x21, 127, (0.5, 1.0)),
        (0xF7, 127, (6.0, -6.0)),
        (0x9A, 120, (-0.0078125, -0.00390625)),
        (0x5E, 130, (-32.0, 24.0)),
    ],
)
def test_published_vectors(byte, scale_code, expected):
    packed = torch.full((1, 16), byte, dtype=torch.uint8)
    out = mxfp4_dequant(packed, torch.tensor([[scale_code]], dtype=torch.uint8), dtype=torch.bfloat16)
    assert out[0, :2].tolist() == list(expected)


def test_code_8_is_minus_zero():
    out = mxfp4_dequant(
        torch.full((1, 16), 0x88, dtype=torch.uint8), torch.tensor([[127]], dtype=torch.uint8), dtype=torch.float32
    )
    assert (out == 0).all()
    assert out.signbit().all()


def test_strided_halves_decode_like_copies():
    packed = torch.randint(0, 256, (4, 64), dtype=torch.uint8)[:, ::2]
    scale = torch.randint(120, 130, (4, 4), dtype=torch.uint8)[:, ::2]
    copied = mxfp4_dequant(packed.clone(), scale.clone(), dtype=torch.float32)
    assert_close(mxfp4_dequant(packed, scale, dtype=torch.float32), copied, TOLERANCE)


def test_what_does_not_fit_is_refused():
    packed, scale = torch.zeros(2, 16, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8)
    with pytest.raises(
        ValueError, match=r"packed has shape \(2, 20\), but \[\.\.\., R, C/2\] is needed with R=2, C=32"
    ):
        mxfp4_dequant(torch.zeros(2, 20, dtype=torch.uint8), scale, dtype=torch.float32)
    with pytest.raises(ValueError, match="all dimensions but the last must agree"):
        mxfp4_dequant(packed.expand(3, 2, 16), scale.expand(4, 2, 1), dtype=torch.float32)
    with pytest.raises(ValueError, match="cannot decode to torch.int8; use float32, bfloat16 or float16"):
        mxfp4_dequant(packed, scale, dtype=torch.int8)
