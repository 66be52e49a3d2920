"""Tells whether a call was recalled, that is found its plan, or took the long way: made one."""

from __future__ import annotations

from typing import Any

import pytest

from quire import plans


@pytest.fixture(autouse=True)
def long_ways(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each call that is checked and planned; nothing is known at the start."""
    taken: list[None] = []
    make = plans.make

    def counted(*args: Any) -> Any:
        taken.append(None)
        return make(*args)

    monkeypatch.setattr(plans, "make", counted)
    plans.known.clear()
    return taken
