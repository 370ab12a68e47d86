"""The chat encoding: literal forms of fact sheet 4.4, segment by segment. Tools and schemas have files of their own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from sglang_k3.chat.encoding import (
    CLOSE,
    END_OF_MESSAGE,
    OPEN,
    SEP,
    Segment,
    encode,
    encode_conversation,
    render,
)
from sglang_k3.host.chat_tokenizer import HFChatTokenizer
from sglang_k3.testing.presets import PRESETS
from sglang_k3.testing.tiny import write_tiny
from sglang_k3.testing.tokenizer import special_token_ids
from tests.kit.chat import CONTROL, ToyTokenizer, hostile_text, text_of

Message = dict[str, Any]
EFFORT = (
    '<|open|>message role="system" type="thinking-effort"<|sep|>'
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel), "
    "supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort=max`."
    "<|close|>message<|sep|><|end_of_msg|>"
)
THINK = '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>'
RESPOND = '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>'


def silent(messages: list[Message], **options: Any) -> str:
    """The rendered conversation without the effort message."""
    return text_of(render(messages, effort=None, **options))


def test_an_empty_conversation_is_the_effort_and_the_prompt_to_think() -> None:
    assert text_of(render([])) == EFFORT + THINK


@pytest.mark.parametrize("effort", ["low", "medium", "high", "max"])
def test_the_effort_is_announced(effort: str) -> None:
    assert text_of(render([], effort=effort)) == EFFORT.replace("=max", f"={effort}") + THINK


def test_no_effort_is_not_announced() -> None:
    assert text_of(render([], effort=None)) == THINK


@pytest.mark.parametrize("effort", ["", "none", "Max", "xhigh", "<|open|>"])
def test_another_effort_is_refused(effort: str) -> None:
    with pytest.raises(ValueError, match=rf"{re.escape(repr(effort))} is not one of low, medium, high, max\."):
        render([], effort=effort)
    assert text_of(render([], effort=effort, thinking=False)) == RESPOND  # where it is not announced, it says nothing


@pytest.mark.parametrize(("role", "written"), [("system", "system"), ("developer", "system"), ("user", "user")])
def test_a_message_of_plain_text(role: str, written: str) -> None:
    rendered = silent([{"role": role, "content": 'Say <b>"hi"</b> & so on.\n'}])
    body = 'Say <b>"hi"</b> & so on.\n'  # content is not escaped
    assert rendered == f'<|open|>message role="{written}"<|sep|>{body}<|close|>message<|sep|><|end_of_msg|>{THINK}'


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_an_assistant_turn_keeps_its_reasoning(key: str) -> None:
    assert silent([{"role": "assistant", "content": "4", key: "2 + 2"}]) == (
        '<|open|>message role="assistant"<|sep|>'
        "<|open|>think<|sep|>2 + 2<|close|>think<|sep|>"
        "<|open|>response<|sep|>4<|close|>response<|sep|>"
        f"<|close|>message<|sep|><|end_of_msg|>{THINK}"
    )


def test_reasoning_content_wins_over_reasoning() -> None:
    turn = {"role": "assistant", "content": "", "reasoning_content": "first", "reasoning": "second"}
    assert "<|sep|>first<|close|>" in silent([turn])
    assert "second" not in silent([turn])


@pytest.mark.parametrize("turn", [{"content": "4"}, {"content": "4", "reasoning_content": None}])
def test_an_assistant_turn_without_reasoning_has_an_empty_channel(turn: Message) -> None:
    assert silent([{"role": "assistant", **turn}]) == (
        '<|open|>message role="assistant"<|sep|>'
        "<|open|>think<|sep|><|close|>think<|sep|>"
        "<|open|>response<|sep|>4<|close|>response<|sep|>"
        f"<|close|>message<|sep|><|end_of_msg|>{THINK}"
    )


@pytest.mark.parametrize("turn", [{}, {"content": None}, {"content": ""}, {"content": []}], ids=str)
def test_no_content_is_an_empty_body(turn: Message) -> None:
    """The channel and the message are written all the same."""
    assert silent([{"role": "user", **turn}]) == (
        f'<|open|>message role="user"<|sep|><|close|>message<|sep|><|end_of_msg|>{THINK}'
    )
    assert "<|open|>response<|sep|><|close|>response<|sep|>" in silent([{"role": "assistant", **turn}])


def test_with_thinking_off_nothing_speaks_of_thinking() -> None:
    conversation = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "2 + 2?"},
        {"role": "assistant", "content": "4", "reasoning_content": "easy"},
        {"role": "user", "content": "3 + 3?"},
    ]
    assert text_of(render(conversation, thinking=False)) == (
        '<|open|>message role="system"<|sep|>Be brief.<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="user"<|sep|>2 + 2?<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>4<|close|>response<|sep|>'
        "<|close|>message<|sep|><|end_of_msg|>"
        f'<|open|>message role="user"<|sep|>3 + 3?<|close|>message<|sep|><|end_of_msg|>{RESPOND}'
    )


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant"])
def test_a_name_follows_the_role(role: str) -> None:
    rendered = silent([{"role": role, "name": "Ann", "content": ""}])
    written = "system" if role == "developer" else role
    assert rendered.startswith(f'<|open|>message role="{written}" name="Ann"<|sep|>')


@pytest.mark.parametrize("name", ["", None])
def test_an_empty_name_is_left_out(name: str | None) -> None:
    assert silent([{"role": "user", "name": name, "content": ""}]).startswith('<|open|>message role="user"<|sep|>')


@pytest.mark.parametrize(
    ("name", "escaped"),
    [
        ('A "B" C', "A &quot;B&quot; C"),
        ("A & B", "A &amp; B"),
        ("&quot;", "&amp;quot;"),
        ('"&"', "&quot;&amp;&quot;"),
        ("<'>\n", "<'>\n"),
    ],
)
def test_attribute_values_are_escaped(name: str, escaped: str) -> None:
    """The ampersand first, so that what was escaped before is not taken for an escape; nothing else."""
    assert f' name="{escaped}"<|sep|>' in silent([{"role": "user", "name": name, "content": ""}])


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "one "}, {"text": "two"}]
    assert "<|sep|>one two<|close|>" in silent([{"role": "user", "content": parts}])


def test_segments_are_those_of_the_fact_sheet() -> None:
    """4.4.2: each control token, the tag name, four pieces per attribute, each contiguous piece of content."""
    segments = render([{"role": "user", "name": 'A "B"', "content": "a message"}], effort=None)
    o, c, s, e = (Segment(text, is_control=True) for text in CONTROL)
    assert [segment for segment in segments if segment.text] == [
        o,
        Segment("message"),
        Segment(" role"),
        Segment('="'),
        Segment("user"),
        Segment('"'),
        Segment(" name"),
        Segment('="'),
        Segment("A &quot;B&quot;"),
        Segment('"'),
        s,
        Segment("a message"),
        c,
        Segment("message"),
        s,
        e,
        o,
        Segment("message"),
        Segment(" role"),
        Segment('="'),
        Segment("assistant"),
        Segment('"'),
        s,
        o,
        Segment("think"),
        s,
    ]


def test_the_control_tokens_are_spelled_as_published() -> None:
    assert (OPEN, CLOSE, SEP, END_OF_MESSAGE) == CONTROL


def test_no_merge_crosses_a_border() -> None:
    """``message role="user"`` as one string merges ``e `` and ``="``; K3 keeps the tag name and the key apart."""
    ids = encode(render([{"role": "user", "content": "ab"}], effort=None, thinking=False), ToyTokenizer())
    o, c, s, e = (ToyTokenizer.CONTROL_IDS[spelling] for spelling in CONTROL)
    equals, ab = (ToyTokenizer.MERGES[pair] for pair in ('="', "ab"))
    tag, key, quote = [ord(x) for x in "message"], [ord(x) for x in " role"], ord('"')
    user, assistant = [ord(x) for x in "user"], [ord(x) for x in "assistant"]
    response = [ord(x) for x in "response"]
    expected = [o, *tag, *key, equals, *user, quote, s, ab, c, *tag, s, e]
    expected += [o, *tag, *key, equals, *assistant, quote, s, o, *response, s]
    assert ids == expected
    # In one go the same text gives other ids, so the merges above were there to be made.
    assert ToyTokenizer().encode_ordinary('message role="user"') != [*tag, *key, equals, *user, quote]


@pytest.mark.parametrize("role", ["function", "", "User", None])
def test_another_role_is_refused(role: Any) -> None:
    with pytest.raises(ValueError, match=f"role {role!r} is not one of system, developer, user, assistant, tool"):
        render([{"role": role, "content": "x"}])


@pytest.mark.parametrize("role", ["user", "assistant", "system"])
@pytest.mark.parametrize("kind", ["image_url", "image", "input_audio"])
@pytest.mark.parametrize("text", [{}, {"text": None}])
def test_content_that_is_not_text_is_refused(role: str, kind: str, text: Message) -> None:
    content = [{"type": "text", "text": "see"}, {"type": kind, kind: {}, **text}]
    with pytest.raises(ValueError, match=f"content part of type '{kind}': this version of sglang-k3 serves text only"):
        render([{"role": role, "content": content}])


def test_a_caption_does_not_make_text_of_an_image() -> None:
    with pytest.raises(ValueError, match="content part of type 'image'"):
        render([{"role": "user", "content": [{"type": "image", "text": "a cat"}]}])


def test_other_parts_contribute_their_text() -> None:
    assert "<|sep|>one two<|close|>" in silent(
        [{"role": "user", "content": [{"type": "input_text", "text": "one "}, {"type": "text", "text": "two"}]}]
    )


@pytest.mark.parametrize("content", [7, {"text": "x"}, ["x"], [None]], ids=str)
def test_content_of_another_kind_is_refused(content: Any) -> None:
    with pytest.raises(ValueError, match="content"):
        render([{"role": "user", "content": content}])


def test_the_image_placeholder_is_defused() -> None:
    """Also where it comes together from two parts."""
    whole, apart = "<|kimi_image_placeholder|>", "<| kimi_image_placeholder |>"
    parts = [{"type": "text", "text": "<|kimi_image_"}, {"type": "text", "text": "placeholder|>"}]
    call = {"id": "1", "function": {"name": "f", "arguments": {whole: whole, "list": [whole]}}}
    broken = {"id": "2", "function": {"name": "f", "arguments": "{" + whole}}
    text = silent(
        [
            {"role": "system", "content": whole},
            {"role": "user", "content": parts},
            {"role": "assistant", "content": whole, "reasoning_content": whole, "tool_calls": [call, broken]},
            {"role": "tool", "tool_call_id": "1", "content": whole},
        ]
    )
    assert whole not in text
    assert text.count(apart) == 9


def test_the_prompt_as_ids_is_that_of_the_segments() -> None:
    conversation = [{"role": "user", "content": "ab"}]
    options: dict[str, Any] = {
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "tool_choice": "required",
        "response_format": {"type": "json_object"},
        "thinking": True,
        "effort": "low",
    }
    toy = ToyTokenizer()
    assert encode_conversation(conversation, toy, **options) == encode(render(conversation, **options), toy)
    assert encode_conversation(conversation, toy) == encode(render(conversation), toy)


seeded = settings(max_examples=200, derandomize=True, database=None, deadline=None)


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "model") / "tokenizer.json"


@pytest.fixture(scope="module")
def hf_tokenizer(tokenizer_file: Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_file=str(tokenizer_file))


@pytest.fixture(scope="module")
def special_ids() -> dict[str, int]:
    return special_token_ids(PRESETS["default"].vocab_size)


def test_control_ids_are_those_of_the_tokenizer(
    hf_tokenizer: PreTrainedTokenizerFast, special_ids: dict[str, int]
) -> None:
    chat = HFChatTokenizer(hf_tokenizer)
    assert [chat.control_id(spelling) for spelling in CONTROL] == [special_ids[spelling] for spelling in CONTROL]


@pytest.mark.parametrize("spelling", ["<|open|>", "[EOS]", "<|media_pad|>", "<|reserved_token_320|>"])
def test_a_special_token_spelled_out_is_ordinary_text(
    spelling: str, hf_tokenizer: PreTrainedTokenizerFast, special_ids: dict[str, int]
) -> None:
    """The tokenizer itself would make one id of it, which is what the flag of ``encode_ordinary`` is for."""
    assert hf_tokenizer.encode(spelling, add_special_tokens=False) == [special_ids[spelling]]
    ids = HFChatTokenizer(hf_tokenizer).encode_ordinary(spelling)
    assert not set(ids) & set(special_ids.values())
    assert hf_tokenizer.decode(ids) == spelling
    # The flag is a setting of the shared tokenizer: ours must not stay behind.
    assert hf_tokenizer.encode(spelling, add_special_tokens=False) == [special_ids[spelling]]


@given(hostile_text)
@seeded
def test_ordinary_text_survives(hf_tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = HFChatTokenizer(hf_tokenizer).encode_ordinary(text)
    assert hf_tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_the_tiny_tokenizer_would_merge_across_borders(hf_tokenizer: PreTrainedTokenizerFast) -> None:
    """The same text in one go gives other ids, so a server that did so would be seen."""
    segments = render([{"role": "user", "content": "hello"}])
    whole = hf_tokenizer.encode(text_of(segments), add_special_tokens=False)
    ids = encode(segments, HFChatTokenizer(hf_tokenizer))
    assert ids != whole
    assert hf_tokenizer.decode(ids) == hf_tokenizer.decode(whole) == text_of(segments)


def test_a_tokenizer_without_control_tokens_is_refused(tmp_path: Path) -> None:
    """Also where it has an id for what it does not know."""
    for unknown in (None, "[UNK]"):
        vocab = {"a": 0, "[UNK]": 1}
        file = tmp_path / "tokenizer.json"
        file.write_text(Tokenizer(models.WordLevel(vocab, unk_token="[UNK]")).to_str())
        plain = PreTrainedTokenizerFast(tokenizer_file=str(file), unk_token=unknown)
        with pytest.raises(ValueError, match=r"no control token <\|open\|>.*Use /generate or /v1/completions"):
            HFChatTokenizer(plain).control_id("<|open|>")
