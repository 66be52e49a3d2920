"""Whether a call was recalled, or took the long way."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from quire.recall import dense, pages

PAGE = sys.modules["quire.attention"]  # the name in the package is the function's


@pytest.fixture(autouse=True)
def long_ways(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each call that is checked and planned; nothing is known at the start."""
    taken: list[None] = []
    prepare = PAGE.prepare

    def counted(*args: Any) -> Any:
        taken.append(None)
        return prepare(*args)

    monkeypatch.setattr(PAGE, "prepare", counted)
    for way in (dense, pages):
        way._known.clear()
    return taken
