"""A radix tree over token ids: which KV is cached, page by page, and who may not lose it.

Keys are token ids within a namespace (cache salt, LoRA adapter): equal ids of two namespaces share nothing. A node
ends ``depth`` tokens below the root, and holds the KV locations of its edge and, perhaps, one state. Edges are whole
pages; two children of a node differ within their first page.

The tree knows nodes, not resources: it frees no location and no slot. Matching changes nothing; only an insert splits
an edge, and then the lower part keeps the node, with its end, its state and its locks.
"""

from __future__ import annotations

import dataclasses
import itertools
from array import array
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from sglang_k3.mem.state_slots import SlotId

if TYPE_CHECKING:
    from torch import Tensor

Tokens = array  # of type code "q": compares and slices without a Python object per token
Namespace = Hashable


def as_tokens(ids: Sequence[int]) -> array[int]:
    return ids if isinstance(ids, array) else array("q", ids)


@dataclasses.dataclass
class Checkpoint:
    """A state in the tree.

    Attributes:
        slot_id: its slot, owned by the tree.
        is_fork: paths diverge behind it: it was planted where a request left what was cached.
        lock_ref: how many copies from it are not enqueued yet, or sessions hold it.
        used_at: logical time of the last restore, or of its planting.
        uses: how often requests have started from it.
    """

    slot_id: SlotId
    is_fork: bool
    lock_ref: int = 0
    used_at: int = 0
    uses: int = 0


@dataclasses.dataclass(eq=False)
class TreeNode:
    """One edge and its end.

    Attributes:
        node_id: order of creation.
        namespace: whose tokens these are.
        tokens: ids of the edge, whole pages.
        kv_locs: KV location per token of the edge ``[len(tokens)]``, int64.
        depth: tokens from the root to the end of the node.
        checkpoint: the state at exactly ``depth`` tokens; None is a tombstone, whose KV is alive.
        lock_ref: how many requests and sessions use the KV from the root to here.
        hold_ref: how many of them are sessions, which make way when a request needs the room.
        used_at: logical time of the last use of its end.
    """

    node_id: int
    namespace: Namespace
    tokens: array[int]
    kv_locs: Tensor
    depth: int
    parent: TreeNode | None
    children: dict[Hashable, TreeNode] = dataclasses.field(default_factory=dict)
    checkpoint: Checkpoint | None = None
    lock_ref: int = 0
    hold_ref: int = 0
    used_at: int = 0

    def __repr__(self) -> str:
        state = f", state slot {self.checkpoint.slot_id}" if self.checkpoint else ""
        return f"TreeNode({self.node_id}: {self.depth - len(self.tokens)}..{self.depth}{state}, {self.lock_ref} locks)"

    @property
    def start(self) -> int:
        return self.depth - len(self.tokens)

    @property
    def is_evictable_leaf(self) -> bool:
        return self.parent is not None and not self.children and not self.lock_ref

    @property
    def is_held(self) -> bool:
        """Whether sessions alone protect it."""
        return 0 < self.lock_ref == self.hold_ref

    def path(self) -> Iterator[TreeNode]:
        """This node and its ancestors, upwards, without the root."""
        node: TreeNode = self
        while node.parent is not None:
            yield node
            node = node.parent


class Walk(NamedTuple):
    """How far a sequence is cached: ``nodes`` are matched to their end, ``depth`` may lie inside the next edge."""

    nodes: list[TreeNode]
    depth: int


class RadixTree:
    """The tree of one rank.

    Args:
        page_size: tokens per page; edges are whole pages.
        no_kv: an empty tensor of KV locations, which gives device and dtype.
    """

    def __init__(self, page_size: int, no_kv: Tensor) -> None:
        self.page_size = page_size
        self._ids = itertools.count()
        self.root = TreeNode(next(self._ids), None, as_tokens(()), no_kv, 0, None)
        self.num_tokens = 0
        self.num_protected_tokens = self.num_held_tokens = 0

    def __repr__(self) -> str:
        return f"RadixTree(page {self.page_size}: {self.num_tokens} tokens, {self.num_protected_tokens} protected)"

    def walk(self, namespace: Namespace, tokens: array[int]) -> Walk:
        """The cached part of ``tokens``, in whole pages. Changes nothing. O(length)."""
        node, depth, nodes = self.root, 0, []
        while (child := node.children.get(self._child_key(node, namespace, tokens, depth))) is not None:
            common = common_prefix(child.tokens, tokens, depth) // self.page_size * self.page_size
            depth += common
            if common < len(child.tokens):
                break
            nodes.append(child)
            node = child
        return Walk(nodes, depth)

    def insert(self, namespace: Namespace, tokens: array[int], kv_locs: Tensor) -> tuple[TreeNode, int]:
        """Make a node end at exactly ``len(tokens)``, which is whole pages.

        Where tokens are cached already the tree keeps its own locations, and the caller's duplicates stay with the
        caller. Splits at most one edge to branch and adds at most one node.

        Returns:
            The node, and how many tokens were cached before.
        """
        assert len(tokens) % self.page_size == 0, f"{len(tokens)} tokens are no whole pages of {self.page_size}"
        nodes, cached = self.walk(namespace, tokens)
        node = nodes[-1] if nodes else self.root
        if cached > node.depth:
            node = self._split(node.children[self._child_key(node, namespace, tokens, node.depth)], cached)
        if cached < len(tokens):
            # A copy: the locations come as a view of the request's row, which will be somebody else's.
            node = self._add(node, namespace, tokens[cached:], kv_locs[cached:].clone())
        return node, cached

    def remove_leaf(self, node: TreeNode) -> TreeNode:
        """Take out an evictable leaf without a state; its parent."""
        assert node.is_evictable_leaf and node.checkpoint is None, f"{node} is in use"
        parent = node.parent
        assert parent is not None
        del parent.children[self._child_key(parent, node.namespace, node.tokens, 0)]
        node.parent = None
        self.num_tokens -= len(node.tokens)
        return parent

    def inc_lock_ref(self, node: TreeNode, *, by_session: bool = False) -> None:
        """Protect the KV from the root to the end of ``node``. O(path)."""
        self._lock(node, 1, by_session)

    def dec_lock_ref(self, node: TreeNode, *, by_session: bool = False) -> None:
        self._lock(node, -1, by_session)

    def nodes(self) -> Iterator[TreeNode]:
        """Every node but the root, parents first. O(nodes)."""
        stack = [*self.root.children.values()]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def check_invariants(self) -> None:
        num_tokens = num_protected = num_held = 0
        for node in self.nodes():
            parent = node.parent
            assert parent is not None and node.start == parent.depth, f"I1: {node} does not begin where {parent} ends"
            assert len(node.tokens) == len(node.kv_locs) > 0, f"{node} has {len(node.kv_locs)} KV locations"
            assert len(node.tokens) % self.page_size == 0, f"{node} is no whole pages of {self.page_size}"
            key = self._child_key(parent, node.namespace, node.tokens, 0)
            assert parent.children.get(key) is node, f"{node} is lost"
            assert parent is self.root or parent.namespace == node.namespace, f"{node} is in another's namespace"
            assert parent is self.root or parent.lock_ref >= node.lock_ref, f"{node} is locked, {parent} is not"
            num_tokens += len(node.tokens)
            num_protected += len(node.tokens) if node.lock_ref else 0
            num_held += len(node.tokens) if node.is_held else 0
        assert num_tokens == self.num_tokens, f"I2: {self!r} has {num_tokens} tokens"
        assert num_protected == self.num_protected_tokens, f"I2: {self!r} protects {num_protected} tokens"
        assert num_held == self.num_held_tokens, f"I2: {self!r} counts {self.num_held_tokens} held tokens of {num_held}"

    def _lock(self, node: TreeNode, step: int, by_session: bool) -> None:
        for on_path in node.path():
            self._count_locked(on_path, -1)
            on_path.lock_ref += step
            on_path.hold_ref += step * by_session
            assert on_path.lock_ref >= on_path.hold_ref >= 0, f"{on_path} is not locked"
            self._count_locked(on_path, 1)

    def _count_locked(self, node: TreeNode, sign: int) -> None:
        self.num_protected_tokens += sign * len(node.tokens) * (node.lock_ref > 0)
        self.num_held_tokens += sign * len(node.tokens) * node.is_held

    def _child_key(self, parent: TreeNode, namespace: Namespace, tokens: array[int], start: int) -> Hashable:
        page = tokens[start : start + self.page_size].tobytes()
        return (namespace, page) if parent is self.root else page

    def _split(self, node: TreeNode, depth: int) -> TreeNode:
        """Cut the edge of ``node`` at ``depth``; the new node above, which has no state: none was kept there."""
        parent, cut = node.parent, depth - node.start
        assert parent is not None
        upper = TreeNode(
            next(self._ids), node.namespace, node.tokens[:cut], node.kv_locs[:cut], depth, parent,
            lock_ref=node.lock_ref, hold_ref=node.hold_ref, used_at=node.used_at,
        )  # fmt: skip
        parent.children[self._child_key(parent, node.namespace, node.tokens, 0)] = upper
        node.tokens, node.kv_locs, node.parent = node.tokens[cut:], node.kv_locs[cut:], upper
        upper.children[self._child_key(upper, node.namespace, node.tokens, 0)] = node
        return upper

    def _add(self, parent: TreeNode, namespace: Namespace, tokens: array[int], kv_locs: Tensor) -> TreeNode:
        node = TreeNode(next(self._ids), namespace, tokens, kv_locs, parent.depth + len(tokens), parent)
        parent.children[self._child_key(parent, namespace, tokens, 0)] = node
        self.num_tokens += len(tokens)
        return node


def common_prefix(edge: array[int], tokens: array[int], start: int) -> int:
    """How many ids of ``edge`` agree with ``tokens[start:]``, by halving: each compare runs in C."""
    low, high = 0, min(len(edge), len(tokens) - start)
    if edge[:high] == tokens[start : start + high]:
        return high
    while high - low > 1:  # the first ``low`` agree, the first ``high`` do not
        middle = (low + high) // 2
        if edge[low:middle] == tokens[start + low : start + middle]:
            low = middle
        else:
            high = middle
    return low
