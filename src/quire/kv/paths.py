"""Which drafts stay: of the nodes of a tree behind a prefix, those of a path.

prefix of 3 tokens, tree([-1, 0, 0, 1, 2])      positions  0 1 2 3 4 5 6 7
the path 0, 2, 4                                nodes            0 1 2 3 4
stays as                                                   0 1 2 0 2 4
"""

from __future__ import annotations

import itertools

import numpy as np

from quire.checks.arguments import whole_number
from quire.errors import ArgumentError, ShapeError
from quire.kv.handles import listed, one_each
from quire.kv.table import Kept, Numbers

_ADVICE = "Count nodes from the first draft on, as the parents of a tree do."


def kept_by(prefix_length: object, paths: object, lengths: Numbers) -> Kept:
    """What stays of sequences with so many tokens; or an error if a path is none."""
    advice = "Say how many tokens stand before the drafts."
    start = one_each("prefix_length", prefix_length, len(lengths), advice)
    given = listed(paths)
    if given is None or len(given) != len(lengths):
        raise ShapeError(
            f"expected a path for each of {len(lengths)} sequences, got "
            f"{paths if given is None else len(given)}. Give an empty one where no draft was "
            f"accepted."
        )
    nodes = [
        _checked(path, before, length)
        for path, before, length in zip(given, start.tolist(), lengths.tolist(), strict=True)
    ]
    counts = np.array([len(path) for path in nodes], np.int64)
    flat = np.array([node for path in nodes for node in path], np.int64)
    return Kept(start, counts, flat + np.repeat(start, counts))


def _checked(path: object, before: int, length: int) -> list[int]:
    if before > length:
        raise ArgumentError(
            f"expected a prefix of at most {length} tokens, which the sequence has, got {before}. "
            f"Give the length that it had before the drafts."
        )
    given = listed(path)
    if given is None:
        raise ShapeError(f"expected a list of nodes for each path, got {path!r}. {_ADVICE}")
    nodes = [whole_number("a node of a path", node, minimum=0, advice=_ADVICE) for node in given]
    if max(nodes, default=-1) >= length - before:
        raise ArgumentError(
            f"expected nodes below {length - before}, the number of drafts behind position "
            f"{before}, got {max(nodes)}. {_ADVICE}"
        )
    for node, following in itertools.pairwise(nodes):
        if following <= node:
            raise ArgumentError(
                f"expected a path whose nodes rise, since each follows its parent, got {node} and "
                f"then {following}. Go from the root to the leaf, and name each node once."
            )
    return nodes
