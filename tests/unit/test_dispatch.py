import importlib
import inspect
import logging
import subprocess
import sys

import pytest
import torch

from sglang_k3.kernels import OPS, OpContext, bind, bind_impl
from sglang_k3.kernels.dispatch import Impl, choose, reference_impl

CPU = OpContext(torch.device("cpu"), torch.float32)


def fast(x):
    return x


def slow(x):
    return x


IMPLS = (
    Impl("triton", fast, lambda ctx: None if ctx.sizes.get("K") == 128 else f"needs K=128, got {ctx.sizes.get('K')}"),
    reference_impl(slow),
)


def test_the_first_that_supports_the_context_is_chosen():
    assert choose(IMPLS, OpContext(torch.device("cpu"), sizes={"K": 128})).fn is fast
    assert choose(IMPLS, OpContext(torch.device("cpu"), sizes={"K": 64})).fn is slow


def test_a_mode_admits_only_its_own():
    assert choose(IMPLS, OpContext(torch.device("cpu"), sizes={"K": 128}), "reference").fn is slow
    assert choose(IMPLS, OpContext(torch.device("cpu"), sizes={"K": 128}), "triton").fn is fast


def test_a_mode_that_cannot_be_met_gives_every_reason_and_a_remedy():
    message = r"triton: needs K=128, got 64; reference: not asked for by mode triton\). Unset K3PLUGIN_KERNELS"
    with pytest.raises(ValueError, match=message):
        choose(IMPLS, OpContext(torch.device("cpu"), sizes={"K": 64}), "triton")


def test_falling_back_is_logged_with_the_reason(caplog):
    with caplog.at_level(logging.INFO, logger="sglang_k3"):
        choose(IMPLS, OpContext(torch.device("cpu"), sizes={"K": 64}))
        choose(IMPLS, OpContext(torch.device("cpu"), sizes={"K": 128}))
    assert [record.getMessage() for record in caplog.records] == [
        "slow runs as reference (triton: needs K=128, got 64)"
    ]


def test_contexts_of_equal_sizes_share_a_choice():
    a, b = (OpContext(torch.device("cpu"), torch.float32, {"K": 1, "V": 2}) for _ in range(2))
    assert a == b
    assert hash(a) == hash(b)
    assert a != OpContext(torch.device("cpu"), torch.float32, {"K": 2, "V": 2})


@pytest.mark.parametrize("op_name", OPS)
def test_every_implementation_has_the_signature_of_its_op(op_name):
    module = importlib.import_module(OPS[op_name])
    assert op_name in module.__all__
    assert module.IMPLS[-1].name == "reference"
    for impl in module.IMPLS:
        assert inspect.signature(impl.fn) == inspect.signature(getattr(module, op_name))


@pytest.mark.parametrize("op_name", OPS)
def test_tensors_are_positional_and_everything_else_is_by_keyword(op_name):
    op = getattr(importlib.import_module(OPS[op_name]), op_name)
    for parameter in inspect.signature(op).parameters.values():
        positional = parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY or (positional and parameter.annotation == "Tensor")


@pytest.mark.parametrize("op_name", OPS)
def test_every_op_has_cases_with_distinct_names_and_a_cost(op_name):
    cases = importlib.import_module(f"{OPS[op_name]}.cases")
    ids = [case.id for case in cases.CASES]
    assert len(set(ids)) == len(ids) <= 25
    assert cases.TOLERANCE in ("bitwise", "ulp", "ratio")
    for case in cases.CASES:
        num_bytes, num_flops = cases.cost(case)
        assert num_bytes >= 0
        if "gpu" in case.marks:  # seconds to draw
            continue
        inputs = cases.make_inputs(case, "cpu")
        # An op that computes reads its first input at least once; pools count by the rows that are touched.
        assert num_flops == 0 or num_bytes >= inputs.args[0].numel() * inputs.args[0].element_size()


@pytest.mark.parametrize("op_name", OPS)
def test_cases_are_the_same_whenever_they_are_made(op_name):
    cases = importlib.import_module(f"{OPS[op_name]}.cases")
    for case in cases.CASES:
        if "gpu" in case.marks:  # seconds to draw
            continue
        first, second = (cases.make_inputs(case, "cpu") for _ in range(2))
        for a, b in zip(first.args, second.args, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_bind_gives_the_bare_implementation():
    module = importlib.import_module(OPS["situ_and_mul"])
    assert bind("situ_and_mul", CPU) is module.reference.situ_and_mul


def test_weights_lie_as_they_are_published_unless_an_implementation_says_otherwise():
    weight = torch.arange(4).view(1, 2, 2)
    for impl in (bind_impl("situ_and_mul", CPU), Impl("triton", fast, lambda _: None)):
        assert impl.layout.arguments == ()
        impl.layout.apply("weight", weight)
        assert impl.layout.read("weight", weight[0]).tolist() == [[0, 1], [2, 3]]
        impl.layout.undo("weight", weight)
        assert weight.flatten().tolist() == [0, 1, 2, 3]
        impl.layout.write("weight", weight[0], torch.tensor([[4.0, 5.0]]), 1)
        assert weight.flatten().tolist() == [0, 1, 4, 5]
        weight = torch.arange(4).view(1, 2, 2)


@pytest.mark.parametrize("op_name", OPS)
def test_a_layout_is_about_arguments_of_the_op(op_name):
    module = importlib.import_module(OPS[op_name])
    for impl in module.IMPLS:
        assert set(impl.layout.arguments) <= set(inspect.signature(getattr(module, op_name)).parameters)


def test_bind_follows_the_environment(monkeypatch):
    bind("situ_and_mul", CPU)
    monkeypatch.setenv("K3PLUGIN_KERNELS", "fastest")
    with pytest.raises(ValueError, match="K3PLUGIN_KERNELS='fastest' is not one of auto, triton, reference"):
        bind("situ_and_mul", CPU)


def test_an_unknown_op_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match=r"no op 'kda_prefil'\. Known: .*kda_prefill"):
        bind("kda_prefil", CPU)


def test_ops_load_neither_triton_nor_the_host():
    code = (
        "import importlib, sys; from sglang_k3.kernels import OPS\n"
        "for module in OPS.values(): importlib.import_module(module); importlib.import_module(module + '.cases')\n"
        "print([m for m in ('triton', 'sglang', 'pytest') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
