"""Who owns which KV page, and which pages can be used again for prompts that start the same.

A page is in one of three places, and their sizes always add up to the pool:

    in use      referenced by one or more sequences
    cached      referenced by none, but holds keys and values of a known prefix; evicted, least recently used first, when needed
    free        holds nothing of use

Only full pages are cached. A page is known by a chained hash of everything before it: H(parent's digest, its token ids),
with the salt at the root, so a hit needs the same salt and the same tokens from the very start. A hit is confirmed against
what is stored (the parent entry itself and the token ids): a collision of hashes is refused, never served.
"""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

HashFunction = Callable[[bytes], bytes]


def blake2b(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()


@dataclass(eq=False)
class PrefixEntry:
    """A page's place in the prefix cache: the root of a salt (page -1), or a full page after `parent`."""

    __slots__ = ("__weakref__", "digest", "page_id", "parent", "token_ids")
    digest: bytes
    parent: PrefixEntry | None
    token_ids: tuple[int, ...]
    page_id: int


class BlockManager:
    """Bookkeeping of the pool; it never touches the pages' contents."""

    def __init__(
        self, num_pages: int, page_size: int, *, prefix_caching: bool = True, hash_function: HashFunction = blake2b
    ) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self._prefix_caching = prefix_caching
        self._hash = hash_function
        self._references = [0] * num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # the lowest number on top
        self._cached: OrderedDict[int, None] = OrderedDict()  # unreferenced pages with an entry, least recently used first
        self._entries: dict[int, PrefixEntry] = {}  # by page id
        self._index: dict[bytes, PrefixEntry] = {}
        # A root lives as long as a sequence or a known page hangs on it: clients may send a new salt with every request.
        self._roots: weakref.WeakValueDictionary[str, PrefixEntry] = weakref.WeakValueDictionary()
        self.num_evictions = 0

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

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def root(self, salt: str) -> PrefixEntry:
        """Where the chains of a salt start."""
        root = self._roots.get(salt)
        if root is None:
            # JSON can hold lone surrogates, which plain UTF-8 refuses.
            root = PrefixEntry(self._hash(b"salt:" + salt.encode("utf-8", "surrogatepass")), None, (), -1)
            self._roots[salt] = root
        return root

    def match(self, token_ids: Sequence[int], salt: str) -> list[PrefixEntry]:
        """Entries of the longest known prefix in whole pages, at least one token short of `token_ids` (its logits are needed).

        The pages are not reserved: `acquire` them before anything else is allocated.
        """
        entries: list[PrefixEntry] = []
        if not self._prefix_caching:
            return entries
        parent = self.root(salt)
        for start in range(0, len(token_ids) - self.page_size, self.page_size):
            page_tokens = tuple(token_ids[start : start + self.page_size])
            entry = self._index.get(self._digest(parent, page_tokens))
            if entry is None or entry.parent is not parent or entry.token_ids != page_tokens:
                break
            entries.append(entry)
            parent = entry
        return entries

    def acquire(self, page_ids: Sequence[int]) -> None:
        """One more sequence references these pages, which hold something already."""
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
        """A sequence lets its pages go. Its last page is the first to be evicted: no page is of use without those before it."""
        for page_id in reversed(page_ids):
            self._references[page_id] -= 1
            if self._references[page_id] == 0:
                if page_id in self._entries:
                    self._cached[page_id] = None
                else:
                    self._free.append(page_id)

    def register(self, page_id: int, parent: PrefixEntry, token_ids: Sequence[int]) -> PrefixEntry:
        """Make a full page known, once its keys and values exist. Returns the entry to chain the next page on: that of
        another page where the same prefix is known already."""
        tokens = tuple(token_ids)
        digest = self._digest(parent, tokens)
        known = self._index.get(digest)
        if known is not None and known.parent is parent and known.token_ids == tokens:
            return known
        entry = PrefixEntry(digest, parent, tokens, page_id)
        if not self._prefix_caching:
            return entry
        if known is not None:  # its parent was evicted and came back, so nothing can reach it any more
            self._forget(known)
        self._index[digest] = entry
        self._entries[page_id] = entry
        return entry

    def forget_all(self) -> None:
        """Make no page a hit any more, as when the pool's contents are lost."""
        for entry in list(self._entries.values()):
            self._forget(entry)

    def check_invariants(self) -> None:
        """For tests: raises AssertionError when the books do not balance."""
        free, cached = set(self._free), set(self._cached)
        in_use = {page for page, count in enumerate(self._references) if count > 0}
        assert len(free) == len(self._free), "a page is free twice"
        assert not (free | cached) & in_use, "a page in use is to be had"
        assert not free & cached, "a page is free and cached"
        assert len(free) + len(cached) + len(in_use) == self.num_pages, "a page is lost"
        assert all(count >= 0 for count in self._references)
        assert cached <= set(self._entries), "a cached page is not known by any prefix"
        assert not free & set(self._entries), "a free page is still known"
        assert all(self._index[entry.digest] is entry for entry in self._entries.values())
        assert len(self._index) == len(self._entries)

    def _digest(self, parent: PrefixEntry, token_ids: tuple[int, ...]) -> bytes:
        return self._hash(parent.digest + np.array(token_ids, np.int64).tobytes())

    def _evict(self) -> None:
        page_id, _ = self._cached.popitem(last=False)
        entry = self._entries.pop(page_id)
        del self._index[entry.digest]
        self._free.append(page_id)
        self.num_evictions += 1

    def _forget(self, entry: PrefixEntry) -> None:
        del self._index[entry.digest]
        del self._entries[entry.page_id]
        if entry.page_id in self._cached:
            del self._cached[entry.page_id]
            self._free.append(entry.page_id)


class StaticBlocks(BlockManager):
    """A region of pages for each sequence, which it has whole from its start to its end.

    Nothing is shared or cached, and nothing runs out while a sequence runs, so none is ever preempted.
    """

    def __init__(self, num_pages: int, page_size: int, region_pages: int) -> None:
        """Pages beyond the last whole region are not used."""
        super().__init__(num_pages // region_pages * region_pages, page_size, prefix_caching=False)
        self._region_pages = region_pages

    def allocate(self, count: int) -> list[int]:
        """A whole region, one page after another: pages come back as they went, so they stay together."""
        assert count <= self._region_pages
        return super().allocate(self._region_pages)
