"""Where fitting starts: weights of a model that already looks at some words of its context and repeats them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sglang_k3.config import K3Config, MLAConfig

EMBEDDING_STD = 0.5
LM_HEAD_GAIN = 0.1

CONSTANT, MARKED, FIRST_GROUP = 0, 1, 2  # channels of the embedding
MARK = 1.5
LOOK = 1.6  # attention logits of marked words are then about 3 above the others


def initial_weights(
    config: K3Config,
    shapes: Mapping[str, torch.Size],
    spellings: Sequence[str],
    groups: Sequence[Sequence[str]],
    *,
    seed: int,
) -> dict[str, Tensor]:
    """Values to start fitting from: a model that already looks at, and repeats, the words that are worth repeating.

    From a plain random start attention finds them, too, but only after most of the time that fitting takes. So the
    embedding has a constant channel, one that marks the words of any group, and one per group; MLA queries read the
    first and keys the second, MLA values pass through unchanged, and ``lm_head`` is a small copy of the embedding.

    Args:
        shapes: of the tensors to make, by name.
        spellings: of every token id.
        groups: words to look at, each group of one kind; a word is found with and without a space in front.
        seed: of everything else.
    """
    generator = torch.Generator().manual_seed(seed)
    weights = {name: _initial(name, shape, generator) for name, shape in shapes.items()}
    embedding = weights["model.embed_tokens.weight"]
    _start_with_groups(embedding, spellings, groups)
    weights["lm_head.weight"] = embedding * LM_HEAD_GAIN
    weights["lm_head.weight"][:, :FIRST_GROUP] = 0
    for name in weights:
        if name.endswith(".kv_a_proj_with_mqa.weight"):
            _start_by_copying(config.mla, weights, name.removesuffix("kv_a_proj_with_mqa.weight"), generator)
    return weights


def _initial(name: str, shape: torch.Size, generator: torch.Generator) -> Tensor:
    """Norms at one, AttnRes projections at zero (the plain mean of the rows), matrices keep the size of their input."""
    kind = name.split(".")[-2] if name.endswith(".weight") else name.split(".")[-1]
    if kind.endswith("norm"):
        return torch.ones(shape)
    if kind.endswith("res_proj") or kind in ("A_log", "e_score_correction_bias"):
        return torch.zeros(shape)
    if kind == "dt_bias":
        return torch.rand(shape, generator=generator) * 6.0 - 7.0  # forget 0.5 to 75 percent per token
    if kind.endswith("conv1d"):
        taps = torch.rand(shape, generator=generator) - 0.5
        taps[..., -1] += 0.5
        return taps
    if kind == "embed_tokens":
        return torch.randn(shape, generator=generator) * EMBEDDING_STD
    gain = 0.5 if kind in ("o_proj", "down_proj", "routed_expert_up_proj") else 1.0
    return torch.randn(shape, generator=generator) * gain / math.sqrt(shape[-1])


def _start_with_groups(embedding: Tensor, spellings: Sequence[str], groups: Sequence[Sequence[str]]) -> None:
    ids = {spelling: i for i, spelling in enumerate(spellings)}
    for spelling, i in ids.items():
        bare = ids.get(spelling.removeprefix(" "))
        if bare is not None and bare != i:
            embedding[i] = (embedding[i] + embedding[bare]) / math.sqrt(2)
    embedding[:, : FIRST_GROUP + len(groups)] = 0
    embedding[:, CONSTANT] = MARK
    for channel, group in enumerate(groups, FIRST_GROUP):
        found = [ids[text] for word in group for text in (word, f" {word}") if text in ids]
        embedding[found, MARKED] = MARK
        embedding[found, channel] = MARK


def _start_by_copying(mla: MLAConfig, weights: dict[str, Tensor], name: str, generator: torch.Generator) -> None:
    """One MLA layer: look at marked words, and write what is read there."""
    q_down, q_up, kv_down, kv_up, out = (
        weights[f"{name}{p}.weight"] for p in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    )
    hidden, width = out.shape
    read = torch.linalg.qr(torch.randn(hidden, mla.kv_lora_rank, generator=generator)).Q.T
    spread = torch.linalg.qr(torch.randn(width, mla.kv_lora_rank, generator=generator)).Q
    kv_down[: mla.kv_lora_rank] = read
    value_rows = kv_up.unflatten(0, (mla.num_heads, -1))[:, mla.qk_nope_head_dim :]
    value_rows.copy_(spread.unflatten(0, (mla.num_heads, -1)))
    out.copy_((spread @ read).T)

    shared_key = mla.kv_lora_rank  # its first channel says "marked"; the first query latent, "always"
    kv_down[shared_key] = 0
    kv_down[shared_key, MARKED] = LOOK
    q_down[0] = 0
    q_down[0, CONSTANT] = LOOK
    meets_shared_key = q_up.unflatten(0, (mla.num_heads, -1))[:, mla.qk_nope_head_dim]
    meets_shared_key[:] = 0
    meets_shared_key[:, 0] = LOOK
