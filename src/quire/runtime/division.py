"""How the work of a call is divided: which kernel computes which sequences, in which blocks.

Results do not depend on any of this, only the time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from quire.block_mask import BlockMask
from quire.block_mask.blocks import Runs
from quire.codegen.convention import (
    FEW_ROWS,
    MANY_KEYS,
    MOST_ROWS,
    Form,
    choose_block_q,
    choose_heads,
)
from quire.codegen.llvm.target import Target
from quire.codegen.llvm.types import F32, F64
from quire.codegen.phases.tiles import TileShape
from quire.memory import One, Placed, longest
from quire.memory.tables import Sequences
from quire.runtime.blocks import NO_LISTS, TileLists, num_tiles, read_lists
from quire.runtime.launch import num_threads
from quire.support.bounded import BoundedDict

SMALLEST_BLOCK = 64

TILE = 128
"""Queries and keys of a tile, about, for an estimate of what tiles would cost."""

LANES = 16
"""Queries that a panel computes at once, about."""

WORTH = 0.75
"""Cut tiles if the blocks that are listed take at most this part of the time of whole tiles."""

ROW_COST = 2
"""How much longer a score takes in the kernel for few queries, about."""

MOST_CELLS = 2**24
"""The most blocks of a mask that are put into a table, to look up the block of each element."""


class FormPart(NamedTuple):
    """Sequences that one kernel computes, `block_q` queries of a head at a time."""

    form: Form
    rows: One | Sequences
    block_q: int
    lists: TileLists = NO_LISTS


def parts_of(
    placed: Placed, mask: BlockMask | None, kv_begin: int = 0, *, observes: bool = False
) -> list[FormPart]:
    """Return how the forward pass is divided.

    A block mask counts from the position `kv_begin`. A kernel that observes scores computes whole
    tiles.
    """
    parts = [
        FormPart(form, rows, queries_of_item(form, placed, rows, mask))
        for form, rows in by_form(placed.rows, placed.key.dtype)
    ]
    if mask is None:
        return parts
    return [_with_lists(part, placed, mask, kv_begin, cuts=not observes) for part in parts]


def _with_lists(
    part: FormPart, placed: Placed, mask: BlockMask, kv_begin: int, *, cuts: bool
) -> FormPart:
    """Return a part with the lists of a mask, in the blocks of the mask if they are small."""
    size, lengths = mask.BLOCK_SIZE, placed.lengths
    small = size[0] % part.block_q != 0 and lengths[0] > size[0]
    if small and cuts and _is_worth(mask, placed, part.form):
        form: Form = "row" if size[0] <= MOST_ROWS else "panel"
        part = part._replace(form=form, block_q=size[0])
    key_heads = placed.key.shape[1] if part.form == "row" else 0
    block_kv = Target.host().block_kv
    lists = read_lists(
        mask, lengths, part.block_q, block_kv, kv_begin, cuts=cuts, key_heads=key_heads
    )
    return part._replace(lists=lists)


def _is_worth(mask: BlockMask, placed: Placed, form: Form) -> bool:
    """Return whether the listed blocks take less time than tiles that hold them."""
    lengths, groups = placed.lengths, placed.key.shape[1]
    key = (mask.content(), lengths, groups, form)
    known = _known.get(key)
    if known is None:
        runs = mask.rows(*lengths, groups=groups).runs
        known = _known.keep(key, _is_less(runs, mask.BLOCK_SIZE, lengths[0], form))
    return known


_known: BoundedDict[tuple[object, ...], bool] = BoundedDict(16)


def _is_less(runs: Runs, size: tuple[int, int], q_len: int, form: Form) -> bool:
    """Return whether listed blocks take less time than tiles that hold them, by an estimate."""
    q_size, kv_size = size
    if math.prod(runs.shape) > MOST_CELLS:
        return True
    cost = int((runs.stops - runs.starts).sum()) * q_size * kv_size * _score_cost(q_size)
    tall, wide = max(TILE, q_size), max(TILE, kv_size)
    area = num_tiles(runs, size, tall, wide) * wide * min(tall, q_len)
    if form == "row":
        area *= ROW_COST
    return cost <= WORTH * area


def _score_cost(queries: int) -> float:
    """Return how long a score takes if a block has so many queries; in a tile it takes 1."""
    return ROW_COST if queries <= MOST_ROWS else -(-queries // LANES) * LANES / queries


def by_form(rows: One | Sequences, dtype: torch.dtype) -> list[tuple[Form, One | Sequences]]:
    """Split sequences by the kernel that computes them: "row" for few queries, else "panel".

    Both give the same bits. "row" reads keys of that `dtype` once for all heads that share them.
    """
    if isinstance(rows, One):
        few_rows = has_few(rows.q_len, rows.kv_end - rows.kv_begin, dtype)
        return [("row" if few_rows else "panel", rows)]
    most = _most_rows(dtype)
    few = (rows.q_len <= FEW_ROWS) | ((rows.q_len <= most) & (rows.kv_len >= MANY_KEYS))
    if not few.any():
        return [("panel", rows)]
    if few.all():
        return [("row", rows)]
    return [("row", rows.where(few)), ("panel", rows.where(~few))]


def has_few(queries: int, keys: int, dtype: torch.dtype) -> bool:
    """Return whether a sequence has few queries for its keys."""
    return queries <= (_most_rows(dtype) if keys >= MANY_KEYS else FEW_ROWS)


def _most_rows(dtype: torch.dtype) -> int:
    """Return the most queries for which the decode kernel is faster if there are many keys."""
    return MOST_ROWS if dtype.itemsize < torch.float32.itemsize else FEW_ROWS


def queries_of_item(
    form: Form, placed: Placed, rows: One | Sequences, mask: BlockMask | None
) -> int:
    """Return how many queries of a head a thread computes at once."""
    if form == "row":
        return max(1, rows.q_len if isinstance(rows, One) else longest(rows.q_len))
    query, value = placed.query, placed.value
    tile = TileShape(Target.host(), F64 if query.dtype == torch.float64 else F32)
    panels = 2 if form == "tangent" else 1  # tangents have panels of their own
    head_dim, value_dim = (panels * x.shape[3] for x in (query, value))
    count = num_rows(placed, rows)
    block_q = choose_block_q(tile, head_dim, value_dim, count, num_threads())
    if mask is None:
        return block_q
    # A block of queries should be within one block of the mask, unless it becomes tiny.
    divisor = math.gcd(block_q, mask.BLOCK_SIZE[0])
    return divisor if divisor >= SMALLEST_BLOCK else block_q


def heads_of_item(form: Form, placed: Placed, rows: One | Sequences, block_q: int) -> int:
    """Return how many heads a thread computes one after the other."""
    if form == "row":
        return 1
    batch, heads, *_ = placed.query.shape
    if isinstance(rows, One):
        q_len, alike = rows.q_len, batch if rows.q_len * (rows.kv_end - rows.kv_begin) else 0
    else:
        products = rows.q_len * rows.kv_len
        q_len, alike = longest(rows.q_len), int(products.sum()) // max(1, longest(products))
    return choose_heads(heads, q_len, alike, block_q, num_threads())


def num_rows(placed: Placed, rows: One | Sequences) -> int:
    """Return the number of query rows of some sequences, in all heads."""
    count = rows.q_len if isinstance(rows, One) else int(rows.q_len.sum())
    return count * placed.query.shape[1] * placed.batches
