"""The K3 text model over whole batches and differentiable, to fit a tiny one on a CPU.

Written from the equations like ``reference``, in the forms that are quick to train: KDA in chunks, attention over all
positions at once, every expert evaluated and weighted by its routing weight (zero if it was not chosen). Sequences
are padded on the right, which a causal model does not see.

What is trained is what ships: each forward pass reads its matrices through the grid on which they are stored
(``fitted.round_trip``, MXFP4 for experts), and the gradient goes straight through.

Legend: B sequences, T positions, N = B * T, H heads, K key dim, V value dim, C chunk, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sglang_k3.config import K3Config
from sglang_k3.testing import fitted, mxfp4
from sglang_k3.testing.equations import L2NORM_EPS, ROUTING_WEIGHT_EPS

CHUNK = 16  # at most 5 * 16 = 80 of log-decay, so that exp of half of it is far from float32's limits
LATENT_NORM_EPS = 1e-6


class FitModel(nn.Module):
    """Logits of whole batches, with gradients.

    Args:
        config: the checked ``config.json``; one expert group, renormalised routing, as in K3.
        weights: initial values by published name without ``language_model.``, as ``load_text_weights`` returns them.
        quantize: read matrices through their storage grid; False computes with the weights as they are.
    """

    def __init__(self, config: K3Config, weights: Mapping[str, Tensor], *, quantize: bool = True) -> None:
        super().__init__()
        self.config = config
        self.quantize = quantize
        self.params = nn.ParameterDict(
            {_key(name): nn.Parameter(weight.float().clone()) for name, weight in _stack_experts(weights).items()}
        )
        for name, parameter in self.params.items():
            parameter.requires_grad_(not name.endswith("e_score_correction_bias"))
        self.expert_load: dict[str, Tensor] = {}

    def published(self) -> dict[str, Tensor]:
        """The weights by published name without ``language_model.``, experts apart, on their grids, float32."""
        weights: dict[str, Tensor] = {}
        for key in self.params:
            name = key.replace("/", ".")
            weight = self.weight(name).detach()
            base, is_experts, which = name.partition(".experts.")
            if is_experts:
                weights |= {f"{base}.experts.{e}.{which}": w for e, w in enumerate(weight)}
            else:
                weights[name] = weight
        return weights

    def weight(self, name: str) -> Tensor:
        """A parameter as it is stored, the gradient passing straight through; experts stacked under ``experts.w1``."""
        weight: Tensor = self.params[_key(name)]
        if not self.quantize:
            return weight
        exact = weight.detach()
        if ".experts." in name:
            stored = mxfp4.decode(*mxfp4.encode(exact))
        else:
            stored = fitted.round_trip(name, exact)
        return weight + (stored - exact)

    def forward(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Logits of the next token.

        Args:
            ids: ``[B, T]``.
            positions: boolean ``[B, T]``, where logits are wanted; None for everywhere.
        Returns:
            ``[B, T, vocab]``, or ``[n, vocab]`` for the ``n`` wanted positions in row-major order.
        """
        padding = -ids.shape[1] % CHUNK
        hidden = self._hidden(functional.pad(ids, (0, padding)))[:, : ids.shape[1]]
        if positions is not None:
            hidden = hidden[positions]
        tied = self.config.tie_word_embeddings
        return self._linear(hidden, "model.embed_tokens" if tied else "lm_head")

    def _hidden(self, ids: Tensor) -> Tensor:
        bank: list[Tensor] = []
        prefix_sum: Tensor | None = functional.embedding(ids, self.weight("model.embed_tokens.weight"))
        for layer in range(self.config.num_hidden_layers):
            name = f"model.layers.{layer}"
            assert prefix_sum is not None
            mixed = self._mix(bank, prefix_sum, f"{name}.self_attention_res")
            if self.config.appends_bank_row(layer):
                bank.append(prefix_sum)
                prefix_sum = None
            x = self._rms(mixed, f"{name}.input_layernorm")
            attention = self._mla if self.config.is_full_attention(layer) else self._kda
            attended = self._linear(attention(x, f"{name}.self_attn"), f"{name}.self_attn.o_proj")
            prefix_sum = attended if prefix_sum is None else prefix_sum + attended
            x = self._rms(self._mix(bank, prefix_sum, f"{name}.mlp_res"), f"{name}.post_attention_layernorm")
            is_moe = self.config.is_moe(layer)
            fed = self._latent_moe(x, f"{name}.block_sparse_moe") if is_moe else self._mlp(x, f"{name}.mlp")
            prefix_sum = prefix_sum + fed
        assert prefix_sum is not None
        return self._rms(self._mix(bank, prefix_sum, "model.output_attn_res"), "model.norm")

    def _mix(self, bank: list[Tensor], prefix_sum: Tensor, name: str) -> Tensor:
        if not bank:
            return prefix_sum
        folded = self.weight(f"{name}_norm.weight") * self.weight(f"{name}_proj.weight")[0]
        rows = torch.stack([*bank, prefix_sum])
        inverse_rms = torch.rsqrt(rows.square().mean(-1) + self.config.rms_norm_eps)
        shares = torch.softmax((rows @ folded) * inverse_rms, dim=0)
        return (shares[..., None] * rows).sum(0)

    def _kda(self, x: Tensor, name: str) -> Tensor:
        """``[B, T, D]`` -> ``[B, T, H * V]``, gated."""
        kda = self.config.kda
        q, k, v = (self._convolved(x, name, c).unflatten(-1, (kda.num_heads, kda.head_dim)) for c in "qkv")
        a = self._linear(self._linear(x, f"{name}.f_a_proj"), f"{name}.f_b_proj")
        rate = torch.exp(self.weight(f"{name}.A_log")[: kda.num_heads])[:, None]
        z = (a + self.weight(f"{name}.dt_bias")).unflatten(-1, (kda.num_heads, kda.head_dim))
        g = kda.gate_lower_bound * torch.sigmoid(rate * z)
        beta = torch.sigmoid(self._linear(x, f"{name}.b_proj"))
        o = chunked_delta_rule(_l2norm(q) * kda.head_dim**-0.5, _l2norm(k), v, g, beta)
        normed = _unit_rms(o, self.config.rms_norm_eps) * self.weight(f"{name}.o_norm.weight")
        return normed.flatten(-2) * torch.sigmoid(self._linear(x, f"{name}.g_proj"))

    def _convolved(self, x: Tensor, name: str, channel: str) -> Tensor:
        taps = self.weight(f"{name}.{channel}_conv1d.weight")[:, 0]  # [H * K, W]
        width, length = taps.shape[1], x.shape[1]
        padded = functional.pad(self._linear(x, f"{name}.{channel}_proj"), (0, 0, width - 1, 0))
        mixed = padded[:, :length] * taps[:, 0]
        for tap in range(1, width):
            mixed = mixed + padded[:, tap : tap + length] * taps[:, tap]
        return functional.silu(mixed)

    def _mla(self, x: Tensor, name: str) -> Tensor:
        """``[B, T, D]`` -> ``[B, T, H * V]``, gated."""
        mla = self.config.mla
        q_latent = self._rms(self._linear(x, f"{name}.q_a_proj"), f"{name}.q_a_layernorm", LATENT_NORM_EPS)
        q = self._linear(q_latent, f"{name}.q_b_proj").unflatten(-1, (mla.num_heads, mla.qk_head_dim))
        down = self._linear(x, f"{name}.kv_a_proj_with_mqa")
        latent, shared_key = down.split([mla.kv_lora_rank, mla.qk_rope_head_dim], dim=-1)
        latent = self._rms(latent, f"{name}.kv_a_layernorm", LATENT_NORM_EPS)
        up = self._linear(latent, f"{name}.kv_b_proj").unflatten(-1, (mla.num_heads, -1))
        own_key, value = up.split([mla.qk_nope_head_dim, mla.v_head_dim], dim=-1)
        shared = shared_key[:, :, None].expand(-1, -1, mla.num_heads, -1)
        key = torch.cat([own_key, shared], dim=-1)
        heads = functional.scaled_dot_product_attention(
            q.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2), is_causal=True, scale=mla.scale
        )
        flat = heads.transpose(1, 2).flatten(-2)
        return flat * torch.sigmoid(self._linear(x, f"{name}.g_proj")) if mla.use_output_gate else flat

    def _latent_moe(self, x: Tensor, name: str) -> Tensor:
        z = self._linear(x, f"{name}.routed_expert_down_proj")
        shares = self._route(x, name)  # [B, T, E]
        w1, w3, w2 = (self.weight(f"{name}.experts.{w}.weight") for w in ("w1", "w3", "w2"))
        experts, width, _ = w1.shape
        hidden = self._situ(z @ w1.flatten(0, 1).T, z @ w3.flatten(0, 1).T).unflatten(-1, (experts, width))
        routed = (shares[..., None] * hidden).flatten(-2) @ w2.transpose(0, 1).flatten(1).T
        if self.config.moe.use_norm:
            routed = self._rms(routed, f"{name}.routed_expert_norm")
        out = self._linear(routed, f"{name}.routed_expert_up_proj")
        return out + self._mlp(x, f"{name}.shared_experts") if self.config.moe.num_shared_experts else out

    def _route(self, x: Tensor, name: str) -> Tensor:
        """Routing weights ``[B, T, E]``, zero where not chosen; remembers how often each expert was."""
        moe = self.config.moe
        scores = torch.sigmoid(self._linear(x, f"{name}.gate"))
        chosen = (scores + self.weight(f"{name}.gate.e_score_correction_bias")).topk(moe.top_k, dim=-1).indices
        mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        self.expert_load[name] = mask.detach().flatten(0, -2).mean(0)
        kept = scores * mask
        return kept / (kept.sum(-1, keepdim=True) + ROUTING_WEIGHT_EPS) * moe.routed_scaling_factor

    def _mlp(self, x: Tensor, name: str) -> Tensor:
        hidden = self._situ(self._linear(x, f"{name}.gate_proj"), self._linear(x, f"{name}.up_proj"))
        return self._linear(hidden, f"{name}.down_proj")

    def _situ(self, gate: Tensor, up: Tensor) -> Tensor:
        beta, linear_beta = self.config.activation_situ_beta, self.config.activation_situ_linear_beta
        out: Tensor = Situ.apply(gate, up, beta, linear_beta)  # type: ignore[no-untyped-call]
        return out

    def _rms(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        return _unit_rms(x, self.config.rms_norm_eps if eps is None else eps) * self.weight(f"{name}.weight")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return functional.linear(x, self.weight(f"{name}.weight"))


class Situ(torch.autograd.Function):
    """SiTU with its derivative by hand: a third of the passes over memory that autograd would make."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, beta: float, linear_beta: float | None) -> Tensor:
        capped_gate, share = torch.tanh(gate / beta), torch.sigmoid(gate)
        capped_up = up if linear_beta is None else torch.tanh(up / linear_beta).mul_(linear_beta)
        ctx.save_for_backward(capped_gate, share, capped_up)
        ctx.beta, ctx.linear_beta = beta, linear_beta
        return (capped_gate * share).mul_(capped_up).mul_(beta)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> tuple[Tensor, Tensor, None, None]:
        capped_gate, share, capped_up = ctx.saved_tensors
        scaled = outer[0] * share
        of_up = scaled * capped_gate
        of_up.mul_(ctx.beta)
        # d/dg beta tanh(g / beta) sigmoid(g) = sigmoid(g) (1 - tanh^2 + beta tanh (1 - sigmoid(g)))
        slope = torch.addcmul(capped_gate, capped_gate, share, value=-1).mul_(ctx.beta)
        slope.addcmul_(capped_gate, capped_gate, value=-1).add_(1)
        of_gate = scaled.mul_(capped_up).mul_(slope)
        if ctx.linear_beta is not None:
            of_up.addcmul_(of_up * capped_up, capped_up, value=-1 / ctx.linear_beta**2)
        return of_gate, of_up, None, None


def chunked_delta_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The gated delta rule from a zero state, ``CHUNK`` tokens at a time (fact sheet 3.3.5, chunk form).

    Args:
        q, k, g: ``[B, T, H, K]``, q and k normalised and q scaled; T is a multiple of ``CHUNK``.
        v: ``[B, T, H, V]``. beta: ``[B, T, H]``.
    Returns:
        ``[B, T, H, V]``.
    """
    q, k, v, g = (x.unflatten(1, (-1, CHUNK)).permute(1, 0, 3, 2, 4) for x in (q, k, v, g))  # [n, B, H, C, .]
    beta = beta.unflatten(1, (-1, CHUNK)).permute(1, 0, 3, 2)[..., None]
    decay = g.cumsum(-2)
    centre = decay[..., CHUNK // 2 - 1, None, :]  # keeps both factors of exp(decay_i - decay_j) in range
    rising, falling = k * torch.exp(centre - decay), torch.exp(decay - centre)
    identity = torch.eye(CHUNK, dtype=q.dtype)
    system = identity + (beta * ((k * falling) @ rising.mT)).tril(-1)
    from_start = torch.exp(decay)
    solved = torch.linalg.solve_triangular(
        system, beta * torch.cat([v, k * from_start], -1), upper=False, unitriangular=True
    )
    own, of_state = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    scores = ((q * falling) @ rising.mT).tril()
    q_from_start = q * from_start
    last = decay[..., -1:, :]
    k_to_end, keep = k * torch.exp(last - decay), torch.exp(last).mT
    state = q.new_zeros(*q.shape[1:3], k.shape[-1], v.shape[-1])
    outputs = []
    for i in range(q.shape[0]):
        update = own[i] - of_state[i] @ state
        outputs.append(q_from_start[i] @ state + scores[i] @ update)
        state = keep[i] * state + k_to_end[i].mT @ update
    return torch.stack(outputs, dim=1).permute(0, 1, 3, 2, 4).flatten(1, 2)


def _key(name: str) -> str:
    return name.replace(".", "/")  # a ParameterDict takes no dots


def _stack_experts(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``x.experts.{E}.w1.weight`` becomes ``x.experts.w1.weight`` with a leading expert dimension."""
    stacked: dict[str, Tensor] = {}
    experts: dict[str, list[Tensor]] = {}
    for name, weight in weights.items():
        base, is_expert, rest = name.partition(".experts.")
        if is_expert:
            experts.setdefault(f"{base}.experts.{rest.split('.', 1)[1]}", []).append(weight)
        else:
            stacked[name] = weight
    return stacked | {name: torch.stack(group) for name, group in experts.items()}


def _unit_rms(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def _l2norm(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2NORM_EPS)
