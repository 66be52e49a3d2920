"""Where rows live, as a kernel is told: strides, sequences and pages of the operands of a call."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from quire.codegen.convention import MOST_ROWS, SEQUENCE, Form, num_items, num_pieces
from quire.codegen.staging import ENDLESS
from quire.memory.placed import One, Placed, longest
from quire.memory.sequences import Numbers, Sequences
from quire.runtime.shared_prefix import shared_pieces


class Records(NamedTuple):
    """What a launch is told about sequences: a table, how many there are, and their items.

    An item may be for several sequences, its members. If one is, or if keys are in several pieces,
    each piece of a sequence has a slot. `products` is about how many multiplications there are.
    """

    table: bytes
    num_sequences: int
    products: int
    items: int
    slots: int = 0
    members: int = 1


class Cut(NamedTuple):
    """Into how many pieces the keys of sequences are cut, and how many of these are shared.

    The first `shared` are computed for all `members` of a group by its first sequence.
    """

    pieces: Numbers
    shared: Numbers
    members: Numbers

    @property
    def slices(self) -> Numbers:
        """How many pieces a sequence has items for."""
        return np.where(self.members == 0, self.pieces - self.shared, self.pieces)

    @property
    def columns(self) -> dict[str, Numbers]:
        """As records name them."""
        return {**self._asdict(), "slices": self.slices}


def by_form(rows: One | Sequences) -> list[tuple[Form, One | Sequences]]:
    """The sequences that are computed in the same form, together.

    The form of a sequence depends on nothing but its own length.
    """
    if isinstance(rows, One):
        return [("row" if rows.q_len <= MOST_ROWS else "panel", rows)]
    few = rows.q_len <= MOST_ROWS
    if not few.any():
        return [("panel", rows)]
    if few.all():
        return [("row", rows)]
    return [("row", rows.where(few)), ("panel", rows.where(~few))]


def num_rows(placed: Placed, rows: One | Sequences) -> int:
    """How many query rows some sequences have in all heads."""
    count = rows.q_len if isinstance(rows, One) else int(rows.q_len.sum())
    return count * placed.query.shape[1] * placed.batches


def num_products(placed: Placed, rows: One | Sequences) -> int:
    """About how many multiplications some sequences take."""
    _, heads, _, head_dim = placed.query.shape
    if isinstance(rows, One):
        count = rows.q_len * (rows.kv_end - rows.kv_begin)
    else:
        count = int(np.vdot(rows.q_len, rows.kv_len))
    return count * placed.batches * heads * head_dim


def records_of(
    placed: Placed, rows: One | Sequences, form: Form, *, heads: int, block_q: int
) -> Records:
    """Sequences as the kernel of a form reads them, with the items of so many heads."""
    if not isinstance(rows, One):
        return _table(placed, rows, form, heads, block_q)
    pieces = max(1, num_pieces(rows.kv_begin, rows.kv_end)) if form == "row" else 1
    count = num_items(rows.q_len, heads, block_q) * pieces * placed.batches
    products = num_products(placed, rows)
    return Records(record(rows, pieces), 1, products, count, count if pieces > 1 else 0)


def _table(placed: Placed, rows: Sequences, form: Form, heads: int, block_q: int) -> Records:
    """Threads take items in this order: large ones come first, so that none is left for the end."""
    pieces = np.ones_like(rows.q_len)
    if form == "row":
        pieces = np.maximum(1, num_pieces(rows.kv_begin, rows.kv_end))
    order = rows.largest_first()
    shared = group = None
    if form == "row" and placed.page_table is not None:
        page = placed.key.shape[2]
        order, shared, group = shared_pieces(rows, placed.page_table, page, order)
    rows, pieces = rows.where(order), pieces[order]
    cut = Cut(pieces, np.zeros_like(pieces), np.ones_like(pieces))
    if shared is not None and group is not None:
        cut = Cut(pieces, shared, group)
    each = num_items(rows.q_len, heads, block_q)
    items, slots = each * cut.slices, each * pieces
    columns = cut.columns | {"first_slot": np.cumsum(slots) - slots}
    table = table_of(rows, np.cumsum(items) - items, columns)
    members = longest(cut.members)
    total = int(slots.sum()) if max(longest(pieces), members) > 1 else 0
    return Records(
        table,
        rows.num,
        num_products(placed, rows),
        items=int(items.sum()),
        slots=total,
        members=members,
    )


def row_layout(placed: Placed) -> dict[str, int]:
    """The part of a plan that says where rows live."""
    query, key, value, table = placed.query, placed.key, placed.value, placed.page_table
    result = dict(zip(_NAMES["query"], strides(query), strict=True))
    for name, tensor in (("key", key), ("value", value)):
        batch, head, row, column = strides(tensor)
        page = tensor.stride(0) if table is not None else 0
        steps = (batch if table is None else 0, head, page, row, column)
        result.update(zip(_NAMES[name], steps, strict=True))
    for name, scale in (("key_scale", placed.key_scale), ("value_scale", placed.value_scale)):
        page, head, row = (0, 0, 0) if scale is None else scale.stride()
        result |= {f"{name}_head": head, f"{name}_page": page, f"{name}_row": row}
    return result | {
        "head_dim": query.shape[3],
        "value_dim": value.shape[3],
        "sequence_stride": 0 if placed.is_dense else 1,
        "page_table_stride": 0 if table is None else table.stride(0),
        "page_size": ENDLESS if table is None else key.shape[2],
    }


_NAMES = {
    name: [f"{name}_{axis}" for axis in axes]
    for name, axes in {
        "query": ("batch", "head", "row", "column"),
        "key": ("batch", "head", "page", "row", "column"),
        "value": ("batch", "head", "page", "row", "column"),
    }.items()
}


def strides(tensor: Tensor) -> tuple[int, ...]:
    """From row to row. A first dimension of 1 is shared by all batches, and by all sequences."""
    steps = tensor.stride()
    return steps if tensor.shape[0] > 1 else (0, *steps[1:])


def table_of(sequences: Sequences, first_item: Numbers, more: dict[str, Numbers]) -> bytes:
    """As the kernel reads them, each with the number of its first item; what is not said is 0."""
    columns = sequences._asdict() | {"first_item": first_item} | more
    nothing = np.zeros_like(first_item)
    return np.stack([columns.get(name, nothing) for name in SEQUENCE.fields], axis=1).tobytes()


def record(rows: One, pieces: int = 1, slices: int = 1) -> bytes:
    """A single sequence as the kernel reads it: its items are pieces of keys, or slices."""
    q_len, q_start, kv_begin, kv_end, b = rows
    items = max(slices, pieces)
    return SEQUENCE.pack_in_order(
        *(b, 0, 0, 0, q_len, q_start, -kv_begin, kv_begin, kv_end, items, pieces, 0, 1, 0)
    )
