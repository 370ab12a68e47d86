"""Every Triton kernel does what the reference of its op does: same results, same pools, row by row the same bits.

With the marker ``gpu`` the kernels run on all cases. Without it Triton's interpreter runs the small ones on the CPU;
that has to be chosen before Triton is imported, so one test starts this file again in a process of its own.
"""

import importlib
import inspect
import os
import subprocess
import sys

import pytest
import torch

from sglang_k3.env import triton_interprets
from sglang_k3.kernels import OPS
from tests.kit.compare import assert_bitwise, assert_ulp
from tests.kit.ops import clone_pool, numerics_of
from tests.kit.tolerance import assert_close

SMALL = 1_000_000  # bytes and operations of a case that the interpreter finishes in about a second
OPS_IN_TRITON = [op for op in OPS if any(impl.name == "triton" for impl in importlib.import_module(OPS[op]).IMPLS)]

# For ops whose rows are independent of each other: the dimension that counts the rows, by argument.
ROWS = {
    "attn_merge": {"out_a": 0, "lse_a": 0, "out_b": 0, "lse_b": 0},
    "depth_mix": {"bank": 1, "prefix_sum": 0, "delta": 0},
    "gated_rms_norm": {"o": 0, "gate": 0},
    "kda_decode": {"q": 0, "k": 0, "v": 0, "g": 0, "beta": 0, "cache_indices": 0},
    "kda_gate": {"a": 0, "b": 0},
    "kv_gather": {"loc": 0, "owner_mask": 0},
    "rms_norm": {"x": 0},
    "router_topk": {"x": 0},
    "short_conv_decode": {"x": 0, "cache_indices": 0},
    "sigmoid_gate": {"o": 0, "gate": 0},
    "situ_and_mul": {"gate_up": 0},
}


def cases_of(op):
    return importlib.import_module(f"{OPS[op]}.cases")


def parameter(op, case, *marks):
    return pytest.param(op, case, id=f"{op}-{case.id}", marks=[getattr(pytest.mark, m) for m in {*case.marks, *marks}])


def cases_to_run():
    """Every case on a GPU, the small ones in the interpreter."""
    return [
        parameter(op, case, *(() if triton_interprets() else ("gpu",)))
        for op in OPS_IN_TRITON
        for case in cases_of(op).CASES
        if not triton_interprets() or (not case.marks and sum(cases_of(op).cost(case)) <= SMALL)
    ]


def largest_cases():
    return [parameter(op, max(cases_of(op).CASES, key=cases_of(op).cost)) for op in OPS_IN_TRITON]


def implementations(op):
    impls = {impl.name: impl for impl in importlib.import_module(OPS[op]).IMPLS}
    return impls["triton"], impls["reference"]


def named(op, inputs):
    """All arguments by name, the positional ones first."""
    parameters = inspect.signature(getattr(importlib.import_module(OPS[op]), op)).parameters
    return {**dict(zip(parameters, inputs.args, strict=False)), **inputs.kwargs}


def copied(arguments):
    """Copies of the same strides, offsets and surroundings."""
    return {name: clone_pool(value) if torch.is_tensor(value) else value for name, value in arguments.items()}


def call(op, impl, arguments):
    """The results as a tuple; tensors that are options of the op go by keyword.

    Weights are copied into the layout of the implementation.
    """
    moved = {name: arguments[name] for name in impl.layout.arguments if arguments.get(name) is not None}
    for name, weight in moved.items():
        moved[name] = weight.clone(memory_format=torch.contiguous_format)
        impl.layout.apply(name, moved[name])
    arguments = arguments | moved
    kinds = inspect.signature(getattr(importlib.import_module(OPS[op]), op)).parameters
    args = [value for name, value in arguments.items() if kinds[name].kind is not inspect.Parameter.KEYWORD_ONLY]
    kwargs = {name: value for name, value in arguments.items() if kinds[name].kind is inspect.Parameter.KEYWORD_ONLY}
    returned = impl.fn(*args, **kwargs)
    return returned if isinstance(returned, tuple) else () if returned is None else (returned,)


def storage(tensor):
    """Everything that lies in the memory of a tensor, also what its strides leave out."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())


def assert_agree(actual, expected, op, case, what):
    """Both may be as far from the exact result as the test of the op allows, so twice as far from each other."""
    numerics = numerics_of(cases_of(op), case)
    if not actual.is_floating_point():
        assert_bitwise(actual, expected, what)
    elif numerics == "ulp":
        max_ulp = importlib.import_module(f"tests.kernels.test_{op}").MAX_ULP[actual.dtype]
        assert_ulp(actual, expected, max_ulp=2 * max_ulp, what=what)
    else:
        inner = cases_of(op).inner_dtype(case) if hasattr(cases_of(op), "inner_dtype") else None
        assert_close(actual, expected, numerics, what, inner=inner)


def assert_same_memory(actual, expected, before, op, case, what):
    """Rows that the reference changed agree in the class of the op; all else is still there bit for bit.

    Rows and not elements: one that the reference rounded back to what it was may come out an ulp beside it.
    """
    changed = (expected != before) & ~(expected.isnan() & before.isnan())
    written = torch.zeros(storage(before).shape, dtype=torch.bool, device=before.device)
    if changed.numel():
        rows = changed.any(dim=-1, keepdim=True).expand_as(changed)
        written.as_strided(before.shape, before.stride(), before.storage_offset()).copy_(rows)
    actual, expected, before = storage(actual), storage(expected), storage(before)
    assert_bitwise(actual[~written], before[~written], f"{what}, outside of what is written")
    assert_agree(actual[written], expected[written], op, case, what)


@pytest.mark.parametrize(("op", "case"), cases_to_run())
def test_results_and_memory_are_those_of_the_reference(op, case, device):
    triton, reference = implementations(op)
    before = named(op, cases_of(op).make_inputs(case, device))
    ours, theirs = copied(before), copied(before)
    actual, expected = call(op, triton, ours), call(op, reference, theirs)
    assert len(actual) == len(expected)
    exact = getattr(cases_of(op), "EXACT_RESULTS", ())
    for n, (a, e) in enumerate(zip(actual, expected, strict=True)):
        if n in exact:
            assert_bitwise(a, e, f"result {n}")
        else:
            assert_agree(a, e, op, case, f"result {n}")
    for name, value in before.items():
        if torch.is_tensor(value):
            assert_same_memory(ours[name], theirs[name], value, op, case, name)


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "case"), [p for p in cases_to_run() if p.values[0] in ROWS])
def test_a_row_alone_has_the_bits_that_it_has_in_a_batch(op, case, device):
    triton, _ = implementations(op)
    arguments = named(op, cases_of(op).make_inputs(case, device))
    together = call(op, triton, copied(arguments))
    for row in range(together[0].shape[0]):
        alone = {
            name: value.narrow(dim, row, 1) if (dim := ROWS[op].get(name)) is not None and value is not None else value
            for name, value in copied(arguments).items()
        }
        for n, result in enumerate(call(op, triton, alone)):
            assert_bitwise(result, together[n][row : row + 1], f"result {n}, row {row}")


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "case"), largest_cases())
def test_a_call_can_be_captured_in_a_cuda_graph(op, case, device):
    triton, _ = implementations(op)
    before = named(op, cases_of(op).make_inputs(case, device))
    eager, captured = copied(before), copied(before)
    expected = call(op, triton, eager)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = call(op, triton, captured)
    graph.replay()
    for n, (a, e) in enumerate(zip(actual, expected, strict=True)):
        assert_bitwise(a, e, f"result {n}")
    for name, value in eager.items():
        if torch.is_tensor(value):
            assert_bitwise(storage(captured[name]), storage(value), name)


@pytest.mark.parametrize("op", OPS_IN_TRITON)
def test_the_launcher_has_the_signature_of_its_op(op):
    module = importlib.import_module(OPS[op])
    launcher = getattr(importlib.import_module(f"{OPS[op]}.triton_impl"), op)
    assert inspect.signature(launcher) == inspect.signature(getattr(module, op))


def test_the_interpreter_agrees_on_the_cpu():
    chosen = ["-m", "not gpu", "-k", test_results_and_memory_are_those_of_the_reference.__name__]
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *chosen, __file__],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-2000:]
