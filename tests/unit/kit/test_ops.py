import torch

from tests.kit.ops import clone_pool


def test_a_cloned_pool_has_the_same_strides_and_other_storage():
    buffer = torch.arange(60.0).view(4, 15)
    pool = buffer[:, 2:14].view(4, 3, 4).transpose(1, 2)
    clone = clone_pool(pool)
    assert clone.stride() == pool.stride()
    assert torch.equal(clone, pool)
    clone.fill_(-1.0)
    assert torch.equal(buffer, torch.arange(60.0).view(4, 15))
