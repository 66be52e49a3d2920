"""Whether a call was recalled, or took the long way."""

from __future__ import annotations

from typing import Any

import pytest

from quire.plans import cache


@pytest.fixture(autouse=True)
def long_ways(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each call that is checked and planned; nothing is known at the start."""
    taken: list[None] = []
    make = cache.make

    def counted(*args: Any) -> Any:
        taken.append(None)
        return make(*args)

    monkeypatch.setattr(cache, "make", counted)
    cache.known.clear()
    return taken
