"""Which sequence has which KV pages, and which pages can be used again for prompts that start the same.

Layers that attend to all tokens and layers with a sliding window keep their pages apart, in groups (page_pool.py). A sequence
has a list of pages for each group; a window group gives back what has fallen out of the window (-1 in its place):

    tokens          0..3  4..7  8..11 12..15     pages of 4 tokens, a window of 6, 14 tokens computed
    full group         5     2     9     4
    window group      -1    -1     7     1       the next token, 14, sees 9 and later ones

Only full pages are cached. A prefix is known by a chained hash of everything before it: H(parent's digest, its token ids), with
the salt at the root, so a hit needs the same salt and the same tokens from the very start. A hit is confirmed against what is
stored (the parent entry itself and the token ids): a collision of hashes is refused, never served. A group's pages of a prefix
are evicted one by one; a hit ends where each group still has all that the next token attends to.
"""

from __future__ import annotations

import functools
import hashlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from llm_runtime.page_pool import PageGroup, PagePool

HashFunction = Callable[[bytes], bytes]
GONE = -1  # in place of a page: there is none, or none any more


def blake2b(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=32).digest()


@dataclass(eq=False)
class PrefixEntry:
    """The root of a salt, or the tokens of a full page after `parent`, and the page that has them in each group."""

    __slots__ = ("__weakref__", "digest", "page_ids", "parent", "token_ids")
    digest: bytes
    parent: PrefixEntry | None
    token_ids: tuple[int, ...]
    page_ids: list[int]


class BlockManager:
    """Bookkeeping of the pools; it never touches the pages' contents. A sequence's pages are a list for each group."""

    def __init__(
        self,
        groups: Sequence[PageGroup],
        page_size: int,
        *,
        prefix_caching: bool = True,
        hash_function: HashFunction = blake2b,
    ) -> None:
        self.groups = tuple(groups)
        self.page_size = page_size
        self._prefix_caching = prefix_caching
        self._hash = hash_function
        # A page of each pool that is known -> its entry.
        self._entries: list[dict[int, PrefixEntry]] = [{} for _ in self.groups]
        self.pools = [
            PagePool(group.num_pages, functools.partial(self._on_evict, index)) for index, group in enumerate(self.groups)
        ]
        # An entry lives as long as a page, a sequence or an entry after it hangs on it, a root likewise: clients may send a new
        # salt with every request.
        self._index: weakref.WeakValueDictionary[bytes, PrefixEntry] = weakref.WeakValueDictionary()
        self._roots: weakref.WeakValueDictionary[str, PrefixEntry] = weakref.WeakValueDictionary()

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def max_context(self) -> int | None:
        """Tokens that one sequence, alone in the pools, can have; None: any number."""
        limits = [limit for group in self.groups if (limit := group.max_context(self.page_size)) is not None]
        return min(limits, default=None)

    def root(self, salt: str) -> PrefixEntry:
        """Where the chains of a salt start."""
        root = self._roots.get(salt)
        if root is None:
            # JSON can hold lone surrogates, which plain UTF-8 refuses.
            root = PrefixEntry(self._hash(b"salt:" + salt.encode("utf-8", "surrogatepass")), None, (), [])
            self._roots[salt] = root
        return root

    def match(self, token_ids: Sequence[int], salt: str) -> list[PrefixEntry]:
        """Entries of the longest prefix in whole pages that a sequence can start after, at least one token short of `token_ids`
        (its logits are needed).

        The pages are not reserved: `hold` them before anything else is allocated.
        """
        entries: list[PrefixEntry] = []
        if not self._prefix_caching:
            return entries
        parent = self.root(salt)
        usable = 0
        unbroken = [0] * len(self.groups)  # newest entries in a row that have a page, by group
        for start in range(0, len(token_ids) - self.page_size, self.page_size):
            page_tokens = tuple(token_ids[start : start + self.page_size])
            entry = self._find(parent, page_tokens, self._digest(parent, page_tokens))
            if entry is None:
                break
            entries.append(entry)
            parent = entry
            unbroken = [count + 1 if page_id != GONE else 0 for count, page_id in zip(unbroken, entry.page_ids, strict=True)]
            if self._suffices(unbroken, len(entries)):
                usable = len(entries)
        return entries[:usable]

    def hold(self, entries: Sequence[PrefixEntry]) -> list[list[int]]:
        """Reference what a sequence after these entries attends to. `release` it later."""
        position = len(entries) * self.page_size
        held = []
        for index, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            first = group.first_page(position, self.page_size)
            pages = [entry.page_ids[index] for entry in entries[first:]]
            pool.acquire(pages)
            held.append([GONE] * first + pages)
        return held

    def start(self, entries: Sequence[PrefixEntry], num_tokens: int) -> list[list[int]] | None:
        """Pages of a sequence that starts after `entries` and has `num_tokens` already: all of those that it will not give
        back. A window group's pages come as they are needed, if there is room for a window's now. None, and nothing changed,
        where room is missing."""
        missing = self.pages_for(num_tokens) - len(entries)
        held = self.hold(entries)
        for group, pool in zip(self.groups, self.pools, strict=True):
            needed = min(missing, group.pages_at_once(1, self.page_size)) if group.window else missing
            if needed > pool.num_available:
                self.release(held)
                return None
        for pages, group, pool in zip(held, self.groups, self.pools, strict=True):
            if not group.window:
                pages += pool.allocate(missing)
        return held

    def grow(self, page_ids: list[list[int]], num_tokens: int) -> bool:
        """Pages for a sequence to have so many tokens. False, and nothing changed, where some are missing."""
        wanted = self.pages_for(num_tokens)
        if any(wanted - len(pages) > pool.num_available for pages, pool in zip(page_ids, self.pools, strict=True)):
            return False
        for pages, pool in zip(page_ids, self.pools, strict=True):
            pages += pool.allocate(max(0, wanted - len(pages)))
        return True

    def grow_as_far(self, page_ids: list[list[int]], num_tokens: int) -> int:
        """Pages for a sequence to have so many tokens, or as many as there is room for. Returns how many."""
        wanted = self.pages_for(num_tokens)
        for pages, pool in zip(page_ids, self.pools, strict=True):
            wanted = min(wanted, len(pages) + pool.num_available)
        for pages, pool in zip(page_ids, self.pools, strict=True):
            pages += pool.allocate(max(0, wanted - len(pages)))
        return min(num_tokens, wanted * self.page_size)

    def shrink(self, page_ids: list[list[int]], num_tokens: int) -> None:
        """Take back what a sequence of so many tokens does not need."""
        needed = self.pages_for(num_tokens)
        for pages, pool in zip(page_ids, self.pools, strict=True):
            pool.release(pages[needed:])
            del pages[needed:]

    def slide(self, page_ids: list[list[int]], position: int) -> None:
        """Take back what no token from `position` on attends to."""
        for pages, group, pool in zip(page_ids, self.groups, self.pools, strict=True):
            end = first = group.first_page(position, self.page_size)
            while first > 0 and pages[first - 1] != GONE:
                first -= 1
            pool.release(pages[first:end][::-1])  # the oldest is the first to be evicted
            pages[first:end] = [GONE] * (end - first)

    def release(self, page_ids: list[list[int]]) -> None:
        """A sequence lets all its pages go."""
        for pages, pool in zip(page_ids, self.pools, strict=True):
            pool.release([page_id for page_id in pages if page_id != GONE])

    def register(self, page_ids: Sequence[int], parent: PrefixEntry, token_ids: Sequence[int]) -> PrefixEntry:
        """Make a full page, one of each group, known, once its keys and values exist. Returns the entry to chain the next page
        on: the one that there is, where the same prefix is known already."""
        tokens = tuple(token_ids)
        digest = self._digest(parent, tokens)
        entry = self._find(parent, tokens, digest)
        if entry is None:
            entry = PrefixEntry(digest, parent, tokens, [GONE] * len(self.groups))
            if not self._prefix_caching:
                return entry
            if (other := self._index.get(digest)) is not None:  # two of one hash; the older one can go
                self._forget(other)
            self._index[digest] = entry
        for index, page_id in enumerate(page_ids):
            if page_id != GONE and entry.page_ids[index] == GONE and self._prefix_caching:
                entry.page_ids[index] = page_id
                self._entries[index][page_id] = entry
                self.pools[index].keep(page_id)
        return entry

    def forget_all(self) -> None:
        """Make no page a hit any more, as when the pools' contents are lost."""
        for entries in self._entries:
            for entry in list(entries.values()):
                self._forget(entry)

    def check_invariants(self) -> None:
        """For tests: raises AssertionError when the books do not balance."""
        for index, (pool, entries) in enumerate(zip(self.pools, self._entries, strict=True)):
            pool.check_invariants(set(entries))
            assert all(entry.page_ids[index] == page_id for page_id, entry in entries.items()), "two pages for one prefix"
            assert all(self._index[entry.digest] is entry for entry in entries.values()), "a known page cannot be found"

    def _digest(self, parent: PrefixEntry, token_ids: tuple[int, ...]) -> bytes:
        return self._hash(parent.digest + np.array(token_ids, np.int64).tobytes())

    def _find(self, parent: PrefixEntry, token_ids: tuple[int, ...], digest: bytes) -> PrefixEntry | None:
        entry = self._index.get(digest)
        return entry if entry is not None and entry.parent is parent and entry.token_ids == token_ids else None

    def _suffices(self, unbroken: Sequence[int], num_entries: int) -> bool:
        position = num_entries * self.page_size
        return all(
            count >= num_entries - group.first_page(position, self.page_size)
            for count, group in zip(unbroken, self.groups, strict=True)
        )

    def _on_evict(self, group: int, page_id: int) -> None:
        self._entries[group].pop(page_id).page_ids[group] = GONE

    def _forget(self, entry: PrefixEntry) -> None:
        for index, page_id in enumerate(entry.page_ids):
            if page_id != GONE:
                del self._entries[index][page_id]
                self.pools[index].forget(page_id)
                entry.page_ids[index] = GONE


class StaticBlocks(BlockManager):
    """A region of pages for each sequence, which it has whole from its start to its end.

    Nothing is shared or cached, and nothing runs out while a sequence runs, so none is ever preempted.
    """

    def __init__(self, num_pages: int, page_size: int, region_pages: int) -> None:
        """Pages beyond the last whole region are not used."""
        whole = num_pages // region_pages * region_pages
        super().__init__([PageGroup(whole)], page_size, prefix_caching=False)
        self._region_pages = region_pages

    def pages_for(self, num_tokens: int) -> int:
        """A whole region, one page after another: pages come back as they went, so they stay together."""
        assert num_tokens <= self._region_pages * self.page_size
        return self._region_pages
