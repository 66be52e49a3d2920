"""`quire walk`: the way of a call through the source, and that it stays short."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from quire import flex_attention
from quire.config import config
from quire.tools.show import load
from quire.tools.walk import walk

WALKS = Path(__file__).parents[2] / "examples" / "walks.py"


@pytest.fixture(scope="module")
def calls() -> dict[str, Any]:
    """The calls of the example; the process has computed something before."""
    query = torch.randn(1, 2, 9, 8, requires_grad=True)
    flex_attention(query, query, query).sum().backward()
    return {name: load(f"{WALKS}:{name}") for name in ("paged_decode", "flex_training")}


@pytest.mark.parametrize(("name", "most"), [("paged_decode", 16), ("flex_training", 20)])
def test_a_first_call_enters_few_files(name: str, most: int, calls: dict[str, Any]) -> None:
    config()  # reads the environment once
    first = walk(calls[name])
    assert len(first.files) <= most, "\n".join(first.files)


@pytest.mark.parametrize(("name", "most"), [("paged_decode", 9), ("flex_training", 12)])
def test_a_later_call_enters_few_files(name: str, most: int, calls: dict[str, Any]) -> None:
    walk(calls[name])
    later = walk(calls[name])
    assert len(later.files) <= most, "\n".join(later.files)
    assert walk(calls[name]) == later


def test_a_walk_names_files_and_functions_in_order(calls: dict[str, Any]) -> None:
    walk(calls["paged_decode"])
    later = walk(calls["paged_decode"])
    assert later.files[:2] == ["api/attention.py", "plans.py"]
    assert later.stops[0].functions == ("attention",)
    assert str(later).splitlines()[1].split()[:2] == ["plans.py", "compute"]
    assert not any(file.startswith(("ir/", "codegen/")) for file in later.files)
    assert any(stop.file == "ir/trace.py" for stop in later.stops)


def test_nothing_is_noted_outside_of_quire() -> None:
    assert walk(lambda: torch.ones(2).sum()).stops == ()
    assert walk(lambda: torch.ones(2).sum()).moves == 0
