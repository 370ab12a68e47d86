"""What a CUDA graph of a decode step reads: buffers that were there at the capture, filled anew before each replay.

The host's own input buffers, padding and batch views; a graph is the Python calls that would be captured, made again.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention
from sglang.srt.model_executor.cuda_graph_buffer_registry import build_decode_registry
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import build_replay_fb_view
from sglang.srt.model_executor.runner_utils.buffers import DecodeInputBuffers
from torch import Tensor

from sglang_k3.host.kda_backend import KDAMetadata
from sglang_k3.host.mla_backend import MLAMetadata
from sglang_k3.models.text.kda import KimiDeltaAttention
from tests.kit.compare import assert_bitwise
from tests.kit.tolerance import assert_close
from tests.model.fakes import NUM_STATE_SLOTS, FakeRunner, Request, hybrid_backend
from tests.model.harness import tiny_k3

pytestmark = pytest.mark.sglang

MAX_BS = 6
KDA_LAYER, MLA_LAYER = 2, 3


class Graph:
    """One batch size over the host's static buffers, and the backends' part of its capture and replay."""

    def __init__(self, runner: FakeRunner, size: int) -> None:
        self.runner, self.size = runner, size
        self.config = tiny_k3().config
        self.backend = hybrid_backend(runner, self.config)
        fill = self.backend.get_cuda_graph_seq_len_fill_value()
        common = {
            "max_num_token": MAX_BS,
            "max_bs": MAX_BS,
            "seq_len_fill_value": fill,
            "cache_loc_dtype": torch.int64,
            "enable_mamba_track": True,
            "dp_size": 1,
            "is_encoder_decoder": False,
            "encoder_len_fill_value": 0,
            "require_mlp_tp_gather": False,
        }
        self.buffers = DecodeInputBuffers.create(
            device="cpu",
            hidden_size=1,
            next_token_logits_buffer=torch.zeros(MAX_BS, 1),
            dtype=torch.float32,
            pp_size=1,
            num_tokens_per_req=1,
            **common,
        )
        self.registry = build_decode_registry(device="cpu", source=self.buffers, share_pool=False, **common)
        self.backend.init_cuda_graph_state(MAX_BS, MAX_BS)
        self.static = SimpleNamespace(
            forward_mode=ForwardMode.DECODE,
            batch_size=size,
            spec_info=None,
            **{
                name: self.registry.get_slot(name).slice_for(size, size)
                for name in (
                    *("req_pool_indices", "seq_lens", "seq_lens_cpu", "out_cache_loc"),
                    *("mamba_track_indices", "mamba_track_mask"),
                )
            },
        )
        self.backend.init_forward_metadata_out_graph(self.static, in_capture=True)
        self.backend.init_forward_metadata_in_graph(self.static)

    @property
    def kda(self) -> KDAMetadata:
        return self.backend.linear_attn_backend.metadata

    @property
    def mla(self) -> MLAMetadata:
        return self.backend.full_attn_backend.metadata

    def replay(self, batch: SimpleNamespace) -> None:
        """What the host does before a replay, then what the graph holds of the backends."""
        real, size = batch.batch_size, self.size
        self.registry.fill_from(batch, raw_bs=real, padded_bs=size, raw_num_tokens=real, padded_num_tokens=size)
        view = build_replay_fb_view(
            forward_batch=batch,
            buffers=self.buffers,
            bs=size,
            raw_bs=real,
            num_tokens=size,
            seq_len_fill_value=self.backend.get_cuda_graph_seq_len_fill_value(),
            capture_forward_mode=ForwardMode.DECODE,
            is_encoder_decoder=False,
        )
        self.backend.init_forward_metadata_out_graph(view)
        self.backend.init_forward_metadata_in_graph(self.static)


def decode_batch(runner: FakeRunner, requests: list[Request], due: list[bool], targets: list[int]) -> SimpleNamespace:
    batch = runner.decode(requests)
    batch.mamba_track_mask, batch.mamba_track_indices = (
        torch.tensor(due, dtype=torch.bool),
        torch.tensor(targets, dtype=torch.int64),
    )
    batch.seq_lens_cpu, batch.seq_lens_sum, batch.spec_info = batch.seq_lens.clone(), int(batch.seq_lens.sum()), None
    return batch


def requests_of(runner: FakeRunner, lens: list[int]) -> list[Request]:
    config = tiny_k3().config
    requests = [runner.new_request() for _ in lens]
    for request, length in zip(requests, lens, strict=True):
        for layer in config.full_attention_layers[1:]:
            runner.kv[layer].zero_()
        runner.cache_prefix(request, torch.randn(length, config.mla.latent_dim), MLA_LAYER)
        runner.conv[:, request.state_slot], runner.temporal[:, request.state_slot] = 0.5, 0.25
    return requests


def addresses(graph: Graph) -> dict[str, int]:
    """Where the graph finds its inputs; what it computes from them lies in its own memory."""
    pool = graph.runner.req_to_token_pool
    read = {
        "cache_indices": graph.kda.cache_indices,
        "track_indices": graph.kda.track_indices,
        "table": pool.req_to_token,
        **{name: getattr(graph.static, name) for name in ("req_pool_indices", "seq_lens", "mamba_track_mask")},
    }
    return {name: tensor.data_ptr() for name, tensor in read.items()}


@pytest.mark.parametrize("real", [0, 1, 3, 4])
def test_a_replay_has_the_metadata_of_the_same_batch_without_a_graph(real: int) -> None:
    runner = FakeRunner(tiny_k3().config)
    graph = Graph(runner, size=4)
    captured = addresses(graph)
    requests = requests_of(runner, [5, 1, 9, 30][:real])
    targets = [runner.new_state_slot() for _ in requests]
    for round_ in range(3):
        requests.reverse()
        due = [(i + round_) % 2 == 0 for i in range(real)]
        batch = decode_batch(runner, requests, due, targets)
        graph.replay(batch)
        assert addresses(graph) == captured
        eager = hybrid_backend(runner, graph.config)
        eager.init_forward_metadata(batch)
        expected, spans = eager.linear_attn_backend.metadata, eager.full_attn_backend.metadata.kv_spans
        assert graph.kda.cache_indices.tolist() == [*expected.cache_indices.tolist(), *[-1] * (4 - real)]
        assert graph.kda.track_sources.tolist() == [*expected.track_sources.tolist(), *[-1] * (4 - real)]
        assert graph.kda.track_indices[:real].tolist() == expected.track_indices.tolist()
        assert graph.mla.kv_spans[:real].tolist() == spans.tolist()
        assert (graph.mla.kv_spans[real:, 0] == graph.mla.kv_spans[real:, 1]).all()


def test_a_capture_touches_no_request() -> None:
    """The host captures with request 0 and slot 0 in every row, which nobody owns."""
    graph = Graph(FakeRunner(tiny_k3().config), size=4)
    assert graph.kda.track_sources.tolist() == [-1] * 4
    assert graph.static.out_cache_loc.tolist() == [0] * 4
    assert (graph.mla.kv_spans[:, 0] == graph.mla.kv_spans[:, 1]).all()


def layers() -> tuple[RadixLinearAttention, RadixAttention, Tensor]:
    tiny = tiny_k3()
    module = KimiDeltaAttention(tiny.config, KDA_LAYER)
    tiny.load_into(module, f"layers.{KDA_LAYER}.self_attn.")
    mla = tiny.config.mla
    attention = RadixAttention(mla.num_heads, mla.latent_dim, mla.scale, 1, MLA_LAYER, v_head_dim=mla.kv_lora_rank)
    w_kv = torch.randn(mla.num_heads, mla.qk_nope_head_dim + mla.v_head_dim, mla.kv_lora_rank)
    return module.attn, attention, w_kv


def test_a_padded_step_leaves_what_the_step_alone_leaves() -> None:
    """Outputs, states, snapshots and latent rows; padding rows give zeros and write only to the slot of nobody."""
    config, real, size = tiny_k3().config, 3, 4
    kda_layer, mla_layer, w_kv = layers()
    width, heads, mla = config.kda.width, config.kda.num_heads, config.mla
    inputs = [torch.randn(size, 3 * width), torch.randn(size, width), torch.randn(size, heads)]
    q, rows = torch.randn(size, mla.num_heads, mla.qk_head_dim), torch.randn(size, mla.latent_dim)
    results = []
    for padded in (False, True):
        torch.manual_seed(1)
        runner = FakeRunner(config)
        requests = requests_of(runner, [5, 1, 9])
        batch = decode_batch(runner, requests, [True, False, True], [runner.new_state_slot() for _ in requests])
        graph = Graph(runner, size)
        graph.backend.linear_attn_backend.last_layer = KDA_LAYER
        if padded:
            graph.replay(batch)
            batch, n = graph.static, size
        else:
            graph.backend.init_forward_metadata(batch)
            n = real
        mixed = graph.backend.linear_attn_backend.forward_decode(kda_layer, batch, *(x[:n] for x in inputs))
        attended = graph.backend.full_attn_backend.forward_decode(q[:n], rows[:n], None, mla_layer, batch, w_kv=w_kv)
        results.append((mixed, attended, runner.conv, runner.temporal, runner.kv[MLA_LAYER]))
    alone, together = results
    assert_bitwise(together[0][:real], alone[0], "outputs of KDA")
    assert_close(together[1][:real], alone[1], "ratio", "outputs of MLA")
    assert not together[0][real:].any() and not together[1][real:].any()
    for slot in range(NUM_STATE_SLOTS):
        assert_bitwise(together[2][:, slot], alone[2][:, slot], f"windows of slot {slot}")
        assert_bitwise(together[3][:, slot], alone[3][:, slot], f"states of slot {slot}")
    assert_bitwise(together[4][1:], alone[4][1:], "latent rows")
