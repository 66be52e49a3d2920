"""Which entries of a pyramid cover a range: enough of them, and no wider than they must be."""

from __future__ import annotations

import pytest
import torch

from quire.ir.graph import Node
from quire.ir.interpret import interpret
from quire.ir.intervals import Interval
from quire.ir.pyramid import Axis, entries_of

LENGTH = 37


def elements_of(entry: int, axis: Axis) -> set[int]:
    """The elements that an entry has, among those that a tensor could have."""
    width = 1
    while entry < axis.leaves:
        entry, width = 2 * entry, 2 * width
    first = entry - axis.leaves
    return set(range(first << axis.grain, (first + width) << axis.grain))


def found_entries(axis: Axis, levels: int) -> dict[tuple[int, int], list[int]]:
    """The entries for every range of elements, by its first and its last one."""
    ends = Interval(*(Node("input", (), torch.int64, name) for name in ("q_low", "q_high")))
    low, high = torch.triu_indices(LENGTH, LENGTH)
    env = {"q_low": low, "q_high": high}
    places = [interpret(node, env) for node in entries_of(ends, axis, LENGTH, levels)]
    ranges = zip(low.tolist(), high.tolist(), strict=True)
    return dict(zip(ranges, torch.stack(places, -1).tolist(), strict=True))


@pytest.mark.parametrize("levels", [0, 1, 3, 6])
@pytest.mark.parametrize("axis", [Axis(0, 64), Axis(0, 16, 2), Axis(0, 1, 6)], ids=str)
def test_entries_cover_their_range(axis: Axis, levels: int) -> None:
    for (low, high), entries in found_entries(axis, levels).items():
        covered = set[int]().union(*(elements_of(entry, axis) for entry in entries))
        assert covered >= set(range(low, high + 1)), (low, high, entries)
        if axis.grain == 0 and high - low < 2**levels:
            assert covered == set(range(low, high + 1)), (low, high, entries)


def test_two_entries_are_the_smallest_that_cover_a_range() -> None:
    axis = Axis(0, 64)
    for (low, high), entries in found_entries(axis, 0).items():
        level = next(k for k in range(7) if (high >> k) - (low >> k) <= 1)
        assert entries == [(axis.leaves + low) >> level, (axis.leaves + high) >> level]


def test_what_is_counted_from_the_end_is_the_whole() -> None:
    ends = Interval(*(Node("input", (), torch.int64, name) for name in ("q_low", "q_high")))
    low, high = torch.tensor([-1, -5, 0, 36, 40]), torch.tensor([3, -2, 37, 36, 41])
    for node in entries_of(ends, Axis(0, 64), LENGTH, 0):
        found = interpret(node, {"q_low": low, "q_high": high})
        assert found.tolist() == [1, 1, 1, 64 + 36, 1]
