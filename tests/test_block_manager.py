"""The page books against a slow and plain reference, and the prefix cache's promises."""

from __future__ import annotations

import gc
import random

import pytest

from llm_runtime.block_manager import BlockManager, PrefixEntry, blake2b

PAGE = 2


def register_all(blocks: BlockManager, tokens: list[int], pages: list[int], salt: str = "") -> list[PrefixEntry]:
    """Make every full page of `tokens` known."""
    chain: list[PrefixEntry] = []
    for index in range(len(tokens) // PAGE):
        parent = chain[-1] if chain else blocks.root(salt)
        chain.append(blocks.register(pages[index], parent, tokens[index * PAGE : (index + 1) * PAGE]))
    return chain


class Reference:
    """What each page holds, by the whole prefix spelled out; a match may only name pages that hold exactly it."""

    def __init__(self) -> None:
        self.contents: dict[int, tuple[str, tuple[int, ...]]] = {}

    def computed(self, salt: str, tokens: list[int], pages: list[int]) -> None:
        for index, page in enumerate(pages):
            self.contents[page] = (salt, tuple(tokens[: (index + 1) * PAGE]))

    def check_match(self, salt: str, tokens: list[int], pages: list[int]) -> None:
        assert len(pages) * PAGE <= len(tokens) - 1
        for index, page in enumerate(pages):
            assert self.contents[page] == (salt, tuple(tokens[: (index + 1) * PAGE])), "a false hit"


@pytest.mark.parametrize(
    "hash_function", [blake2b, lambda data: b"same", lambda data: blake2b(data)[:1]], ids=["good", "one", "256"]
)
@pytest.mark.parametrize("seed", range(8))
def test_no_false_hit_and_no_lost_page_under_random_use(seed, hash_function):
    """Sequences come and go over few distinct tokens, so prefixes are shared, evicted, and made again."""
    rng = random.Random(seed)
    blocks = BlockManager(rng.randint(6, 16), PAGE, hash_function=hash_function)
    reference = Reference()
    live: list[list[int]] = []
    num_hits = 0
    for _ in range(600):
        if live and rng.random() < 0.5:
            blocks.release(live.pop(rng.randrange(len(live))))
        else:
            salt, tokens = rng.choice("ab"), [rng.randint(0, 1) for _ in range(rng.randint(1, 9))]
            chain = blocks.match(tokens, salt)
            hits = [entry.page_id for entry in chain]
            reference.check_match(salt, tokens, hits)
            blocks.acquire(hits)
            num_hits += len(hits)
            missing = blocks.pages_for(len(tokens)) - len(hits)
            if missing > blocks.num_available:
                blocks.release(hits)
                continue
            pages = hits + blocks.allocate(missing)
            assert len(set(pages)) == len(pages)
            assert all(page not in other[len(hits) :] for other in live for page in pages[len(hits) :])
            reference.computed(salt, tokens, pages)
            register_all(blocks, tokens, pages, salt)
            live.append(pages)
        blocks.check_invariants()
        assert blocks.num_free + blocks.num_cached + blocks.num_in_use == blocks.num_pages
        assert blocks.num_in_use == len({page for pages in live for page in pages})
    for pages in live:
        blocks.release(pages)
    blocks.check_invariants()
    assert blocks.num_in_use == 0
    assert blocks.num_evictions > 0 or hash_function is not blake2b
    assert num_hits > 50 or hash_function is not blake2b


def test_a_match_is_the_longest_known_prefix_short_of_the_last_token():
    blocks = BlockManager(8, PAGE)
    tokens = [1, 2, 3, 4, 5, 6]
    pages = blocks.allocate(3)
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
    blocks = BlockManager(4, PAGE)
    register_all(blocks, [1, 2, 3, 4], blocks.allocate(2), salts[0])
    assert blocks.match([1, 2, 3, 4, 5], salts[1]) == []
    assert len(blocks.match([1, 2, 3, 4, 5], salts[0])) == 2


def test_salts_that_left_nothing_cached_are_not_remembered():
    blocks = BlockManager(2, PAGE)
    for index in range(1000):
        salt = f"salt {index}"
        pages = blocks.allocate(1)
        register_all(blocks, [1, 2], pages, salt)
        blocks.release(pages)
        blocks.match([1, 2, 3], salt + "!")
    gc.collect()
    assert len(blocks._roots) <= blocks.num_pages


def test_the_same_prefix_twice_keeps_the_first_page_known():
    blocks = BlockManager(4, PAGE)
    first, second = blocks.allocate(2), blocks.allocate(2)
    chain = register_all(blocks, [1, 2, 3, 4], first)
    assert register_all(blocks, [1, 2, 3, 4], second) == chain
    blocks.release(second)
    assert (blocks.num_cached, blocks.num_free) == (0, 2)
    blocks.release(first)
    assert (blocks.num_cached, blocks.num_free) == (2, 2)
    blocks.check_invariants()


def test_a_prefix_made_again_after_its_start_was_evicted_is_found():
    blocks = BlockManager(3, PAGE)
    first = blocks.allocate(1)
    (start,) = register_all(blocks, [1, 2], first)
    own = blocks.allocate(2)
    rest = blocks.register(own[1], start, [3, 4])  # its sequence computed [1, 2] too, on a page that is not the known one
    blocks.release(first)
    (evicted,) = blocks.allocate(1)
    blocks.check_invariants()
    (again,) = register_all(blocks, [1, 2], [evicted])
    assert blocks.match([1, 2, 3, 4, 5], "") == [again], "the second page hangs on a start that is gone"
    renewed = blocks.register(own[0], again, [3, 4])
    assert renewed is not rest
    assert blocks.match([1, 2, 3, 4, 5], "") == [again, renewed]
    blocks.check_invariants()


def test_without_prefix_caching_nothing_is_kept():
    blocks = BlockManager(2, PAGE, prefix_caching=False)
    pages = blocks.allocate(2)
    register_all(blocks, [1, 2, 3, 4], pages)
    blocks.release(pages)
    assert blocks.match([1, 2, 3, 4, 5], "") == []
    assert (blocks.num_cached, blocks.num_free) == (0, 2)


def test_forget_all_ends_all_hits_and_loses_no_page():
    blocks = BlockManager(4, PAGE)
    kept, released = blocks.allocate(1), blocks.allocate(2)
    register_all(blocks, [1, 2], kept)
    register_all(blocks, [5, 6, 7, 8], released)
    blocks.release(released)
    blocks.forget_all()
    blocks.check_invariants()
    assert blocks.match([1, 2, 3], "") == blocks.match([5, 6, 7], "") == []
    assert (blocks.num_free, blocks.num_cached, blocks.num_in_use) == (3, 0, 1)
    blocks.release(kept)
    assert blocks.num_free == 4
