"""How well a fitted checkpoint talks: greedy answers of the reference to conversations with unseen phrasings.

python -m sglang_k3.testing.fit_measure DIR --count 200            DIR: `sglang-k3 tiny DIR --preset chat`
python -m sglang_k3.testing.fit_measure DIR --rounded              in bfloat16 instead of float32
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tqdm import tqdm

from sglang_k3.chat.encoding import CLOSE, END_OF_MESSAGE, OPEN, SEP, encode
from sglang_k3.testing.fit_data import TOPICS, Speaker
from sglang_k3.testing.fit_render import Conversation, SegmentTokenizer, answer_text, prompt_segments
from sglang_k3.testing.reference import ReferenceModel

MAX_NEW_TOKENS = 120

_TEXT = r"(?:(?!<\|)[\s\S])*"
_ARGUMENT = rf'<open>argument key="\w+" type="\w+"<sep>{_TEXT}<close>argument<sep>'
_CALL = rf'<open>call tool="\w+" index="\d+"<sep>(?:{_ARGUMENT})*<close>call<sep>'
_WELL_FORMED = re.compile(
    rf"(?:{_TEXT}<close>think<sep><open>response<sep>)?{_TEXT}<close>response<sep>"
    rf"(?:<open>tools<sep>(?:{_CALL})+<close>tools<sep>)?<close>message<sep><end>".replace("<open>", re.escape(OPEN))
    .replace("<close>", re.escape(CLOSE))
    .replace("<sep>", re.escape(SEP))
    .replace("<end>", re.escape(END_OF_MESSAGE))
)
_CALLED = re.compile(r'call tool="(\w+)"')
_VALUE = re.compile(rf'argument key="(\w+)" type="(\w+)"{re.escape(SEP)}({_TEXT})')


@dataclasses.dataclass(frozen=True)
class Answer:
    """What the model wrote, with its markers, and what it should have written."""

    text: str
    expected: str
    topic: str = ""

    @property
    def ended(self) -> bool:
        return self.text.endswith(END_OF_MESSAGE)

    @property
    def well_formed(self) -> bool:
        return _WELL_FORMED.fullmatch(self.text) is not None

    @property
    def right_tools(self) -> bool:
        return _CALLED.findall(self.text) == _CALLED.findall(self.expected)

    @property
    def right_arguments(self) -> bool:
        return self.right_tools and _VALUE.findall(self.text) == _VALUE.findall(self.expected)

    @property
    def exact(self) -> bool:
        return self.text == self.expected


class Answerer:
    """Greedy answers of a checkpoint folder, until the end of the turn."""

    def __init__(self, folder: Path, *, round_to: torch.dtype | None = None) -> None:
        self.model = ReferenceModel.from_checkpoint(folder, round_to=round_to)
        self.tokenizer = SegmentTokenizer(Tokenizer.from_file(str(folder / "tokenizer.json")))
        self.end_id = self.tokenizer.control_id(END_OF_MESSAGE)

    def continue_prompt(self, ids: Sequence[int], max_new_tokens: int = MAX_NEW_TOKENS) -> str:
        """What follows these ids, with its markers."""
        state = self.model.new_state()
        for token_id in ids:
            logits = self.model.step(state, token_id)
        written: list[int] = []
        while len(written) < max_new_tokens:
            written.append(int(logits.argmax()))
            if written[-1] == self.end_id:
                break
            logits = self.model.step(state, written[-1])
        text: str = self.tokenizer.tokenizer.decode(written, skip_special_tokens=False)
        return text

    def answer(self, conversation: Conversation, topic: str = "") -> Answer:
        """The last turn of a conversation, from the turns before it."""
        ids = encode(prompt_segments(conversation), self.tokenizer)
        return Answer(self.continue_prompt(ids), answer_text(conversation), topic)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m sglang_k3.testing.fit_measure", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("folder", type=Path, metavar="DIR", help="checkpoint to measure")
    parser.add_argument("--count", type=int, default=200, help="conversations (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1_000_000, help="of the conversations (default: %(default)s)")
    parser.add_argument("--seen", action="store_true", help="with the phrasings of training")
    parser.add_argument("--rounded", action="store_true", help="round to bfloat16 wherever a served model does")
    parser.add_argument("--show", action="store_true", help="print the answers that are not as expected")
    args = parser.parse_args(argv)
    answerer = Answerer(args.folder, round_to=torch.bfloat16 if args.rounded else None)
    speaker = Speaker(args.seed, held_out=not args.seen)
    topics = [list(TOPICS)[i % len(TOPICS)] for i in range(args.count)]
    answers = [answerer.answer(speaker.conversation(topic), topic) for topic in tqdm(topics)]
    for name in ("ended", "well_formed", "right_tools", "right_arguments", "exact"):
        tqdm.write(f"{name:16} {sum(getattr(answer, name) for answer in answers) / len(answers):7.1%}")
    for answer in answers:
        if args.show and not answer.exact:
            tqdm.write(f"\n{answer.topic}\n  expected {answer.expected!r}\n  written  {answer.text!r}")


if __name__ == "__main__":
    main()
