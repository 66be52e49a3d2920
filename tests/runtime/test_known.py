"""Things that are known: the oldest of too many goes."""

from __future__ import annotations

from quire.runtime.known import Known


def test_the_oldest_of_too_many_is_forgotten() -> None:
    known: Known[str, int] = Known(2)
    assert known.keep("a", 1) == 1
    known.keep("b", 2)
    known.keep("c", 3)
    assert known == {"b": 2, "c": 3}
    assert known.get("a") is None
