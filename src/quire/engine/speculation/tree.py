"""A tree of guesses: several ways in which a text may go on.

    DraftTree([5, 6, 9, 6], parents=[-1, 0, 0, -1])         text ─┬─ 5 ─┬─ 6
                                                                  │     └─ 9
    paths: [5, 6], [5, 9], [6]                                    └─ 6

A node must have the bits that it has in plain decoding, and those depend on the positions of the
keys that it sees: sums run in the order of positions. In one sequence under the mask
`quire.mods.tree`, siblings lie between a node and its parent, which changes the order. So each path
is a fork of the text's sequence, in which every node has the position that it will have. Forks
share all pages of the text but the last, and one packed call verifies all paths: its page table is
the mask of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.checks.arguments import whole_number
from quire.errors import ArgumentError


@dataclass(frozen=True)
class DraftTree:
    """Guesses `tokens`, each after its parent: an earlier guess by its place, or -1 for the text.

    >>> DraftTree([5, 6, 9, 6], parents=[-1, 0, 0, -1]).paths
    [[5, 6], [5, 9], [6]]
    """

    tokens: Sequence[int]
    parents: Sequence[int]

    def __post_init__(self) -> None:
        fits = len(self.tokens) == len(self.parents) and all(
            -1 <= parent < place for place, parent in enumerate(self.parents)
        )
        if not fits:
            raise ArgumentError(
                f"parents must have an earlier place or -1 for each of {len(self.tokens)} tokens, "
                f"but are {list(self.parents)}. Put each guess after the one that it follows."
            )

    @property
    def paths(self) -> list[list[int]]:
        """The guesses from the text to each leaf, in the order of their first nodes."""
        ways: list[list[int]] = []
        for token, parent in zip(self.tokens, self.parents, strict=True):
            ways.append([*([] if parent < 0 else ways[parent]), token])
        inner = set(self.parents)
        return [way for place, way in enumerate(ways) if place not in inner]


def paths_of(drafts: Sequence[int] | DraftTree, room: int, num_tokens: int) -> list[list[int]]:
    """Return the paths of a draft, cut to `room` guesses. Raise if a guess is no token."""
    paths = drafts.paths if isinstance(drafts, DraftTree) else [drafts]
    checked = [[_token(each, num_tokens) for each in path] for path in paths]
    return [path[:room] for path in checked if path]


def _token(given: object, num_tokens: int) -> int:
    advice = "Use the tokenizer of this model."
    token = whole_number("a token of drafts", given, advice=advice)
    if not 0 <= token < num_tokens:
        raise ArgumentError(
            f"drafts must be tokens from 0 to {num_tokens - 1}, but one is {token}. {advice}"
        )
    return token
