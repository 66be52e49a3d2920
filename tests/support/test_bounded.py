"""A dictionary of limited size, which drops its oldest entry."""

from __future__ import annotations

from quire.support.bounded import BoundedDict


def test_the_oldest_of_too_many_is_forgotten() -> None:
    known: BoundedDict[str, int] = BoundedDict(2)
    assert known.keep("a", 1) == 1
    known.keep("b", 2)
    known.keep("c", 3)
    assert known == {"b": 2, "c": 3}
    assert known.get("a") is None
