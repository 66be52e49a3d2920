"""A prompt finds the pages of its own beginning, and never any other's."""

from __future__ import annotations

import hashlib
import types

import numpy as np
import pytest

from quire.errors import ArgumentError, PageError
from quire.kv import prefix as module
from quire.kv.pool import PagePool
from quire.kv.prefix import PrefixCache


def made(num_pages: int = 20) -> tuple[PagePool, PrefixCache]:
    pool = PagePool(num_pages)
    return pool, PrefixCache(pool, 2)


def kept(pool: PagePool, prefix: PrefixCache, tokens: list[int], **salt: bytes) -> list[int]:
    """Insert a prompt whose sequence is then freed."""
    pages = pool.allocate(len(tokens) // 2)
    prefix.insert(tokens, pages, **salt)
    pool.release(pages)
    prefix.check_integrity()
    return pages.tolist()


def found(pool: PagePool, prefix: PrefixCache, tokens: list[int], **salt: bytes) -> list[int]:
    pages = prefix.match(tokens, **salt)
    pool.release(pages)
    prefix.check_integrity()
    return pages.tolist()


def test_the_longest_known_beginning_is_found() -> None:
    pool, prefix = made()
    pages = kept(pool, prefix, [1, 2, 3, 4, 5, 6, 7])
    assert len(pages) == len(prefix) == 3  # the 7 fills no page
    assert found(pool, prefix, [1, 2, 3, 4, 5, 6]) == pages
    assert found(pool, prefix, [1, 2, 3, 4, 5]) == pages[:2]
    assert found(pool, prefix, [1, 2, 9, 9, 5, 6]) == pages[:1]
    assert found(pool, prefix, [3, 4]) == []  # known, but not at the beginning
    assert found(pool, prefix, []) == []


def test_what_is_found_is_shared() -> None:
    pool, prefix = made()
    kept(pool, prefix, [1, 2, 3, 4])
    pages = prefix.match([1, 2, 3, 4])
    assert pool.references(pages).tolist() == [2, 2]
    assert prefix.evict(5) == 0
    pool.release(pages)
    assert prefix.evict(5) == 2 and pool.num_free == 20


def test_known_pages_stay_and_new_ones_follow_them() -> None:
    pool, prefix = made()
    first = kept(pool, prefix, [1, 2, 3, 4])
    pages = pool.allocate(3)
    assert prefix.insert([1, 2, 3, 4, 5, 6], pages) == 1
    assert found(pool, prefix, [1, 2, 3, 4, 5, 6]) == [*first, pages[2]]
    assert pool.references(pages).tolist() == [1, 1, 2]


def test_a_salt_separates() -> None:
    pool, prefix = made()
    mine = kept(pool, prefix, [1, 2, 3, 4], salt=b"a")
    assert found(pool, prefix, [1, 2, 3, 4]) == found(pool, prefix, [1, 2, 3, 4], salt=b"b") == []
    theirs = kept(pool, prefix, [1, 2, 3, 4], salt=b"b")
    assert found(pool, prefix, [1, 2, 3, 4], salt=b"a") == mine != theirs


def test_the_least_recently_used_leaf_goes_first() -> None:
    pool, prefix = made()
    a = kept(pool, prefix, [1, 1, 2, 2])
    b = kept(pool, prefix, [1, 1, 3, 3])
    c = kept(pool, prefix, [4, 4])
    found(pool, prefix, [1, 1, 2, 2])
    assert a[0] != b[0] and len(prefix) == 4  # one beginning for both, the first one's
    for rest in (
        {*a, c[0]},  # b's end was used longest ago
        {*a},
        {a[0]},  # a page goes after what follows it, though it was used as long ago
        set(),
    ):
        assert prefix.evict(1) == 1
        assert set(prefix.pages.tolist()) == rest
        prefix.check_integrity()


def test_asking_for_room_evicts_nothing() -> None:
    pool, prefix = made()
    kept(pool, prefix, [1, 1, 2, 2, 3, 3])
    kept(pool, prefix, [1, 1, 4, 4])
    used = prefix.match([1, 1, 4, 4])
    before = prefix.pages.tolist()
    for _ in range(2):  # again, from what the first attempt left
        assert not prefix.can_evict(3)  # only two are in nobody's use
        assert prefix.can_evict(2)
        prefix.check_integrity()
        assert prefix.pages.tolist() == before
    assert prefix.evict(2) == 2
    prefix.check_integrity()
    assert sorted(prefix.pages.tolist()) == sorted(used.tolist())


def test_the_queue_does_not_grow_with_use() -> None:
    pool, prefix = made()
    kept(pool, prefix, [1, 1, 2, 2])
    for _ in range(1_000):
        found(pool, prefix, [1, 1, 2, 2])
    assert len(prefix._leaves) < 100


def test_tokens_that_collide_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def weak(data: bytes, key: bytes = b"") -> types.SimpleNamespace:
        short = hashlib.blake2b(data, key=key, digest_size=1).digest()
        return types.SimpleNamespace(digest=lambda: bytes([short[0] % 3]))

    monkeypatch.setattr(module, "hashlib", types.SimpleNamespace(blake2b=weak))
    pool, prefix = made(200)
    prompts = [[n, n + 1, 7, n, 8, 8] for n in range(30)]
    for prompt in prompts:
        kept(pool, prefix, prompt)
    assert 0 < len(prefix) <= 3
    contents = {block.page: block.tokens for block in prefix._blocks.values()}
    num_found = 0
    for prompt in prompts:
        cut = np.array(prompt, np.int32).reshape(-1, 2)
        pages = found(pool, prefix, prompt)
        num_found += len(pages)
        assert [contents[page] for page in pages] == [row.tobytes() for row in cut[: len(pages)]]
    assert 0 < num_found <= 3
    pool.check_integrity(prefix.pages)


def test_a_page_is_found_only_behind_the_very_page_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(data: bytes, key: bytes = b"") -> types.SimpleNamespace:
        return types.SimpleNamespace(digest=lambda: data[-8:])  # the tokens of the last page alone

    monkeypatch.setattr(module, "hashlib", types.SimpleNamespace(blake2b=forgetful))
    pool, prefix = made()
    pages = kept(pool, prefix, [1, 1, 5, 5])
    other = kept(pool, prefix, [2, 2, 5, 5])
    assert found(pool, prefix, [1, 1, 5, 5]) == pages
    assert found(pool, prefix, [2, 2, 5, 5]) == other[:1]  # the keys of 5, 5 after 1, 1 are others
    assert found(pool, prefix, [1, 1], salt=b"tenant") == []
    pool.check_integrity(prefix.pages)


def test_secrets_differ_unless_given() -> None:
    pool = PagePool(4)
    digests = [PrefixCache(pool, 2)._digest(b"", b"x") for _ in range(2)]
    same = [PrefixCache(pool, 2, secret=b"s")._digest(b"", b"x") for _ in range(2)]
    assert digests[0] != digests[1] and same[0] == same[1]
    assert len(same[0]) * 8 >= 128


def test_what_is_refused() -> None:
    pool, prefix = made()
    pages = pool.allocate(3)
    prefix.insert([1, 2, 3, 4], pages)
    for error, message, tokens, given in (
        (
            PageError,
            "pages must be at least 3, as many as 6 tokens fill, but are 2",
            range(6),
            pages[:2],
        ),
        (PageError, "must not be kept yet", [9, 9], pages),
        (PageError, "must not be kept yet", [9, 9, 9, 9], [pages[2], pages[2]]),
        (PageError, "but page 7 is free", [9, 9], [7]),
        (ArgumentError, "fit 32 bits", [2**40, 1], pages),
        (ArgumentError, "fit 32 bits", np.array([2**64 - 1, 1], np.uint64), pages),
        (ArgumentError, "whole numbers, but are float64", [1.0, 2.5], pages),
        (ArgumentError, "whole numbers, but are object", [2**70, 1], pages),
        (ArgumentError, r"but have shape \[1, 2\]", [[1, 2]], pages),
    ):
        with pytest.raises(error, match=message):
            prefix.insert(tokens, given)  # type: ignore[arg-type]
        assert len(prefix) == 2
        prefix.check_integrity()
    with pytest.raises(ArgumentError, match="page_size"):
        PrefixCache(pool, 0)


@pytest.mark.parametrize("damage", ["num_children", "last_used", "tokens", "page"])
def test_damage_is_noticed(damage: str) -> None:
    pool, prefix = made()
    kept(pool, prefix, [1, 2, 3, 4])
    first, second = prefix._blocks.values()
    wrong = {"num_children": 2, "last_used": -1, "tokens": b"", "page": second.page}[damage]
    setattr(first, damage, wrong)
    with pytest.raises(PageError, match="this bug"):
        prefix.check_integrity()
