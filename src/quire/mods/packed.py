"""Masks of sequences that hold several texts: documents, answers to one prompt, a tree of drafts.

The factories turn the description into a few vectors, once; the masks compare what these hold at
`q_idx` and `kv_idx`. That costs memory for a sequence, never for its square.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.arguments import lengths_tensor, offsets_tensor, prefix_number, tensor_of
from quire.block_mask.packed import LENGTHS_ADVICE, OFFSETS_ADVICE, ids_of_lengths
from quire.errors import ArgumentError, ShapeError
from quire.ir.trace import mod_name
from quire.mods.compose import Mask, MaskMod
from quire.mods.objects import check_callables

_PREFIX_ADVICE = "Give the number of positions before the nodes, for each sequence of the batch."
_LARGEST_TILE = 256  # positions that are bounded closely if they are a power of two, and aligned


def document(
    ids: Tensor | Sequence[int] | None = None,
    *,
    lengths: Tensor | Sequence[int] | None = None,
    offsets: Tensor | Sequence[int] | None = None,
    mask_mod: MaskMod | None = None,
) -> Mask:
    """Keep documents that are packed into one sequence apart.

    document(lengths=[2, 3, 1]):

        1 1 0 0 0 0
        1 1 0 0 0 0
        0 0 1 1 1 0
        0 0 1 1 1 0
        0 0 1 1 1 0
        0 0 0 0 0 1

    document(offsets=[0, 4, 7], mask_mod=prefix_lm(2)):

        1 1 0 0 0 0 0
        1 1 0 0 0 0 0
        1 1 1 0 0 0 0
        1 1 1 1 0 0 0
        0 0 0 0 1 1 0
        0 0 0 0 1 1 0
        0 0 0 0 1 1 1

    Give one of `ids`, the number of the document of each position, [S] or [B, S]; `lengths` of the
    documents; or `offsets`, where they start and the last one ends. `mask_mod` is asked within a
    document, with positions counted from the document's first token; masks that only compare
    positions, such as `causal`, mean the same in `and_masks`.
    """
    numbers = _document_ids(ids, lengths, offsets)
    if mask_mod is None:
        return Mask(_document, "document", ids=numbers)
    check_callables("document", mask_mod)
    starts, name = _first_positions(numbers), f"document({mod_name(mask_mod)})"
    return Mask(_document, name, ids=numbers, starts=starts, mask_mod=mask_mod)


def _document(
    b: Tensor,
    h: Tensor,
    q_idx: Tensor,
    kv_idx: Tensor,
    ids: Tensor,
    starts: Tensor | None = None,
    mask_mod: MaskMod | None = None,
) -> Tensor:
    batched = ids.ndim == 2

    def at(tensor: Tensor, idx: Tensor) -> Tensor:
        return tensor[b, idx] if batched else tensor[idx]

    together = at(ids, q_idx) == at(ids, kv_idx)
    if starts is None or mask_mod is None:
        return together
    return together & mask_mod(b, h, q_idx - at(starts, q_idx), kv_idx - at(starts, kv_idx))


def shared_prefix(
    offsets: Tensor | Sequence[int], prefix_document_id: Tensor | Sequence[int]
) -> Mask:
    """Pack answers behind the one prompt they share; each sees the prompt and itself, causally.

    shared_prefix([0, 2, 4, 6], [0, 0, 0]):

        1 0 0 0 0 0
        1 1 0 0 0 0
        1 1 1 0 0 0
        1 1 1 1 0 0
        1 1 0 0 1 0
        1 1 0 0 1 1

    Document d lies in `offsets[d]` to `offsets[d + 1]` and continues document
    `prefix_document_id[d]`; a prompt continues itself.
    """
    advice = "Give the document that each document continues, and for a prompt its own number."
    bounds = offsets_tensor(offsets, OFFSETS_ADVICE)
    prefixes = tensor_of("integers", "prefix_document_id", prefix_document_id, advice=advice).long()
    _check_prefixes(prefixes, num_documents=len(bounds) - 1, advice=advice)

    first, last, *gap = _seen_ranges(bounds, prefixes)
    return Mask(_shared_prefix, "shared_prefix", first=first, last=last, gap=tuple(gap))


def _shared_prefix(
    b: Tensor,
    h: Tensor,
    q_idx: Tensor,
    kv_idx: Tensor,
    first: Tensor,
    last: Tensor,
    gap: tuple[Tensor, Tensor],
) -> Tensor:
    gap_start, gap_end = gap
    within = (first[q_idx] <= kv_idx) & (kv_idx <= last[q_idx])
    return within & ((kv_idx < gap_start[q_idx]) | (gap_end[q_idx] <= kv_idx))


def tree(
    parent_indices: Tensor | Sequence[int], prefix_length: int | Tensor | Sequence[int] = 0
) -> Mask:
    """Show each node of a tree its ancestors and itself: many drafts, checked at once.

    tree([-1, 0, 0, 1, 1, 2]):

        1 0 0 0 0 0
        1 1 0 0 0 0
        1 0 1 0 0 0
        1 1 0 1 0 0
        1 1 0 0 1 0
        1 0 1 0 0 1

    tree([-1, 0, 0], prefix_length=2):

        1 0 0 0 0
        1 1 0 0 0
        1 1 1 0 0
        1 1 1 1 0
        1 1 1 0 1

    `parent_indices[i]` is the parent of node i, which comes before it, or -1 for a root; several
    roots make a forest. The nodes stand behind `prefix_length` positions that are causal and that
    every node sees. Both positions count from the start of the prefix; where queries are the
    nodes alone, write `offset(tree(parents, n), n)`. In a batch whose sequences have prefixes of
    their own `prefix_length` is a tensor [B] or a list; what stands behind the nodes of a shorter
    one is seen by none of them.
    """
    advice = "Order the nodes so that each follows its parent, and give roots the parent -1."
    parents = tensor_of("integers", "parent_indices", parent_indices, advice=advice)
    _check_forest(parents, advice)
    enter, leave, turn = _unwound(*_preorder(parents))
    name, filled = f"tree_{len(parents)}", 0
    if isinstance(prefix_length, Sequence) or (
        isinstance(prefix_length, Tensor) and prefix_length.ndim
    ):
        prefix_length = lengths_tensor(prefix_length, _PREFIX_ADVICE, name="prefix_length")
        name += "_prefix_tensor"
    elif prefix_length := prefix_number(prefix_length):
        name += f"_prefix_{prefix_length}"
        # Node 0 fills the last tile of the prefix, so that tiles of nodes are tiles of the vectors.
        filled = prefix_length % _LARGEST_TILE
        enter, leave = (torch.cat([ends[:1].expand(filled), ends]) for ends in (enter, leave))
    fields = {"enter": enter, "leave": leave, "turn": turn, "filled": filled}
    return Mask(_tree, name, prefix_length=prefix_length, **fields)


def _tree(
    b: Tensor,
    h: Tensor,
    q_idx: Tensor,
    kv_idx: Tensor,
    enter: Tensor,
    leave: Tensor,
    turn: int,
    prefix_length: int | Tensor,
    filled: int,
) -> Tensor:
    # Positions in the prefix have no node. Node 0 stands in, and its answer is not used. Behind the
    # nodes of a sequence that is shorter than others the last one does: nodes see nothing later.
    last = None
    if isinstance(prefix_length, Tensor):
        prefix_length, last = prefix_length[b], len(enter) - 1
    first = prefix_length - filled
    q_enter = enter[torch.clamp(q_idx - first, min=0, max=last)]
    kv_node = torch.clamp(kv_idx - first, min=0, max=last)
    below = (q_enter - leave[kv_node]) >> turn < (q_enter - enter[kv_node]) >> turn
    return (kv_idx <= q_idx) & ((kv_idx < prefix_length) | below)


def _document_ids(
    ids: Tensor | Sequence[int] | None,
    lengths: Tensor | Sequence[int] | None,
    offsets: Tensor | Sequence[int] | None,
) -> Tensor:
    """The number of the document at each position, from whichever description was given."""
    given = {"ids": ids, "lengths": lengths, "offsets": offsets}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise ArgumentError(
            f"document needs one of ids, lengths and offsets, got {' and '.join(names) or 'none'}. "
            "Give ids [S] or [B, S], or the documents' lengths, or their offsets."
        )
    if lengths is not None:
        return ids_of_lengths(lengths_tensor(lengths, LENGTHS_ADVICE))
    if offsets is not None:
        bounds = offsets_tensor(offsets, OFFSETS_ADVICE)
        return ids_of_lengths(bounds[1:] - bounds[:-1])
    assert ids is not None
    advice = "Give the number of the document of each position, [S] or [B, S]."
    return tensor_of("integers", "ids", ids, ranks=(1, 2), advice=advice)


def _first_positions(ids: Tensor) -> Tensor:
    """At each position, the first position with the same id."""
    if ids.ndim == 2:
        return torch.stack([_first_positions(row) for row in ids])
    places = torch.arange(len(ids), device=ids.device)
    unique, group = ids.unique(return_inverse=True)
    first = torch.full_like(unique, len(ids), dtype=torch.int64)
    return first.scatter_reduce(0, group, places, "amin")[group].int()


def _seen_ranges(bounds: Tensor, prefixes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What each position sees: `first` to `last`, but for `gap_start` up to `gap_end`.

        1 1 1 1 0 0 0 0 1 1 1      the prompt, other answers, the own document up to the query
        first   gap_start   last
                        gap_end

    Where a prompt stands behind the documents that continue it, it is the end of the range. One
    range with a gap is bounded more closely than two ranges: rows that see the same keys by
    different ones of two would have to be told apart.
    """
    starts, ends = bounds[:-1], bounds[1:]
    owner = ids_of_lengths(ends - starts)
    query = torch.arange(len(owner), device=owner.device)
    own_start, start, end = starts[owner], starts[prefixes][owner], ends[prefixes][owner]
    continues = (prefixes[owner] != owner) & (start < end)
    before = continues & (start < own_start)
    after = continues & ~before
    first = torch.where(before, start, own_start)
    last = torch.where(after, end - 1, query)
    gap_start = torch.where(before, end, query + 1)
    gap_end = torch.where(before, own_start, start)
    # No gap is one that starts behind everything and ends before it: bounds then pass over it.
    gap = continues & (gap_start < gap_end)
    gap_start, gap_end = gap_start.where(gap, len(owner)), gap_end.where(gap, 0)
    return first.int(), last.int(), gap_start.int(), gap_end.int()


def _check_prefixes(prefixes: Tensor, *, num_documents: int, advice: str) -> None:
    if len(prefixes) != num_documents:
        raise ShapeError(
            f"prefix_document_id must have one entry for each of the {num_documents} documents, "
            f"got {len(prefixes)}. {advice}"
        )
    for document_id, prefix in enumerate(prefixes.tolist()):
        if not 0 <= prefix < num_documents or int(prefixes[prefix]) != prefix:
            raise ArgumentError(
                "prefix_document_id must name documents that continue only themselves, "
                f"got {prefix} for document {document_id}. {advice}"
            )


def _check_forest(parents: Tensor, advice: str) -> None:
    if len(parents) == 0:
        raise ArgumentError(f"parent_indices must have at least one node, got none. {advice}")
    for node, parent in enumerate(parents.tolist()):
        if not -1 <= parent < node:
            raise ArgumentError(
                f"parent_indices must name an earlier node or -1, got {parent} for node {node}. "
                f"{advice}"
            )


def _preorder(parents: Tensor) -> tuple[Tensor, Tensor]:
    """When a walk through the forest enters each node, and when it leaves the last one below it.

             0            node    0  1  2  3  4
           1   2          enter   0  1  4  2  3
          3 4             leave   5  4  5  3  4

    So j is i or an ancestor of i where `enter[j] <= enter[i] < leave[j]`: two vectors say what
    would else take a matrix.
    """
    parent_of, nodes = parents.tolist(), range(len(parents))
    # One more entry, which is also entry -1, stands for the parent of all roots.
    size, free = [1] * (len(nodes) + 1), [0] * (len(nodes) + 1)
    for node in reversed(nodes):
        size[parent_of[node]] += size[node]
    enter = []
    for node in nodes:
        enter.append(free[parent_of[node]])
        free[parent_of[node]] += size[node]
        free[node] = enter[node] + 1
    leave = [enter[node] + size[node] for node in nodes]
    both = torch.tensor([enter, leave], dtype=torch.int32, device=parents.device)
    return both[0], both[1]


def _unwound(enter: Tensor, leave: Tensor) -> tuple[Tensor, Tensor, int]:
    """The walk's numbers as places on a circle of 2**turn, each near the place before it.

        node    0   1 2   3 4 5  6    7  8  9 10 11 12 13 14
        enter   0   1 8   2 5 9 12    3  4  6  7 10 11 13 14
        place   0   1 8   2 5 9 12   19 20 22 23 26 27 29 30    turn 4

    Trees are often written level by level, and where a level ends the walk's numbers fall. Places
    go on instead, once more around, so that a range of positions is bounded closely. A place is
    in the subtree of another, whole circles aside, where one circle more fits between it and
    `enter` than between it and `leave`.
    """
    turn = max(1, (len(enter) - 1).bit_length())
    circle, number, half = 1 << turn, enter.long(), (1 << turn) // 2
    steps = (torch.diff(number, prepend=number[:1]) + half - 1) % circle - half + 1
    # From the middle of what 32 bits hold with room to spare, all of it whole circles.
    places = (2**28 + number[0] + steps.cumsum(0)) % 2**29
    return places.int(), (places + leave - enter).int(), turn
