"""The tree keeps what was put in, page by page: depths through splits, locks, and namespaces apart."""

from __future__ import annotations

import random
from array import array

import pytest
import torch

from sglang_k3.mem.radix_tree import RadixTree, common_prefix
from tests.kit.mem_scheduler import NO_KV


def tokens(*ids: int) -> array[int]:
    return array("q", ids)


def locs(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def tree_with(*sequences: tuple[int, ...], page_size: int = 1) -> RadixTree:
    tree = RadixTree(page_size, NO_KV)
    for n, ids in enumerate(sequences):
        tree.insert(None, tokens(*ids), torch.arange(len(ids)) + 100 * n)
        tree.check_invariants()
    return tree


def shape(tree: RadixTree) -> list[tuple[int, list[int]]]:
    return sorted((node.depth, node.tokens.tolist()) for node in tree.nodes())


def test_an_insert_inside_an_edge_splits_it_and_keeps_depths():
    tree = RadixTree(1, NO_KV)
    long, _ = tree.insert(None, tokens(1, 2, 3, 4), locs(10, 11, 12, 13))
    tree.inc_lock_ref(long)
    fork, cached = tree.insert(None, tokens(1, 2), locs(20, 21))
    assert (cached, fork.depth, long.depth, long.start) == (2, 2, 4, 2)
    assert fork.kv_locs.tolist() == [10, 11] and long.kv_locs.tolist() == [12, 13]
    assert (fork.lock_ref, long.lock_ref, tree.num_protected_tokens) == (1, 1, 4)
    assert fork.checkpoint is None
    tree.dec_lock_ref(long)
    assert (fork.lock_ref, long.lock_ref, tree.num_protected_tokens) == (0, 0, 0)
    tree.check_invariants()


def test_a_branch_adds_one_node_and_splits_one_edge():
    tree = tree_with((1, 2, 3, 4), (1, 2, 5), (1, 2, 3, 4, 6))
    assert shape(tree) == [(2, [1, 2]), (3, [5]), (4, [3, 4]), (5, [6])]
    assert tree.num_tokens == 6


def test_a_walk_stops_inside_an_edge_and_changes_nothing():
    tree = tree_with((1, 2, 3, 4))
    before = repr([*tree.nodes()])
    nodes, depth = tree.walk(None, tokens(1, 2, 3, 9))
    assert (nodes, depth) == ([], 3)
    assert repr([*tree.nodes()]) == before


def test_only_whole_pages_match_and_branch():
    tree = tree_with((1, 2, 3, 4, 5, 6), (1, 2, 3, 9, 5, 6), page_size=2)
    assert shape(tree) == [(2, [1, 2]), (6, [3, 4, 5, 6]), (6, [3, 9, 5, 6])]
    assert tree.walk(None, tokens(1, 2, 3, 4, 5)).depth == 4
    assert tree.walk(None, tokens(1)).depth == 0
    with pytest.raises(AssertionError, match="3 tokens are no whole pages of 2"):
        tree.insert(None, tokens(1, 2, 3), locs(1, 2, 3))


def test_namespaces_share_nothing():
    tree = RadixTree(1, NO_KV)
    for namespace in (None, "salt", ("salt", "adapter")):
        assert tree.walk(namespace, tokens(1, 2)).depth == 0
        tree.insert(namespace, tokens(1, 2), locs(1, 2))
        assert tree.walk(namespace, tokens(1, 2)).depth == 2
    tree.check_invariants()
    assert tree.num_tokens == 6


def test_only_unprotected_leaves_can_be_removed():
    tree = tree_with((1, 2), (1, 2, 3))
    upper, leaf = sorted(tree.nodes(), key=lambda node: node.depth)
    assert (upper.is_evictable_leaf, leaf.is_evictable_leaf) == (False, True)
    tree.inc_lock_ref(upper)
    assert tree.remove_leaf(leaf) is upper
    assert not upper.is_evictable_leaf
    with pytest.raises(AssertionError, match="is in use"):
        tree.remove_leaf(upper)
    tree.dec_lock_ref(upper)
    assert tree.remove_leaf(upper) is tree.root
    assert tree.num_tokens == 0
    with pytest.raises(AssertionError, match="is not locked"):
        tree.dec_lock_ref(tree_with((1,)).insert(None, tokens(2), locs(1))[0])


def test_locations_are_copied_from_the_request_s_row():
    row = locs(1, 2, 3)
    tree = RadixTree(1, NO_KV)
    node, _ = tree.insert(None, tokens(7, 8, 9), row)
    row.fill_(-1)
    assert node.kv_locs.tolist() == [1, 2, 3]


def test_the_common_prefix_is_that_of_a_plain_loop():
    rng = random.Random(0)
    for _ in range(2000):
        edge, other = ([rng.randrange(2) for _ in range(rng.randrange(9))] for _ in range(2))
        start = rng.randrange(len(other) + 1)
        expected = 0
        while expected < min(len(edge), len(other) - start) and edge[expected] == other[start + expected]:
            expected += 1
        assert common_prefix(tokens(*edge), tokens(*other), start) == expected


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda node: setattr(node, "depth", node.depth + 1), "I1: .* does not begin where"),
        (lambda node: setattr(node, "kv_locs", node.kv_locs[1:]), "KV locations"),
        (lambda node: setattr(node, "lock_ref", 1), "protects"),
        (lambda node: setattr(node, "tokens", node.tokens[::-1]), "is lost"),
        (lambda node: setattr(node, "namespace", "other"), "is lost"),
        (lambda node: node.parent.children.clear(), "has 0 tokens"),
    ],
)
def test_a_damaged_tree_says_what_is_wrong(damage, message: str):
    tree = tree_with((1, 2, 3))
    damage(next(tree.nodes()))
    with pytest.raises(AssertionError, match=message):
        tree.check_invariants()
