"""K3's channel parser in the two shapes that SGLang asks for: a reasoning and a tool-call detector.

The host runs them one after the other over decoded text. Both are the same parser: the first keeps the reasoning
and, where tools are in play, hands the whole turn on untouched, so that the second sees exactly what the model wrote.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from sglang.srt.function_call.base_format_detector import BaseFormatDetector
from sglang.srt.function_call.core_types import StreamingParseResult as ToolParseResult
from sglang.srt.function_call.core_types import ToolCallItem
from sglang.srt.parser.reasoning_parser import BaseReasoningFormatDetector, StreamingParseResult

from sglang_k3.chat.channels import (
    CUT_OFF,
    CallArguments,
    CallStart,
    ChannelParser,
    Content,
    Event,
    MalformedCall,
    Reasoning,
    ReasoningWithdrawn,
)
from sglang_k3.chat.scanners import TextScanner, with_opening
from sglang_k3.chat.segments import CLOSE, END_OF_MESSAGE, OPEN, SEP
from sglang_k3.chat.tool_calls import ToolSchema

logger = logging.getLogger(__name__)


class KimiK3ReasoningDetector(BaseReasoningFormatDetector):
    """Separates the think channel from the rest.

    Args:
        force_reasoning: whether the prompt left the think channel open.

    Attributes:
        hands_on: pass the turn on as it came, for the tool-call detector; otherwise only its content.
    """

    def __init__(
        self,
        stream_reasoning: bool = True,
        force_reasoning: bool = True,
        continue_final_message: bool = False,
        previous_content: str = "",
        force_nonempty_content: bool = False,
    ) -> None:
        # The host wants a single token here; the complete end has three, and only our own parser decides by it.
        super().__init__(think_start_token=OPEN, think_end_token=CLOSE, reasoning_default="thinking")
        self.hands_on = False
        self._thinking = force_reasoning
        self._parser = ChannelParser(TextScanner(), thinking=force_reasoning)
        self._is_first = True

    def detect_and_parse(self, text: str) -> StreamingParseResult:
        return self._result([*self._parser.feed(text), *self._parser.finish()], text)

    def parse_streaming_increment(self, new_text: str) -> StreamingParseResult:
        return self._result(self._parser.feed(new_text), new_text)

    def finish(self) -> StreamingParseResult:
        return self._result(self._parser.finish(), END_OF_MESSAGE)

    def _result(self, events: Iterable[Event], raw: str) -> StreamingParseResult:
        events = list(events)
        reasoning = _reasoning_of(events)
        if not self.hands_on:
            return StreamingParseResult("".join(_content_of(event) for event in events), reasoning)
        if self._is_first and not self._thinking:
            # The second parser starts in the think channel: tell it where this turn starts.
            raw = with_opening(f"{OPEN}response{SEP}", raw)
        self._is_first = False
        return StreamingParseResult(raw, reasoning)


class KimiK3ToolCallDetector(BaseFormatDetector):
    """Takes a whole turn and gives its content and its calls, arguments as they come."""

    def __init__(self) -> None:
        super().__init__()
        self._parser: ChannelParser[str] | None = None

    def has_tool_call(self, text: str) -> bool:
        """Every turn has to pass through the parser: what is not a call still has markers to lose."""
        return True

    def supports_structural_tag(self) -> bool:
        return True

    def get_structural_tag(self, tools: Any = None, tool_choice: Any = "auto", thinking_mode: bool = False) -> Any:
        """Constraints need the whole request; ``integration.seam_parsers`` puts the real one in this one's place."""
        return {}

    def structure_info(self) -> Any:
        """Abstract in the base class, for formats whose calls begin and end with fixed strings; K3's do not.

        The host asks for it only where ``get_structural_tag`` gives nothing, so never here; its own detectors without
        such strings refuse in the same way.
        """
        raise NotImplementedError("K3 calls are constrained turn by turn, see sglang_k3.chat.grammar")

    def detect_and_parse(self, text: str, tools: list[Any]) -> ToolParseResult:
        parser = _parser_for(tools)
        content, calls = "", {}
        for event in [*parser.feed(text), *parser.finish()]:
            content += _content_of(event)
            if isinstance(event, CallStart):
                calls[event.index] = ToolCallItem(tool_index=event.index, name=event.name, parameters="")
            elif isinstance(event, CallArguments):
                calls[event.index].parameters += event.fragment
        return ToolParseResult(normal_text=content, calls=list(calls.values()))

    def parse_streaming_increment(self, new_text: str, tools: list[Any]) -> ToolParseResult:
        if self._parser is None:
            self._parser = _parser_for(tools)
        content, calls = "", []
        for event in self._parser.feed(new_text):
            content += _content_of(event)
            if isinstance(event, CallStart):
                calls.append(ToolCallItem(tool_index=event.index, name=event.name, parameters=""))
            elif isinstance(event, CallArguments):
                calls.append(ToolCallItem(tool_index=event.index, name=None, parameters=event.fragment))
        return ToolParseResult(normal_text=content, calls=calls)


def _parser_for(tools: list[Any]) -> ChannelParser[str]:
    schemas = [ToolSchema(tool.function.name, tool.function.parameters) for tool in tools]
    return ChannelParser(TextScanner(), thinking=True, tools=schemas)


def _reasoning_of(events: Iterable[Event]) -> str:
    """The reasoning among some events; what an earlier chunk of a stream has told cannot be taken back."""
    reasoning = ""
    for event in events:
        if isinstance(event, Reasoning):
            reasoning += event.text
        elif isinstance(event, ReasoningWithdrawn):
            reasoning = ""
    return reasoning


def _content_of(event: Event) -> str:
    """What of an event belongs into the text that the user reads.

    A call that the client has not been told of would be lost: it is reported as text, without its markers. Not so
    the marker of a call that the end of the turn cut off: the model has not said yet what it wants.
    """
    if isinstance(event, Content):
        return event.text
    if isinstance(event, MalformedCall):
        logger.warning("K3: malformed tool call (%s): %.500s", event.reason, event.raw)
        if event.index is None and event.reason != CUT_OFF:
            return f"[malformed tool call: {event.reason}] {_without_markers(event.raw)}"
    return ""


def _without_markers(raw: str) -> str:
    for marker in (OPEN, CLOSE, SEP, END_OF_MESSAGE):
        raw = raw.replace(marker, " ")
    return raw
