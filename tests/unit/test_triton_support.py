import inspect
import sys

import pytest
import torch

from sglang_k3.kernels import OpContext
from sglang_k3.kernels.kda_gate import reference
from sglang_k3.kernels.triton_support import supports_triton, supports_triton_up_to, triton_impl


def on(device):
    return OpContext(torch.device(device))


@pytest.mark.parametrize(
    ("capability", "reason"), [((7, 5), "needs a CUDA device of sm_80 or newer, got sm_75"), ((8, 0), None)]
)
def test_a_cuda_device_is_judged_by_its_capability(monkeypatch, capability, reason):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert supports_triton(on("cuda")) == reason


def test_a_cpu_will_do_only_where_triton_interprets(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert supports_triton(on("cpu")) == "needs a CUDA device of sm_80 or newer, got cpu"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert supports_triton(on("cpu")) is None
    assert supports_triton(on("meta")) == "needs a CUDA device of sm_80 or newer, got meta"


def test_a_kernel_of_whole_rows_refuses_larger_ones(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    supports = supports_triton_up_to(K=128)
    assert supports(OpContext(torch.device("cuda"), sizes={"K": 128, "V": 512})) is None
    assert supports(OpContext(torch.device("cuda"), sizes={"K": 129})) == "takes K up to 128, got 129"
    assert supports(on("cuda")) is None, "a size that nobody names is taken on trust"


def test_an_implementation_is_named_and_called_like_its_reference(monkeypatch):
    called = []
    module = type(sys)("sglang_k3.kernels.kda_gate.triton_impl")
    module.kda_gate = lambda *args, **kwargs: called.append((args, kwargs))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    impl = triton_impl(reference.kda_gate)
    assert (impl.name, impl.fn.__name__) == ("triton", "kda_gate")
    assert inspect.signature(impl.fn) == inspect.signature(reference.kda_gate)
    impl.fn(1, 2, 3, lower_bound=-5.0)
    assert called == [((1, 2, 3), {"lower_bound": -5.0})]
