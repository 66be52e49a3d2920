"""Tables of sequences: where the rows of each are, which positions they stand for, which pages.

offsets = [0, 5, 5, 12]    three sequences: rows 0 to 4, none, rows 5 to 11
lengths = [3, 0, 7]        of which the first has only rows 0 to 2; rows 3 and 4 are a hole
"""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.checks import check_kind
from quire.checks.arguments import tensor_of
from quire.errors import ArgumentError, DeviceError
from quire.support.bounded import BoundedDict
from quire.support.torch_private import in_transform, is_ordinary

Numbers: TypeAlias = NDArray[np.int64]


class Sequences(NamedTuple):
    """A table with an entry for each sequence in every column.

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
        """A single sequence, whose rows begin with the tensors'."""
        columns = np.array([b, q_len, q_start, kv_begin, kv_end, 0, -kv_begin])
        return Sequences(*columns.reshape(-1, 1))

    @property
    def num(self) -> int:
        """How many there are."""
        return len(self.b)

    @property
    def kv_len(self) -> Numbers:
        """How many keys each has."""
        return self.kv_end - self.kv_begin

    def where(self, chosen: NDArray[np.bool_] | NDArray[np.int64]) -> Sequences:
        """Those that are chosen, by truth values or in the order of their places."""
        return Sequences(*(column[chosen] for column in self))

    def largest_first(self) -> Numbers:
        """The places of the sequences in the order in which threads should take them."""
        order: Numbers = np.argsort(-self.q_len * self.kv_len, kind="stable")
        return order

    def unowned(self, num_rows: int) -> NDArray[np.bool_] | None:
        """Which rows of the query belong to no sequence; None where all belong to one."""
        if int(self.q_len.sum()) == num_rows:
            return None
        steps = np.zeros(num_rows + 1, np.int64)
        np.add.at(steps, self.q_row, 1)
        np.add.at(steps, self.q_row + self.q_len, -1)
        holes: NDArray[np.bool_] = np.cumsum(steps[:-1]) == 0
        return holes


class Spans(NamedTuple):
    """The first row of each sequence, and how many rows it has."""

    first: Numbers
    lengths: Numbers


def spans(names: tuple[str, str], offsets: object, lengths: object, num_rows: int) -> Spans:
    """Where sequences are in `num_rows` rows; `names` are what the user calls offsets, lengths."""
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


def checked_offsets(name: str, offsets: object, num_rows: int) -> Numbers:
    """Where sequences begin and the last one ends, in `num_rows` rows."""
    advice = f"{name} are the first row of each sequence and the end of the last one."
    ends = _numbers(name, offsets, advice)
    if len(ends) == 0:
        raise ArgumentError(f"{name} must hold at least one number, but are empty. {advice}")
    falls = np.flatnonzero(ends[1:] < ends[:-1])
    if len(falls):
        at = int(falls[0])
        raise ArgumentError(
            f"{name} must not fall, but {ends[at]} is followed by {ends[at + 1]} at place "
            f"{at + 1}. {advice}"
        )
    if ends[0] < 0 or ends[-1] > num_rows:
        raise ArgumentError(
            f"{name} must be from 0 to {num_rows}, the number of rows, but go from {ends[0]} "
            f"to {ends[-1]}. {advice}"
        )
    return ends


def checked_lengths(names: tuple[str, str], lengths: object, room: Numbers) -> Numbers:
    """How many rows each sequence has, `room` being how many it may have."""
    return checked_counts(
        *(names[1], lengths, room),
        advice=f"{names[1]} are how many rows each sequence has, at most up to the next of "
        f"{names[0]}.",
    )


def checked_counts(
    name: str, counts: object, room: Numbers, reason: str = "", advice: str = ""
) -> Numbers:
    """One number for each sequence, from 0 up to its `room`, for a `reason`."""
    advice = advice or f"Give one for each of {len(room)} sequences."
    given = _numbers(name, counts, advice)
    if len(given) != len(room):
        raise ArgumentError(
            f"{name} must hold a number for each of {len(room)} sequences, but hold {len(given)}. "
            f"{advice}"
        )
    wrong = np.flatnonzero((given < 0) | (given > room))
    if len(wrong):
        at = int(wrong[0])
        why = f", {reason}" if reason else ""
        raise ArgumentError(
            f"{name}[{at}] must be from 0 to {room[at]}{why}, but is {given[at]}. {advice}"
        )
    return given


def first_positions(start: object, q_lengths: Numbers, kv_lengths: Numbers) -> Numbers:
    """The position of each sequence's first query: `start`, or so that the last is at the end."""
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
    if given.size and given.min() < 0:
        raise ArgumentError(
            f"q_start must not be negative, but holds {given.min()}. Count tokens from the first "
            f"of the sequence."
        )
    return np.broadcast_to(given, q_lengths.shape)


def _numbers(name: str, values: object, advice: str, ranks: tuple[int, ...] = (1,)) -> Numbers:
    """Integers of the user's, as they are now."""
    tensor: Tensor = tensor_of("integers", name, values, ranks=ranks, advice=advice)
    check_kind(name, tensor)
    if tensor.is_meta:
        raise DeviceError(
            f"{name} must hold numbers, but are on the meta device, which holds none. {advice}"
        )
    if in_transform():  # which wraps every tensor
        return np.array(tensor.tolist(), np.int64)
    numbers: Numbers = tensor.detach().cpu().numpy().astype(np.int64)
    return numbers


# --- pages ----------------------------------------------------------------------------------------


MOST_BYTES = 2**16
"""The size of a table up to which it is known by its content."""

_ADVICE = "A row holds the pages of one sequence, in the order of its positions."


Content: TypeAlias = tuple[tuple[int, ...], tuple[object, ...]]
"""The sizes of a call, and all that its tables hold."""


class ReadTables(NamedTuple):
    """Tables that were checked: the sequences, and the page table as int32 [B, most]."""

    sequences: Sequences
    numbers: Tensor


KNOWN: BoundedDict[object, ReadTables] = BoundedDict(16)
"""What tables came to, by their content."""


class PageTables(NamedTuple):
    """The tables of paged memory as the user gave them, see `Paged`."""

    page_table: Tensor
    lengths: object
    first_page: object

    def checked(self, num_pages: int, page: int) -> tuple[Tensor, Numbers, Numbers]:
        """The page table as int32 [B, most], and where the keys of each sequence begin and end."""
        tensor = tensor_of("integers", "page_table", self.page_table, ranks=(2,), advice=_ADVICE)
        check_kind("page_table", tensor)
        count, most = tensor.shape
        room = np.full(count, most * page)
        ends = checked_counts("lengths", self.lengths, room, f"{most} pages of {page} rows")
        begins = np.zeros_like(ends)
        if self.first_page is not None:
            pages = -(-ends // page)
            first = checked_counts("first_page", self.first_page, pages, "as many as it has pages")
            begins = np.minimum(first * page, ends)
        if tensor.dtype != torch.int32:
            tensor = tensor.long().clamp(-1, 2**31 - 1).to(torch.int32)
        table = tensor.contiguous()
        _check_pages(table.numpy(), num_pages, begins // page, -(-ends // page))
        return table, begins, ends


def _check_pages(numbers: NDArray[np.int32], num_pages: int, first: Numbers, last: Numbers) -> None:
    """Refuse a page that does not exist, among those from `first` up to `last` of a sequence."""
    if not numbers.size or (numbers.min() >= 0 and numbers.max() < num_pages):
        return
    place = np.arange(numbers.shape[1])
    used = (place >= first[:, None]) & (place < last[:, None])
    wrong = np.argwhere(used & ((numbers < 0) | (numbers >= num_pages)))
    if len(wrong):
        b, at = wrong[0].tolist()
        raise ArgumentError(
            f"page_table[{b}, {at}] must be one of the {num_pages} pages, but is "
            f"{numbers[b, at]}. {_ADVICE}"
        )


def content_of(tables: PageTables, sizes: tuple[int, ...]) -> Content | None:
    """All that tables hold, for a call of such sizes; None where it cannot be told, or is large."""
    table = tables.page_table
    if (
        not is_ordinary(table)
        or table.dtype != torch.int32
        or table.dim() != 2
        or not table.is_contiguous()
    ):
        return None
    parts: list[object] = []
    for numbers in tables:
        if numbers is None:
            parts.append(None)
        elif is_ordinary(numbers) and numbers.nbytes <= MOST_BYTES:
            parts += (numbers.shape, numbers.dtype, numbers.numpy().tobytes())
        else:
            return None
    return sizes, tuple(parts)
