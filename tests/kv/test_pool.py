"""Pages are free or held, never both, never neither; a refused call changes nothing."""

from __future__ import annotations

import ast
import inspect

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import OutOfPages, PageError
from quire.kv import pool as pool_module
from quire.kv import prefix as prefix_module
from quire.kv.pool import PagePool


def test_allocate_share_release() -> None:
    pool = PagePool(6)
    pages = pool.allocate(4)
    assert pages.tolist() == [0, 1, 2, 3]
    pool.share(pages[:2])
    assert (pool.num_free, pool.num_used, pool.num_shared) == (2, 4, 2)
    assert pool.release(pages).tolist() == [2, 3]
    assert pool.references([0, 1, 2]).tolist() == [1, 1, 0]
    assert repr(pool) == "PagePool(6 pages, 4 free, 0 shared)"


def test_what_was_freed_last_is_taken_first() -> None:
    pool = PagePool(6)
    pages = pool.allocate(3)
    pool.release(pages[1:2])
    assert pool.allocate(2).tolist() == [1, 3]


def test_a_page_can_be_named_twice() -> None:
    pool = PagePool(3)
    pages = pool.allocate(2)
    pool.share([0, 0])
    assert pool.num_freed_by(np.array([0, 0, 1], np.int32)) == 1
    assert pool.release([0, 0, 1]).tolist() == [1]
    assert pool.release(pages[:1]).tolist() == [0]


def refused(pool: PagePool, error: type[Exception], message: str, call: str, *args: object) -> None:
    before = pool._counts.copy(), pool.free_pages
    with pytest.raises(error, match=message):
        getattr(pool, call)(*args)
    assert np.array_equal(before[0], pool._counts) and np.array_equal(before[1], pool.free_pages)


def test_what_is_refused() -> None:
    pool = PagePool(4)
    pool.allocate(3)
    refused(pool, OutOfPages, "at most 1, as so many of 4 pages are free, but is 2", "allocate", 2)
    refused(pool, PageError, "count must be at least 0, but is -1", "allocate", -1)
    refused(pool, PageError, "but page 3 is free", "share", [0, 3])
    refused(pool, PageError, "but page 3 is free", "release", [0, 3])
    refused(pool, PageError, "page 1 is released more often", "release", [0, 1, 1])
    refused(pool, PageError, "from 0 to 3, but one is 4", "share", [4])
    refused(pool, PageError, "from 0 to 3, but one is -1", "release", [-1])
    refused(pool, PageError, "since a pool only grows, but is 3", "grow", 3)
    with pytest.raises(PageError, match="must be at least 0, but is -1"):
        PagePool(-1)


def test_growing_adds_pages_that_are_taken_last() -> None:
    pool = PagePool(2)
    held = pool.allocate(1)
    pool.grow(4)
    assert pool.allocate(3).tolist() == [1, 2, 3]
    pool.release(held)
    pool.check_integrity([1, 2, 3])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda pool: pool._counts.__setitem__(0, 0), "1 pages are lost"),
        (lambda pool: pool._counts.__setitem__(3, 1), "free and held"),
        (lambda pool: pool._free.__setitem__(0, pool._free[1]), "free twice"),
        (lambda pool: pool._counts.__setitem__(0, -1), "a count is negative"),
        (lambda pool: pool._counts.__setitem__(0, 2), r"pages \[0\] are held \[1\] times"),
    ],
)
def test_damage_is_noticed(damage: object, message: str) -> None:
    pool = PagePool(5)
    held = pool.allocate(2)
    pool.check_integrity(held)
    damage(pool)  # type: ignore[operator]
    with pytest.raises(PageError, match=message):
        pool.check_integrity(held)


@given(st.lists(st.tuples(st.sampled_from(["allocate", "share", "release"]), st.integers(0, 5))))
def test_it_counts_as_a_list_does(steps: list[tuple[str, int]]) -> None:
    pool, held = PagePool(8), list[int]()
    for action, count in steps:
        if action == "allocate" and count <= pool.num_free:
            held += pool.allocate(count).tolist()
        elif action == "share":
            pool.share(held[:count])
            held += held[:count]
        elif action == "release":
            pool.release(held[:count])
            held = held[count:]
        pool.check_integrity(held)
    assert pool.num_used == len(set(held))


@pytest.mark.parametrize("module", [pool_module, prefix_module])
def test_there_is_no_torch_in_it(module: object) -> None:
    tree = ast.parse(inspect.getsource(module))  # type: ignore[arg-type]
    named = {
        name
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert named and not any(name.startswith("torch") for name in named)
    assert {name for name in named if name.startswith("quire")} <= {"quire.errors", "quire.kv.pool"}
