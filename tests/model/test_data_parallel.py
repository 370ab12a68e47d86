"""Data-parallel attention: a rank holds all of attention and its part of the experts, which see everyone's tokens."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from sglang.srt.server_args import ServerArgs
from torch import Tensor

from sglang_k3.models.text import data_parallel
from tests.kit.compare import assert_bitwise
from tests.model.harness import Rank, state_of, tiny_k3

pytestmark = pytest.mark.sglang


@pytest.fixture
def attention_is_data_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("sglang_k3.models.kimi_k3", "sglang_k3.models.text.data_parallel"):
        monkeypatch.setattr(f"{module}.is_dp_attention_enabled", lambda: True)


@pytest.mark.parametrize("head_by_attention_rank", [False, True])
@pytest.mark.usefixtures("attention_is_data_parallel")
def test_a_rank_holds_all_of_attention_and_its_part_of_the_rest(
    head_by_attention_rank: bool, server_args: ServerArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head is the user's choice: ``--enable-dp-lm-head``."""
    args = SimpleNamespace(**vars(server_args) | {"enable_dp_lm_head": head_by_attention_rank})
    monkeypatch.setattr("sglang.srt.layers.logits_processor.get_server_args", lambda: args)
    tiny = tiny_k3()
    whole, parts = state_of(tiny.build()), []
    for rank in range(2):
        with (
            Rank(rank, tp_size=2, ep_size=2).active(),
            get_parallel().override(attn_tp_size=1, attn_tp_rank=0, attn_dp_size=2, attn_dp_rank=rank),
        ):
            model = tiny.build()
            model.load_weights(tiny.tensors.items())
            parts.append(state_of(model))
    split = {name for name, tensor in whole.items() if any(part[name].numel() * 2 == tensor.numel() for part in parts)}
    shared = ("gate_up_proj.weight", "down_proj.weight")
    experts = (".w13", ".w2", ".w13_scale", ".w2_scale")
    of_mlps = {n for n in whole if ".mlp." in n and n.endswith(shared + experts) and "routed_expert" not in n}
    assert split == of_mlps | (set() if head_by_attention_rank else {"lm_head.weight"})
    for name in whole.keys() - split:
        assert_bitwise(parts[0][name].data, parts[1][name].data, name)


@pytest.mark.parametrize("lens", [(3, 4), (5, 0), (0, 2)])
@pytest.mark.usefixtures("attention_is_data_parallel")
def test_each_rank_gets_its_own_tokens_back(lens: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What the ranks exchange is played by slices of one tensor; a rank without requests takes part too."""
    everyone = torch.randn(sum(lens), 8)
    own = list(everyone.split(lens))
    seen = []

    def mlp(x: Tensor) -> Tensor:
        seen.append(x.clone())
        return 2 * x

    for rank, x in enumerate(own):
        monkeypatch.setattr(data_parallel, "dp_gather_replicate", lambda whole, part, batch: whole.copy_(everyone))
        monkeypatch.setattr(
            data_parallel, "dp_scatter", lambda part, whole, batch, rank=rank: part.copy_(whole.split(lens)[rank])
        )
        batch = SimpleNamespace(global_dp_buffer_len=sum(lens))
        assert_bitwise(data_parallel.over_all_requests(mlp, x, batch), 2 * x)
    assert len(seen) == 2
    for x in seen:
        assert_bitwise(x, everyone)


def test_a_rank_without_requests_attends_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = tiny_k3()
    model = tiny.build()
    for layer in model.model.layers:
        monkeypatch.setattr(layer.self_attn, "forward", lambda *args: pytest.fail("there is nothing to attend to"))
    batch = SimpleNamespace(forward_mode=ForwardMode.IDLE)
    assert model.model(torch.empty(0, dtype=torch.int64), batch).shape == (0, tiny.config.hidden_size)
