"""Full pages found by their tokens, so that prompts with the same beginning share pages.

    prefix = PrefixCache(pool, page_size=16)
    prefix.insert(prompt, pages)             # the cache now holds these pages too
    pages = prefix.match(other_prompt)       # pages of the common beginning, held for the caller

The keys in a page depend on all tokens up to its end. So a page is looked up by a digest of its
tokens and of the digest of the page before:

    secret, salt ──▶ digest ──▶ digest ──▶ digest
                       ▲          ▲          ▲
                    page 0      page 1     page 2      of tokens

Digests have 512 bits and start from a secret, so nobody can search for two prompts that collide.
A page is also used only if its tokens are equal and the page before is the same object. Prompts
with different salts share no pages: with a salt for each tenant, nobody can learn from the speed of
an answer what other tenants asked.

The cache holds pages as sequences do. Pages that nobody else holds can be evicted, the least
recently used first. A page is evicted after the pages that follow it, which need it.
"""

from __future__ import annotations

import hashlib
import heapq
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.errors import ArgumentError, PageError
from quire.kv.pool import PagePool, Pages


@dataclass(slots=True, eq=False)
class _Block:
    """A page that is kept, and its place in the tree of prompts."""

    digest: bytes
    tokens: bytes
    parent: _Block | bytes  # the page before, or the salt
    page: int
    last_used: int
    num_children: int = 0


class PrefixCache:
    """The full pages of prompts, by their tokens.

    Methods take `tokens` [n], the ids of a prompt, and `pages` [m], the ids of the pages that hold
    them. Digests start from `secret`, by default random bytes. Give one to make them reproducible.
    """

    def __init__(self, pool: PagePool, page_size: int, *, secret: bytes | None = None) -> None:
        if page_size < 1:
            raise ArgumentError(
                f"page_size must be at least 1, but is {page_size}. Give the tokens of a page."
            )
        self.page_size = page_size
        self._pool = pool
        self._secret = secrets.token_bytes(32) if secret is None else secret
        self._blocks: dict[bytes, _Block] = {}
        self._kept: set[int] = set()
        # A heap of (last_used, serial, block). Each block without children has an entry; there
        # are also stale entries.
        self._leaves: list[tuple[int, int, _Block]] = []
        self._clock = self._serial = 0

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def pages(self) -> Pages:
        """All pages that are kept."""
        return np.fromiter((block.page for block in self._blocks.values()), np.int32, len(self))

    def match(self, tokens: Sequence[int] | NDArray[np.int64], *, salt: bytes = b"") -> Pages:
        """Return the pages of the longest known beginning of `tokens`, held for the caller."""
        found = self._find(self._cut(tokens), salt)
        self._touch(found)
        pages: Pages = np.fromiter((block.page for block in found), np.int32, len(found))
        self._pool.share(pages)
        return pages

    def insert(
        self,
        tokens: Sequence[int] | NDArray[np.int64],
        pages: Pages | Sequence[int],
        *,
        salt: bytes = b"",
    ) -> int:
        """Keep `pages`, which hold `tokens`. Return how many pages are new to the cache.

        Tokens after the last full page are ignored. If a page with the same tokens is kept already,
        it stays, and the new one is not kept.
        """
        wanted = self._cut(tokens)
        ids = np.asarray(pages, np.int32)
        if len(ids) < len(wanted):
            raise PageError(
                f"pages must be at least {len(wanted)}, as many as {len(tokens)} tokens fill, but "
                f"are {len(ids)}. Give the pages of the sequence from its beginning."
            )
        found = self._find(wanted, salt)
        known = len(found)
        new: Pages = ids[known : len(wanted)]
        self._refuse_kept(new)
        self._pool.share(new)  # raises if a page is free
        parent: _Block | bytes = found[-1] if found else salt
        for content, page in zip(wanted[known:], new.tolist(), strict=True):
            digest = self._digest(parent, content)
            if digest in self._blocks:  # a collision, however unlikely: the old page stays
                self._pool.release(ids[len(found) : len(wanted)])
                break
            block = _Block(digest, content, parent, page, self._clock)
            self._blocks[digest] = block
            self._kept.add(page)
            if isinstance(parent, _Block):
                parent.num_children += 1
            found.append(block)
            parent = block
        self._touch(found)
        return len(found) - known

    def evict(self, count: int) -> int:
        """Release up to `count` pages that nobody else holds. Return how many."""
        return self._drop(self._victims(count))

    def can_evict(self, count: int) -> bool:
        """Return whether `evict` could release `count` pages."""
        victims = self._victims(count)
        self._spare(victims)
        return len(victims) == count

    def check_integrity(self) -> None:
        """Raise PageError unless blocks, children and the queue of leaves agree."""
        children: dict[int, int] = {}
        for digest, block in self._blocks.items():
            _expect(block.digest == digest, "a block lies under another's digest")
            _expect(self._digest(block.parent, block.tokens) == digest, "a digest is wrong")
            if isinstance(block.parent, _Block):
                parent = block.parent
                _expect(self._blocks.get(parent.digest) is parent, "a block outlived its parent")
                _expect(parent.last_used >= block.last_used, "a page is older than what follows")
                children[id(parent)] = children.get(id(parent), 0) + 1
        queued = {(id(block), last_used) for last_used, _, block in self._leaves}
        for block in self._blocks.values():
            _expect(block.num_children == children.get(id(block), 0), "children are miscounted")
            waiting = (id(block), block.last_used) in queued
            _expect(block.num_children > 0 or waiting, "a leaf is not in the queue")
        _expect(bool((self._pool.references(self.pages) > 0).all()), "a page is kept and free")
        _expect(len(self._kept) == len(self), "a page is kept twice")
        _expect(self._kept == set(self.pages.tolist()), "the set of kept pages is another")

    # --- looking up

    def _cut(self, tokens: Sequence[int] | NDArray[np.int64]) -> list[bytes]:
        """The tokens of each full page, as bytes."""
        ids = np.asarray(tokens)
        if ids.ndim != 1:
            raise ArgumentError(
                f"tokens must be 1-D, but have shape {list(ids.shape)}. Give one prompt."
            )
        if ids.size and ids.dtype.kind not in "iu":  # floats would be rounded to other tokens
            raise ArgumentError(
                f"tokens must be whole numbers, but are {ids.dtype}. Give their ids."
            )
        narrow = ids.astype(np.int32)
        if not np.array_equal(narrow, ids):
            raise ArgumentError(
                "tokens must fit 32 bits, but one is larger. Give the ids of a vocabulary."
            )
        content, size = narrow.tobytes(), 4 * self.page_size
        return [content[at : at + size] for at in range(0, len(content) - size + 1, size)]

    def _digest(self, parent: _Block | bytes, content: bytes) -> bytes:
        before = parent.digest if isinstance(parent, _Block) else self._root(parent)
        return hashlib.blake2b(before + content).digest()

    def _root(self, salt: bytes) -> bytes:
        return hashlib.blake2b(salt, key=self._secret).digest()

    def _find(self, wanted: list[bytes], salt: bytes) -> list[_Block]:
        expect_salt(salt)
        found: list[_Block] = []
        parent: _Block | bytes = salt
        digest, blocks, blake2b = self._root(salt), self._blocks, hashlib.blake2b
        for content in wanted:
            digest = blake2b(digest + content).digest()
            block = blocks.get(digest)
            if block is None or block.tokens != content or block.parent != parent:
                break
            found.append(block)
            parent = block
        return found

    def _refuse_kept(self, pages: Pages) -> None:
        again = self._kept.intersection(pages.tolist())
        if again or len(np.unique(pages)) < len(pages):
            raise PageError(
                f"pages must not be kept yet, and each be given once, but are "
                f"{sorted(again)[:5] or pages}. Insert a page once, with the tokens that it holds."
            )

    def _touch(self, chain: list[_Block]) -> None:
        if chain:
            self._clock += 1
            for block in chain:
                block.last_used = self._clock
            self._queue(chain[-1])

    # --- evicting

    def _queue(self, block: _Block) -> None:
        if block.num_children == 0:
            self._serial += 1
            heapq.heappush(self._leaves, (block.last_used, self._serial, block))
        if len(self._leaves) > 2 * len(self._blocks) + 64:
            current = {id(entry[2]): entry for entry in self._leaves if self._is_leaf(*entry)}
            self._leaves = list(current.values())
            heapq.heapify(self._leaves)

    def _is_leaf(self, last_used: int, _serial: int, block: _Block) -> bool:
        """Return whether an entry of the queue is valid: its block is kept and has no children.

        An entry is stale if its block was used again after it was queued.
        """
        there = self._blocks.get(block.digest) is block
        return there and block.num_children == 0 and block.last_used == last_used

    def _victims(self, count: int) -> list[_Block]:
        """Return up to `count` leaves to drop, children before parents.

        They no longer count as children of their parents: call `_drop`, or `_spare` to undo it.
        """
        victims: dict[int, _Block] = {}
        in_use: list[_Block] = []
        while len(victims) < count and self._leaves:
            entry = heapq.heappop(self._leaves)
            block = entry[2]
            if not self._is_leaf(*entry) or id(block) in victims:
                continue
            if self._pool.references([block.page])[0] > 1:
                in_use.append(block)
                continue
            victims[id(block)] = block
            if isinstance(block.parent, _Block):
                block.parent.num_children -= 1
                self._queue(block.parent)
        for block in in_use:
            self._queue(block)
        return list(victims.values())

    def _spare(self, victims: list[_Block]) -> None:
        for block in victims:
            if isinstance(block.parent, _Block):
                block.parent.num_children += 1
        for block in victims:
            self._queue(block)

    def _drop(self, victims: list[_Block]) -> int:
        for block in victims:
            del self._blocks[block.digest]
            self._kept.remove(block.page)
        return len(self._pool.release([block.page for block in victims]))


def expect_salt(salt: object) -> None:
    """Raise unless a salt is bytes."""
    if not isinstance(salt, bytes):
        raise ArgumentError(f"salt must be bytes, but is {salt!r}. Encode it.")


def _expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise PageError(f"a prefix cache must be consistent, but {otherwise}. Report this bug.")
