"""Reference model: the K3 text model for one sequence, one token at a time, in float32 or float64.

The slow and obvious form of everything: the KDA recurrence, MLA with explicit per-head keys and values, AttnRes
over a Python list of rows, a loop over the chosen experts. It shares no code with ``sglang_k3.kernels`` and
``sglang_k3.models``; only ``config.json`` is read through ``K3Config``.

    model = ReferenceModel.from_checkpoint(path)
    model.logprobs(token_ids)           # [len, vocab]
    ids, gaps = model.greedy(prompt, 16)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from sglang_k3.config import K3Config
from sglang_k3.errors import CheckpointError
from sglang_k3.testing import equations, mxfp4

TEXT_PREFIX = "language_model."


@dataclasses.dataclass(frozen=True)
class KDAState:
    """Attributes:
    window: the last ``W - 1`` inputs of the convolutions, oldest first, ``[W - 1, 3 * H * K]`` (q, k, v).
    state_kv: ``[H, K, V]``.
    """

    window: Tensor
    state_kv: Tensor


@dataclasses.dataclass(frozen=True)
class MLAState:
    """Attributes:
    keys: ``[n, H, nope + rope]``.
    values: ``[n, H, V]``.
    """

    keys: Tensor
    values: Tensor


@dataclasses.dataclass
class ReferenceState:
    """All that a sequence carries from token to token; ``layers[L]`` is replaced, its tensors never modified."""

    layers: list[KDAState | MLAState]
    num_tokens: int = 0

    def clone(self) -> ReferenceState:
        """An independent copy: stepping one leaves the other as it is."""
        return ReferenceState(list(self.layers), self.num_tokens)


class ReferenceModel:
    """The reference for one checkpoint.

    Args:
        config: the checked ``config.json``.
        weights: every tensor of the language model by its published name without ``language_model.``; experts as
            ``...experts.{E}.w1.weight`` (see ``load_text_weights``).
        dtype: float32 or float64; everything is computed in it.
        latent_norm_eps: epsilon of ``q_a_layernorm`` and ``kv_a_layernorm``.
        round_to: round each value that a served model keeps in its run dtype to this dtype, to measure the noise that
            such a run legitimately shows; ``None`` rounds nothing.
        device: where weights and states are.
    """

    def __init__(
        self,
        config: K3Config,
        weights: Mapping[str, Tensor],
        *,
        dtype: torch.dtype = torch.float32,
        latent_norm_eps: float = 1e-6,
        round_to: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(
                f"dtype={dtype}: the reference computes in torch.float32 or torch.float64; "
                "use round_to to imitate a run in a lower precision."
            )
        self.config = config
        self.dtype = dtype
        self.latent_norm_eps = latent_norm_eps
        self.round_to = round_to
        self.device = device
        self.weights = {name: tensor.to(device, dtype) for name, tensor in weights.items()}

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        dtype: torch.dtype = torch.float32,
        *,
        latent_norm_eps: float = 1e-6,
        round_to: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> ReferenceModel:
        """Read ``config.json`` and the safetensors files of a checkpoint folder.

        Raises:
            CheckpointError: no safetensors file is there.
        """
        folder = Path(path)
        config = K3Config.from_dict(json.loads((folder / "config.json").read_text()))
        weights = load_text_weights(folder, dtype)
        return cls(config, weights, dtype=dtype, latent_norm_eps=latent_norm_eps, round_to=round_to, device=device)

    def new_state(self) -> ReferenceState:
        """The state of an empty sequence."""
        kda, mla = self.config.kda, self.config.mla
        zeros = functools.partial(torch.zeros, dtype=self.dtype, device=self.device)
        empty_kda = KDAState(
            window=zeros(kda.short_conv_kernel_size - 1, 3 * kda.width),
            state_kv=zeros(kda.num_heads, kda.head_dim, kda.head_dim),
        )
        empty_mla = MLAState(
            keys=zeros(0, mla.num_heads, mla.qk_head_dim), values=zeros(0, mla.num_heads, mla.v_head_dim)
        )
        full = self.config.full_attention_layers
        return ReferenceState([empty_mla if i in full else empty_kda for i in range(self.config.num_hidden_layers)])

    def step(self, state: ReferenceState, token_id: int) -> Tensor:
        """Feed one token, advance ``state`` in place, return the next token's logits ``[vocab]``, float32."""
        with _one_thread():
            return self._forward(state, token_id, {}).float()

    def logprobs(self, token_ids: Sequence[int]) -> Tensor:
        """Log-probabilities of the next token after each given token, ``[len, vocab]``, float32."""
        state = self.new_state()
        return torch.log_softmax(torch.stack([self.step(state, token_id) for token_id in token_ids]), dim=-1)

    def greedy(self, prompt_ids: Sequence[int], num_new_tokens: int) -> tuple[list[int], list[float]]:
        """Continue a prompt greedily, past any end token.

        Returns:
            The new ids, and for each the distance between the two best logits: where it is below the noise of a
            run, the run may rightly choose another token.
        """
        if not prompt_ids:
            raise ValueError("prompt_ids is empty: greedy needs at least one token to start from.")
        state = self.new_state()
        logits = torch.stack([self.step(state, token_id) for token_id in prompt_ids])[-1]
        ids: list[int] = []
        gaps: list[float] = []
        for _ in range(num_new_tokens):
            best = logits.topk(2)
            ids.append(int(best.indices[0]))
            gaps.append(float(best.values[0] - best.values[1]))
            logits = self.step(state, ids[-1])
        return ids, gaps

    def trace(self, token_ids: Sequence[int]) -> dict[str, Tensor]:
        """What each sub-layer read and wrote, to find the first layer in which a served model differs.

        Returns:
            ``layers.{L}.attention_mix``, ``.attention_output``, ``.mlp_mix``, ``.mlp_output`` and ``final_mix``, each
            ``[len, hidden]``. A mix is the residual before the sub-layer's norm; an output is what is added.
        """
        state = self.new_state()
        rows: list[dict[str, Tensor]] = []
        for token_id in token_ids:
            row: dict[str, Tensor] = {}
            with _one_thread():
                self._forward(state, token_id, row)
            rows.append(row)
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def _forward(self, state: ReferenceState, token_id: int, seen: dict[str, Tensor]) -> Tensor:
        """One token through all layers; fills ``seen`` with the entries that ``trace`` describes."""
        block = self.config.attn_res_block_size
        bank: list[Tensor] = []
        prefix_sum: Tensor | None = self._weight("model.embed_tokens.weight")[token_id]
        for layer in range(self.config.num_hidden_layers):
            name, key = f"model.layers.{layer}", f"layers.{layer}"
            assert prefix_sum is not None
            mixed = self._mix(bank, prefix_sum, f"{name}.self_attention_res")
            if block is not None and layer % block == 0:
                bank.append(prefix_sum)
                prefix_sum = None
            attended = self._attention(state, layer, self._rms(mixed, f"{name}.input_layernorm"))
            prefix_sum = attended if prefix_sum is None else self._round(prefix_sum + attended)
            mlp_mixed = self._mix(bank, prefix_sum, f"{name}.mlp_res")
            fed = self._feed_forward(layer, self._rms(mlp_mixed, f"{name}.post_attention_layernorm"))
            prefix_sum = self._round(prefix_sum + fed)
            seen |= {f"{key}.attention_mix": mixed, f"{key}.attention_output": attended}
            seen |= {f"{key}.mlp_mix": mlp_mixed, f"{key}.mlp_output": fed}
        assert prefix_sum is not None
        seen["final_mix"] = self._mix(bank, prefix_sum, "model.output_attn_res")
        state.num_tokens += 1
        tied = self.config.tie_word_embeddings
        return self._linear(self._rms(seen["final_mix"], "model.norm"), "model.embed_tokens" if tied else "lm_head")

    def _mix(self, bank: list[Tensor], prefix_sum: Tensor, name: str) -> Tensor:
        """AttnRes: the frozen rows, then the running prefix. An empty bank gives the prefix itself."""
        if not bank:
            return prefix_sum
        mixed = equations.depth_mix(
            [*bank, prefix_sum],
            norm_weight=self._weight(f"{name}_norm.weight"),
            proj=self._weight(f"{name}_proj.weight")[0],
            eps=self.config.rms_norm_eps,
        )
        return self._round(mixed)

    def _attention(self, state: ReferenceState, layer: int, x: Tensor) -> Tensor:
        name, layer_state = f"model.layers.{layer}.self_attn", state.layers[layer]
        if isinstance(layer_state, MLAState):
            state.layers[layer], heads = self._mla(layer_state, x, name)
        else:
            state.layers[layer], heads = self._kda(layer_state, x, name)
        return self._linear(heads.flatten(), f"{name}.o_proj")

    def _kda(self, state: KDAState, x: Tensor, name: str) -> tuple[KDAState, Tensor]:
        """Kimi Delta Attention up to the output projection: the new state and ``[H, V]``."""
        kda = self.config.kda
        shape = (kda.num_heads, kda.head_dim)
        inputs = torch.cat([self._linear(x, f"{name}.{c}_proj") for c in "qkv"])
        taps = torch.cat([self._weight(f"{name}.{c}_conv1d.weight")[:, 0] for c in "qkv"])
        window = torch.cat([state.window, inputs[None]])
        q, k, v = self._round(equations.short_conv(window, taps)).view(3, *shape)
        a = self._linear(self._linear(x, f"{name}.f_a_proj"), f"{name}.f_b_proj").view(shape)
        g = equations.log_decay(
            a,
            self._weight(f"{name}.A_log")[: kda.num_heads],
            self._weight(f"{name}.dt_bias").view(shape),
            lower_bound=kda.gate_lower_bound,
        )
        beta = torch.sigmoid(self._linear(x, f"{name}.b_proj"))
        scaled_q = equations.l2norm(q) * kda.head_dim**-0.5
        state_kv, o = equations.delta_rule(state.state_kv, scaled_q, equations.l2norm(k), v, g, beta)
        normed = equations.unit_rms(self._round(o), eps=self.config.rms_norm_eps)
        output_gate = torch.sigmoid(self._linear(x, f"{name}.g_proj")).view(shape)
        heads = self._round(normed * self._weight(f"{name}.o_norm.weight") * output_gate)
        return KDAState(window[1:], state_kv), heads

    def _mla(self, state: MLAState, x: Tensor, name: str) -> tuple[MLAState, Tensor]:
        """Multi-head latent attention, not absorbed, up to the output projection: the new state and ``[H, V]``."""
        mla, eps = self.config.mla, self.latent_norm_eps
        q_latent = self._rms(self._linear(x, f"{name}.q_a_proj"), f"{name}.q_a_layernorm", eps)
        q = self._linear(q_latent, f"{name}.q_b_proj").view(mla.num_heads, mla.qk_head_dim)
        down = self._linear(x, f"{name}.kv_a_proj_with_mqa")
        latent, shared_key = down.split([mla.kv_lora_rank, mla.qk_rope_head_dim])
        up = self._linear(self._rms(latent, f"{name}.kv_a_layernorm", eps), f"{name}.kv_b_proj")
        own_key, value = up.view(mla.num_heads, -1).split([mla.qk_nope_head_dim, mla.v_head_dim], dim=-1)
        key = torch.cat([own_key, shared_key.expand(mla.num_heads, -1)], dim=-1)
        grown = MLAState(torch.cat([state.keys, key[None]]), torch.cat([state.values, value[None]]))
        heads = self._round(equations.softmax_attention(q, grown.keys, grown.values, scale=mla.qk_head_dim**-0.5))
        if mla.use_output_gate:
            output_gate = self._round(torch.sigmoid(self._linear(x, f"{name}.g_proj")))
            heads = self._round(heads * output_gate.view_as(heads))
        return grown, heads

    def _feed_forward(self, layer: int, x: Tensor) -> Tensor:
        cfg = self.config
        if layer >= cfg.first_k_dense_replace and layer % cfg.moe_layer_freq == 0:
            return self._latent_moe(x, f"model.layers.{layer}.block_sparse_moe")
        return self._mlp(x, *(f"model.layers.{layer}.mlp.{p}_proj" for p in ("gate", "up", "down")))

    def _latent_moe(self, x: Tensor, name: str) -> Tensor:
        """Routed experts in the latent space, beside the shared experts at full width."""
        moe = self.config.moe
        chosen, weights = self._route(x, name)
        z = self._linear(x, f"{name}.routed_expert_down_proj")
        routed = torch.zeros_like(z)
        for expert, weight in zip(chosen, weights, strict=True):
            routed = routed + weight * self._mlp(z, *(f"{name}.experts.{expert}.{w}" for w in ("w1", "w3", "w2")))
        routed = self._round(routed)
        if moe.use_norm:
            routed = self._rms(routed, f"{name}.routed_expert_norm")
        out = self._linear(routed, f"{name}.routed_expert_up_proj")
        if moe.num_shared_experts:
            shared = self._mlp(x, *(f"{name}.shared_experts.{p}_proj" for p in ("gate", "up", "down")))
            out = self._round(out + shared)
        return out

    def _route(self, x: Tensor, name: str) -> tuple[list[int], Tensor]:
        moe = self.config.moe
        return equations.route(
            self._weight(f"{name}.gate.weight") @ x,  # never rounded: the router runs in float32
            self._weight(f"{name}.gate.e_score_correction_bias"),
            top_k=moe.top_k,
            num_expert_group=moe.num_expert_group,
            topk_group=moe.topk_group,
            renormalize=moe.renormalize,
            scaling_factor=moe.routed_scaling_factor,
        )

    def _mlp(self, x: Tensor, gate: str, up: str, down: str) -> Tensor:
        hidden = equations.situ(
            self._linear(x, gate),
            self._linear(x, up),
            beta=self.config.activation_situ_beta,
            linear_beta=self.config.activation_situ_linear_beta,
        )
        return self._linear(self._round(hidden), down)

    def _rms(self, x: Tensor, name: str, eps: float | None = None) -> Tensor:
        normed = equations.unit_rms(x, eps=self.config.rms_norm_eps if eps is None else eps)
        return self._round(self._round(normed) * self._weight(f"{name}.weight"))

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return self._round(self._weight(f"{name}.weight") @ x)

    def _weight(self, name: str) -> Tensor:
        try:
            return self.weights[name]
        except KeyError:
            raise CheckpointError(
                f"the checkpoint has no tensor {TEXT_PREFIX}{name}: config.json asks for it; "
                "check that all shards are there and belong to this config.json."
            ) from None

    def _round(self, x: Tensor) -> Tensor:
        return x if self.round_to is None else x.to(self.round_to).to(self.dtype)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """Torch hands even tiny softmaxes and products to its threads; on a busy machine that costs a hundredfold."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def load_text_weights(folder: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    """The language model's tensors without their prefix, MXFP4 pairs decoded to ``.weight``; vision is left out.

    Raises:
        CheckpointError: the folder holds no safetensors file.
    """
    index = folder / "model.safetensors.index.json"
    if index.exists():
        files = sorted({folder / file for file in json.loads(index.read_text())["weight_map"].values()})
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no *.safetensors file: give the folder of a downloaded checkpoint.")
    stored: dict[str, Tensor] = {}
    for file in files:
        stored |= load_file(file)
    weights: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        base, _, kind = name.removeprefix(TEXT_PREFIX).rpartition(".")
        if not name.startswith(TEXT_PREFIX) or kind == "weight_scale":
            continue
        if kind == "weight_packed":
            scale = stored[f"{TEXT_PREFIX}{base}.weight_scale"]
            weights[f"{base}.weight"] = mxfp4.decode(tensor, scale, dtype=dtype)
        else:
            weights[name.removeprefix(TEXT_PREFIX)] = tensor.to(dtype)
    return weights
