import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_bf16_in_triton_s_interpreter_is_what_torch_makes_of_it(tmp_path):
    """A process of its own, since Triton chooses the interpreter when it is imported."""
    program = tmp_path / "program.py"
    program.write_text(
        textwrap.dedent("""
            import pytest, torch, triton
            import triton.language as tl
            from tests.kit import interpreter

            @triton.jit
            def multiply(a_ptr, b_ptr, out_ptr, N: tl.constexpr):
                at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
                product = tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at))
                tl.store(out_ptr + at, product.to(tl.bfloat16))

            interpreter.mend(pytest.MonkeyPatch())
            a, b = torch.randint(-99, 100, (2, 16, 16)).bfloat16()  # exact in fp32 in any order
            out = torch.empty_like(a)
            multiply[(1,)](a, b, out, N=16)
            print(torch.equal(out, (a.float() @ b.float()).bfloat16()))
        """)
    )
    ran = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "True\n"
