"""Random weights that make a tiny K3 *behave*: every component matters, and bf16 noise stays small.

Values are uniform, never normal, and each tensor is seeded by its own name: the bytes then depend neither on the
CPU's vector unit nor on the order of generation.

Plain random weights would fail as a test model in one place. Top-k routing is discontinuous, and with random
logits some token of a few hundred always sits so close to a tie that bf16 noise picks another expert. So routing
is made decisive: the embedding carries an *expert code*, one channel per expert with evenly spaced values in an order
that differs from token to token, plus one constant *anchor* channel by which the MLP-side AttnRes always keeps a
share of that row; the sub-layers hardly write to these channels and the router reads mostly them. One expert per
layer has a bias that no score can overcome, so that the bias decides and noise does not.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from sglang_k3.testing import mxfp4
from sglang_k3.testing.presets import TinyPreset

A_LOG_MULTIPLE = 128
CONV_TAPS = 4

SHORTEST_BLOCK = 4  # layers per bank row for which the gains below are meant

EMBEDDING_STD = 2.0
ANCHOR_VALUE = 6.0
EXPERT_CODE_SPAN = 5.0
CODE_LEAK = 0.005  # what the sub-layers write to the anchor and the code, of what they write elsewhere
ROUTER_CODE_GAIN = 1.2
ROUTER_OTHER_GAIN = 0.02  # what the router reads of all other channels
FAVOURED_EXPERT_BIAS = 1.5  # scores are below 1

# The MLA latents are normalised, so their size is free: this small, epsilon 1e-6 and 1e-5 give different models.
LATENT_GAIN = 0.005

# AttnRes projection of the anchor channel: how much the embedding's row is preferred before a sub-layer.
ATTENTION_ANCHOR = 0.6
MLP_ANCHOR = 0.9
OUTPUT_ANCHOR = 0.5


class RandomWeights:
    """Draws the tensors of one checkpoint, by their published names, in their dtypes on disk.

    Args:
        preset: the sizes.
        seed: another seed draws other values everywhere, expert code and favoured experts included.
        packed_experts: MXFP4 pairs, or the same values unpacked to bf16.
    """

    def __init__(self, preset: TinyPreset, *, seed: int, packed_experts: bool) -> None:
        self.preset = preset
        self.seed = seed
        self.packed_experts = packed_experts
        self.code_channels = slice(1, 1 + preset.num_experts)

    def text(self) -> dict[str, Tensor]:
        """The language model (fact sheet 2.1 to 2.6)."""
        preset, root = self.preset, "language_model.model"
        tensors = {f"{root}.embed_tokens.weight": self._embedding(f"{root}.embed_tokens.weight")}
        for layer in range(preset.num_layers):
            name = f"{root}.layers.{layer}"
            tensors |= self._norm(f"{name}.input_layernorm", preset.hidden_size)
            tensors |= self._norm(f"{name}.post_attention_layernorm", preset.hidden_size)
            tensors |= self._residual(f"{name}.self_attention_res", anchor=ATTENTION_ANCHOR)
            tensors |= self._residual(f"{name}.mlp_res", anchor=MLP_ANCHOR)
            is_mla = layer + 1 in preset.full_attention_layers
            tensors |= self._mla(f"{name}.self_attn") if is_mla else self._kda(f"{name}.self_attn")
            if layer == 0:
                tensors |= self._mlp(f"{name}.mlp", preset.dense_width)
            else:
                code_gain = tensors[f"{name}.post_attention_layernorm.weight"][self.code_channels].float()
                tensors |= self._latent_moe(f"{name}.block_sparse_moe", code_gain)
        tensors |= self._residual(f"{root}.output_attn_res", anchor=OUTPUT_ANCHOR)
        tensors |= self._norm(f"{root}.norm", preset.hidden_size)
        tensors |= self._linear("language_model.lm_head", preset.vocab_size, preset.hidden_size, gain=2.5)
        return tensors

    def vision(self, config: dict[str, int]) -> dict[str, Tensor]:
        """Tower and projector (fact sheet 2.8) for a ``vision_config``."""
        width, patch = config["vt_hidden_size"], config["patch_size"]
        qkv, mlp = config["qkv_hidden_size"], config["vt_intermediate_size"]
        rows, columns = config["init_pos_emb_height"], config["init_pos_emb_width"]
        proj, pos_emb = "vision_tower.patch_embed.proj.weight", "vision_tower.patch_embed.pos_emb.weight"
        tensors = {
            proj: self._spread(proj, (width, 3, patch, patch), 1.0 / math.sqrt(3 * patch * patch)).bfloat16(),
            pos_emb: self._spread(pos_emb, (rows, columns, width), 0.5).bfloat16(),
        }
        for block in range(config["vt_num_hidden_layers"]):
            name = f"vision_tower.encoder.blocks.{block}"
            tensors |= self._norm(f"{name}.norm0", width) | self._norm(f"{name}.norm1", width)
            tensors |= self._linear(f"{name}.wqkv", 3 * qkv, width, gain=1.5)
            tensors |= self._linear(f"{name}.wo", width, qkv, gain=1.0)
            tensors |= self._linear(f"{name}.mlp.fc0", mlp, width, gain=1.0)
            tensors |= self._linear(f"{name}.mlp.fc1", width, mlp, gain=1.0)
        tensors |= self._norm("vision_tower.encoder.final_layernorm", width)
        merged = 4 * config["mm_hidden_size"]
        tensors |= self._linear("mm_projector.proj.0", merged, merged, gain=1.0)
        tensors |= self._linear("mm_projector.proj.2", config["text_hidden_size"], merged, gain=1.0)
        tensors |= self._norm("mm_projector.post_norm", config["text_hidden_size"])
        return tensors

    def _embedding(self, name: str) -> Tensor:
        preset = self.preset
        table = self._spread(name, (preset.vocab_size, preset.hidden_size), EMBEDDING_STD)
        levels = torch.linspace(-EXPERT_CODE_SPAN, EXPERT_CODE_SPAN, preset.num_experts)
        order = self._uniform(f"{name}/code", (preset.vocab_size, preset.num_experts), 0.0, 1.0).argsort(dim=1)
        table[:, 0] = ANCHOR_VALUE
        table[:, self.code_channels] = levels[order]
        return table.bfloat16()

    def _residual(self, name: str, *, anchor: float) -> dict[str, Tensor]:
        """AttnRes norm and projection: scores spread by about 1, and the anchor's share on the embedding's row."""
        hidden = self.preset.hidden_size
        proj = self._spread(f"{name}_proj.weight", (1, hidden), 1.0 / math.sqrt(hidden))
        proj[0, 0] = anchor
        return self._norm(f"{name}_norm", hidden) | {f"{name}_proj.weight": proj.bfloat16()}

    def _kda(self, name: str) -> dict[str, Tensor]:
        preset = self.preset
        hidden, heads, rank = preset.hidden_size, preset.kda_heads, preset.kda_head_dim
        width = heads * rank
        tensors: dict[str, Tensor] = {}
        for c in "qkv":
            tensors |= self._linear(f"{name}.{c}_proj", width, hidden, gain=1.0)
            taps = self._spread(f"{name}.{c}_conv1d.weight", (width, 1, CONV_TAPS), 0.7)
            tensors[f"{name}.{c}_conv1d.weight"] = taps
        tensors |= self._linear(f"{name}.f_a_proj", rank, hidden, gain=1.0)
        tensors |= self._linear(f"{name}.f_b_proj", width, rank, gain=1.0)
        tensors |= self._linear(f"{name}.b_proj", heads, hidden, gain=1.0)
        a_log = torch.zeros(-(-heads // A_LOG_MULTIPLE) * A_LOG_MULTIPLE)
        a_log[:heads] = self._uniform(f"{name}.A_log", (heads,), 0.0, 1.0)
        tensors[f"{name}.A_log"] = a_log
        tensors[f"{name}.dt_bias"] = self._uniform(f"{name}.dt_bias", (width,), -5.0, 1.0)
        tensors[f"{name}.o_norm.weight"] = self._uniform(f"{name}.o_norm.weight", (rank,), 0.5, 1.5)
        tensors |= self._linear(f"{name}.g_proj", width, hidden, gain=1.5)
        return tensors | self._output(f"{name}.o_proj", width, gain=1.2)

    def _mla(self, name: str) -> dict[str, Tensor]:
        preset = self.preset
        hidden, heads, q_rank, kv_rank = preset.hidden_size, preset.mla_heads, preset.q_lora_rank, preset.kv_lora_rank
        nope, rope, v = preset.qk_nope_head_dim, preset.qk_rope_head_dim, preset.v_head_dim
        tensors = self._linear(f"{name}.q_a_proj", q_rank, hidden, gain=LATENT_GAIN)
        tensors |= self._norm(f"{name}.q_a_layernorm", q_rank)
        tensors |= self._linear(f"{name}.q_b_proj", heads * (nope + rope), q_rank, gain=2.0)
        latent_and_key = self._spread(f"{name}.kv_a_proj_with_mqa.weight", (kv_rank + rope, hidden), hidden**-0.5)
        latent_and_key[:kv_rank] *= LATENT_GAIN
        tensors[f"{name}.kv_a_proj_with_mqa.weight"] = latent_and_key.bfloat16()
        tensors |= self._norm(f"{name}.kv_a_layernorm", kv_rank)
        tensors |= self._linear(f"{name}.kv_b_proj", heads * (nope + v), kv_rank, gain=1.0)
        tensors |= self._linear(f"{name}.g_proj", heads * v, hidden, gain=1.5)
        return tensors | self._output(f"{name}.o_proj", heads * v, gain=2.0)

    def _latent_moe(self, name: str, code_gain: Tensor) -> dict[str, Tensor]:
        """``code_gain``: the norm weights of the code channels, undone here so that the code stays evenly spaced."""
        preset = self.preset
        hidden, experts, latent = preset.hidden_size, preset.num_experts, preset.latent_size
        router = self._spread(f"{name}.gate.weight", (experts, hidden), ROUTER_OTHER_GAIN / math.sqrt(hidden))
        router[:, self.code_channels] += torch.diag(ROUTER_CODE_GAIN / code_gain)
        bias = self._spread(f"{name}.gate.e_score_correction_bias", (experts,), 0.002)
        bias[int(self._uniform(f"{name}/favoured", (1,), 0, experts))] += FAVOURED_EXPERT_BIAS
        tensors = {f"{name}.gate.weight": router.bfloat16(), f"{name}.gate.e_score_correction_bias": bias}
        tensors |= self._linear(f"{name}.routed_expert_down_proj", latent, hidden, gain=1.0)
        for expert in range(experts):
            tensors |= self._expert(f"{name}.experts.{expert}.w1", preset.moe_width, latent)
            tensors |= self._expert(f"{name}.experts.{expert}.w3", preset.moe_width, latent)
            tensors |= self._expert(f"{name}.experts.{expert}.w2", latent, preset.moe_width)
        tensors |= self._norm(f"{name}.routed_expert_norm", latent)
        tensors |= self._output(f"{name}.routed_expert_up_proj", latent, gain=0.6)
        return tensors | self._mlp(f"{name}.shared_experts", preset.num_shared_experts * preset.moe_width)

    def _expert(self, name: str, rows: int, columns: int) -> dict[str, Tensor]:
        weight = self._spread(f"{name}.weight", (rows, columns), 1.5 / math.sqrt(columns))
        packed, scale = mxfp4.encode(weight)
        if self.packed_experts:
            return {f"{name}.weight_packed": packed, f"{name}.weight_scale": scale}
        return {f"{name}.weight": mxfp4.decode(packed, scale, dtype=torch.bfloat16)}

    def _mlp(self, name: str, width: int) -> dict[str, Tensor]:
        hidden = self.preset.hidden_size
        tensors = self._linear(f"{name}.gate_proj", width, hidden, gain=1.2)
        tensors |= self._linear(f"{name}.up_proj", width, hidden, gain=1.2)
        return tensors | self._output(f"{name}.down_proj", width, gain=0.7)

    def _output(self, name: str, fan_in: int, *, gain: float) -> dict[str, Tensor]:
        """A linear that writes to the residual, but hardly to anchor and code; longer blocks get smaller terms."""
        gain *= math.sqrt(SHORTEST_BLOCK / self.preset.attn_res_block_size)
        weight = self._spread(f"{name}.weight", (self.preset.hidden_size, fan_in), gain / math.sqrt(fan_in))
        weight[: self.code_channels.stop] *= CODE_LEAK
        return {f"{name}.weight": weight.bfloat16()}

    def _linear(self, name: str, rows: int, columns: int, *, gain: float) -> dict[str, Tensor]:
        """``gain`` is the root mean square of the output for a unit input."""
        return {f"{name}.weight": self._spread(f"{name}.weight", (rows, columns), gain / math.sqrt(columns)).bfloat16()}

    def _norm(self, name: str, width: int) -> dict[str, Tensor]:
        return {f"{name}.weight": self._uniform(f"{name}.weight", (width,), 0.6, 1.4).bfloat16()}

    def _spread(self, name: str, shape: tuple[int, ...], std: float) -> Tensor:
        """Zero mean, this standard deviation."""
        return self._uniform(name, shape, -math.sqrt(3) * std, math.sqrt(3) * std)

    def _uniform(self, name: str, shape: tuple[int, ...], low: float, high: float) -> Tensor:
        digest = hashlib.sha256(f"{self.seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        return torch.rand(shape, generator=generator) * (high - low) + low
