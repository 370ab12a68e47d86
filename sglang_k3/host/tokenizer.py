"""The tokenizer of K3 checkpoints, whichever file it comes in, without any code of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from sglang_k3.chat.tiktoken_file import FILE_NAME, load_tokenizer


class KimiK3TokenizerFast(PreTrainedTokenizerFast):
    """Reads a ``tokenizer.json``, or else the ``tiktoken.model`` of the published checkpoint.

    All 256 reserved ids are special tokens, so decoding with ``skip_special_tokens`` leaves K3's markers out.
    """

    vocab_files_names = {"tokenizer_file": "tokenizer.json", "vocab_file": FILE_NAME}

    @classmethod
    def convert_to_native_format(cls, **kwargs: Any) -> dict[str, Any]:
        ranks_file = kwargs.pop("vocab_file", None)
        if kwargs.get("tokenizer_file") is not None:
            return super().convert_to_native_format(**kwargs)
        if ranks_file is None:
            raise ValueError(
                f"{kwargs.get('name_or_path')} has neither tokenizer.json nor {FILE_NAME}: add one of them, or name "
                "another folder with --tokenizer-path."
            )
        named = {token_id: str(token) for token_id, token in kwargs["added_tokens_decoder"].items()}
        tokenizer = load_tokenizer(Path(ranks_file), named)
        return {**kwargs, "tokenizer_object": tokenizer, "added_tokens_decoder": tokenizer.get_added_tokens_decoder()}

    @classmethod
    def _patch_mistral_regex(cls, tokenizer: Any, *args: Any, **kwargs: Any) -> Any:
        """The base class suspects every large vocabulary of a mistake in Mistral's pattern; K3's is its own."""
        return tokenizer
