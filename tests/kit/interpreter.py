"""Two faults of Triton 3.6's interpreter, mended: what it does in bf16 is not what any GPU does.

It narrows fp32 to bf16 by cutting the low bits off (hardware rounds to nearest, ties to even), and ``tl.dot``
multiplies the bit patterns of bf16 operands as integers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def mend(monkeypatch: Any) -> None:
    """Until the end of a test, through pytest's ``monkeypatch``."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert, builder = interpreter._convert_float, interpreter.InterpreterBuilder
    dot = builder.create_dot

    def convert_float(data: Any, input_dtype: Any, output_dtype: Any, rounding_mode: Any) -> Any:
        if (input_dtype, output_dtype) != (tl.float32, tl.bfloat16):
            return convert(data, input_dtype, output_dtype, rounding_mode)
        narrowed = torch.from_numpy(np.array(data, dtype=np.float32)).bfloat16()
        return narrowed.view(torch.int16).numpy().view(np.uint16)

    def create_dot(self: Any, a: Any, b: Any, d: Any, *options: Any) -> Any:
        wide = [self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)]
        return dot(self, *wide, d, *options)

    monkeypatch.setattr(interpreter, "_convert_float", convert_float)
    monkeypatch.setattr(builder, "create_dot", create_dot)
