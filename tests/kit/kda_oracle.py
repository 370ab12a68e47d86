"""KDA from the equations, for one head in fp64, in two forms that share nothing.

Legend: C tokens, K key channels, V value channels. States are key-major here, ``[K, V]``, unlike the pools.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Head(NamedTuple):
    """One head of one sequence, fp64: q, k, g ``[C, K]``, v ``[C, V]``, beta ``[C]``."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor


def prepared(head: Head, scale: float) -> Head:
    """q and k over their norms, epsilon inside the root; q scaled."""
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (head.q, head.k))
    return head._replace(q=q * scale, k=k)


def recurrence(head: Head, state_kv: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Token by token; the states after 0, 1, ..., C tokens."""
    outputs, states = [], [state_kv]
    for q, k, v, g, beta in zip(*head, strict=True):
        decayed = torch.diag(g.exp()) @ states[-1]
        u = beta * (v - decayed.T @ k)
        states.append(decayed + torch.outer(k, u))
        outputs.append(states[-1].T @ q)
    return torch.stack(outputs) if outputs else head.v, states


def chunked(head: Head, state_kv: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """A chunk at a time, each by one triangular solve; the last state."""
    outputs = []
    for begin in range(0, head.q.shape[0], chunk):
        q, k, v, g, beta = (x[begin : begin + chunk] for x in head)
        gamma = g.cumsum(0)
        between = (gamma.unsqueeze(1) - gamma.unsqueeze(0)).exp()  # [i, j, K]; only j <= i is used
        a = beta.unsqueeze(1) * torch.einsum("ic,jc,ijc->ij", k, k, between).tril(-1)
        right = beta.unsqueeze(1) * (v - (k * gamma.exp()) @ state_kv)
        u = torch.linalg.solve_triangular(a + torch.eye(len(a), dtype=a.dtype), right, upper=False, unitriangular=True)
        attention = torch.einsum("ic,jc,ijc->ij", q, k, between).tril()
        outputs.append((q * gamma.exp()) @ state_kv + attention @ u)
        state_kv = gamma[-1].exp().unsqueeze(1) * state_kv + (k * (gamma[-1] - gamma).exp()).T @ u
    return torch.cat(outputs), state_kv
