"""The model names that this package adds, and how to tell a K3 from any other model."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from sglang_k3.config import ARCHITECTURE
from sglang_k3.env import cache_root
from sglang_k3.errors import ConfigError
from sglang_k3.weights.audit import read_config

PUBLISHED = "moonshotai/Kimi-K3"
PUBLISHED_REVISION = "f831ab66814297da540d832a5235f8e904f29d06"
ALIAS = "kimi-k3"
TINY_ALIAS = "kimi-k3-tiny"
TINY_PRESET = "chat"  # the one that can answer
_OTHER_LAYOUTS = ("params.json", "model_index.json")  # in place of config.json, with models that the host knows


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """Where a model name leads: a repository or folder, and the revision that the name stands for."""

    path: str
    revision: str | None = None


def is_k3(model_path: str, revision: str | None = None) -> bool:
    """Whether a name or folder is a K3 model, without touching the network."""
    path = Path(model_path) / "config.json"
    if not Path(model_path).exists():
        if _is_alias(model_path) or model_path.lower() == PUBLISHED.lower():
            return True
        cached = _cached_config(model_path, revision)
        if cached is None:
            return False
        path = cached
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return ARCHITECTURE in config["architectures"]
    except (OSError, ValueError, KeyError, TypeError):
        return False


def config_folder(model_path: str, revision: str | None) -> Path | None:
    """Where the ``config.json`` of a folder lies, or of a repository that has been downloaded before."""
    if Path(model_path).is_dir():
        return Path(model_path)
    cached = _cached_config(model_path, revision)
    return None if cached is None else cached.parent


def refuse_no_model(model_path: str) -> None:
    """Refuse a local path with no model at all, of which the host would say that it lacks an accelerator, or ask the
    hub.

    Raises:
        ConfigError: nothing is there and it cannot be the name of a repository, or it is a file of a checkpoint, or a
            folder whose ``config.json`` is missing or broken.
    """
    path = Path(model_path)
    if not model_path:
        raise ConfigError(f"The model's name is empty. Give a checkpoint folder, {ALIAS} or {TINY_ALIAS}.")
    if path.is_file() and path.suffix in (".json", ".safetensors"):
        raise ConfigError(f"{model_path} is a file of a checkpoint. Give its folder, {path.parent}.")
    if not path.exists() and model_path.startswith("~"):
        raise ConfigError(f"No shell has expanded the ~ of {model_path}. Write {os.path.expanduser(model_path)}.")
    if not path.exists() and model_path.startswith(("/", ".")):
        raise ConfigError(f"There is no {model_path}. Give a checkpoint folder that exists, {ALIAS} or {TINY_ALIAS}.")
    if path.is_dir() and not any((path / name).exists() for name in _OTHER_LAYOUTS) and not any(path.glob("*.gguf")):
        read_config(path)


def is_on_this_machine(model_path: str, revision: str | None) -> bool:
    """Whether a folder, a file or a repository in the hub's cache says what model it is."""
    return Path(model_path).exists() or _cached_config(model_path, revision) is not None


def _cached_config(repository: str, revision: str | None) -> Path | None:
    """The ``config.json`` of a repository that has been downloaded before."""
    try:
        found = try_to_load_from_cache(repository, "config.json", revision=revision)
    except HFValidationError:  # not the name of a repository
        return None
    return Path(found) if isinstance(found, str) else None


def resolve(model_path: str) -> ModelSource:
    """Follow an alias; the tiny model is written into the cache folder first. An existing path always wins."""
    if Path(model_path).exists():
        return ModelSource(model_path)
    if model_path == TINY_ALIAS:
        from sglang_k3.testing.cache import ensure_tiny

        return ModelSource(str(ensure_tiny(cache_root(), TINY_PRESET)))
    if model_path == ALIAS:
        return ModelSource(PUBLISHED, PUBLISHED_REVISION)
    if _is_alias(model_path):
        raise ConfigError(
            f"There is no model {model_path!r}: known names are {ALIAS} and {TINY_ALIAS}, and no such path exists. "
            f"Write a tiny model of another shape with `sglang-k3 tiny DIR --preset NAME` and serve its folder."
        )
    return ModelSource(model_path)


def _is_alias(model_path: str) -> bool:
    """A bare name in this package's namespace, misspelt ones included: the host would look for them on the hub."""
    return model_path.startswith(ALIAS) and "/" not in model_path
