"""What clients of a serving engine rely on, on the model that is served by name."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sglang_k3.testing.server import ResponseError, ServerProcess
from tests.kit.configurations import ON_GPU

pytestmark = pytest.mark.server
CONTEXT_LENGTH = 8192


@pytest.fixture(scope="module")
def server(tiny_server: ServerProcess) -> ServerProcess:
    return tiny_server


def generate(server: ServerProcess, **body: Any) -> dict[str, Any]:
    body.setdefault("input_ids", list(range(20, 60)))
    body["sampling_params"] = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True} | body.get(
        "sampling_params", {}
    )
    return server.post_json("/generate", body)


def chat_body(**extra: Any) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": [{"type": "text", "text": "And <|open|>now?"}]},
    ]
    return {"model": "kimi-k3-tiny", "messages": messages, "max_tokens": 10, "temperature": 0} | extra


def end_of_message(server: ServerProcess) -> int:
    folder = Path(server.get_json("/server_info")["model_path"])
    return json.loads((folder / "config.json").read_text())["eos_token_id"]


def test_the_alias_is_the_served_name(server: ServerProcess) -> None:
    (model,) = server.get_json("/v1/models")["data"]
    assert model["id"] == "kimi-k3-tiny"
    assert model["max_model_len"] == CONTEXT_LENGTH


def test_the_plugin_chose_what_the_user_left_open(server: ServerProcess) -> None:
    info = server.get_json("/server_info")
    assert info["attention_backend"] == "k3_mla"
    assert info["dtype"] == "float32"
    assert info["mamba_radix_cache_strategy"] == "extra_buffer"
    assert info["disable_overlap_schedule"] is False


def cpu_seconds(server: ServerProcess) -> float:
    """What all processes have taken so far: fields 14 and 15 of their ``/proc/PID/stat``."""
    stats = [Path(f"/proc/{process.pid}/stat").read_text() for process in server.processes()]
    ticks = (int(ticks) for stat in stats for ticks in stat.rpartition(")")[2].split()[11:13])
    return sum(ticks) / os.sysconf("SC_CLK_TCK")


@pytest.mark.skipif(ON_GPU, reason="a GPU server may keep a core busy")
def test_an_idle_server_takes_no_core(server: ServerProcess) -> None:
    generate(server)
    time.sleep(1.0)
    before = cpu_seconds(server)
    time.sleep(2.0)
    assert cpu_seconds(server) - before < 1.0


def test_the_whole_server_stays_under_4_gb(server: ServerProcess) -> None:
    generate(server)
    assert server.peak_memory_bytes() < 4e9


def test_completions_and_generate_agree(server: ServerProcess) -> None:
    text = "The quick brown fox"
    completion = server.post_json(
        "/v1/completions", {"model": "kimi-k3-tiny", "prompt": text, "max_tokens": 12, "temperature": 0, "logprobs": 1}
    )
    (choice,) = completion["choices"]
    direct = server.post_json("/generate", {"text": text, "sampling_params": {"max_new_tokens": 12, "temperature": 0}})
    assert choice["text"] == direct["text"]
    assert len(choice["logprobs"]["token_logprobs"]) == completion["usage"]["completion_tokens"]


@pytest.mark.covers("chat", "stream")
def test_chat_streams_what_it_answers_whole(server: ServerProcess) -> None:
    whole = server.post_json("/v1/chat/completions", chat_body())
    chunks = list(server.stream("/v1/chat/completions", chat_body(stream=True)))
    deltas = [c["choices"][0]["delta"].get("content") or "" for c in chunks if c["choices"]]
    assert "".join(deltas) == whole["choices"][0]["message"]["content"]
    assert whole["usage"]["completion_tokens"] <= 10
    assert whole["choices"][0]["finish_reason"] in ("length", "stop")


def test_thinking_off_shortens_the_prompt(server: ServerProcess) -> None:
    on = server.post_json("/v1/chat/completions", chat_body())["usage"]["prompt_tokens"]
    off = server.post_json("/v1/chat/completions", chat_body(chat_template_kwargs={"thinking": False}))
    assert off["usage"]["prompt_tokens"] < on


def test_stop_tokens_end_an_answer(server: ServerProcess) -> None:
    first, second, *_ = generate(server)["output_ids"]
    assert end_of_message(server) not in (first, second) and first != second
    stopped = generate(server, sampling_params={"stop_token_ids": [second], "ignore_eos": False})
    assert stopped["output_ids"] == [first, second]
    assert stopped["meta_info"]["finish_reason"] == {"type": "stop", "matched": second}


def test_stop_strings_end_an_answer(server: ServerProcess) -> None:
    text = generate(server)["text"]
    stopped = generate(server, sampling_params={"stop": [text[3]]})
    assert stopped["text"] == text[: text.index(text[3])]


def test_the_end_of_message_token_of_the_config_ends_an_answer(server: ServerProcess) -> None:
    """Forced by a bias, so that it does not depend on what random weights say."""
    bias = {str(end_of_message(server)): 100}
    reply = server.post_json(
        "/v1/completions",
        {"model": "kimi-k3-tiny", "prompt": "x", "max_tokens": 8, "temperature": 0, "logit_bias": bias},
    )
    assert reply["choices"][0]["finish_reason"] == "stop"
    assert reply["usage"]["completion_tokens"] == 1


@pytest.mark.covers("abort")
def test_an_aborted_request_leaves_the_server_working(server: ServerProcess) -> None:
    before = generate(server)["output_ids"]
    body = {
        "input_ids": list(range(100, 180)),
        "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True, "temperature": 0},
        "rid": "to-be-aborted",
    }
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(server.post_json, "/generate", body)
        time.sleep(1.0)
        server.post_json("/abort_request", {"rid": "to-be-aborted"})
        reply = pending.result(timeout=60)
    assert reply["meta_info"]["finish_reason"]["type"] == "abort"
    assert generate(server)["output_ids"] == before


@pytest.mark.covers("abort", "stream")
def test_a_client_that_leaves_a_stream_does_not_hold_the_server(server: ServerProcess) -> None:
    before = generate(server)["output_ids"]
    stream = server.stream(
        "/generate",
        {"input_ids": [7, 8, 9], "stream": True, "sampling_params": {"max_new_tokens": 4000, "ignore_eos": True}},
    )
    next(stream)
    stream.close()
    assert generate(server)["output_ids"] == before


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("/generate", {"input_ids": [1] * (CONTEXT_LENGTH + 1)}, "context length"),
        (
            "/v1/chat/completions",
            chat_body(
                messages=[
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}],
                    }
                ]
            ),
            "text only",
        ),
        ("/v1/chat/completions", chat_body(chat_template_kwargs={"thinking_effort": "huge"}), "is not one of low"),
        (
            "/v1/chat/completions",
            chat_body(messages=[{"role": "assistant", "content": "Hi, I"}], continue_final_message=True),
            "not supported",
        ),
    ],
    ids=["prompt longer than the context", "image", "effort", "continue a message"],
)
def test_a_request_that_cannot_be_served_is_answered_with_400(
    server: ServerProcess, path: str, body: dict[str, Any], says: str
) -> None:
    with pytest.raises(ResponseError, match=says) as caught:
        server.post_json(path, body)
    assert caught.value.status == 400
    generate(server)


def test_the_log_has_no_traceback(server: ServerProcess) -> None:
    assert "Traceback" not in Path(server.log_path).read_text()
