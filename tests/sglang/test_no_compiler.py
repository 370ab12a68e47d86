"""What the host would compile at the first step is computed as the host writes it, without a compiler."""

from __future__ import annotations

import pytest
import torch
from sglang.srt.layers import vocab_parallel_embedding
from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_k3.integration import seam_compilers

pytestmark = pytest.mark.sglang


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_anyway(*args: object, **kwargs: object) -> None:
        raise AssertionError("something was compiled")

    monkeypatch.setattr("torch._dynamo.convert_frame.ConvertFrame.__call__", compile_anyway)


def test_the_compiler_would_be_noticed(no_compiler: None) -> None:
    with pytest.raises(AssertionError, match="compiled"):
        torch.compile(lambda x: x + 1)(torch.ones(3))


def test_every_target_says_what_it_was_before_it_was_compiled() -> None:
    seam_compilers.install()
    assert set(seam_compilers.COMPILED_BY_TORCH) <= HookRegistry._patched


def test_ids_of_other_ranks_are_masked(no_compiler: None) -> None:
    seam_compilers.install()
    ids = torch.tensor([0, 191, 192, 383])
    masked, outside = vocab_parallel_embedding.get_masked_input_and_mask(ids, 192, 384, 0, 384, 384)
    assert masked.tolist() == [0, 0, 0, 191]
    assert outside.tolist() == [True, True, False, False]


def test_the_position_of_a_padding_row_is_zero() -> None:
    positions = seam_compilers._positions(lambda _: pytest.fail("compiled"), torch.tensor([0, 1, 9]))
    assert positions.tolist() == [0, 0, 8]
