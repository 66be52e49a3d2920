"""Masks of sequences that hold several texts: documents, answers to one prompt, a tree of drafts.

Each function turns its arguments into a few vectors [S], once. The mask compares their entries at
`q_idx` and `kv_idx`, so it never takes memory for a table [S, S].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.checks.arguments import lengths_tensor, offsets_tensor, prefix_number, tensor_of
from quire.errors import ArgumentError, ShapeError
from quire.ir.trace import mod_name
from quire.mods.compose import Mask, MaskMod
from quire.mods.objects import check_callables

_LENGTHS_ADVICE = "Give the number of tokens of each document."
_OFFSETS_ADVICE = "Give where each document starts, and where the last one ends."
_PREFIX_ADVICE = "Give the number of positions before the nodes, for each sequence of the batch."
_LARGEST_TILE = 256  # aligned blocks of positions up to this power of two have close bounds


def document(
    ids: Tensor | Sequence[int] | None = None,
    *,
    lengths: Tensor | Sequence[int] | None = None,
    offsets: Tensor | Sequence[int] | None = None,
    mask_mod: MaskMod | None = None,
) -> Mask:
    """Let a query see its own document, if several documents are packed into one sequence.

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

    Give one of: `ids` [S] or [B, S], the number of the document at each position; `lengths` [N],
    the tokens of each of N documents; `offsets` [N + 1], where each document starts and the last
    one ends. `mask_mod` decides within a document and is called with positions that count from the
    document's first token. For a mask that only compares positions, such as `causal`,
    `and_masks(document(...), causal)` does the same.
    """
    numbers = _document_ids(ids, lengths, offsets)
    if mask_mod is None:
        return Mask(_document, "document", ids=numbers)
    check_callables("document", mask_mod)
    starts, name = _first_positions(numbers), f"document({mod_name(mask_mod)})"
    return Mask(_document, name, ids=numbers, starts=starts, mask_mod=mask_mod)


def _document(
    *place: Tensor, ids: Tensor, starts: Tensor | None = None, mask_mod: MaskMod | None = None
) -> Tensor:
    b, h, q_idx, kv_idx = place
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
    """Pack several answers after one prompt. Each sees the prompt and itself, causally.

    shared_prefix([0, 2, 4, 6], [0, 0, 0]):

        1 0 0 0 0 0
        1 1 0 0 0 0
        1 1 1 0 0 0
        1 1 1 1 0 0
        1 1 0 0 1 0
        1 1 0 0 1 1

    `offsets` [N + 1] says where each of N documents starts and the last one ends. Document d
    continues document `prefix_document_id[d]` of `prefix_document_id` [N]; a prompt continues
    itself.
    """
    advice = "Give the document that each document continues, and for a prompt its own number."
    bounds = offsets_tensor(offsets, _OFFSETS_ADVICE)
    prefixes = tensor_of("integers", "prefix_document_id", prefix_document_id, advice=advice).long()
    _check_prefixes(prefixes, num_documents=len(bounds) - 1, advice=advice)

    first, last, *gap = _seen_ranges(bounds, prefixes)
    return Mask(_shared_prefix, "shared_prefix", first=first, last=last, gap=tuple(gap))


def _shared_prefix(
    *place: Tensor, first: Tensor, last: Tensor, gap: tuple[Tensor, Tensor]
) -> Tensor:
    *_, q_idx, kv_idx = place
    gap_start, gap_end = gap
    within = (first[q_idx] <= kv_idx) & (kv_idx <= last[q_idx])
    return within & ((kv_idx < gap_start[q_idx]) | (gap_end[q_idx] <= kv_idx))


def tree(
    parent_indices: Tensor | Sequence[int], prefix_length: int | Tensor | Sequence[int] = 0
) -> Mask:
    """Let each node of a tree see its ancestors and itself, to verify many drafts in one call.

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

    `parent_indices` [N] has the parent of each node, which must come before it, or -1 for a root.
    There may be several roots. The nodes follow `prefix_length` positions, which are causal and
    which every node sees. `q_idx` and `kv_idx` count from the start of the prefix: if the queries
    are the nodes alone, use `offset(tree(parents, n), n)`. If the sequences of a batch have
    prefixes of different lengths, give `prefix_length` as a tensor [B] or a list. No node sees what
    follows the nodes of a shorter sequence.
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
        # Repeat node 0 over the last block of the prefix: then a block of positions that starts at
        # a multiple of its size is also such a block of `enter` and `leave`, and has close bounds.
        filled = prefix_length % _LARGEST_TILE
        enter, leave = (torch.cat([ends[:1].expand(filled), ends]) for ends in (enter, leave))
    fields = {"enter": enter, "leave": leave, "turn": turn, "filled": filled}
    return Mask(_tree, name, prefix_length=prefix_length, **fields)


def _tree(
    *place: Tensor,
    enter: Tensor,
    leave: Tensor,
    turn: int,
    prefix_length: int | Tensor,
    filled: int,
) -> Tensor:
    b, _, q_idx, kv_idx = place
    # A position in the prefix has no node: we read node 0 and do not use the result. A position
    # after the last node reads the last one, which is right, since nodes see no later position.
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
    """The number of the document at each position, [S] or [B, S], from the one that is given."""
    given = {"ids": ids, "lengths": lengths, "offsets": offsets}
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        raise ArgumentError(
            f"document must be given one of ids, lengths and offsets, but is given "
            f"{' and '.join(names) or 'none'}. Give ids [S] or [B, S], or the lengths of the "
            f"documents, or their offsets."
        )
    if lengths is not None:
        return _repeated(lengths_tensor(lengths, _LENGTHS_ADVICE))
    if offsets is not None:
        return _repeated(offsets_tensor(offsets, _OFFSETS_ADVICE).diff())
    assert ids is not None
    advice = "Give the number of the document of each position, [S] or [B, S]."
    return tensor_of("integers", "ids", ids, ranks=(1, 2), advice=advice)


def _repeated(lengths: Tensor) -> Tensor:
    """The number of each document, repeated for each of its tokens: lengths [N] to int32 [S]."""
    numbers = torch.arange(len(lengths), dtype=torch.int32, device=lengths.device)
    return torch.repeat_interleave(numbers, lengths.long())


def _first_positions(ids: Tensor) -> Tensor:
    """For each position, the first position with the same id: int32 like `ids` [S] or [B, S]."""
    if ids.ndim == 2:
        return torch.stack([_first_positions(row) for row in ids])
    places = torch.arange(len(ids), device=ids.device)
    unique, group = ids.unique(return_inverse=True)
    first = torch.full_like(unique, len(ids), dtype=torch.int64)
    return first.scatter_reduce(0, group, places, "amin")[group].int()


def _seen_ranges(bounds: Tensor, prefixes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The keys that each query sees: from `first` to `last`, without `gap_start` up to `gap_end`.

        1 1 1 1 0 0 0 0 1 1 1      the prompt, other answers, the own document up to the query
        first   gap_start   last
                        gap_end

    If a prompt comes after a document that continues it, the prompt is the end of the range. We use
    one range with a gap instead of two ranges, because its bounds over a block of queries are
    closer: with two ranges, neighbouring queries could see the same keys by different ranges.
    """
    starts, ends = bounds[:-1], bounds[1:]
    owner = _repeated(ends - starts)
    query = torch.arange(len(owner), device=owner.device)
    own_start, start, end = starts[owner], starts[prefixes][owner], ends[prefixes][owner]
    continues = (prefixes[owner] != owner) & (start < end)
    before = continues & (start < own_start)
    after = continues & ~before
    first = torch.where(before, start, own_start)
    last = torch.where(after, end - 1, query)
    gap_start = torch.where(before, end, query + 1)
    gap_end = torch.where(before, own_start, start)
    # If a query has no gap, let its gap start after the end and end at 0. Such a gap hides nothing,
    # and it does not widen the bounds of a block in which other queries have one.
    gap = continues & (gap_start < gap_end)
    gap_start, gap_end = gap_start.where(gap, len(owner)), gap_end.where(gap, 0)
    return first.int(), last.int(), gap_start.int(), gap_end.int()


def _check_prefixes(prefixes: Tensor, *, num_documents: int, advice: str) -> None:
    if len(prefixes) != num_documents:
        raise ShapeError(
            f"prefix_document_id must have one entry for each of the {num_documents} documents, "
            f"but has {len(prefixes)}. {advice}"
        )
    for document_id, prefix in enumerate(prefixes.tolist()):
        if not 0 <= prefix < num_documents or int(prefixes[prefix]) != prefix:
            raise ArgumentError(
                "prefix_document_id must name documents that continue only themselves, but is "
                f"{prefix} for document {document_id}. {advice}"
            )


def _check_forest(parents: Tensor, advice: str) -> None:
    if len(parents) == 0:
        raise ArgumentError(f"parent_indices must have at least one node, but has none. {advice}")
    for node, parent in enumerate(parents.tolist()):
        if not -1 <= parent < node:
            raise ArgumentError(
                f"parent_indices must name an earlier node or -1, but is {parent} for node {node}. "
                f"{advice}"
            )


def _preorder(parents: Tensor) -> tuple[Tensor, Tensor]:
    """Number the nodes in depth-first order: `enter` [N], and `leave` [N], the end of its subtree.

             0            node    0  1  2  3  4
           1   2          enter   0  1  4  2  3
          3 4             leave   5  4  5  3  4

    Node j is i or an ancestor of i exactly if `enter[j] <= enter[i] < leave[j]`.
    """
    parent_of, nodes = parents.tolist(), range(len(parents))
    # The last entry, which is also entry -1, is for the parent of all roots.
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
    """Change the depth-first numbers by multiples of 2**turn, so that neighbours stay close.

        node    0   1 2   3 4 5  6    7  8  9 10 11 12 13 14
        enter   0   1 8   2 5 9 12    3  4  6  7 10 11 13 14
        place   0   1 8   2 5 9 12   19 20 22 23 26 27 29 30    turn 4

    Trees are often written level by level. At the end of a level the numbers fall, so the minimum
    and maximum over a block of positions say little. So we add multiples of 2**turn, such that the
    numbers go on rising. With these numbers, node i is in the subtree of node j if and only if
    (enter[i] - enter[j]) >> turn is above (enter[i] - leave[j]) >> turn.
    """
    turn = max(1, (len(enter) - 1).bit_length())
    circle, number, half = 1 << turn, enter.long(), (1 << turn) // 2
    steps = (torch.diff(number, prepend=number[:1]) + half - 1) % circle - half + 1
    # Start at a multiple of 2**turn that leaves room in int32 on both sides.
    places = (2**28 + number[0] + steps.cumsum(0)) % 2**29
    return places.int(), (places + leave - enter).int(), turn
