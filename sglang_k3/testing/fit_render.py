"""Conversations as training sequences: token ids, and which of them the model has to write.

All is rendered by ``sglang_k3.chat.encoding``: the assistant's past turns are spelled there just as the model should
spell its own.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from sglang_k3.chat import bodies
from sglang_k3.chat.encoding import Segment, encode, render

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# Long texts that hardly occur but whole: the vocabulary has a token for each.
FIXED_TEXTS = (
    bodies.thinking_effort("max").removesuffix("max`."),
    bodies.tool_declaration([]).partition("[]")[0],
    str(bodies.tool_choice("required")),
    str(bodies.tool_choice("none")),
    str(bodies.response_format({"type": "json_object"})),
    str(bodies.response_format({"type": "json_schema", "json_schema": {"schema": {}}})).partition("{}")[0],
    # of declared tools
    '[{"function":{"description":"',
    '[{"function":{"name":"',
    '","name":"',
    '","parameters":{"properties":{"',
    '"],"type":"object"}},"type":"function"},{"function":{"description":"',
    '"],"type":"object"}},"type":"function"},{"function":{"name":"',
    '"],"type":"object"}},"type":"function"}]',
    '"}},"required":["',
    '":{"type":"',
    '":{"description":"',
    '","type":"',
)


@dataclasses.dataclass(kw_only=True)
class Conversation:
    """A conversation that ends with the assistant's turn; the fields are those of an OpenAI client.

    A turn in ``messages`` with ``"learn": False`` is history that the model need not be able to write. ``tool_choice``
    and ``response_format`` concern the last turn.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    thinking: bool = True
    effort: str | None = "max"
    tool_choice: str | None = None
    response_format: dict[str, Any] | None = None


class SegmentTokenizer:
    """The ``ChatTokenizer`` of ``sglang_k3.chat`` over a ``tokenizers.Tokenizer``, which it changes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        tokenizer.encode_special_tokens = True  # control strings in ordinary text stay ordinary
        self.tokenizer = tokenizer

    def control_id(self, spelling: str) -> int:
        token_id: int | None = self.tokenizer.token_to_id(spelling)
        assert token_id is not None, f"{spelling!r} is no token of this vocabulary"
        return token_id

    def encode_ordinary(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def prompt_segments(conversation: Conversation) -> list[Segment]:
    """All up to where the model writes the last turn."""
    return render(
        conversation.messages[:-1],
        tools=conversation.tools,
        tool_choice=conversation.tool_choice,
        response_format=conversation.response_format,
        thinking=conversation.thinking,
        effort=conversation.effort,
    )


def answer_segments(turn: dict[str, Any], *, thinking: bool) -> list[Segment]:
    """What the model should write after the prompt."""
    stub = len(render([], thinking=thinking, effort=None))
    return render([turn], thinking=thinking, effort=None)[stub:-stub]


def answer_text(conversation: Conversation) -> str:
    """What the model should write after the prompt, with its markers."""
    return "".join(s.text for s in answer_segments(conversation.messages[-1], thinking=conversation.thinking))


def whole_segments(conversation: Conversation) -> tuple[list[Segment], list[bool]]:
    """The prompt and the last turn; for each segment whether the model has to write it."""
    prompt = prompt_segments(conversation)
    last = answer_segments(conversation.messages[-1], thinking=conversation.thinking)
    learned = [False] * len(prompt) + [True] * len(last)
    for i, turn in enumerate(conversation.messages[:-1]):
        if turn["role"] == "assistant" and turn.get("learn", True):
            earlier = dataclasses.replace(
                conversation, messages=conversation.messages[: i + 1], tool_choice=None, response_format=None
            )
            start = len(prompt_segments(earlier))
            length = len(answer_segments(turn, thinking=conversation.thinking))
            learned[start : start + length] = [True] * length
    return prompt + last, learned


def training_sequence(conversation: Conversation, tokenizer: SegmentTokenizer) -> tuple[list[int], list[bool]]:
    """The ids of the whole conversation, and for each whether the model has to write it."""
    ids: list[int] = []
    learned: list[bool] = []
    for segment, learn in zip(*whole_segments(conversation), strict=True):
        piece = encode([segment], tokenizer)
        ids += piece
        learned += [learn] * len(piece)
    return ids, learned
