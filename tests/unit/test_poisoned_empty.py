"""The NaN poison of ``conftest.py``: every test has it, so it is tested where it is used."""

import pytest
import torch


def allocate_as(module_name, expression):
    """What ``expression`` gives when code of a module of that name evaluates it."""
    return eval(expression, {"__name__": module_name, "torch": torch, "x": torch.zeros(3)})


ALLOCATIONS = [
    "torch.empty(3)",
    "torch.empty_like(x)",
    "torch.empty_strided((3,), (1,))",
    "x.new_empty(3)",
    "x.new_empty_strided((3,), (1,))",
    "torch.empty(3, dtype=torch.bfloat16)",
]


@pytest.mark.parametrize("expression", ALLOCATIONS)
def test_the_package_gets_nan(expression):
    assert allocate_as("sglang_k3.kernels.some_op", expression).isnan().all()


def test_integers_are_wild_and_bools_untouched():
    assert allocate_as("sglang_k3.mem", "torch.empty(3, dtype=torch.int32)").tolist() == [0x5A] * 3
    assert allocate_as("sglang_k3.mem", "torch.empty(3, dtype=torch.bool)").dtype == torch.bool
    assert allocate_as("sglang_k3.mem", "torch.empty(3, device='meta')").is_meta


def test_everyone_else_is_left_alone(monkeypatch):
    """The fill is what poisons: no caller outside the package may reach it."""

    def no_fill(*_):
        raise AssertionError("filled")

    monkeypatch.setattr(torch.Tensor, "fill_", no_fill)
    for expression in ALLOCATIONS:
        allocate_as("sglang.srt.models", expression)
    with pytest.raises(AssertionError, match="filled"):
        allocate_as("sglang_k3.mem", "torch.empty(3)")
