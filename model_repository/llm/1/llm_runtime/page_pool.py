"""The pages of one group of layers: which are referenced, which are kept for later, which are free.

A page is in one of three places, and their sizes always add up to the pool:

    in use      referenced by one or more sequences
    cached      referenced by none, but holds keys and values of a known prefix; evicted, least recently used first, when needed
    free        holds nothing of use
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PageGroup:
    """Layers that keep keys and values of the same tokens, on pages of their own."""

    num_pages: int
    window: int = 0  # newest tokens that the layers attend to; 0: all

    def first_page(self, position: int, page_size: int) -> int:
        """Of a sequence, the first page that a token at `position`, or a later one, attends to."""
        return max(0, position - self.window + 1) // page_size if self.window else 0

    def pages_at_once(self, num_tokens: int, page_size: int) -> int:
        """The most that a sequence needs while it runs so many tokens at once; only where there is a window."""
        return (self.window + num_tokens - 3) // page_size + 2

    def max_context(self, page_size: int) -> int | None:
        """Tokens that one sequence, alone in the pool, can have; None: any number, as its pages are used again."""
        if self.window and self.num_pages >= self.pages_at_once(1, page_size):
            return None
        return self.num_pages * page_size


class PagePool:
    """Bookkeeping of one group's pages; it never touches what they hold. `on_evict` hears of cached pages that are given up."""

    def __init__(self, num_pages: int, on_evict: Callable[[int], None]) -> None:
        self.num_pages = num_pages
        self.num_evictions = 0
        self._on_evict = on_evict
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # the lowest number on top
        self._known: set[int] = set()  # pages that hold a known prefix
        self._cached: OrderedDict[int, None] = OrderedDict()  # unreferenced known pages, least recently used first

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give out: free ones and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_in_use(self) -> int:
        return self.num_pages - self.num_available

    def acquire(self, page_ids: Iterable[int]) -> None:
        """One more sequence references these known pages."""
        for page_id in page_ids:
            if self._references[page_id] == 0:
                del self._cached[page_id]
            self._references[page_id] += 1

    def allocate(self, count: int) -> list[int]:
        """Pages for one sequence, contents undefined; evicts as needed. Call only when `num_available` suffices."""
        pages = []
        for _ in range(count):
            if not self._free:
                self._evict()
            page_id = self._free.pop()
            self._references[page_id] = 1
            pages.append(page_id)
        return pages

    def release(self, page_ids: Sequence[int]) -> None:
        """A sequence lets its pages go. The last is the first to be evicted: no page is of use without those before it."""
        for page_id in reversed(page_ids):
            self._references[page_id] -= 1
            if self._references[page_id] == 0:
                if page_id in self._known:
                    self._cached[page_id] = None
                else:
                    self._free.append(page_id)

    def keep(self, page_id: int) -> None:
        """A page in use holds a known prefix from now on."""
        self._known.add(page_id)

    def forget(self, page_id: int) -> None:
        """A known page is of no use any more but to those who hold it."""
        self._known.remove(page_id)
        if page_id in self._cached:
            del self._cached[page_id]
            self._free.append(page_id)

    def check_invariants(self, known: set[int]) -> None:
        """For tests: raises AssertionError when the books do not balance, or `known` are not the known pages."""
        free, cached = set(self._free), set(self._cached)
        in_use = {page for page, count in enumerate(self._references) if count > 0}
        assert len(free) == len(self._free), "a page is free twice"
        assert not (free | cached) & in_use, "a page in use is to be had"
        assert not free & cached, "a page is free and cached"
        assert len(free) + len(cached) + len(in_use) == self.num_pages, "a page is lost"
        assert all(count >= 0 for count in self._references)
        assert self._known == known, "a page is known to one side only"
        assert cached <= known, "a cached page is not known by any prefix"
        assert not free & known, "a free page is still known"

    def _evict(self) -> None:
        page_id, _ = self._cached.popitem(last=False)
        self._known.remove(page_id)
        self._free.append(page_id)
        self.num_evictions += 1
        self._on_evict(page_id)
