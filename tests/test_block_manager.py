"""The page books against a slow and plain reference, and the prefix cache's promises."""

from __future__ import annotations

import gc
import random

import pytest

from llm_runtime.block_manager import GONE, BlockManager, PrefixEntry, blake2b
from llm_runtime.page_pool import PageGroup

PAGE = 2
Pages = list[list[int]]
KINDS = {"full": (0,), "window": (5,), "both": (0, 5), "a window of one page": (0, 2)}


def make_blocks(num_pages: int, **options) -> BlockManager:
    return BlockManager([PageGroup(num_pages)], PAGE, **options)


def register_all(blocks: BlockManager, tokens: list[int], pages: Pages, salt: str = "") -> list[PrefixEntry]:
    """Make every full page of `tokens` known."""
    chain: list[PrefixEntry] = []
    for index in range(len(tokens) // PAGE):
        parent = chain[-1] if chain else blocks.root(salt)
        page_tokens = tokens[index * PAGE : (index + 1) * PAGE]
        chain.append(blocks.register([group[index] for group in pages], parent, page_tokens))
    return chain


class Reference:
    """What each page of each group holds, by the whole prefix spelled out; a sequence may only start on pages that hold exactly
    it, as far as its next token sees."""

    def __init__(self, windows: tuple[int, ...]) -> None:
        self._windows = windows
        self._contents: list[dict[int, tuple[str, tuple[int, ...]]]] = [{} for _ in windows]

    def computed(self, salt: str, tokens: list[int], pages: Pages) -> None:
        for contents, group in zip(self._contents, pages, strict=True):
            contents |= {page: (salt, tuple(tokens[: (i + 1) * PAGE])) for i, page in enumerate(group) if page != GONE}

    def check(self, salt: str, tokens: list[int], num_hits: int, pages: Pages) -> None:
        length = num_hits * PAGE
        assert length <= len(tokens) - 1
        for contents, group, window in zip(self._contents, pages, self._windows, strict=True):
            for position in range(max(0, length - window + 1) if window else 0, length):
                index = position // PAGE
                assert contents[group[index]] == (salt, tuple(tokens[: (index + 1) * PAGE])), "a false hit"


@pytest.mark.parametrize(
    "hash_function", [blake2b, lambda data: b"same", lambda data: blake2b(data)[:1]], ids=["good", "one", "256"]
)
@pytest.mark.parametrize("windows", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_no_false_hit_and_no_lost_page_under_random_use(seed, windows, hash_function):
    """Sequences come, grow and go over few distinct tokens, so prefixes are shared, evicted, and made again."""
    rng = random.Random(seed)
    blocks = BlockManager([PageGroup(rng.randint(6, 16), window) for window in windows], PAGE, hash_function=hash_function)
    reference = Reference(windows)
    live: list[Pages] = []
    num_hits = 0
    for _ in range(600):
        if live and rng.random() < 0.5:
            blocks.release(live.pop(rng.randrange(len(live))))
        else:
            salt, tokens = rng.choice("ab"), [rng.randint(0, 1) for _ in range(rng.randint(1, 9))]
            chain = blocks.match(tokens, salt)
            pages = blocks.start(chain, len(tokens))
            if pages is None:
                continue
            reference.check(salt, tokens, len(chain), pages)
            num_hits += len(chain)
            for end in range(len(chain) * PAGE + 1, len(tokens) + 1):
                if not blocks.grow(pages, end):
                    break
                assert all(len(set(group) - {GONE}) == len(group) - group.count(GONE) for group in pages)
                assert all(page not in other[i][:-1] for i, group in enumerate(pages) for other in live for page in group[-1:])
                reference.computed(salt, tokens, pages)
                chain += register_all(blocks, tokens[:end], pages, salt)[len(chain) :] if end % PAGE == 0 else []
                blocks.slide(pages, end)
            live.append(pages)
        blocks.check_invariants()
        for index, pool in enumerate(blocks.pools):
            assert pool.num_in_use == len({page for pages in live for page in pages[index]} - {GONE})
    for pages in live:
        blocks.release(pages)
    blocks.check_invariants()
    assert not any(pool.num_in_use for pool in blocks.pools)
    assert any(pool.num_evictions for pool in blocks.pools) or hash_function is not blake2b
    assert num_hits > 20 or hash_function is not blake2b


def test_a_match_is_the_longest_known_prefix_short_of_the_last_token():
    blocks = make_blocks(8)
    tokens = [1, 2, 3, 4, 5, 6]
    pages = blocks.start([], 6)
    assert blocks.match(tokens, "") == [], "nothing is a hit before it is registered"
    chain = register_all(blocks, tokens, pages)
    assert blocks.match(tokens, "") == chain[:2]
    assert blocks.match([*tokens, 7], "") == chain
    assert blocks.match([1, 2, 9, 9, 5, 6, 7], "") == chain[:1]
    assert blocks.match([9, 2, 3, 4, 5], "") == []
    assert blocks.match([1, 2], "") == []
    assert blocks.match([1], "") == []


@pytest.mark.parametrize("salts", [("A", "B"), ("", " "), ("ab", "a"), ("a", ""), ("\ud800", "?")])
def test_two_salts_share_nothing(salts):
    blocks = make_blocks(4)
    register_all(blocks, [1, 2, 3, 4], blocks.start([], 4), salts[0])
    assert blocks.match([1, 2, 3, 4, 5], salts[1]) == []
    assert len(blocks.match([1, 2, 3, 4, 5], salts[0])) == 2


def test_salts_that_left_nothing_cached_are_not_remembered():
    blocks = make_blocks(2)
    for index in range(1000):
        salt = f"salt {index}"
        pages = blocks.start([], 2)
        register_all(blocks, [1, 2], pages, salt)
        blocks.release(pages)
        blocks.match([1, 2, 3], salt + "!")
    gc.collect()
    assert len(blocks._roots) <= blocks.pools[0].num_pages


def test_the_same_prefix_twice_keeps_the_first_page_known():
    blocks = make_blocks(4)
    first, second = blocks.start([], 4), blocks.start([], 4)
    chain = register_all(blocks, [1, 2, 3, 4], first)
    assert register_all(blocks, [1, 2, 3, 4], second) == chain
    blocks.release(second)
    assert (blocks.pools[0].num_cached, blocks.pools[0].num_free) == (0, 2)
    blocks.release(first)
    assert (blocks.pools[0].num_cached, blocks.pools[0].num_free) == (2, 2)
    blocks.check_invariants()


def test_a_prefix_made_again_after_its_start_was_evicted_is_found():
    blocks = make_blocks(3)
    first = blocks.start([], 2)
    (start,) = register_all(blocks, [1, 2], first)
    own = blocks.start([], 4)
    rest = blocks.register([own[0][1]], start, [3, 4])  # its sequence computed [1, 2] too, on a page that is not the known one
    blocks.release(first)
    evicted = blocks.start([], 2)
    assert blocks.match([1, 2, 3, 4, 5], "") == [], "the second page is there, the first is not"
    blocks.check_invariants()
    assert register_all(blocks, [1, 2], evicted) == [start]
    assert blocks.match([1, 2, 3, 4, 5], "") == [start, rest]
    blocks.check_invariants()


def test_what_nothing_hangs_on_is_not_remembered():
    blocks = make_blocks(3)
    for token in range(100):
        pages = blocks.start([], 4)
        register_all(blocks, [token, 1, 2, 3], pages)
        blocks.release(pages)
    gc.collect()
    assert len(blocks._index) <= blocks.pools[0].num_pages + 1


def test_a_hit_needs_what_the_next_token_sees_and_no_more():
    blocks = BlockManager([PageGroup(20), PageGroup(5, window=4)], PAGE)
    pages = blocks.start([], 12)
    assert [len(group) for group in pages] == [6, 0], "pages of a window come as they are needed"
    tokens, chain = list(range(12)), []
    for end in range(2, 13, 2):
        assert blocks.grow(pages, end)
        chain = register_all(blocks, tokens[:end], pages) if end <= 4 else [*chain, register_one(blocks, tokens, pages, chain)]
        blocks.slide(pages, end)
    assert pages[1][:4] == [GONE] * 4
    assert blocks.pools[1].num_in_use == 2
    blocks.release(pages)
    assert blocks.match([*tokens, 0], "") == chain
    assert blocks.pools[1].num_evictions == 1, "six pages went through a pool of five"
    assert blocks.match(tokens[:5], "") == [], "the window before it is gone"
    assert blocks.match(tokens[:9], "") == chain[:4]
    held = blocks.start(chain, 13)
    assert held[0][:6] == pages[0][:6]
    assert held[1][:4] == [GONE] * 4
    blocks.check_invariants()


def register_one(blocks: BlockManager, tokens: list[int], pages: Pages, chain: list[PrefixEntry]) -> PrefixEntry:
    index = len(chain)
    return blocks.register([group[index] for group in pages], chain[-1], tokens[index * PAGE : (index + 1) * PAGE])


def test_one_that_does_not_fit_both_pools_takes_from_neither():
    blocks = BlockManager([PageGroup(20), PageGroup(3, window=4)], PAGE)
    first = blocks.start([], 4)
    assert blocks.grow(first, 4)
    assert blocks.start([], 20) is None
    assert not blocks.grow(first, 8)
    assert blocks.grow_as_far(first, 8) == 6
    assert [pool.num_in_use for pool in blocks.pools] == [3, 3]
    blocks.shrink(first, 2)
    assert [pool.num_in_use for pool in blocks.pools] == [1, 1]
    blocks.check_invariants()


def test_without_prefix_caching_nothing_is_kept():
    blocks = make_blocks(2, prefix_caching=False)
    pages = blocks.start([], 4)
    register_all(blocks, [1, 2, 3, 4], pages)
    blocks.release(pages)
    assert blocks.match([1, 2, 3, 4, 5], "") == []
    assert (blocks.pools[0].num_cached, blocks.pools[0].num_free) == (0, 2)


def test_forget_all_ends_all_hits_and_loses_no_page():
    blocks = make_blocks(4)
    kept, released = blocks.start([], 2), blocks.start([], 4)
    register_all(blocks, [1, 2], kept)
    register_all(blocks, [5, 6, 7, 8], released)
    blocks.release(released)
    blocks.forget_all()
    blocks.check_invariants()
    assert blocks.match([1, 2, 3], "") == blocks.match([5, 6, 7], "") == []
    assert (blocks.pools[0].num_free, blocks.pools[0].num_cached, blocks.pools[0].num_in_use) == (3, 0, 1)
    blocks.release(kept)
    assert blocks.pools[0].num_free == 4
