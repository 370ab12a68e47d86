"""A KV page allocator as a host has one, in its plainest form."""

from __future__ import annotations

from collections.abc import Callable

import torch


class KVPages:
    """``num_pages`` pages of ``page_size`` locations; a location is ``page * page_size + offset``.

    Args:
        on_free: told the locations of the pages that become free.
    """

    def __init__(self, num_pages: int, page_size: int, on_free: Callable[[torch.Tensor], None]) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.free_pages = [*range(num_pages)]
        self._on_free = on_free

    def try_extend(self, kv_locs: torch.Tensor, length: int) -> torch.Tensor | None:
        """``kv_locs`` made ``length`` long: first the rest of its last page, then new pages; None without room."""
        missing = length - len(kv_locs)
        if missing <= 0:
            return kv_locs
        rest = -len(kv_locs) % self.page_size
        num_new = -(-max(0, missing - rest) // self.page_size)
        if num_new > len(self.free_pages):
            return None
        new = torch.arange(rest) + kv_locs[-1] + 1 if rest else kv_locs[:0]
        pages = [self.free_pages.pop() for _ in range(num_new)]
        return torch.cat([kv_locs, new, self._locs(pages)])[:length]

    def free(self, kv_locs: torch.Tensor) -> None:
        pages = sorted({loc // self.page_size for loc in kv_locs.tolist()})
        twice = {*pages} & {*self.free_pages}
        assert not twice, f"I3: KV pages {twice} are freed twice"
        self.free_pages += pages
        self._on_free(self._locs(pages))

    def _locs(self, pages: list[int]) -> torch.Tensor:
        return torch.tensor(
            [page * self.page_size + offset for page in pages for offset in range(self.page_size)], dtype=torch.int64
        )
