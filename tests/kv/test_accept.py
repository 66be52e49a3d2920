"""Drafts that were accepted stay, whichever rows they lie in, and the others are forgotten."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from kv.test_cache import made
from torch import Tensor

import quire
from quire.errors import (
    ArgumentError,
    OutOfPages,
    QuireError,
    ReleasedRowsError,
    SequenceError,
    ShapeError,
    UnwrittenRowsError,
)
from quire.kv import Group, PagedKVCache, SequenceHandle
from quire.mods import causal, sliding_window, tree

PREFIXES = [9, 0, 14]
NODES = 7
PATHS = [[0, 2, 3, 6], [], [1, 5]]
WINDOW = 6


def filled(cache: PagedKVCache, tokens: Sequence[Tensor]) -> list[SequenceHandle]:
    """Sequences with these keys, [layers, tokens, heads, width]; the values are twice as large."""
    sequences = [cache.sequence() for _ in tokens]
    rows = torch.cat(list(tokens), dim=1)
    cache.append(sequences, *sides(cache, rows), counts=[part.shape[1] for part in tokens])
    return sequences


def sides(cache: PagedKVCache, rows: Tensor) -> list[Tensor]:
    """Keys and values, or keys alone if values are a part of them."""
    return [rows, 2 * rows][: len(cache.shape.sides)]


def drafted(lengths: Sequence[int]) -> list[Tensor]:
    return [torch.randn(2, length, 2, 4) for length in lengths]


def accepted(rows: Tensor, prefix: int, path: Sequence[int]) -> Tensor:
    return torch.cat([rows[:, :prefix], rows[:, [prefix + node for node in path]]], dim=1)


def parts(cache: PagedKVCache, sequence: SequenceHandle) -> list[Tensor]:
    """All that a cache holds of a sequence, as it lies in pages."""
    held = [cache.dense(layer, sequence) for layer in range(cache.num_layers)]
    return [each for dense in held for each in (dense.key, dense.value)]


def assert_same(cache: PagedKVCache, sequence: SequenceHandle, rows: Tensor) -> None:
    for layer in range(cache.num_layers):
        held = cache.dense(layer, sequence)
        assert torch.equal(held.key[0].transpose(0, 1), rows[layer, held.start :])
        assert torch.equal(held.value[0].transpose(0, 1), 2 * rows[layer, held.start :])


def windows(**options: Any) -> PagedKVCache:
    groups = [Group([0]), Group([1], window=WINDOW)]
    sizes = {"heads": 2, "head_dim": 4, "page_size": 4, "n_pages": 40}
    return PagedKVCache(groups=groups, **{**sizes, **options})


CACHES: dict[str, Callable[[], PagedKVCache]] = {
    "float32": lambda: made(n_pages=40),
    "bfloat16": lambda: made(n_pages=40, dtype=torch.bfloat16),
    "int8": lambda: made(n_pages=40, dtype=torch.int8),
    "pages of one row": lambda: made(n_pages=100, page_size=1),
    "large pages": lambda: made(n_pages=40, page_size=64),
    "windows": windows,
    "windows of int8": lambda: windows(dtype=torch.int8),
    "latent": lambda: made(n_pages=40, latent=3),
    "latent int8": lambda: made(n_pages=40, latent=3, dtype=torch.int8),
    "float8": lambda: made(n_pages=40, dtype=torch.float8_e4m3fn),
    "float8 without scales": lambda: made(n_pages=40, dtype=torch.float8_e5m2, scales=False),
}


@pytest.mark.parametrize("kind", CACHES)
def test_what_is_left_is_what_appending_the_path_alone_gives(kind: str) -> None:
    """Attention has the same bits, and so has the next step."""
    cache, plain = CACHES[kind](), CACHES[kind]()
    prompts, nodes = drafted(PREFIXES), drafted([NODES] * 3)
    sequences, alone = filled(cache, prompts), filled(plain, prompts)
    new = torch.cat(nodes, dim=1)
    cache.append(sequences, *sides(cache, new))
    cache.accept(sequences, PREFIXES, PATHS)
    short = torch.cat([rows[:, path] for rows, path in zip(nodes, PATHS, strict=True)], dim=1)
    plain.append(alone, *sides(plain, short), counts=[len(path) for path in PATHS])
    cache.check_integrity()
    query, step = torch.randn(3, 4, 1, 4), torch.randn(2, 3, 2, 4)
    for _ in range(2):
        for layer in range(2):
            mask = causal if layer == 0 else sliding_window(WINDOW)
            ours, theirs = cache.memory(layer, sequences), plain.memory(layer, alone)
            assert torch.equal(ours.lengths, theirs.lengths)
            out = [quire.attention(query, each, mask=mask) for each in (ours, theirs)]
            assert torch.equal(*out)
        cache.append(sequences, *sides(cache, step))
        plain.append(alone, *sides(plain, step))
    assert cache.statistics().tokens == plain.statistics().tokens


def test_a_tree_is_checked_and_its_path_stays() -> None:
    """As a server decodes: one call checks the tree, then the path is as if it came alone."""
    parents, path = [-1, 0, 0, 1, 2, 4], [0, 2, 4, 5]
    cache = made(n_pages=40)
    prompt, nodes = drafted([10, len(parents)])
    (sequence,) = filled(cache, [prompt])
    cache.append([sequence], nodes, 2 * nodes)
    query = torch.randn(1, 4, len(parents), 4)
    together = quire.attention(query, cache.memory(0, [sequence]), mask=tree(parents, 10))
    cache.accept([sequence], 10, [path])
    alone = quire.attention(query[:, :, path], cache.memory(0, [sequence]), mask=causal)
    torch.testing.assert_close(together[:, :, path], alone)
    assert_same(cache, sequence, torch.cat([prompt, nodes[:, path]], dim=1))


def test_pages_behind_the_path_are_given_back() -> None:
    cache = made(n_pages=12)
    (rows,) = drafted([30])
    (sequence,) = filled(cache, [rows])
    cache.accept([sequence], 6, [[20, 23]])
    assert cache.length(sequence) == 8 and cache.statistics().free == 10
    assert_same(cache, sequence, accepted(rows, 6, [20, 23]))
    cache.check_integrity()


def test_what_others_hold_is_copied_before_it_is_written_to() -> None:
    cache = made(n_pages=20, prefix=True)
    (rows,) = drafted([16])
    (sequence,) = filled(cache, [rows])
    cache.keep(sequence, range(16))
    fork = cache.fork(sequence)
    cache.accept([sequence], 5, [[0, 3, 8]])
    assert_same(cache, sequence, accepted(rows, 5, [0, 3, 8]))
    assert_same(cache, fork, rows)
    again = cache.sequence(range(16))
    assert cache.length(again) == 16
    assert_same(cache, again, rows)
    cache.check_integrity()


def test_forks_accept_different_paths_of_the_same_rows_at_once() -> None:
    """The first page stays shared. Of the other pages, one fork may overwrite its own in place."""
    cache = made(n_pages=20)
    (rows,) = drafted([16])
    (first,) = filled(cache, [rows])
    family = [first, cache.fork(first), cache.fork(first)]
    paths = [[1, 2, 3, 4, 9], [0, 7, 8, 9, 10], [11]]
    cache.accept(family, 4, paths)
    for sequence, path in zip(family, paths, strict=True):
        assert_same(cache, sequence, accepted(rows, 4, path))
    now = cache.statistics()
    assert now.pages - now.free == 1 + 2 + 2 + 1
    cache.check_integrity()


def test_a_page_is_not_copied_where_the_other_holder_drops_it() -> None:
    cache = made(n_pages=2)
    (rows,) = drafted([8])
    (first,) = filled(cache, [rows])
    second = cache.fork(first)
    cache.accept([second, first], [4, 4], [[], [2]])  # no page is free
    assert_same(cache, first, accepted(rows, 4, [2]))
    assert_same(cache, second, rows[:, :4])
    cache.check_integrity()


def test_a_page_that_is_dropped_may_be_the_copy() -> None:
    """Rows are read from a page that becomes the copy of the page they go to."""
    cache = made(n_pages=3)
    (rows,) = drafted([8])
    (first,) = filled(cache, [rows])
    second = cache.fork(first)
    tail = torch.randn(2, 4, 2, 4)
    cache.append([first], tail, 2 * tail)
    cache.accept([first], 4, [[5, 6]])  # from the third page to the second, which `second` holds
    assert_same(cache, first, torch.cat([rows[:, :4], tail[:, 1:3]], dim=1))
    assert_same(cache, second, rows)
    cache.check_integrity()


def test_rows_that_stay_where_they_are_write_to_no_page() -> None:
    cache = made(n_pages=4)
    (rows,) = drafted([16])
    (first,) = filled(cache, [rows])
    second = cache.fork(first)
    cache.accept([first], 6, [range(5)])  # no page is free, and none is needed
    assert_same(cache, first, rows[:, :11])
    assert_same(cache, second, rows)
    assert cache.statistics().shared == 3


def test_running_out_leaves_no_trace() -> None:
    cache = made(n_pages=8, prefix=True)
    rows, other = drafted([16, 12])
    first, third = filled(cache, [rows, other])
    second = cache.fork(first)
    before, table = cache.statistics(), cache.memory(0, [first, second, third]).page_table
    held = [parts(cache, each) for each in (first, second, third)]
    with pytest.raises(OutOfPages, match="there must be 2 free pages, but only 1 of 8 are free"):
        cache.accept([first, third], [4, 2], [[1, 2, 3, 4, 5], range(1, 10)])
    assert cache.statistics() == before
    for each, was in zip((first, second, third), held, strict=True):
        assert all(map(torch.equal, parts(cache, each), was))
    assert torch.equal(cache.memory(0, [first, second, third]).page_table, table)
    cache.check_integrity()
    cache.free(second)
    cache.accept([first, third], [4, 2], [[1, 2, 3, 4, 5], range(1, 10)])
    assert_same(cache, first, accepted(rows, 4, [1, 2, 3, 4, 5]))


def test_kept_pages_make_room() -> None:
    cache = made(n_pages=4, prefix=True)
    rows, other = drafted([8, 8])
    first, second = filled(cache, [rows, other])
    cache.keep(second, range(8))
    cache.free(second)
    fork = cache.fork(first)
    cache.accept([first], 2, [[3]])
    assert cache.statistics().kept == 1
    assert_same(cache, first, accepted(rows, 2, [3]))
    assert_same(cache, fork, rows)
    cache.check_integrity()


def test_rows_that_a_window_has_left_behind_are_not_moved() -> None:
    cache = windows(n_pages=20)
    (whole,) = drafted([30])
    (sequence,) = filled(cache, [whole[:, :28]])
    for at in (28, 29):
        cache.append([sequence], whole[:, at : at + 1], 2 * whole[:, at : at + 1])
    start = cache.start(1, sequence)
    (taken,) = drafted([30])
    (other,) = filled(cache, [taken])  # has the pages that the window left behind
    cache.accept([sequence], 0, [range(1, 30)])  # the first is dropped: all others move by one
    assert_same(cache, other, taken)
    assert cache.length(sequence) == 29 and cache.start(1, sequence) == start > 0
    assert_same(cache, sequence, whole[:, 1:])
    with pytest.raises(ReleasedRowsError, match=r"window of 6 .* but is 12"):
        cache.accept([sequence], 10, [[3, 4]])
    cache.check_integrity()


def test_paths_may_be_tensors() -> None:
    cache = made(n_pages=20)
    rows = drafted([9, 8])
    sequences = filled(cache, rows)
    cache.accept(sequences, torch.tensor([3, 4]), torch.tensor([[1, 4], [0, 2]]))
    assert_same(cache, sequences[0], accepted(rows[0], 3, [1, 4]))
    assert_same(cache, sequences[1], accepted(rows[1], 4, [0, 2]))


def waiting(cache: PagedKVCache) -> SequenceHandle:
    sequence = cache.sequence()
    cache.extend([sequence], 3)
    return sequence


REFUSED: dict[
    str, tuple[type[QuireError], str, Callable[[PagedKVCache, list[SequenceHandle]], object]]
] = {
    "no node": (
        ArgumentError,
        "a node of a path must be below 6, the number of drafts from position 4 on, but is 6",
        lambda c, s: c.accept(s, 4, [[0, 1], [6]]),
    ),
    "negative": (ArgumentError, "at least 0, but is -1", lambda c, s: c.accept(s, 4, [[-1], [0]])),
    "falling": (
        ArgumentError,
        "each follows its parent",
        lambda c, s: c.accept(s, 4, [[2], [1, 0]]),
    ),
    "twice": (ArgumentError, "1 is followed by 1", lambda c, s: c.accept(s, 4, [[2], [1, 1]])),
    "a fraction": (ArgumentError, "whole number", lambda c, s: c.accept(s, 4, [[2], [1.0]])),
    "no path": (ShapeError, "path for each of 2", lambda c, s: c.accept(s, 4, [[1]])),
    "no paths": (ShapeError, "path for each of 2", lambda c, s: c.accept(s, 4, 1)),  # type: ignore[arg-type]
    "a number": (ShapeError, "list of nodes", lambda c, s: c.accept(s, 4, torch.tensor([1, 2]))),
    "flat": (ShapeError, "list of nodes", lambda c, s: c.accept(s, 4, [1, 2])),
    "prefix": (
        ArgumentError,
        "at most 10, as the sequence has 10 tokens, but is 11",
        lambda c, s: c.accept(s, [4, 11], [[1], []]),
    ),
    "negative prefix": (ArgumentError, "at least 0", lambda c, s: c.accept(s, -1, [[1], []])),
    "prefixes": (ShapeError, "for each of 2", lambda c, s: c.accept(s, [1, 2, 3], [[1], []])),
    "huge": (ArgumentError, "at most 1,099", lambda c, s: c.accept(s, 1 << 80, [[1], []])),
    "huge node": (ArgumentError, "must be below 5", lambda c, s: c.accept(s, 4, [[1 << 80], []])),
    "another cache": (
        SequenceError,
        "belongs to another cache",
        lambda c, s: c.accept([s[0], filled(made(), drafted([9]))[0]], 4, [[2], [2]]),
    ),
    "the same twice": (SequenceError, "once", lambda c, s: c.accept([s[0]] * 2, 4, [[2], [3]])),
    "unwritten": (
        UnwrittenRowsError,
        "truncate the sequence to 0",
        lambda c, s: c.accept([s[0], waiting(c)], 0, [[2], [1]]),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    """And nothing is moved, also of the sequence whose path is right."""
    error, message, call = REFUSED[case]
    cache = made(n_pages=20)
    rows = drafted([9, 10])
    sequences = filled(cache, rows)
    with pytest.raises(error, match=message):
        call(cache, sequences)
    for sequence, part in zip(sequences, rows, strict=True):
        assert_same(cache, sequence, part)
    cache.check_integrity()
