"""The host loads the tokenizer of a published K3 folder, without the code that the folder names."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
from sglang.srt.utils.hf_transformers.tokenizer import get_tokenizer
from xgrammar import TokenizerInfo, VocabType

from sglang_k3.config import ARCHITECTURE, MODEL_TYPE
from sglang_k3.host.chat_tokenizer import HFChatTokenizer
from sglang_k3.host.tokenizer import KimiK3TokenizerFast
from sglang_k3.testing.tiny import write_tiny
from tests.kit.llama import write_llama

pytestmark = [pytest.mark.sglang, pytest.mark.usefixtures("plugin")]

TOKENS = [*(bytes([byte]) for byte in range(256)), b"he", b"ll", b"hell", b"hello", "\u4f60".encode()]
OPEN, END_OF_MESSAGE = len(TOKENS) + 3, len(TOKENS) + 2
CONTEXT_LENGTH = 4096


def write_published(folder: Path, architecture: str = ARCHITECTURE) -> Path:
    """A folder as published, as far as it concerns the tokenizer; its code stops whoever runs it."""
    lines = (b"%s %d\n" % (base64.b64encode(token), rank) for rank, token in enumerate(TOKENS))
    (folder / "tiktoken.model").write_bytes(b"".join(lines))
    (folder / "tokenization_kimi.py").write_text("raise SystemExit('code of the checkpoint was run')")
    tokenizer: dict[str, Any] = {
        "added_tokens_decoder": {
            str(OPEN): {"content": "<|open|>", "special": False},
            str(END_OF_MESSAGE): {"content": "<|end_of_msg|>", "special": True},
        },
        "auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]},
        "eos_token": "<|end_of_msg|>",
        "tokenizer_class": "TikTokenTokenizer",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    text_config = {"max_position_embeddings": CONTEXT_LENGTH}
    config = {"architectures": [architecture], "model_type": MODEL_TYPE, "text_config": text_config}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("trust_remote_code", [False, True])
def test_a_published_folder(tmp_path: Path, trust_remote_code: bool) -> None:
    tokenizer = get_tokenizer(
        str(write_published(tmp_path)), trust_remote_code=trust_remote_code, tokenizer_revision=None
    )
    assert type(tokenizer) is KimiK3TokenizerFast
    assert len(tokenizer) == len(TOKENS) + 256
    assert tokenizer.eos_token_id == END_OF_MESSAGE
    assert tokenizer.model_max_length == CONTEXT_LENGTH  # without it, a number that JSON's 64 bits do not hold
    assert tokenizer.encode("hello\u4f60<|open|>") == [TOKENS.index(b"hello"), TOKENS.index("\u4f60".encode()), OPEN]
    assert tokenizer.decode([TOKENS.index(b"hello"), OPEN]) == "hello<|open|>"


def test_a_folder_with_a_tokenizer_json(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny")
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TokenizersBackend"}))
    tokenizer = get_tokenizer(str(folder))
    assert type(tokenizer) is KimiK3TokenizerFast
    assert len(tokenizer.encode("<|open|>")) == 1


def test_the_grammar_backend_reads_its_bytes(tmp_path: Path) -> None:
    info = TokenizerInfo.from_huggingface(get_tokenizer(str(write_published(tmp_path))))
    assert info.vocab_type == VocabType.BYTE_LEVEL
    assert info.decoded_vocab[TOKENS.index("\u4f60".encode())] == "\u4f60".encode()


def test_the_same_class_name_in_another_model_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kimi's other models name it too, and have another format behind it."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder = write_published(tmp_path, "DeepseekV3ForCausalLM")
    config = {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit, match="code of the checkpoint was run"):
        get_tokenizer(str(folder), trust_remote_code=True)


def test_the_tokenizer_of_another_model_is_loaded_as_before(tmp_path: Path) -> None:
    tokenizer = get_tokenizer(str(write_llama(tmp_path)))
    assert not isinstance(tokenizer, KimiK3TokenizerFast)


def test_a_turn_ends_with_its_own_token_whatever_the_files_call_the_end(tmp_path: Path) -> None:
    folder = write_published(tmp_path)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "[EOS]"}))
    assert get_tokenizer(str(folder), tokenizer_revision=None).eos_token_id == END_OF_MESSAGE
    tiny = get_tokenizer(str(write_tiny(tmp_path / "tiny")))  # a tokenizer.json says nothing of it
    assert tiny.eos_token == "<|end_of_msg|>" and tiny.eos_token_id is not None


def test_bytes_of_every_token(tmp_path: Path) -> None:
    (tmp_path / "published").mkdir()
    published = get_tokenizer(str(write_published(tmp_path / "published")), tokenizer_revision=None)
    chat = HFChatTokenizer(published)
    assert [chat.token_bytes(i) for i in range(len(TOKENS))] == TOKENS
    assert chat.token_bytes(OPEN) == b"<|open|>"
    assert chat.token_bytes(10**6) == b""
    tiny = get_tokenizer(str(write_tiny(tmp_path / "tiny", "chat")))
    text = "The sky is blue \u4f60\U0001f600 <|open|> <\ufdd0"
    chat = HFChatTokenizer(tiny)
    assert b"".join(map(chat.token_bytes, chat.encode_ordinary(text))).decode() == text
