"""What the Triton kernels share: functions of fp32, in the interpreter too, as exact as what becomes of them needs.

For a result in fp32 they are as exact as those of torch, to one or two ulp: ``tl.exp`` loses a bit for every doubling
of its argument, there is no ``tl.tanh``, and ``/`` is not rounded correctly; libdevice has better ones, but not for the
interpreter. A result that is rounded to 16 bits takes the instructions of the device as they are: off by less than
2^-16 of the value, a sixteenth of half an ulp of fp16.

And what their launchers share: the dtype of products, and how much of a GPU a tile may take.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.runtime.driver import driver

if TYPE_CHECKING:
    from torch import Tensor

# Architectures that give a program 99 KiB of shared memory; others have 163 and more.
SMALL_SHARED_MEMORY = (86, 89, 120, 121)
LN_2 = tl.constexpr(0.6931471805599453)
LOG2_E = 1.4426950408889634


@triton.jit
def exp(x, dtype: tl.constexpr = tl.float32):
    """``exp(x)``: the whole powers of two are taken out first, with ln 2 in two parts so that nothing is lost."""
    if dtype != tl.float32:
        return tl.exp2(x * 1.4426950408889634)
    x = tl.where(x > 89.0, 89.0, tl.where(x < -104.0, -104.0, x))  # infinite and zero from here on; NaN stays NaN
    power = tl.floor(x * 1.4426950408889634 + 0.5)
    rest = (x - power * 0.693359375) + power * 2.12194440e-4
    return tl.exp2(rest * 1.4426950408889634) * tl.exp2(power)


@triton.jit
def sigmoid(x, dtype: tl.constexpr = tl.float32):
    """``1 / (1 + exp(-x))``."""
    return _divide(1.0, 1.0 + exp(-x, dtype), dtype)


@triton.jit
def tanh(x, dtype: tl.constexpr = tl.float32):
    """``tanh(x)``: an odd polynomial near zero, where ``1 - 2 / (exp(2x) + 1)`` would cancel."""
    square = x * x
    if dtype != tl.float32:
        far = 1.0 - _divide(2.0, exp(2.0 * x, dtype) + 1.0, dtype)
        return tl.where(tl.abs(x) < 0.0625, x - x * square * 0.3333333333, far)
    series = -5.70498872745e-3 * square + 2.06390887954e-2
    series = series * square - 5.37397155531e-2
    series = series * square + 1.33314422036e-1
    series = series * square - 3.33332819422e-1
    far = 1.0 - tl.div_rn(2.0, exp(2.0 * tl.abs(x)) + 1.0)
    return tl.where(tl.abs(x) < 0.625, x + x * square * series, tl.where(x < 0.0, -far, far))


@triton.jit
def soft_cap(x, limit, dtype: tl.constexpr = tl.float32):
    """``limit * tanh(x / limit)``, of which SiTU has two."""
    return limit * tanh(x * tl.div_rn(1.0, limit) if dtype != tl.float32 else tl.div_rn(x, limit), dtype)


@triton.jit
def normalise(x, weight, width, eps, dtype: tl.constexpr):
    """The row ``x``, fp32 and zero past ``width``, in ``dtype``: RMSNorm, rounded before the weight."""
    inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(x * x) / width + eps))
    normed = (x * inverse).to(dtype).to(tl.float32)
    return (normed * weight.to(dtype).to(tl.float32)).to(dtype)


@triton.jit
def online_softmax(scores, peak, mass):
    """One step of a running softmax in base 2: new peak, new mass, weights of the scores, factor of what came before.

    A row that has seen no finite score keeps peak -inf and mass 0.
    """
    new_peak = tl.maximum(peak, tl.max(scores, axis=1))
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    weights = tl.exp2(scores - base[:, None])
    factor = tl.exp2(peak - base)
    return new_peak, mass * factor + tl.sum(weights, axis=1), weights, factor


@triton.jit
def _divide(x, y, dtype: tl.constexpr):
    return x / y if dtype != tl.float32 else tl.div_rn(x, y)


def dot_dtype(*tensors: Tensor) -> tl.dtype:
    """What the matrix units multiply: the 16-bit dtype that all tensors share, else fp32."""
    dtypes = {tensor.dtype for tensor in tensors}
    if len(dtypes) > 1 or torch.float32 in dtypes:
        return tl.float32
    return tl.bfloat16 if torch.bfloat16 in dtypes else tl.float16


@functools.cache
def has_small_shared_memory(device: torch.device) -> bool:
    """Whether tiles must be small; never in the interpreter."""
    return device.type != "cpu" and driver.active.get_current_target().arch in SMALL_SHARED_MEMORY
