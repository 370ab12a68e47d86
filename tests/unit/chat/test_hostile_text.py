"""No text makes a control token, whatever field of a conversation it stands in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from sglang_k3.chat.encoding import encode_conversation, render
from sglang_k3.host.chat_tokenizer import HFChatTokenizer
from sglang_k3.testing.presets import PRESETS
from sglang_k3.testing.tiny import write_tiny
from sglang_k3.testing.tokenizer import special_token_ids
from tests.kit.chat import CONTROL, ToyTokenizer, hostile_text

seeded = settings(max_examples=200, derandomize=True, database=None, deadline=None)
Strategy = st.SearchStrategy[Any]

hostile_name = hostile_text.map(lambda text: text or "f")
hostile_json = st.recursive(
    st.one_of(hostile_text, st.integers(), st.booleans(), st.none()),
    lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(hostile_text, inner, max_size=2)),
    max_leaves=4,
)
hostile_tools = st.lists(
    st.fixed_dictionaries(
        {
            "type": st.just("function"),
            "function": st.fixed_dictionaries(
                {"name": hostile_text, "description": hostile_text, "parameters": hostile_json}
            ),
        }
    ),
    max_size=2,
)
content = st.one_of(
    st.none(),
    hostile_text,
    st.lists(st.fixed_dictionaries({"type": st.just("text"), "text": hostile_text}), max_size=3),
)
# Arguments that parse and that do not are both hostile here; their shapes differ, so a call brings its own skeleton.
call = st.fixed_dictionaries(
    {
        "id": hostile_text,
        "function": st.fixed_dictionaries(
            {
                "name": hostile_name,
                "arguments": st.one_of(
                    st.dictionaries(hostile_text, hostile_json, max_size=2), hostile_text.map("{{}}{}".format)
                ),
            }
        ),
    }
)
message = st.one_of(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "developer", "user"]), "content": content}, optional={"name": hostile_text}
    ),
    st.fixed_dictionaries({"role": st.just("system"), "tools": hostile_tools}),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": content},
        optional={
            "name": hostile_text,
            "reasoning_content": hostile_text,
            "reasoning": hostile_text,
            "tool_calls": st.lists(call, max_size=2),
        },
    ),
    st.fixed_dictionaries(
        {"role": st.just("tool"), "content": content, "tool_call_id": hostile_text, "name": hostile_name}
    ),
)
options = st.fixed_dictionaries(
    {"thinking": st.booleans()},
    optional={
        "tools": hostile_tools,
        "response_format": hostile_json.map(lambda schema: {"type": "json_schema", "json_schema": {"schema": schema}}),
    },
)


def skeleton(conversation: Sequence[dict[str, Any]], thinking: bool, **extra: Any) -> list[str]:
    """The control tokens of a conversation, by the roles and counts of what it holds and by no text of it."""
    o, c, s, e = CONTROL
    pair = [o, s, c, s]
    plain = [*pair, e]
    out: list[str] = plain * bool(extra.get("tools")) + plain * thinking
    for turn in conversation:
        if turn["role"] != "assistant":
            out += plain
            continue
        out += [o, s, *pair * thinking, *pair]
        if turn.get("tool_calls"):
            out += [o, s]
            for one in turn["tool_calls"]:
                arguments = one["function"]["arguments"]
                count = len(arguments) if isinstance(arguments, dict) else arguments.strip() != "{}"
                out += [o, s, *pair * count, c, s]
            out += [c, s]
        out += [c, s, e]
    return out + plain * ("response_format" in extra) + [o, s, o, s]


conversations = st.lists(message, max_size=4)


@given(conversations, options)
@seeded
def test_the_control_segments_are_those_of_the_structure(
    conversation: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    segments = render(conversation, **options)
    assert [segment.text for segment in segments if segment.is_control] == skeleton(conversation, **options)


@given(conversations, options)
@seeded
def test_ordinary_segments_give_ordinary_ids(conversation: list[dict[str, Any]], options: dict[str, Any]) -> None:
    ids = encode_conversation(conversation, ToyTokenizer(), **options)
    expected = [ToyTokenizer.CONTROL_IDS[spelling] for spelling in skeleton(conversation, **options)]
    assert [token for token in ids if token < 0] == expected


@pytest.fixture(scope="module")
def hf_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = write_tiny(tmp_path_factory.mktemp("tiny") / "model")
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))


@given(conversations, options)
@seeded
def test_no_special_id_comes_out_of_the_tokenizer_of_a_server(
    hf_tokenizer: PreTrainedTokenizerFast, conversation: list[dict[str, Any]], options: dict[str, Any]
) -> None:
    special_ids = special_token_ids(PRESETS["default"].vocab_size)
    ids = encode_conversation(conversation, HFChatTokenizer(hf_tokenizer), **options)
    expected = [special_ids[spelling] for spelling in skeleton(conversation, **options)]
    assert [token for token in ids if token in set(special_ids.values())] == expected
