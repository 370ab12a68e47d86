"""What is refused at the door, as a request object of the host; what it answers is tested on a server."""

from __future__ import annotations

import dataclasses
import re
import time
from typing import Any

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_k3.host.request_limits import INTERNAL, MAX_CHOICES, MAX_STOP_PATTERNS, MAX_STOPS, check_request

pytestmark = pytest.mark.sglang
VOCAB = 100
NAN, INFINITY = float("nan"), float("inf")


def check(**fields: Any) -> None:
    if "text" not in fields:
        fields.setdefault("input_ids", [1, 2])
    check_request(GenerateReqInput(**fields), VOCAB)


def check_sampling(**params: Any) -> None:
    check(sampling_params=params)


def test_what_only_looks_like_a_bad_grammar_is_let_through() -> None:
    check_sampling(structural_tag='{"format": {"type": "token", "token": 99}, "tokens": ["<|sep|>"], "a": 5000}')
    check_sampling(ebnf='root ::= "a" {1, 500}')
    check_sampling(ebnf="root ::= Token(1, 99)")
    check_sampling(json_schema='{"type": "string", "pattern": "\\\\u0000"}')


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"input_ids": [1, VOCAB]}, "input_ids=100 is refused: it must be an integer from 0 to 99"),
        ({"input_ids": [-1]}, "input_ids=-1"),
        ({"input_ids": [[1], [2, VOCAB]]}, "input_ids=100"),
        ({"input_ids": [2**64]}, "input_ids must be token ids from 0 to 99"),
        ({"input_ids": ["1"]}, "input_ids must be token ids"),
        ({"input_ids": [1.5]}, "input_ids must be token ids"),
        ({"input_ids": []}, "at least one token id"),
        ({"input_ids": [[1], []]}, "at least one token id"),
        ({"input_ids": [[1], 2]}, "at least one token id"),
        ({"text": ""}, "not empty"),
        ({"text": ["a", ""]}, "not empty"),
        ({"text": []}, "at least one prompt"),
        ({"text": "a\ud800"}, "text is not Unicode text"),
        ({"text": "a", "input_ids": [1]}, "both given"),
        ({"input_ids": None, "input_embeds": [[0.5]]}, "input_embeds is refused"),
        ({"image_data": "x"}, "text only"),
        ({"positional_embed_overrides": 5}, "positional_embed_overrides=5 is refused"),
        ({"rid": "\ud800"}, "rid is not Unicode text"),
        ({"rid": ["a"]}, "rid is a list, but there is one prompt"),
        ({"rid": ["a"], "input_ids": [[1], [2]]}, "rid has 1 entries for 2 prompts"),
        ({"priority": 2**63}, "priority=9223372036854775808"),
        ({"return_logprob": "yes"}, "return_logprob='yes'"),
        ({"logprob_start_len": -2}, "logprob_start_len=-2"),
        ({"top_logprobs_num": -1}, "top_logprobs_num=-1"),
        ({"top_logprobs_num": VOCAB + 1}, "top_logprobs_num=101"),
        ({"token_ids_logprob": [VOCAB]}, "token_ids_logprob=100"),
        ({"token_ids_logprob": [[1], [VOCAB]], "input_ids": [[1], [2]]}, "token_ids_logprob=100"),
        ({"token_ids_logprob": [1] * (VOCAB + 1)}, "each token id once"),
        ({"session_params": {"idd": "x"}}, "session_params='idd'"),
        ({"session_params": {"offset": "x"}}, "session_params: Expected `int | null`"),
        ({"sampling_params": []}, "sampling_params is a list"),
        ({"sampling_params": [{}], "input_ids": [[1], [2]]}, "1 entries for 2 prompts"),
        ({"sampling_params": [{}, {"n": 0}], "input_ids": [[1], [2]]}, "n=0"),
    ],
)
def test_a_request_is_refused_with_what_is_wrong(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as caught:
        check(**fields)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"temprature": 1}, "sampling_params='temprature' is refused: it must be made of"),
        ({"is_normalized": True}, "is_normalized"),
        ({"max_new_tokens": "5"}, "Expected `int | null`, got `str`"),
        ({"max_new_tokens": 1.0}, "Expected `int | null`, got `float`"),
        ({"max_new_tokens": -1}, "max_new_tokens=-1"),
        ({"max_new_tokens": 2**31}, "max_new_tokens=2147483648"),
        ({"min_new_tokens": 2**70}, "min_new_tokens="),
        ({"n": 0}, "n=0"),
        ({"n": None}, "n=None"),
        ({"n": MAX_CHOICES + 1}, "n=1025"),
        ({"top_k": 2**31}, "top_k=2147483648"),
        ({"sampling_seed": -1}, "sampling_seed=-1"),
        ({"stream_interval": 0}, "stream_interval=0"),
        ({"temperature": NAN}, "temperature=nan"),
        ({"temperature": INFINITY}, "temperature=inf"),
        ({"temperature": 1e39}, "temperature=1e+39"),
        ({"repetition_penalty": 1e-50}, "repetition_penalty=1e-50"),
        ({"logit_bias": {"5": NAN}}, "logit_bias=nan"),
        ({"logit_bias": {"5": -1e39}}, "logit_bias=-1e+39"),
        ({"logit_bias": {str(VOCAB): 1}}, "logit_bias=100"),
        ({"logit_bias": {"-1": 1}}, "logit_bias='-1'"),
        ({"logit_bias": {"1_0": 1}}, "logit_bias='1_0'"),
        ({"logit_bias": {"5": None}}, "Expected `float`, got `null`"),
        ({"stop_token_ids": [VOCAB]}, "stop_token_ids=100"),
        ({"stop_token_ids": [-1]}, "stop_token_ids=-1"),
        ({"stop": [""]}, "match at once"),
        ({"stop": "a\udfff"}, "sampling_params.stop is not Unicode text"),
        ({"stop": ["x"] * (MAX_STOPS + 1)}, "at most 1024"),
        ({"stop_regex": "("}, "no regular expression"),
        ({"stop_regex": "(" * 500 + ")" * 500}, "no regular expression"),
        ({"stop_regex": "x" * 1001}, "at most 1000 long"),
        ({"stop_regex": ["x"] * (MAX_STOP_PATTERNS + 1)}, "at most 32"),
        ({"json_schema": "{"}, "not JSON"),
        ({"json_schema": "[" * 100_000}, "not JSON"),
        ({"json_schema": "[" * 129 + "]" * 129}, "129 levels"),
        ({"structural_tag": '{"a":' * 200 + "1" + "}" * 200}, "200 levels"),
        ({"structural_tag": ""}, "leave it out"),
        ({"structural_tag": '{"format": {"type": "token", "token": 100}}'}, "token=100"),
        ({"structural_tag": '{"a": [{"exclude_tokens": ["x", 1, 5e9]}]}'}, "exclude_tokens=5000000000"),
        ({"structural_tag": '{"a": {"type": "regex", "pattern": "\\u0000"}}'}, "NUL"),
        ({"ebnf": "root ::= Token(1, 100)"}, "100"),
        ({"regex": "\0+"}, "NUL"),
        ({"json_schema": '{"type": "string", "pattern": "a\\u0000"}'}, "NUL"),
        ({"structural_tag": "{}", "regex": "a"}, "regex and structural_tag"),
        ({"custom_params": {"a": {"b": {"c": 1}}}}, "custom_params"),
    ],
)
def test_sampling_parameters_are_refused_with_what_is_wrong(params: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError) as caught:
        check_sampling(**params)
    assert says in str(caught.value)


@pytest.mark.parametrize(
    "pattern",
    [
        r"(.|.)*\x00",  # doubles with each character
        r"(a+)+b",
        r"a*a*b",
        r"\d+",
        r"(a|aa){2,}",
        r"(a)\1",
        r"(?=a)b",
        r"(?<!a)b",
        r"[^,]",
    ],
)
def test_a_stop_pattern_of_no_bounded_length_is_refused(pattern: str) -> None:
    """The host would search the whole answer for it, after every token."""
    for value in (pattern, ["stop", pattern]):
        with pytest.raises(ValueError, match="must be of bounded length: write"):
            check_sampling(stop_regex=value)


@pytest.mark.parametrize(
    "pattern",
    [
        r"(.|.){64}\x00",
        r"(a|ab){0,20}x",
        r"(a?){30}a{30}",
        r"(?:x{0,9}){0,9}y",
        r"x{0,40}x{0,40}y",
        r"(){0,4000000000}",
        r"((((a|b{2}){9}){9}){9}){9}",
        r".{0,60}?.{0,60}?z",
        "a{0,99}" * 140,
        "(?i)[\x00-\U0010ffff]",
    ],
    ids=range(10),
)
def test_a_stop_pattern_of_many_steps_is_refused_at_once(pattern: str) -> None:
    started = time.monotonic()
    with pytest.raises(ValueError, match="1000 steps"):
        check_sampling(stop_regex=pattern)
    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    ("pattern", "found", "missed"),
    [
        (r"\n\n\n", "\n" * 3, "\n" * 2),
        (r"[.!?]$", "?", "? "),
        (r"Answer: [0-9]{1,3}\.", "Answer: 42.", "Answer: 4242."),
        (r"\s{0,50}END", " " * 9 + "END", " " * 60),
        (r"(?i)stop|halt|end of (file|text)", "End of text", "end of the text"),
        (r"<[^>\n]{1,40}>", "<a b>", "<" + "a" * 60),
        (r"(?:ab){3,50}c", "ab" * 5 + "c", "ab" * 60),
        (r".{0,200}?z", "z", "y" * 300),
        (r"(yes|no|y[ea]s){1,3}!", "yesno!", "yes" * 200),
        (r"\bEND\b", "an END.", "ENDED"),
        ("[\u4e00-\u9fff]{20}", "\u4e00" * 20, "\u4e00" * 19 + "."),
    ],
)
def test_a_stop_pattern_that_is_allowed_is_searched_in_no_time(pattern: str, found: str, missed: str) -> None:
    check_sampling(stop_regex=pattern)
    assert re.search(pattern, found) and not re.search(pattern, missed)
    started = time.monotonic()
    re.search(pattern, missed * (10_000 // len(missed)))
    assert time.monotonic() - started < 1


@pytest.mark.parametrize(
    "fields",
    [
        {"input_ids": [0, VOCAB - 1]},
        {
            "input_ids": [[1], [2]],
            "rid": ["a", "b"],
            "return_logprob": [True, False],
            "sampling_params": [{}, {"n": 1}],
        },
        {"text": ["a", "b\0"], "top_logprobs_num": [VOCAB, 0], "logprob_start_len": -1},
        {"text": "a", "token_ids_logprob": list(range(VOCAB)), "image_data": [None]},
        {"sampling_params": {"json_schema": "[" * 128 + "]" * 128}},
        {"session_params": {"id": "s", "offset": 3, "rid": None}},
    ],
)
def test_what_can_be_served_passes(fields: dict[str, Any]) -> None:
    check(**fields)


def test_every_default_of_the_host_passes() -> None:
    """As the host spells its defaults, and as nulls, which ``n`` alone must not be."""
    defaults = SamplingParams()
    names = [name for name in SamplingParams.__struct_fields__ if name not in INTERNAL]
    check_sampling(**{name: getattr(defaults, name) for name in names})
    check_sampling(**dict.fromkeys(names) | {"n": 1})


def test_a_message_is_short_and_ascii_whatever_was_sent() -> None:
    with pytest.raises(ValueError) as caught:
        check(rid=["\u2028" * 10_000, 5], input_ids=[[1], [2]])
    assert str(caught.value).isascii()
    with pytest.raises(ValueError) as caught:
        check_sampling(stop="x", **{"\u2028" * 10_000: 5})
    assert str(caught.value).isascii() and len(str(caught.value)) < 1000


# Whoever raises the host's version decides of each new field: is it harmless, checked, or refused?
SAMPLING_FIELDS = """
    custom_params ebnf frequency_penalty ignore_eos is_normalized json_schema logit_bias max_new_tokens min_new_tokens
    min_p n no_stop_trim presence_penalty regex repetition_penalty sampling_seed skip_special_tokens
    spaces_between_special_tokens stop stop_regex stop_regex_max_len stop_regex_strs stop_str_max_len stop_strs
    stop_token_ids stream_interval structural_tag temperature top_k top_p
"""
REQUEST_FIELDS = """
    audio_data background bootstrap_host bootstrap_pair_key bootstrap_port bootstrap_room conversation_id custom_labels
    custom_logit_processor decode_tp_size disagg_prefill_dp_rank encoder_urls external_trace_header extra_key
    http_worker_ipc image_data image_max_dynamic_patch images_config input_embeds input_ids log_metrics
    logprob_start_len lora_id lora_path max_dynamic_patch min_dynamic_patch mm_data_mooncake mm_hashes modalities
    multi_item_delimiter_indices need_wait_for_mm_inputs no_logs num_items_assigned positional_embed_overrides priority
    received_time require_reasoning return_bytes return_entropy return_hidden_states return_indexer_topk return_logprob
    return_prompt_token_ids return_routed_experts return_sampling_mask return_text_in_logprobs rid routed_dp_rank
    routed_experts_start_len routing_key sampling_params session_id session_params stream text token_ids_logprob
    top_logprobs_num use_audio_in_video video_data video_max_dynamic_patch
"""


def test_the_host_knows_no_other_fields() -> None:
    assert sorted(SamplingParams.__struct_fields__) == SAMPLING_FIELDS.split()
    assert sorted(field.name for field in dataclasses.fields(GenerateReqInput)) == REQUEST_FIELDS.split()
