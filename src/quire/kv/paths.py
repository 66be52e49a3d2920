"""Which drafts are accepted: the nodes on one path of a tree that follows a prefix.

prefix of 3 tokens, tree([-1, 0, 0, 1, 2])      positions  0 1 2 3 4 5 6 7
drafts are the nodes of the tree                nodes            0 1 2 3 4
the path 0, 2, 4 is accepted                    is then    0 1 2 0 2 4
"""

from __future__ import annotations

import itertools

import numpy as np

from quire.checks.arguments import whole_number
from quire.errors import ArgumentError, ShapeError
from quire.kv.handles import listed, one_each
from quire.kv.table import Kept
from quire.memory.tables import Numbers

_ADVICE = "Count nodes from the first draft on, as the parents of a tree do."


def kept_by(prefix_length: object, paths: object, lengths: Numbers) -> Kept:
    """Return which tokens stay of sequences with `lengths` tokens. Raise if a path is invalid."""
    advice = "Give the number of tokens before the drafts."
    start = one_each("prefix_length", prefix_length, len(lengths), advice)
    given = listed(paths)
    if given is None or len(given) != len(lengths):
        raise ShapeError(
            f"paths must have a path for each of {len(lengths)} sequences, but is "
            f"{paths if given is None else f'a list of {len(given)}'}. Give an empty path if no "
            f"draft was accepted."
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
            f"prefix_length must be at most {length}, as the sequence has {length} tokens, but is "
            f"{before}. Give the length that it had before the drafts."
        )
    given = listed(path)
    if given is None:
        raise ShapeError(f"a path must be a list of nodes, but is {path!r}. {_ADVICE}")
    nodes = [whole_number("a node of a path", node, minimum=0, advice=_ADVICE) for node in given]
    if max(nodes, default=-1) >= length - before:
        raise ArgumentError(
            f"a node of a path must be below {length - before}, the number of drafts from position "
            f"{before} on, but is {max(nodes)}. {_ADVICE}"
        )
    for node, following in itertools.pairwise(nodes):
        if following <= node:
            raise ArgumentError(
                f"the nodes of a path must rise, since each follows its parent, but {node} is "
                f"followed by {following}. Go from the root to the leaf, and name each node once."
            )
    return nodes
