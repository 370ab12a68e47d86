"""Seam: our MLA backend, by the host's attention registry."""

from __future__ import annotations

from typing import Any

from sglang_k3.integration.refusals import ATTENTION_BACKEND


def install() -> None:
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS, register_attention_backend
    from sglang.srt.server_args import ATTENTION_BACKEND_CHOICES, add_attention_backend_choices

    if ATTENTION_BACKEND not in ATTENTION_BACKENDS:
        register_attention_backend(ATTENTION_BACKEND)(_create)
    if ATTENTION_BACKEND not in ATTENTION_BACKEND_CHOICES:
        add_attention_backend_choices([ATTENTION_BACKEND])


def _create(runner: Any) -> Any:
    from sglang_k3.host.mla_backend import K3MLABackend

    if runner.server_args.pp_size > 1:
        # So wide are the host's buffers of a CUDA graph for what comes from the stage before.
        runner.model_config.hc_hidden_size = runner.model.model.handoff_width
    return K3MLABackend(runner)
