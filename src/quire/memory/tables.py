"""Tables of sequences: the rows, positions and pages of each.

offsets = [0, 5, 5, 12]    three sequences: rows 0 to 4, no rows, rows 5 to 11
lengths = [3, 0, 7]        the first sequence has only rows 0 to 2; rows 3 and 4 are unused
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.checks import check_kind, check_position, check_unmapped
from quire.checks.arguments import check_never_falls, tensor_of
from quire.errors import ArgumentError, DeviceError
from quire.support.bounded import BoundedDict
from quire.support.torch_private import in_transform, is_ordinary, outside_transforms

Numbers: TypeAlias = NDArray[np.int64]


class Sequences(NamedTuple):
    """A table with a row for each sequence; each field is a column [B].

                  q_row                     q_row + q_len
    query rows  ──┤ q_start, q_start + 1, ... ├──
    key rows    ──┤ kv_begin ...         kv_end ├──    position p is in row kv_row + p
    """

    b: Numbers
    q_len: Numbers
    q_start: Numbers
    kv_begin: Numbers
    kv_end: Numbers
    q_row: Numbers
    kv_row: Numbers

    @staticmethod
    def one(q_len: int, q_start: int, kv_begin: int, kv_end: int, b: int = 0) -> Sequences:
        """Return a table of one sequence, whose first row is the first row of the tensors."""
        columns = np.array([b, q_len, q_start, kv_begin, kv_end, 0, -kv_begin])
        return Sequences(*columns.reshape(-1, 1))

    @property
    def kv_origin(self) -> int:
        """Return the position of column 0 of a block mask."""
        return 0

    @property
    def num(self) -> int:
        """Return the number of sequences."""
        return len(self.b)

    @property
    def kv_len(self) -> Numbers:
        """Return the number of keys of each sequence."""
        return self.kv_end - self.kv_begin

    def where(self, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> Sequences:
        """Return some of the sequences, by a boolean mask [B] or by indices, in their order."""
        return Sequences(*(column[chosen] for column in self))

    def largest_first(self) -> Numbers:
        """Return the indices of the sequences, those with the most work first."""
        order: Numbers = np.argsort(-self.q_len * self.kv_len, kind="stable")
        return order

    def unowned(self, num_rows: int) -> NDArray[np.bool_] | None:
        """Return which rows [num_rows] of the query belong to no sequence; None if none does."""
        if int(self.q_len.sum()) == num_rows:
            return None
        steps = np.zeros(num_rows + 1, np.int64)
        np.add.at(steps, self.q_row, 1)
        np.add.at(steps, self.q_row + self.q_len, -1)
        holes: NDArray[np.bool_] = np.cumsum(steps[:-1]) == 0
        return holes


class Spans(NamedTuple):
    """The first row of each sequence, and its number of rows."""

    first: Numbers
    lengths: Numbers


def spans(names: tuple[str, str], offsets: object, lengths: object, num_rows: int) -> Spans:
    """Return where sequences are among `num_rows` rows, from `offsets` [B + 1], `lengths` [B].

    `names` are the names of these two arguments in error messages.
    """
    ends = checked_offsets(names[0], offsets, num_rows)
    room = np.diff(ends)
    if lengths is not None:
        return Spans(ends[:-1], checked_lengths(names, lengths, room))
    if ends[0] != 0 or ends[-1] != num_rows:
        raise ArgumentError(
            f"{names[0]} must go from 0 to {num_rows}, the number of rows, but go from {ends[0]} "
            f"to {ends[-1]}. Give {names[1]} as well where rows belong to no sequence."
        )
    return Spans(ends[:-1], room)


def query_spans(query: Tensor, offsets: object, lengths: object, count: int) -> Spans:
    """Return the rows of `count` sequences over pages, in query [B, Hq, L, D] or [total, Hq, D]."""
    if query.dim() == 3:
        if offsets is None:
            raise ArgumentError(
                f"query [total, Hq, D] must come with q_offsets, but they are missing. Give the "
                f"first row of each of {count} sequences and the end of the last; or, if each has "
                f"as many queries, give query [B, Hq, L, D]."
            )
        rows = spans(("q_offsets", "q_lengths"), offsets, lengths, len(query))
    elif offsets is not None:
        raise ArgumentError(
            "q_offsets must come with query [total, Hq, D], but query has 4 dimensions. Leave "
            "them out, or pack the rows of all sequences."
        )
    else:
        batch, _, q_len, _ = query.shape
        limits = np.full(batch, q_len)
        counts = limits if lengths is None else checked_counts("q_lengths", lengths, limits)
        rows = Spans(np.arange(batch) * q_len, counts)
    if len(rows.first) != count:
        raise ArgumentError(
            f"query must be for the {count} sequences of the page table, but is for "
            f"{len(rows.first)}. Give each a row of the table, also where it has no query."
        )
    return rows


def checked_offsets(name: str, offsets: object, num_rows: int) -> Numbers:
    """Return `offsets` [B + 1]: the first of `num_rows` rows of each sequence, and the end."""
    advice = f"{name} are the first row of each sequence and the end of the last one."
    ends = _numbers(name, offsets, advice)
    if len(ends) == 0:
        raise ArgumentError(f"{name} must hold at least one number, but are empty. {advice}")
    check_never_falls(name, ends, advice)
    if ends[0] < 0 or ends[-1] > num_rows:
        raise ArgumentError(
            f"{name} must be from 0 to {num_rows}, the number of rows, but go from {ends[0]} "
            f"to {ends[-1]}. {advice}"
        )
    return ends


def checked_lengths(names: tuple[str, str], lengths: object, room: Numbers) -> Numbers:
    """Return `lengths` [B], the number of rows of each sequence, each at most its `room` [B]."""
    advice = (
        f"{names[1]} are how many rows each sequence has, at most up to the next of {names[0]}."
    )
    return checked_counts(names[1], lengths, room, advice=advice)


def checked_counts(
    name: str, counts: object, limits: Numbers, reason: str = "", advice: str = ""
) -> Numbers:
    """Return `counts` [B], one number per sequence, each at most its limit; `reason` tells why."""
    advice = advice or f"Give one for each of {len(limits)} sequences."
    given = _numbers(name, counts, advice)
    if len(given) != len(limits):
        raise ArgumentError(
            f"{name} must hold a number for each of {len(limits)} sequences, but hold "
            f"{len(given)}. {advice}"
        )
    wrong = np.flatnonzero((given < 0) | (given > limits))
    if len(wrong):
        at = int(wrong[0])
        why = f", {reason}" if reason else ""
        raise ArgumentError(
            f"{name}[{at}] must be from 0 to {limits[at]}{why}, but is {given[at]}. {advice}"
        )
    return given


def first_positions(start: object, q_lengths: Numbers, kv_lengths: Numbers) -> Numbers:
    """Return the position [B] of each first query: `start`, or the last is at the last key."""
    if start is None:
        at_the_end: Numbers = np.maximum(kv_lengths - q_lengths, 0)
        return at_the_end
    advice = "Give one position for all sequences, or one for each."
    given = _numbers("q_start", start, advice, ranks=(0, 1))
    if given.ndim and len(given) != len(q_lengths):
        raise ArgumentError(
            f"q_start must hold a position for each of {len(q_lengths)} sequences, but holds "
            f"{len(given)}. {advice}"
        )
    for position in (given.min(), given.max()) if given.size else ():
        check_position("q_start", int(position))
    return np.broadcast_to(given, q_lengths.shape)


def _numbers(name: str, values: object, advice: str, ranks: tuple[int, ...] = (1,)) -> Numbers:
    """Return a copy of the user's integers."""
    tensor: Tensor = tensor_of("integers", name, values, ranks=ranks, advice=advice)
    check_kind(name, tensor)
    check_unmapped(name, tensor)
    if tensor.is_meta:
        raise DeviceError(
            f"{name} must hold numbers, but are on the meta device, which holds none. {advice}"
        )
    if in_transform():  # a wrapped tensor has no numpy()
        return np.array(tensor.tolist(), np.int64)
    numbers: Numbers = tensor.detach().cpu().numpy().astype(np.int64)
    return numbers


# --- pages ----------------------------------------------------------------------------------------


MOST_BYTES = 2**16
"""The largest size of a table that is compared by content."""

HOLE = -1
"""An entry of a page table: the sequence has no keys at the positions of that page."""

_ADVICE = "A row holds the pages of one sequence, in the order of its positions."


Content: TypeAlias = tuple[tuple[int, ...], tuple[object, ...]]
"""The sizes of a call, and the bytes of its tables."""


@dataclass(frozen=True, eq=False)
class Holes:
    """Which pages of sequences with holes between them are there: bool [B, most].

    `pages` are the places of these in the whole table, ascending: b * most + column.
    """

    there: Tensor
    pages: Numbers


class ReadTables(NamedTuple):
    """The content of checked tables: the sequences, and the page table as int32 [B, most].

    If some sequence has holes between its pages, the table has some page of it there, and `holes`
    says that it is not to be read. `length` is that of the longest sequence, with all its holes.
    """

    sequences: Sequences
    numbers: Tensor
    length: int
    holes: Holes | None = None


KNOWN: BoundedDict[object, ReadTables] = BoundedDict(16)
"""The tables that were read last, by their content."""


class PageTables(NamedTuple):
    """The user's tables of paged memory, see `Paged`."""

    page_table: Tensor
    lengths: object
    first_page: object

    def checked(self, num_pages: int, page: int) -> tuple[Filled, Numbers]:
        """Return the tables without holes, and the length of each sequence [B] with its holes."""
        tensor = tensor_of("integers", "page_table", self.page_table, ranks=(2,), advice=_ADVICE)
        check_kind("page_table", tensor)
        count, most = tensor.shape
        limits = np.full(count, most * page)
        ends = checked_counts("lengths", self.lengths, limits, f"{most} pages of {page} rows")
        begins = np.zeros_like(ends)
        if self.first_page is not None:
            pages = -(-ends // page)
            first = checked_counts("first_page", self.first_page, pages, "as many as it has pages")
            begins = np.minimum(first * page, ends)
        with outside_transforms():
            if tensor.dtype != torch.int32:
                tensor = tensor.long().clamp(-2, 2**31 - 1).to(torch.int32)
            table = tensor.contiguous()
            _check_pages(table.numpy(), num_pages, begins // page, -(-ends // page))
            return fill(table, begins, ends, page), ends


def _check_pages(numbers: NDArray[np.int32], num_pages: int, first: Numbers, last: Numbers) -> None:
    """Raise if an entry from `first` [B] up to `last` [B] is neither a page nor a hole, -1."""
    if not numbers.size or (numbers.min() >= HOLE and numbers.max() < num_pages):
        return
    column = np.arange(numbers.shape[1])
    used = (column >= first[:, None]) & (column < last[:, None])
    wrong = np.argwhere(used & ((numbers < HOLE) | (numbers >= num_pages)))
    if len(wrong):
        b, at = wrong[0].tolist()
        raise ArgumentError(
            f"page_table[{b}, {at}] must be one of the {num_pages} pages, or -1 for a hole, but is "
            f"{numbers[b, at]}. {_ADVICE}"
        )


class Filled(NamedTuple):
    """Tables without holes: the page table, first and end of each sequence, and where holes were.

    page table       -1   4  -1   7   2  -1        begins with page 1, ends with page 4
    filled           -1   4   4   7   2  -1        there    0  1  0  1  1  0
    """

    table: Tensor
    begins: Numbers
    ends: Numbers
    holes: Holes | None = None


def fill(table: Tensor, begins: Numbers, ends: Numbers, page: int) -> Filled:
    """Return the tables without their holes.

    Holes before the first page of a sequence and after its last one only change where it begins
    and ends. Holes between pages get a page of the sequence, so that every entry is valid.
    """
    numbers = table.numpy()
    there = numbers != HOLE
    pages = np.flatnonzero(there)
    if len(pages) == numbers.size:
        return Filled(table, begins, ends)
    most = numbers.shape[1]
    row, column = np.divmod(pages, most)
    used = (column >= (begins // page)[row]) & (column * page < ends[row])
    if not used.all():
        there.ravel()[pages[~used]] = False
        pages, row, column = pages[used], row[used], column[used]
    bounds = np.searchsorted(row, np.arange(len(numbers) + 1))
    some = bounds[1:] > bounds[:-1]
    first, last = (column[x[some]] for x in (bounds[:-1], bounds[1:] - 1))
    begin, end = np.zeros_like(begins), np.zeros_like(ends)
    begin[some] = np.maximum(begins[some], first * page)
    end[some] = np.minimum(ends[some], (last + 1) * page)
    if int((last - first).sum()) + len(first) == len(pages):
        return Filled(table, begin, end)
    filled = np.zeros_like(numbers)
    filled[some] = numbers[some, first][:, None]
    filled.ravel()[pages] = numbers.ravel()[pages]
    return Filled(torch.from_numpy(filled), begin, end, Holes(torch.from_numpy(there), pages))


_last: BoundedDict[int, bytes] = BoundedDict(16)
"""The content of tables by their addresses, as it was when they were read last."""


def content_of(tables: PageTables, sizes: tuple[int, ...]) -> Content | None:
    """Return the bytes of all tables, with `sizes`; None if they are large or not contiguous."""
    table = tables.page_table
    if not isinstance(table, Tensor) or table.dtype is not torch.int32 or table.dim() != 2:
        return None
    parts: list[object] = []
    for numbers in tables:
        if numbers is None:
            parts.append(None)
        elif is_ordinary(numbers) and numbers.is_contiguous() and numbers.nbytes <= MOST_BYTES:
            address = numbers.data_ptr()
            content = ctypes.string_at(address, numbers.nbytes)
            last = _last.get(address)
            if last == content:
                content = last  # it knows its hash, which takes longer than a comparison
            else:
                _last.keep(address, content)
            parts += (numbers.shape, numbers.dtype, content)
        else:
            return None
    return sizes, tuple(parts)


def packed(rows: Tensor) -> Tensor:
    """Return rows [total, H, ...] as [1, H, total, ...]; a 1-D tensor is returned as it is."""
    return rows.transpose(0, 1).unsqueeze(0) if rows.dim() > 1 else rows


def unpacked(entry: Tensor) -> Tensor:
    """Return rows [1, H, total, ...] as [total, H, ...]."""
    return entry[0].transpose(0, 1)
