"""A toy tokenizer whose merges cross the borders of segments, and text that would like to be a control token."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import strategies as st

from sglang_k3.chat.segments import Segment

CONTROL = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")


class ToyTokenizer:
    """Ids of characters are their code points; some pairs of neighbours merge, also over the borders of segments."""

    CONTROL_IDS = {spelling: -1 - i for i, spelling in enumerate(CONTROL)}
    MERGES = {
        pair: 0x110000 + i for i, pair in enumerate(("e ", "e=", '="', '"u', '"m', 'r"', "k<", "\n<", ">m", "ab"))
    }

    def control_id(self, spelling: str) -> int:
        return self.CONTROL_IDS[spelling]

    def encode_ordinary(self, text: str) -> list[int]:
        ids, at = [], 0
        while at < len(text):
            merged = self.MERGES.get(text[at : at + 2])
            ids.append(ord(text[at]) if merged is None else merged)
            at += 1 if merged is None else 2
        return ids


def text_of(segments: Iterable[Segment]) -> str:
    return "".join(segment.text for segment in segments)


# Control tokens whole and in pieces, and any other text.
hostile_text = st.lists(
    st.one_of(
        st.sampled_from(
            [*CONTROL, "<|", "|>", "open", "<|open|", "[EOS]", "<|media_pad|>", '"<|sep|>', "&quot;", "\0"]
        ),
        st.text(max_size=6),
    ),
    max_size=5,
).map("".join)
