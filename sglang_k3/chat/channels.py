"""The one parser of K3's output: a stream of control tokens and text becomes events (fact sheet 4.5).

A turn is a sequence of channels, and a channel lasts until the next marker that says otherwise::

    [think] REASONING </think> <response> TEXT </response> <tools> <call> <argument> VALUE ... </tools> </message>

* think, response and tools come in any order and number. Any open marker ends the channel before it, closers may
  be missing. Close of the message or its end token ends everything.
* Text between channels is response. ``close response`` within the first thoughts means that there was no thinking:
  what has been said is the answer (``ReasoningWithdrawn``).
* Every started call ends in ``CallEnd`` or ``MalformedCall``, and whatever else the tools channel holds is
  reported too. Nothing of a call is dropped, nothing of a malformed one is mended.
* Markers never appear in reasoning or content. In the value of an argument, a marker that does not belong there is
  part of the value.

Events do not depend on how the stream was cut into chunks, except for where one piece of text ends and the next
begins. Time is linear in the length of the stream: what is looked at twice is bounded by ``_LONGEST_TAG``.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import re
from collections.abc import Iterable, Sequence
from typing import Generic, Protocol, TypeVar

from sglang_k3.chat.scanners import Control, Item, TextScanner, UnspelledText
from sglang_k3.chat.tool_calls import ArgumentsWriter, ToolSchema, call_id


@dataclasses.dataclass(frozen=True)
class Reasoning:
    text: str


@dataclasses.dataclass(frozen=True)
class ReasoningWithdrawn:
    """All ``Reasoning`` so far was the answer; it follows once more as ``Content``."""


@dataclasses.dataclass(frozen=True)
class Content:
    text: str


@dataclasses.dataclass(frozen=True)
class CallStart:
    """``index`` counts the calls of the turn from 0, ``id`` those of the conversation."""

    index: int
    name: str
    id: str


@dataclasses.dataclass(frozen=True)
class CallArguments:
    """A piece of the JSON text of the arguments; the pieces of a call concatenate to the whole."""

    index: int
    fragment: str


@dataclasses.dataclass(frozen=True)
class CallEnd:
    index: int


@dataclasses.dataclass(frozen=True)
class MalformedCall:
    """Takes the place of ``CallEnd``; the JSON text of the arguments is left unfinished.

    ``index`` is None for what never got as far as ``CallStart``. ``raw`` spells out all that the model wrote.
    """

    index: int | None
    raw: str
    reason: str


@dataclasses.dataclass(frozen=True)
class MessageEnd:
    """Exactly once, as the last event."""


Event = Reasoning | ReasoningWithdrawn | Content | CallStart | CallArguments | CallEnd | MalformedCall | MessageEnd


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """``arguments`` is JSON text. A malformed call has ``is_complete`` false and the arguments that it came to."""

    name: str
    id: str
    arguments: str
    is_complete: bool


@dataclasses.dataclass(frozen=True)
class Message:
    reasoning: str = ""
    content: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: tuple[MalformedCall, ...] = ()


def parse(text: str, *, thinking: bool, tools: Sequence[ToolSchema] = (), calls_before: int = 0) -> Message:
    """A whole turn at once; see ``ChannelParser`` for the parameters."""
    parser = ChannelParser(TextScanner(), thinking=thinking, tools=tools, calls_before=calls_before)
    return collect([*parser.feed(text), *parser.finish()])


def collect(events: Iterable[Event]) -> Message:
    """The message that a stream of events amounts to."""
    reasoning, content = io.StringIO(), io.StringIO()
    starts: list[CallStart] = []
    arguments: list[io.StringIO] = []
    completed: set[int] = set()
    malformed: list[MalformedCall] = []
    for event in events:
        match event:
            case Reasoning(text):
                reasoning.write(text)
            case ReasoningWithdrawn():
                reasoning = io.StringIO()
            case Content(text):
                content.write(text)
            case CallStart():
                starts.append(event)
                arguments.append(io.StringIO())
            case CallArguments(index, fragment):
                arguments[index].write(fragment)
            case CallEnd(index):
                completed.add(index)
            case MalformedCall():
                malformed.append(event)
    calls = tuple(
        ToolCall(start.name, start.id, text.getvalue(), start.index in completed)
        for start, text in zip(starts, arguments, strict=True)
    )
    return Message(reasoning.getvalue(), content.getvalue(), calls, tuple(malformed))


Chunk = TypeVar("Chunk", contravariant=True)


class Scanner(Protocol[Chunk]):
    """``TextScanner`` or ``TokenScanner``."""

    @property
    def is_exact(self) -> bool: ...

    def feed(self, chunk: Chunk) -> Iterable[Item]: ...

    def finish(self) -> Iterable[Item]: ...


class _Place(enum.Enum):
    """Where in the turn the stream is. From TOOLS to BROKEN: within the tools channel."""

    THINK, RESPONSE, OUTSIDE, TOOLS, CALL, VALUE, BROKEN, ENDED = range(8)


_CHANNELS = {"think": _Place.THINK, "response": _Place.RESPONSE, "tools": _Place.TOOLS}
_SPEECH = (_Place.THINK, _Place.RESPONSE, _Place.OUTSIDE)

CUT_OFF = "cut off"  # the reason of a ``MalformedCall`` that the turn ended in
_LONGEST_TAG = 4096  # characters; keys of arguments are the only part without a natural limit
# The start of a tag as far as it has come: a name, then perhaps the first attribute. Prose after a lone open marker
# fails at its third word or first punctuation mark and is released as text. Every prefix of a match is a match.
_TAG_START = re.compile(r"\s{0,4}[\w-]{0,32}(?:\Z|\s{1,4}(?:\Z|[\w-]{1,32}(?:\Z|=)))")
_ATTRIBUTE = re.compile(r'(?<![\w-])([\w-]+)="([^"]*)"')


@dataclasses.dataclass
class _Call:
    """What the tools channel is at: a call, or (``index`` None) something that never became one."""

    index: int | None
    arguments: ArgumentsWriter
    raw: io.StringIO
    fault: str = ""
    value_tag: str = ""


class ChannelParser(Generic[Chunk]):
    """Incremental parser of one assistant turn.

    Args:
        scanner: turns chunks into items; the type of ``feed``'s chunks is the scanner's.
        thinking: whether the prompt ended with an open think channel, else with an open response channel.
        tools: their schemas direct the types of arguments. Calls of other tools are parsed all the same.
        calls_before: how many calls the conversation has already, for the ids.
    """

    def __init__(
        self, scanner: Scanner[Chunk], *, thinking: bool, tools: Sequence[ToolSchema] = (), calls_before: int = 0
    ) -> None:
        self._scanner = scanner
        self._tools = {tool.name: tool for tool in tools}
        self._calls_before = calls_before
        self._place = _Place.THINK if thinking else _Place.RESPONSE
        self._first_thoughts = io.StringIO() if thinking else None  # kept while they may prove to be the answer
        self._tag: Control | None = None  # OPEN or CLOSE once seen, until SEP
        self._tag_text = ""
        self._call: _Call | None = None
        self._num_calls = 0
        self._reasoning, self._content = UnspelledText(), UnspelledText()
        self._events: list[Event] = []

    def feed(self, chunk: Chunk) -> list[Event]:
        for item in self._scanner.feed(chunk):
            self._take(item)
        events, self._events = self._events, []
        return events

    def finish(self) -> list[Event]:
        """The stream is over. A marker that it was cut off in is dropped, a call is reported."""
        for item in self._scanner.finish():
            self._take(item)
        if self._place is not _Place.ENDED:
            self._end_message()
        events, self._events = self._events, []
        return events

    # Items to tags and text

    def _take(self, item: Item) -> None:
        if self._place is _Place.ENDED:
            return
        if isinstance(item, str):
            if self._tag is None:
                self._on_text(item)
            else:
                self._extend_tag(item)
        elif item is Control.END_OF_MESSAGE:
            self._end_message()
        elif item is Control.SEP:
            self._complete_tag()
        else:
            self._abandon_tag()
            self._tag = item

    def _extend_tag(self, text: str) -> None:
        self._tag_text += text
        if len(self._tag_text) <= _LONGEST_TAG and _TAG_START.match(self._tag_text):
            return
        control, text = self._pop_tag()
        self._on_text(text if self._place in _SPEECH else control.value + text)

    def _complete_tag(self) -> None:
        if self._tag is None:
            self._on_stray(Control.SEP, "", Control.SEP.value)
            return
        control, text = self._pop_tag()
        spelled = control.value + text + Control.SEP.value
        name = (text.split(maxsplit=1) or [""])[0]
        if control is Control.OPEN:
            self._on_open(name, text, spelled)
        else:
            self._on_close(name, spelled)

    def _abandon_tag(self) -> None:
        if self._tag is not None:
            control, text = self._pop_tag()
            self._on_stray(control, text, control.value + text)

    def _pop_tag(self) -> tuple[Control, str]:
        assert self._tag is not None
        tag = self._tag, self._tag_text
        self._tag, self._tag_text = None, ""
        return tag

    # What text and tags mean, by place

    def _on_text(self, text: str) -> None:
        if self._call is not None:
            self._call.raw.write(text)
        match self._place:
            case _Place.THINK:
                self._think(text)
            case _Place.RESPONSE:
                self._say(text)
            case _Place.OUTSIDE if text := text.lstrip():
                self._place = _Place.RESPONSE
                self._say(text)
            case _Place.TOOLS if text := text.lstrip():
                self._break("text outside a call", text)
            case _Place.CALL if text.strip():
                self._break("text outside an argument")
            case _Place.VALUE:
                assert self._call is not None
                self._emit_arguments(self._call.arguments.write(text))

    def _on_open(self, name: str, tag_text: str, spelled: str) -> None:
        attributes = {key: _unescape(value) for key, value in _ATTRIBUTE.findall(tag_text)}
        if name in _CHANNELS:
            if self._place is not _CHANNELS[name]:  # else an empty marker: the first thoughts go on
                self._leave_channel()
                self._place = _CHANNELS[name]
        elif name == "message":
            self._leave_channel()
            self._place = _Place.OUTSIDE
            if attributes.get("role", "assistant") != "assistant":
                self._end_message()  # the model goes on to write somebody else's
        elif name == "call":
            self._leave_channel()
            self._start_call(attributes.get("tool", ""), spelled)
        elif name in ("argument", "json"):
            self._start_value(name, attributes, spelled)
        else:
            self._on_stray(Control.OPEN, tag_text, spelled)

    def _on_close(self, name: str, spelled: str) -> None:
        if name == "message":
            self._leave_channel()
            self._end_message()
        elif self._call is not None:
            self._close_within_call(self._call, name, spelled)
        elif name in _CHANNELS:
            if name == "response" and self._place is _Place.THINK and self._first_thoughts is not None:
                self._withdraw(self._first_thoughts.getvalue())
            self._leave_channel()
            self._place = _Place.OUTSIDE

    def _think(self, text: str) -> None:
        if not self._scanner.is_exact:
            text = self._reasoning.add(text)
        if text:
            self._events.append(Reasoning(text))
        if self._first_thoughts is not None:
            self._first_thoughts.write(text)

    def _say(self, text: str) -> None:
        if not self._scanner.is_exact:
            text = self._content.add(text)
        if text:
            self._events.append(Content(text))

    def _withdraw(self, thoughts: str) -> None:
        if thoughts:
            self._events.append(ReasoningWithdrawn())
            self._say(thoughts)

    def _close_within_call(self, call: _Call, name: str, spelled: str) -> None:
        if self._place is _Place.VALUE and name == call.value_tag:
            call.raw.write(spelled)
            self._end_value(call)
            self._place = _Place.CALL
        elif name == "call":
            call.raw.write(spelled)
            self._end_call(call)
            self._place = _Place.TOOLS
        elif name == "tools":
            self._leave_channel()
            self._place = _Place.OUTSIDE
        else:
            self._on_stray(Control.CLOSE, "", spelled)

    def _on_stray(self, control: Control, text: str, spelled: str) -> None:
        """A marker that means nothing here: part of a value, else worth a report if it opens something."""
        if self._place is _Place.VALUE:
            self._on_text(spelled)
            return
        if self._call is not None:
            self._call.raw.write(spelled)
        if control is not Control.OPEN or not text.strip():
            return
        if self._place is _Place.CALL:
            self._break("unknown marker in a call")
        elif self._place is _Place.TOOLS or text.split()[0] == "call":
            self._leave_channel()
            self._break("a marker that opens no call", spelled)

    # Calls

    def _start_call(self, name: str, spelled: str) -> None:
        if not name:
            self._break("a call without a tool", spelled)
            return
        index = self._num_calls
        self._num_calls += 1
        self._call = _Call(index, ArgumentsWriter(self._tools.get(name)), io.StringIO())
        self._call.raw.write(spelled)
        self._place = _Place.CALL
        self._events.append(CallStart(index, name, call_id(name, self._calls_before + index)))

    def _start_value(self, tag: str, attributes: dict[str, str], spelled: str) -> None:
        call = self._call
        if call is None:
            self._leave_channel()
            self._break(f"{tag} outside a call", spelled)
            return
        if self._place is _Place.VALUE:  # its closer is missing
            self._end_value(call)
            self._place = _Place.CALL
        call.raw.write(spelled)
        if self._place is _Place.BROKEN:
            return
        if call.arguments.is_verbatim or (tag == "json" and not call.arguments.is_empty):
            self._break("a json block beside other arguments")
        elif tag == "argument" and "key" not in attributes:
            self._break("an argument without a key")
        else:
            if tag == "json":
                call.arguments.open_verbatim()
            else:
                self._emit_arguments(call.arguments.open(attributes["key"], attributes.get("type")))
            call.value_tag = tag
            self._place = _Place.VALUE

    def _end_value(self, call: _Call) -> None:
        self._emit_arguments(call.arguments.close())

    def _emit_arguments(self, fragment: str) -> None:
        assert self._call is not None and self._call.index is not None
        if fragment:
            self._events.append(CallArguments(self._call.index, fragment))

    def _break(self, reason: str, raw: str = "") -> None:
        """The call, or what stands in its place, is malformed; the rest of it is only recorded."""
        if self._call is None:
            self._call = _Call(None, ArgumentsWriter(), io.StringIO())
        self._call.raw.write(raw)
        self._call.fault = reason
        self._place = _Place.BROKEN

    def _end_call(self, call: _Call) -> None:
        if self._place is _Place.VALUE:
            self._end_value(call)
        self._call = None
        if call.fault or call.index is None:
            self._events.append(MalformedCall(call.index, call.raw.getvalue(), call.fault))
            return
        fragment = call.arguments.finish()
        if fragment:
            self._events.append(CallArguments(call.index, fragment))
        self._events.append(CallEnd(call.index))

    # Ends

    def _leave_channel(self) -> None:
        self._first_thoughts = None
        if self._call is not None:
            self._end_call(self._call)

    def _end_message(self) -> None:
        """Whatever is still open was cut off: no closer has said that it is whole."""
        if self._tag is not None:
            control, text = self._pop_tag()
            if self._call is not None:
                self._call.raw.write(control.value + text)
            else:
                self._on_stray(control, text, control.value + text)
                if self._call is not None:  # of the marker; nobody knows what it would have opened
                    self._call.fault = CUT_OFF
        if self._call is not None:
            self._call.fault = self._call.fault or CUT_OFF
            self._place = _Place.BROKEN
            self._end_call(self._call)
        self._place = _Place.ENDED
        self._events.append(MessageEnd())


def _unescape(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")
