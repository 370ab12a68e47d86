"""What a request may ask of the engine: what would end the scheduler, or break its messages, is refused at the door.

The host checks some of this late, some in the scheduler and some nowhere: one token id outside the vocabulary ends
the server. Here every request is looked at once, as it was sent, whichever endpoint it came by. The types of sampling
parameters are those that the host itself declares.
"""

from __future__ import annotations

import dataclasses
import json
import re
from array import array
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec
from sglang.srt.managers.io_struct import GenerateReqInput, SessionParams
from sglang.srt.sampling.sampling_params import MAX_LEN, SamplingParams, get_max_seq_length, sre_parse

from sglang_k3.chat.schema_alternatives import NUL_IN_JSON

Struct = TypeVar("Struct", bound=msgspec.Struct)

MAX_CHOICES = 1024  # of one prompt
MAX_STOPS = 1024  # each is looked for after every token
MAX_STOP_PATTERNS = 32  # likewise; Python keeps 512 patterns compiled, for all requests together
MAX_PATTERN_STEPS = 1000  # of a search at one place of the text, in the worst case; also the most characters
MAX_DEPTH = 128  # of a schema: what xgrammar takes to compile it grows with the third power
MAX_INT32 = 2**31 - 1
MIN_INT64, MAX_INT64 = -(2**63), 2**63 - 1
MAX_NUMBER = 1e30  # fits float32, in which the host keeps temperatures and biases, with room for their quotient

_EBNF_TOKEN = re.compile(r"Token\w*\s*\(")  # xgrammar's macros of token ids
_TAG_TOKENS = {"token", "tokens", "exclude_tokens", "trigger_tokens"}
_TEXT_ONLY = "this version of sglang-k3 serves text only"
_OF_THE_HOST = "the processes of the host tell it each other"
_NOT_SERVED = {
    "image_data": _TEXT_ONLY,
    "video_data": _TEXT_ONLY,
    "audio_data": _TEXT_ONLY,
    "positional_embed_overrides": _OF_THE_HOST,
    "multi_item_delimiter_indices": _OF_THE_HOST,
    "mm_data_mooncake": _OF_THE_HOST,
    "num_items_assigned": _OF_THE_HOST,
    "need_wait_for_mm_inputs": _OF_THE_HOST,
    "encoder_urls": _OF_THE_HOST,
    "http_worker_ipc": _OF_THE_HOST,
}
# Fields of the host's sampling parameters that it fills in itself.
INTERNAL = {"stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len", "is_normalized"}


def check_request(request: GenerateReqInput, vocab_size: int) -> None:
    """Raise for the first thing that cannot be served; the request is left as it is.

    How long prompt and answer may be is left to the host, which may be told to truncate.

    Args:
        request: as it was sent, before the host normalizes it.
        vocab_size: rows of the embedding.
    Raises:
        ValueError: names the field, its value, the limit and the remedy; the host answers 400.
    """
    for name, why in _NOT_SERVED.items():
        _require(not _is_given(getattr(request, name)), name, getattr(request, name), f"left out: {why}")
    if request.input_embeds is not None:
        raise ValueError("input_embeds is refused: the prefix cache goes by token ids. Send text or input_ids.")
    num_prompts = _check_prompts(request, vocab_size)
    for params in _each(request, "sampling_params", num_prompts):
        _check_sampling(params, vocab_size)
    for name in ("rid", "extra_key"):
        for value in _each(request, name, num_prompts):
            _require(isinstance(value, str), name, value, "a string")
    for name in ("return_logprob", "return_sampling_mask"):
        for value in _each(request, name, num_prompts):
            _require(isinstance(value, bool), name, value, "true or false")
    for value in _each(request, "logprob_start_len", num_prompts):
        _check_int("logprob_start_len", value, -1, MAX_INT32)
    for value in _each(request, "top_logprobs_num", num_prompts):
        _check_int("top_logprobs_num", value, 0, vocab_size)
    _check_token_ids_logprob(request, num_prompts, vocab_size)
    if request.session_params:
        _convert("session_params", request.session_params, SessionParams)
    for field in dataclasses.fields(request):
        if field.name != "input_ids":  # long, and looked at by now
            check_wire(field.name, getattr(request, field.name))


def _check_prompts(request: GenerateReqInput, vocab_size: int) -> int | None:
    """The number of prompts in a list, or None for one by itself. Without any, the host says what is wrong."""
    if request.text is not None and request.input_ids is not None:
        raise ValueError("text and input_ids are both given, and only one of them could be answered: leave one out.")
    if request.input_ids is not None:
        nested = bool(request.input_ids) and isinstance(request.input_ids[0], list)
        prompts = request.input_ids if nested else [request.input_ids]
        for ids in prompts:
            _require(isinstance(ids, list) and len(ids) > 0, "input_ids", ids, "a list of at least one token id")
            _check_ids("input_ids", ids, vocab_size)
        return len(prompts) if nested else None
    if request.text is not None:
        prompts = request.text if isinstance(request.text, list) else [request.text]
        _require(len(prompts) > 0, "text", prompts, "at least one prompt")
        for text in prompts:
            _require(isinstance(text, str) and text != "", "text", text, "a string that is not empty")
        return len(prompts) if isinstance(request.text, list) else None
    return None


def _check_ids(name: str, ids: Any, vocab_size: int) -> None:
    try:
        values = array("q", ids)
    except (TypeError, OverflowError) as error:
        raise ValueError(f"{name} must be token ids from 0 to {vocab_size - 1}: {error}.") from None
    for value in (min(values, default=0), max(values, default=0)):
        _check_int(name, value, 0, vocab_size - 1)


def _check_sampling(params: Any, vocab_size: int) -> None:
    """Parameters that are null mean the host's own defaults; of ``n`` it has none, as it multiplies before that."""
    given, checked = _convert("sampling_params", params, SamplingParams)
    _check_int("n", params.get("n", 1), 1, MAX_CHOICES)
    _check_ids("stop_token_ids", given.get("stop_token_ids", []), vocab_size)
    for name, low, high in (
        ("max_new_tokens", 0, MAX_INT32),
        ("min_new_tokens", 0, MAX_INT32),
        ("top_k", -1, MAX_INT32),
        ("sampling_seed", 0, MAX_INT64),
        ("stream_interval", 1, MAX_INT32),
    ):
        _check_int(name, given.get(name, low), low, high)
    for token_id, bias in (checked.logit_bias or {}).items():
        _require(re.fullmatch("[0-9]+", token_id) is not None, "logit_bias", token_id, "token ids as keys")
        _check_int("logit_bias", int(token_id), 0, vocab_size - 1)
        _require(abs(bias) <= MAX_NUMBER, "logit_bias", bias, f"a number of size {MAX_NUMBER:g} at most")
    _require(0 <= checked.temperature <= MAX_NUMBER, "temperature", checked.temperature, f"from 0 to {MAX_NUMBER:g}")
    penalty = checked.repetition_penalty
    _require(penalty >= 1 / MAX_NUMBER, "repetition_penalty", penalty, f"from {1 / MAX_NUMBER:g} to 2")
    _check_stops(checked)
    _check_grammars(checked, vocab_size)


def _convert(name: str, value: Any, to: type[Struct]) -> tuple[dict[str, Any], Struct]:
    """``value`` without what is null, and made a ``to``, whose annotations are the host's own types."""
    _require(isinstance(value, Mapping), name, value, "an object")
    given = {key: entry for key, entry in value.items() if entry is not None}
    known = [key for key in to.__struct_fields__ if key not in INTERNAL]
    for key in given:
        _require(key in known, name, key, f"made of {', '.join(known)}")
    try:
        # A struct that is sent as an array is read as one.
        as_sent = [given.get(key) for key in known] if to.__struct_config__.array_like else given
        return given, msgspec.convert(as_sent, to)
    except msgspec.ValidationError as error:
        raise ValueError(f"{name}: {error}.") from None


def _check_stops(params: SamplingParams) -> None:
    for name, value in (("stop", params.stop), ("stop_regex", params.stop_regex)):
        stops = [value] if isinstance(value, str) else value or []
        _require(len(stops) <= MAX_STOPS, name, f"{len(stops)} strings", f"at most {MAX_STOPS}")
        for stop in stops:
            _require(stop != "", name, stop, "text; an empty string would match at once")
    _check_patterns([params.stop_regex] if isinstance(params.stop_regex, str) else params.stop_regex or [])


def _check_patterns(patterns: list[str]) -> None:
    """The scheduler searches with each after every token, and no request goes on before it is done."""
    number = f"{len(patterns)} strings"
    _require(len(patterns) <= MAX_STOP_PATTERNS, "stop_regex", number, f"at most {MAX_STOP_PATTERNS}")
    for pattern in patterns:
        _require(len(pattern) <= MAX_PATTERN_STEPS, "stop_regex", pattern, f"at most {MAX_PATTERN_STEPS} long")
        try:
            length = get_max_seq_length(pattern)
            steps, _ = _search_cost(sre_parse.parse(pattern)) if length < MAX_LEN else (0, 0)
        except (re.error, OverflowError, RecursionError) as error:
            raise ValueError(f"stop_regex={_shown(pattern)} is no regular expression: {error}.") from None
        # Where the host cannot tell how long a match may be, it decodes and searches the whole answer for every token.
        bounded = "of bounded length: write * and + as {0,50} and {1,50}, [^x] as [^x\\0], and leave out look-around"
        _require(length < MAX_LEN, "stop_regex", pattern, f"{bounded} and references")
        simple = f"tried in {MAX_PATTERN_STEPS} steps at any place of the text; lower its repeats, or nest none"
        _require(steps <= MAX_PATTERN_STEPS, "stop_regex", pattern, simple)


def _search_cost(pattern: Any) -> tuple[int, int]:
    """How many steps the backtracking of ``re`` may take at one place of a text, and in how many ways it may match.

    Args:
        pattern: parsed, and of bounded length, so that it is made of characters, classes, groups, branches and repeats.
    Returns:
        Steps and ways, upper bounds as long as neither is over ``MAX_PATTERN_STEPS``, where counting ends.
    """
    steps, ways = 0, 1
    for token, value in pattern:
        if token in (sre_parse.MAX_REPEAT, sre_parse.MIN_REPEAT):
            part = _repeat_cost(*value)
        elif token is sre_parse.SUBPATTERN:
            part = _search_cost(value[-1])
        elif token is sre_parse.BRANCH:
            costs = [_search_cost(branch) for branch in value[1]]
            part = 1 + sum(cost[0] for cost in costs), sum(cost[1] for cost in costs)
        elif token is sre_parse.IN:  # a step, and the time to compile what ranges it has: 15 ms for all of Unicode
            ranges = [bounds for kind, bounds in value if kind is sre_parse.RANGE]
            part = 1 + sum(last - first for first, last in ranges) // 1000, 1
        else:
            part = 1, 1
        steps, ways = (min(n, MAX_PATTERN_STEPS + 1) for n in (steps + ways * part[0], ways * part[1]))
    return steps, ways


def _repeat_cost(low: int, high: int, pattern: Any) -> tuple[int, int]:
    """Of each way so far, one more repeat may be tried; from ``low`` on, each is a way to match."""
    part_steps, part_ways = _search_cost(pattern)
    steps, ways, ways_so_far = 0, 0, 1
    for count in range(high + 1):
        ways += ways_so_far if count >= low else 0
        steps += ways_so_far * (part_steps + 1)
        ways_so_far *= part_ways
        if steps > MAX_PATTERN_STEPS:
            break
    return steps, ways


def _check_grammars(params: SamplingParams, vocab_size: int) -> None:
    """What is well-formed here may still fail to compile, which the host reports of that request alone.

    xgrammar looks token ids up unchecked, and reads past the end of a pattern with a NUL.
    """
    names = ("regex", "ebnf", "json_schema", "structural_tag")
    given = {name: text for name in names if (text := getattr(params, name)) is not None}
    if len(given) > 1:  # the host would take one of them, and take a tool or response_format for a structural_tag
        raise ValueError(f"{' and '.join(given)} (of tools or response_format too) exclude each other: keep one.")
    for name, text in given.items():
        _require(text != "", name, text, "a grammar; leave it out for none")
        _require("\0" not in text and not NUL_IN_JSON.search(text), name, text, "text without a NUL character")
        if name == "ebnf" and _EBNF_TOKEN.search(text):
            for number in re.findall("[0-9]+", text):
                _check_int("a number in an ebnf with tokens", int(number), 0, vocab_size - 1)
        if name in ("json_schema", "structural_tag"):
            try:
                value = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{name}={_shown(text)} is not JSON: {error}.") from None
            check_depth(name, value)
            if name == "structural_tag":
                _check_tag_tokens(value, vocab_size)


def _check_tag_tokens(tag: Any, vocab_size: int) -> None:
    """Token ids, wherever a structural tag may have one; tokens may also be spelled out."""
    for entry in (entry for level in _levels(tag) for entry in level if isinstance(entry, dict)):
        for key in _TAG_TOKENS & entry.keys():
            for token in entry[key] if isinstance(entry[key], list) else [entry[key]]:
                if isinstance(token, (int, float)):
                    _check_int(key, token, 0, vocab_size - 1)


def check_depth(name: str, value: Any) -> None:
    """Refuse what takes too long to compile to a grammar.

    Args:
        value: parsed JSON, of which levels of objects and arrays count.
    Raises:
        ValueError: it is too deep.
    """
    depth = _depth(value)
    _require(depth <= MAX_DEPTH, name, f"{depth} levels", f"at most {MAX_DEPTH} deep; make it flatter")


def _depth(value: Any) -> int:
    return sum(1 for _ in _levels(value))


def _levels(value: Any) -> Iterator[list[dict[str, Any] | list[Any]]]:
    """Objects and arrays by their depth, without recursion."""
    level = [value]
    while level := [entry for entry in level if isinstance(entry, (dict, list))]:
        yield level
        level = [child for entry in level for child in (entry.values() if isinstance(entry, dict) else entry)]


def _check_token_ids_logprob(request: GenerateReqInput, num_prompts: int | None, vocab_size: int) -> None:
    """One list for all prompts, or a list of lists."""
    ids = request.token_ids_logprob
    if ids and isinstance(ids, list) and isinstance(ids[0], list):
        rows = list(_each(request, "token_ids_logprob", num_prompts))
    else:
        rows = [] if ids is None else [ids]
    for row in rows:
        _require(isinstance(row, list), "token_ids_logprob", row, "a list of token ids")
        _require(len(row) <= vocab_size, "token_ids_logprob", row, "a list with each token id once")
        _check_ids("token_ids_logprob", row, vocab_size)


def check_wire(name: str, value: Any) -> None:
    """What JSON can spell, but no message between the host's processes can carry."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"{name} is not Unicode text: {error}.") from None
    elif isinstance(value, int):
        _check_int(name, value, MIN_INT64, MAX_INT64)
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            check_wire(name, key)
            check_wire(f"{name}.{key}", entry)
    elif isinstance(value, (list, tuple, set)):
        for entry in value:
            check_wire(name, entry)


def _each(request: GenerateReqInput, name: str, num_prompts: int | None) -> list[Any]:
    """What ``request`` says for each prompt, or once for all; nothing where the host's default holds."""
    value = getattr(request, name)
    if not isinstance(value, list):
        return [] if value is None else [value]
    if num_prompts is None:
        raise ValueError(
            f"{name} is a list, but there is one prompt: leave the list out, or make one of the prompt too."
        )
    if len(value) != num_prompts:
        raise ValueError(
            f"{name} has {len(value)} entries for {num_prompts} prompts: give one for each, or one for all."
        )
    return [entry for entry in value if entry is not None]


def _check_int(name: str, value: Any, low: int, high: int) -> None:
    _require(isinstance(value, int) and low <= value <= high, name, value, f"an integer from {low} to {high}")


def _require(holds: bool, name: str, value: Any, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{name}={_shown(value)} is refused: it must be {wanted}.")


def _shown(value: Any) -> str:
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def _is_given(value: Any) -> bool:
    return any(map(_is_given, value)) if isinstance(value, list) else bool(value)
