"""A model that is not K3, for tests that it does not notice the plugin; served with ``--load-format dummy``."""

from __future__ import annotations

import json
from pathlib import Path

from sglang_k3.testing.tokenizer import build_tokenizer

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 384,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "dtype": "float32",
    "hidden_act": "silu",
    "bos_token_id": 312,
    "eos_token_id": 314,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


def write_llama(folder: Path) -> Path:
    """A Llama ``config.json`` beside the tokenizer of a tiny K3."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer(CONFIG["vocab_size"]).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder
