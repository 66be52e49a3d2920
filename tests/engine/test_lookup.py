"""Drafts by prompt lookup: what is guessed, and how drafts grow and shrink."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.engine.speculation import PromptLookup
from quire.errors import ArgumentError


def plain(tokens: list[int], longest: int, shortest: int) -> list[int]:
    """What follows the last place where the longest run at the end came before."""
    for size in range(min(longest, len(tokens)), shortest - 1, -1):
        run = tokens[len(tokens) - size :]
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == run:
                return tokens[end:]
    return []


@given(
    tokens=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    longest=st.integers(1, 4),
    shortest=st.integers(1, 2),
    cut=st.integers(1, 60),
)
def test_a_draft_is_what_came_after_the_same_tokens(
    tokens: list[int], longest: int, shortest: int, cut: int
) -> None:
    longest = max(longest, shortest)
    draft = PromptLookup(8, longest=longest, shortest=shortest)
    draft(tokens[:cut])  # the index grows with the text
    found = draft(tokens)
    wanted = plain(tokens, longest, shortest)
    assert found == wanted[: len(found)] and bool(found) == bool(wanted)
    assert PromptLookup(8, longest=longest, shortest=shortest)(tokens) == wanted[:8]


def test_drafts_shrink_when_they_are_wrong_and_grow_when_they_are_right() -> None:
    text = [*range(10, 30), 1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]
    draft = PromptLookup(4)
    assert draft(text) == [3, 4, 5, 6]
    assert draft(text) == [3, 4, 5, 6]  # asked twice in one step
    text += [3, 10, 11]
    assert draft(text) == [12, 13]  # one of four was right
    text += [12, 13, 14]
    assert draft(text) == [15, 16, 17, 18]
    text += [99, 10, 11]
    assert draft(text) == [12]
    text += [99, 98]
    assert draft(text) == []


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ArgumentError, match="most must be a whole number of at least 1, but is 0"):
        PromptLookup(0)
    with pytest.raises(ArgumentError, match="longest must be a whole number of at least 3"):
        PromptLookup(longest=2, shortest=3)
