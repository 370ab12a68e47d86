"""The model's output as a sequence of control tokens and text.

Two ways in, one way out. Token ids tell a control token from text that merely spells one; text alone cannot, so in
text every spelling of a control token is taken for the token. Both may be cut anywhere into chunks.

Where ids have to pass through a place that takes only text, ``MarkedText`` writes them so that nothing is lost.
"""

from __future__ import annotations

import codecs
import enum
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from sglang_k3.chat.encoding import CLOSE, END_OF_MESSAGE, OPEN, SEP


class Control(enum.Enum):
    """A control token; the value is its spelling."""

    OPEN = OPEN
    CLOSE = CLOSE
    SEP = SEP
    END_OF_MESSAGE = END_OF_MESSAGE


Item = Control | str  # a str is never empty, and never a control token whatever it spells

# Begins a marked text, and follows each "<" of its ordinary text, which then spells no control token. A noncharacter.
_LITERAL = "\ufdd0"
_SPELLINGS = tuple(control.value for control in Control)
_SPELLED = re.compile(f"({'|'.join(map(re.escape, _SPELLINGS))})")
_LONGEST_START = max(map(len, _SPELLINGS)) - 1


class TextScanner:
    """Items of text; holds back an end that may turn out to be the start of a control token.

    Attributes:
        is_exact: the text is a marked one; in any other a control token cannot be told from text that spells it.
    """

    def __init__(self) -> None:
        self.is_exact = False
        self._is_first = True
        self._held = ""

    def feed(self, chunk: str) -> Iterator[Item]:
        if self._is_first and chunk:
            self.is_exact = chunk[0] == _LITERAL
            self._is_first = False
            chunk = chunk[self.is_exact :]
        text = self._held + chunk
        end = _start_of_control(text)
        self._held = text[end:]
        for i, piece in enumerate(_SPELLED.split(text[:end])):
            if i % 2:
                yield Control(piece)
            elif piece:
                yield piece.replace(f"<{_LITERAL}", "<") if self.is_exact else piece

    def finish(self) -> Iterator[Item]:
        if self._held == "<":  # anything longer is a marker that was cut off
            yield self._held
        self._held = ""


class TokenScanner:
    """Items of token ids; holds back the bytes of an incomplete character.

    Args:
        controls: id of every control token, ``{tokenizer.control_id(c.value): c for c in Control}``.
        token_bytes: bytes of any other token. What is no UTF-8 becomes U+FFFD.
    """

    is_exact = True

    def __init__(self, controls: Mapping[int, Control], token_bytes: Callable[[int], bytes]) -> None:
        self._controls = controls
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, chunk: Iterable[int]) -> Iterator[Item]:
        run = bytearray()
        for token in chunk:
            control = self._controls.get(token)
            if control is None:
                run += self._token_bytes(token)
                continue
            yield from self._text(bytes(run), final=True)
            run.clear()
            yield control
        yield from self._text(bytes(run), final=False)

    def finish(self) -> Iterator[Item]:
        yield from self._text(b"", final=True)

    def _text(self, run: bytes, *, final: bool) -> Iterator[str]:
        text = self._decoder.decode(run, final)
        if text:
            yield text


class MarkedText:
    """Token ids as text, from which a ``TextScanner`` gives the items back that this one's scanner found.

    The first piece carries the mark of such a text, even if there is nothing else to write yet.
    """

    def __init__(self, scanner: TokenScanner) -> None:
        self._scanner = scanner
        self._start = _LITERAL

    def feed(self, chunk: Iterable[int]) -> str:
        return self._spelled(self._scanner.feed(chunk))

    def finish(self) -> str:
        return self._spelled(self._scanner.finish())

    def _spelled(self, items: Iterable[Item]) -> str:
        start, self._start = self._start, ""
        return start + "".join(
            item.value if isinstance(item, Control) else item.replace("<", f"<{_LITERAL}") for item in items
        )


def with_opening(opening: str, text: str) -> str:
    """The first chunk of a text, marked or not, with markers put before it."""
    return _LITERAL + opening + text[1:] if text.startswith(_LITERAL) else opening + text


class UnspelledText:
    """One text out of pieces between which markers were taken out: what is left must not spell a control token anew.

    Of ``<|op`` and ``en|>`` around a marker, the ``>`` that would complete the spelling is left out.
    """

    def __init__(self) -> None:
        self._tail = ""

    def add(self, piece: str) -> str:
        """The piece as it may be appended."""
        kept: list[str] = []
        start = 0
        while match := _SPELLED.search(self._tail + piece[start : start + _LONGEST_START]):
            end = start + match.end() - len(self._tail)
            kept.append(piece[start : end - 1])
            self._tail = (self._tail + kept[-1])[-_LONGEST_START:]
            start = end
        kept.append(piece[start:])
        self._tail = (self._tail + kept[-1][-_LONGEST_START:])[-_LONGEST_START:]
        return "".join(kept)


def _start_of_control(text: str) -> int:
    """Where an unfinished spelling at the end of the text begins; its length if there is none."""
    start = text.rfind("<", max(0, len(text) - _LONGEST_START))
    if start >= 0:
        tail = text[start:]
        if any(spelling.startswith(tail) and spelling != tail for spelling in _SPELLINGS):
            return start
    return len(text)
