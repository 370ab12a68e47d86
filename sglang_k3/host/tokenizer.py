"""The tokenizer class of K3 checkpoints that ship a ``tokenizer.json``."""

from __future__ import annotations

from transformers import PreTrainedTokenizerFast


class KimiK3TokenizerFast(PreTrainedTokenizerFast):
    """A class of K3's own, found through its config.

    Without one the host retries through ``tokenizer_config.json`` and fails on a checkpoint that has none.
    """
