"""What the host's two detectors make of a whole turn."""

from __future__ import annotations

import pytest
from sglang.srt.entrypoints.openai.protocol import Function, Tool

from sglang_k3.chat.segments import CLOSE, OPEN, SEP
from sglang_k3.host.detectors import KimiK3ReasoningDetector, KimiK3ToolCallDetector

pytestmark = pytest.mark.sglang

TOOLS = [Tool(type="function", function=Function(name="find", parameters={"type": "object"}))]
CLOSED, RESPONSE = f"{CLOSE}response{SEP}", f"{OPEN}response{SEP}"


def whole(text: str, *, with_tools: bool) -> tuple[str, str, list[str | None]]:
    """Reasoning, content and the names of the calls."""
    detector = KimiK3ReasoningDetector()
    detector.hands_on = with_tools
    result = detector.detect_and_parse(text)
    if not with_tools:
        return result.reasoning_text, result.normal_text, []
    answer = KimiK3ToolCallDetector().detect_and_parse(result.normal_text, TOOLS)
    return result.reasoning_text, answer.normal_text, [call.name for call in answer.calls]


with_or_without_tools = pytest.mark.parametrize("with_tools", [False, True])


@with_or_without_tools
def test_an_answer_in_place_of_thoughts_is_no_reasoning(with_tools: bool) -> None:
    assert whole(f"so{CLOSED}", with_tools=with_tools) == ("", "so", [])
    text = f"so{CLOSED}{OPEN}think{SEP}why{CLOSE}think{SEP}{RESPONSE}then"
    assert whole(text, with_tools=with_tools) == ("why", "sothen", [])


@with_or_without_tools
def test_a_stream_takes_back_what_it_has_not_told(with_tools: bool) -> None:
    detector = KimiK3ReasoningDetector()
    detector.hands_on = with_tools
    assert detector.parse_streaming_increment(f"so{CLOSED}").reasoning_text == ""


@with_or_without_tools
@pytest.mark.parametrize("tools", ["", f"{OPEN}tools{SEP}"])
def test_the_marker_of_a_call_that_is_cut_off_is_no_content(with_tools: bool, tools: str) -> None:
    text = f"why{CLOSE}think{SEP}{RESPONSE}so{CLOSED}{tools}{OPEN}call tool="
    for cut in (text, f'{text}"find"'):
        assert whole(cut, with_tools=with_tools) == ("why", "so", [])


def test_a_malformed_call_is_content() -> None:
    _, content, calls = whole(f"why{OPEN}tools{SEP}{OPEN}call{SEP}{CLOSE}call{SEP}", with_tools=True)
    assert content.startswith("[malformed tool call: a call without a tool]") and not calls
