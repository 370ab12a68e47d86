"""How long KDA takes in our kernels and in the ones that the host ships for it, on the same inputs.

    python benchmarks/kda_side_by_side.py                         # one GPU, SGLang installed; a few minutes
    python benchmarks/kda_side_by_side.py --heads 12 --size prefill
    python benchmarks/kda_side_by_side.py --size prefill --set kda_prefill.C=64 kda_prefill.OVER_WARPS=8   # not saved

96 heads are a whole layer of K3, 12 what a rank of eight holds. The host gets the log decay ready made, as we do. Its
prefill takes no snapshot; ours takes one per sequence where the name says ``tracked``. Timed as in ``kernels.py``,
against the same floor. Before a time, the output is compared with ours, and nothing is timed that is further off than
its rounding explains, but for the prefill of SGLang 0.5.16: it takes the decay inside a chunk to base 2 and elsewhere
to base e, which is a fault of results, 9 to 10 % of them, not of time.

What the host decodes with is one kernel that makes the gates as well, for which we have two. That is
``kda_gate+decode``. Its gates are of a model whose decay has no lower bound, so its output is compared with that of
our decode with such gates. Rows go to ``benchmarks/results/kda.json``.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from kernels import floor_us, time_call, time_case
from rows import Row, save
from torch import Tensor
from torch.nn import functional

from sglang_k3.kernels import OPS
from sglang_k3.kernels.case_kit import Cost, Inputs
from sglang_k3.kernels.dispatch import Impl

KEY_DIM = VALUE_DIM = 128
PREFILLS = {"prefill-1x8192": (8192,), "prefill-8x1024": (1024,) * 8, "prefill-64x128": (128,) * 64}
BATCHES = (1, 16, 64, 256)
LARGEST_ERROR = {"kda_decode": 0.02, "kda_prefill": 0.15, "kda_gate+decode": 0.02}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs="+", default=[12, 96])
    parser.add_argument("--size", default="", help="time sizes whose name holds this, such as decode")
    parser.add_argument(
        "--set", nargs="+", default=[], metavar="OP.NAME=NUMBER", help="tile sizes of our kernels to try"
    )
    args = parser.parse_args()
    for setting in args.set:
        name, number = setting.split("=")
        op, constant = name.split(".")
        setattr(importlib.import_module(f"{OPS[op]}.triton_impl"), constant, int(number))
    command = " ".join(["python benchmarks/kda_side_by_side.py", *sys.argv[1:]])

    def report(name: str, error: float, metric: str, us: float, floor: float) -> None:
        print(f"{name:<44} {us:>10.2f} {floor:>9.2f} {us / floor:>7.2f}   {error:.1e}", flush=True)
        row = Row(case=name, metric=metric, value=round(us, 2), unit="us", baseline=round(floor, 2), command=command)
        if not args.set:
            save("kda", [row])

    print(f"{'case':<44} {'us':>10} {'floor':>9} {'ratio':>7}   RMS error to ours", flush=True)
    for heads in args.heads:
        for size, op, case, impls in sizes(heads):
            if args.size not in size:
                continue
            cases = importlib.import_module(f"{OPS[op]}.cases")
            inputs = as_the_host_wants_them(op, cases.make_inputs(case, "cuda"))
            outputs = [output(impl, inputs) for impl in impls]  # of one state: a timed call leaves it changed
            errors = [rms_error(o, outputs[0]) for o in outputs]
            del outputs
            for impl, error in zip(impls, errors, strict=True):
                name = f"{op}/{size}-{heads}-heads/{impl.name}"
                check_error(name, error)
                report(name, error, *time_case(impl, inputs), floor_us(cases.cost(case)))
            del inputs
            torch.cuda.empty_cache()
        for batch in BATCHES:
            if args.size in f"decode-{batch}":
                for who, *figures in times_with_gates(batch, heads):
                    report(f"kda_gate+decode/decode-{batch}-{heads}-heads/{who}", *figures)


def rms_error(o: Tensor, ours: Tensor) -> float:
    return ((o - ours).square().mean() / ours.square().mean()).sqrt().item()


def check_error(name: str, error: float) -> None:
    limit = LARGEST_ERROR[name.split("/")[0]]
    if not error <= limit:
        raise SystemExit(f"{name}: its output is {error:.1e} off ours, more than {limit:g}: not timed.")


def times_with_gates(batch: int, heads: int) -> Iterator[tuple[str, float, str, float, float]]:
    """Who, error, metric, microseconds and floor."""
    width = heads * KEY_DIM
    draw = partial(torch.randn, device="cuda")
    inputs = {
        "mixed_qkv": draw(batch, 3 * width, dtype=torch.bfloat16),
        "a": draw(batch, width, dtype=torch.bfloat16),
        "b": draw(batch, heads, dtype=torch.bfloat16),
        "A_log": draw(heads),
        "dt_bias": draw(heads, KEY_DIM),
        "ssm_states": draw(batch, heads, VALUE_DIM, KEY_DIM),
        "cache_indices": torch.arange(batch, device="cuda", dtype=torch.int32),
    }
    written = (inputs["ssm_states"], inputs["a"])  # the output is as large as a
    floor = floor_us(Cost(sum(x.nbytes for x in (*inputs.values(), *written)), 0))
    for who, call, error in (
        ("triton", gates_and_decode, 0.0),
        ("host", host_gates_and_decode, error_of_the_host(**inputs)),
    ):
        check_error(f"kda_gate+decode/{who}", error)
        yield who, error, *time_call(partial(call, **inputs)), floor


def error_of_the_host(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, ssm_states: Tensor, cache_indices: Tensor
) -> float:
    """Of its output to that of our decode with gates of no lower bound, ``-exp(A_log) softplus(a + dt_bias)``."""
    g = -A_log.exp().unsqueeze(-1) * functional.softplus(a.float().unflatten(-1, (-1, KEY_DIM)) + dt_bias)
    pool = ssm_states.clone()
    ours = decode(mixed_qkv, g, b.float().sigmoid(), ssm_states=pool, cache_indices=cache_indices).float()
    pool.copy_(ssm_states)
    host = host_gates_and_decode(mixed_qkv, a, b, A_log, dt_bias, pool, cache_indices).float()
    return rms_error(host, ours)


def gates_and_decode(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, ssm_states: Tensor, cache_indices: Tensor
) -> Tensor:
    gate = importlib.import_module(OPS["kda_gate"]).IMPLS[0].fn
    g, beta = gate(a.unflatten(-1, (-1, KEY_DIM)), b, A_log, dt_bias, lower_bound=-5.0)
    return decode(mixed_qkv, g, beta, ssm_states=ssm_states, cache_indices=cache_indices)


def decode(mixed_qkv: Tensor, g: Tensor, beta: Tensor, *, ssm_states: Tensor, cache_indices: Tensor) -> Tensor:
    fn = importlib.import_module(OPS["kda_decode"]).IMPLS[0].fn
    q, k, v = mixed_qkv.unflatten(-1, (3, -1, KEY_DIM)).unbind(1)
    o: Tensor = fn(q, k, v, g, beta, ssm_states=ssm_states, cache_indices=cache_indices, scale=KEY_DIM**-0.5)
    return o


def host_gates_and_decode(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, ssm_states: Tensor, cache_indices: Tensor
) -> Tensor:
    o = mixed_qkv.new_empty(len(mixed_qkv), 1, ssm_states.shape[1], VALUE_DIM)
    _host("fused_recurrent_kda_packed_decode", "fused_recurrent")(
        mixed_qkv=mixed_qkv,
        a=a,
        b=b,
        A_log=A_log,
        dt_bias=dt_bias.flatten(),
        scale=KEY_DIM**-0.5,
        initial_state=ssm_states,
        out=o,
        ssm_state_indices=cache_indices,
        use_qk_l2norm_in_kernel=True,
    )
    return o.squeeze(1)


def sizes(heads: int) -> Iterator[tuple[str, str, Any, list[Impl]]]:
    """Name, op, case and implementations, ours first."""
    width = {"heads": heads, "key_dim": KEY_DIM, "value_dim": VALUE_DIM, "dtype": torch.bfloat16, "timed": True}
    for op, host in (("kda_decode", host_decode), ("kda_prefill", host_prefill)):
        module, cases = importlib.import_module(OPS[op]), importlib.import_module(f"{OPS[op]}.cases")
        impls = [module.IMPLS[0], Impl("host", host, lambda _: None)]
        if op == "kda_decode":
            for batch in BATCHES:
                yield f"decode-{batch}", op, cases.Case(batch=batch, **width), impls
            continue
        for size, lens in PREFILLS.items():
            yield size, op, cases.Case(lens=lens, track=False, **width), impls
        yield f"{size}-tracked", op, cases.Case(lens=lens, **width), impls[:1]


def as_the_host_wants_them(op: str, inputs: Inputs) -> Inputs:
    """Slots without gaps in the order of the sequences; for decode also q, k and v without gaps."""
    kwargs = dict(inputs.kwargs)
    names = [name for name in ("cache_indices", "track_indices") if kwargs.get(name) is not None]
    kwargs["ssm_states"] = kwargs["ssm_states"][torch.cat([kwargs[name] for name in names]).long()]
    for n, name in enumerate(names):
        num_seqs = len(kwargs[name])
        kwargs[name] = torch.arange(n * num_seqs, (n + 1) * num_seqs, device=kwargs[name].device, dtype=torch.int32)
    # The prefill of the host writes its output over a v without gaps, so there q, k and v stay views of one tensor.
    return Inputs(tuple(x.contiguous() for x in inputs.args) if op == "kda_decode" else inputs.args, kwargs)


def output(impl: Impl, inputs: Inputs) -> Tensor:
    """One call that leaves the pool of ``inputs`` as it was."""
    o: Tensor = impl.fn(*inputs.args, **{**inputs.kwargs, "ssm_states": inputs.kwargs["ssm_states"].clone()})
    return o.float()


def host_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    ssm_states: Tensor,
    cu_seqlens: Tensor,
    cache_indices: Tensor,
    scale: float,
    **_: Any,
) -> Tensor:
    o: Tensor = _host("chunk_kda")(
        *(x.unsqueeze(0) for x in (q, k, v, g, beta)),
        scale=scale,
        initial_state=ssm_states,
        initial_state_indices=cache_indices,
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=cu_seqlens,
    )
    return o.squeeze(0)


def host_decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    ssm_states: Tensor,
    cache_indices: Tensor,
    scale: float,
) -> Tensor:
    """fla's plain recurrence, which the host ships and does not serve with: its own decode computes gates as well. It
    takes no indices: the slots are those of the sequences in their order."""
    o, _ = _host("fused_recurrent_kda")(
        *(x.unsqueeze(1) for x in (q, k, v, g, beta)), scale=scale, initial_state=ssm_states
    )
    return o.squeeze(1)


def _host(name: str, module: str = "kda") -> Callable[..., Any]:
    fn: Callable[..., Any] = getattr(importlib.import_module(f"sglang.kernels.ops.attention.fla.{module}"), name)
    return fn


if __name__ == "__main__":
    main()
