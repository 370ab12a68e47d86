"""Three ways for two tensors to be equal, each with a message that says where they are not.

NaN must stand at the same places and infinities must be the same ones in all three. Tensors may be on any device.
"""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WORST_TO_RMS = 50.0  # style.md section 5: no element may be off by more than 50 times the RMS error that is allowed


def assert_bitwise(actual: Tensor, expected: Tensor, what: str = "tensors") -> None:
    """The same bits, so that -0 is not 0; any NaN equals any NaN."""
    actual, expected = _comparable(actual, expected, what)
    differs = _ordered(actual) != _ordered(expected)
    if actual.is_floating_point():
        differs &= ~(actual.isnan() & expected.isnan())
    if differs.any():
        raise AssertionError(f"{what}: not bitwise equal, {_where(differs, actual, expected, first=True)}")


def assert_ulp(actual: Tensor, expected: Tensor, *, max_ulp: int, what: str = "tensors") -> None:
    """At most ``max_ulp`` representable numbers of the dtype apart, element by element."""
    actual, expected = _comparable(actual, expected, what)
    finite = _check_specials(actual, expected, what)
    distance = (_ordered(actual) - _ordered(expected)).abs().masked_fill(~finite, 0)
    if (distance > max_ulp).any():
        raise AssertionError(
            f"{what}: more than {max_ulp} ulp apart, {_where(distance > max_ulp, actual, expected, distance)}"
        )


def assert_ratio(
    actual: Tensor, expected: Tensor, *, rms_ratio: float, cosine_deficit: float, what: str = "tensors"
) -> None:
    """RMS of the error over RMS of the expected values, the angle between both, and no single bad element."""
    actual, expected = _comparable(actual, expected, what)
    finite = _check_specials(actual, expected, what)
    a, e = (x.double().masked_fill(~finite, 0.0) for x in (actual, expected))
    error = (a - e).abs()
    if not error.any():
        return
    rms_error, rms_expected = error.square().mean().sqrt().item(), e.square().mean().sqrt().item()
    worst = _where(error == error.max(), actual, expected, error)
    if not rms_error <= rms_ratio * rms_expected:
        raise AssertionError(
            f"{what}: RMS error {rms_error:.3e} over RMS value {rms_expected:.3e} exceeds {rms_ratio:.1e}; {worst}"
        )
    deficit = 1.0 - (a.flatten() @ e.flatten() / (a.norm() * e.norm())).item()
    if not deficit <= cosine_deficit:
        raise AssertionError(f"{what}: cosine deficit {deficit:.3e} exceeds {cosine_deficit:.1e}; {worst}")
    if not error.max().item() <= WORST_TO_RMS * rms_ratio * rms_expected:
        raise AssertionError(
            f"{what}: one element is off by more than {WORST_TO_RMS:g} x {rms_ratio:.1e} x RMS value "
            f"{rms_expected:.3e}; {worst}"
        )


def _comparable(actual: Tensor, expected: Tensor, what: str) -> tuple[Tensor, Tensor]:
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise AssertionError(
            f"{what}: actual is {tuple(actual.shape)} {actual.dtype}, expected {tuple(expected.shape)} {expected.dtype}"
        )
    return actual.detach().cpu(), expected.detach().cpu()


def _check_specials(actual: Tensor, expected: Tensor, what: str) -> Tensor:
    """Where both are finite, after checking that they are NaN and infinite alike."""
    for name, differs in (
        ("NaN positions", actual.isnan() != expected.isnan()),
        ("infinities", (actual.isinf() | expected.isinf()) & (actual != expected)),
    ):
        if differs.any():
            raise AssertionError(f"{what}: {name} differ, {_where(differs, actual, expected, first=True)}")
    return actual.isfinite() & expected.isfinite()


def _ordered(x: Tensor) -> Tensor:
    """Integers that count the representable numbers up to ``x``; -0 comes just below 0."""
    if not x.is_floating_point():
        return x.long()
    bits = x.contiguous().view(_BITS[x.element_size()]).long()
    return torch.where(bits < 0, -(bits & (2 ** (8 * x.element_size() - 1) - 1)) - 1, bits)


def _where(
    differs: Tensor, actual: Tensor, expected: Tensor, distance: Tensor | None = None, *, first: bool = False
) -> str:
    """``3 of 8 elements, first at [1, 0]: actual 0.5, expected 0.25``; without ``first`` the most distant element."""
    flat = differs.flatten()
    at = int(flat.int().argmax() if distance is None else distance.flatten().argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(at), actual.shape)] if actual.ndim else []
    a, e = actual.flatten()[at].item(), expected.flatten()[at].item()
    off = "" if distance is None else f", off by {distance.flatten()[at].item():.6g}"
    which = "first" if first else "worst"
    return f"{int(flat.sum())} of {flat.numel()} elements, {which} at {index}: actual {a!r}, expected {e!r}{off}"
