"""The text of an answer, written from its output ids: what the model only spells is no marker there."""

from __future__ import annotations

from typing import Any

from sglang_k3.chat.scanners import MarkedText


class AnswerText:
    """One answer, in as many outputs as the host hands on.

    Args:
        writer: a new one.
        is_incremental: whether an output has the ids since the one before, else all so far.
        keeps_stop_token: whether the stop token that ended the answer belongs to its text.
    """

    def __init__(self, writer: MarkedText, *, is_incremental: bool, keeps_stop_token: bool) -> None:
        self._writer = writer
        self._is_incremental = is_incremental
        self._keeps_stop_token = keeps_stop_token
        self._num_read = 0

    def add(self, output: dict[str, Any]) -> str:
        """The text that an output adds."""
        ids: list[int] = output["output_ids"]
        finish_reason = output["meta_info"].get("finish_reason")
        if finish_reason and isinstance(finish_reason.get("matched"), int) and not self._keeps_stop_token:
            ids = ids[:-1]
        fresh = ids if self._is_incremental else ids[self._num_read :]
        self._num_read += len(fresh)
        return self._writer.feed(fresh) + (self._writer.finish() if finish_reason else "")
