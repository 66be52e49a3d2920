"""How the queries of a backward pass are cut into slices, and how the sums of slices are added.

    queries   |  slice 0  |  slice 1  |  slice 2  | ...      a multiple of BLOCK_Q queries each
    sums      ((s0 + s1) + s2) + ...                         each begins at zero

A gradient of a key is a sum over queries. Where slices begin follows from the number of queries
alone. So neither threads nor the batch change a bit, nor does it matter which process computes a
slice (`quire.distributed`).

If there are enough sequences and heads for all threads, a share is all slices of one, and the
kernel adds them. Otherwise a share is one slice, and `SumsOfRows` adds them.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.codegen.contract import ALIGNED
from quire.codegen.convention import BLOCK_Q
from quire.memory import One, Placed
from quire.memory.tables import Sequences
from quire.runtime.launch import record, table_of

Numbers: TypeAlias = NDArray[np.int64]

MOST_SLICES = 64
FEWEST_QUERIES = 4 * BLOCK_Q
EVEN = 1.1
"""Threads are busy alike if the last one ends at most so much later than the mean."""
ALL_BLOCKS = 2**40  # of a slice that is not cut
SHARES_OF_THREAD = 4  # at least, if a share is one slice


def slice_size(q_len: int) -> int:
    """Return the number of queries of a slice."""
    size = FEWEST_QUERIES
    while size * MOST_SLICES < q_len:
        size *= 2
    return size


class Slices(NamedTuple):
    """The slices of each sequence: how many queries one has, and how many there are."""

    sizes: tuple[int, ...]
    counts: tuple[int, ...]

    @staticmethod
    def of(lengths: list[int], size: int | None = None) -> Slices:
        """Return the slices of sequences with so many queries; `size` queries each, if given."""
        sizes = [slice_size(q_len) if size is None else size for q_len in lengths]
        counts = [max(1, -(-q_len // size)) for q_len, size in zip(lengths, sizes, strict=True)]
        return Slices(tuple(sizes), tuple(counts))

    @property
    def most(self) -> int:
        """Return the number of slices of the sequence that has most."""
        return max(self.counts, default=1)


class Round(NamedTuple):
    """Some shares: of sequences [b, b_stop), key heads [h, h_stop), slices [s, s_stop)."""

    b: int
    b_stop: int
    h: int
    h_stop: int
    s: int
    s_stop: int


class SliceShares(NamedTuple):
    """How the slices of a pass become shares: all slices of a sequence, or `together` at a time."""

    whole: bool
    together: int

    @staticmethod
    def of(most: int, sequences: float, threads: int) -> SliceShares:
        """Return the division of at most so many slices of each of `sequences`, all heads counted.

        If they are not alike, `sequences` is the work of all over that of the largest.
        """
        turns = -(-sequences // threads)
        if most == 1 or threads == 1 or turns * threads <= EVEN * sequences:
            return SliceShares(whole=True, together=most)
        wanted = -(-SHARES_OF_THREAD * threads // max(1.0, sequences))
        return SliceShares(whole=False, together=min(most, int(wanted)))

    def within(
        self, size: Callable[[AtOnce, int], int], part: AtOnce, limit: int, *, apart: bool
    ) -> tuple[SliceShares, AtOnce]:
        """Return fewer slices at a time, then fewer sequences and heads, so that `size` fits.

        If slices are kept `apart`, all are computed at once. Sequences and heads are divided as if
        there were one, as that decides in which order their sums are added.
        """
        division = self
        while division.together > 1 and not apart and size(part, division.together) > limit:
            division = SliceShares(whole=False, together=-(-division.together // 2))
        slices = 1 if apart else division.together
        while part.batch > 1 and size(part, slices) > limit:
            part = part._replace(batch=-(-part.batch // 2))
        while part.batch == 1 and part.heads > 1 and size(part, slices) > limit:
            part = part._replace(heads=-(-part.heads // 2))
        return division, part

    def rounds(self, slices: Slices, batch: int, key_heads: int, part: AtOnce) -> Iterator[Round]:
        """Yield all shares; at most `part` of the sequences and heads at a time."""
        for s in range(0, slices.most, self.together):
            for b in range(0, batch, max(1, part.batch)):
                for h in range(0, key_heads, max(1, part.heads)):
                    yield Round(
                        b=b,
                        b_stop=min(b + part.batch, batch),
                        h=h,
                        h_stop=min(h + part.heads, key_heads),
                        s=s,
                        s_stop=min(s + self.together, slices.most),
                    )


class AtOnce(NamedTuple):
    """How many sequences and key heads are computed at a time."""

    batch: int
    heads: int


class Shares(NamedTuple):
    """The shares of a round: the table of sequences, and which items of it they are."""

    table: bytes
    first: int
    stop: int
    items: tuple[int, ...]  # of each key head of each sequence of the table

    @staticmethod
    def of(
        rows: One | Sequences, slices: Slices, division: SliceShares, heads: int, part: Round
    ) -> Shares:
        """Return the shares of a round; a sequence has `heads` key heads."""
        if isinstance(rows, One):
            count = 1 if division.whole else part.s_stop - part.s
            size = {"first_slice": part.s, "slice_blocks": slices.sizes[0] // BLOCK_Q}
            table = record(rows, slices=count, **size)
            first, stop = heads * count * part.b, heads * count * part.b_stop
            items = (count,) * part.b_stop
        else:
            counts = np.array(slices.counts, np.int64)
            counts = np.ones_like(counts) if division.whole else counts - part.s
            counts = counts.clip(0, part.s_stop - part.s)
            blocks = np.array(slices.sizes, np.int64) // BLOCK_Q
            if (part.b, part.b_stop) == (0, rows.num):
                order = rows.largest_first()
                counts, blocks, rows = counts[order], blocks[order], rows.where(order)
            ends, items = np.cumsum(heads * counts), tuple(counts.tolist())
            columns = {"slices": counts, "slice_blocks": blocks}
            columns["first_slice"] = np.full_like(counts, part.s)
            table = table_of(rows, ends - heads * counts, columns)
            first, stop = ([0, *ends.tolist()][b] for b in (part.b, part.b_stop))
        if part.h_stop - part.h < heads:
            each = (stop - first) // heads
            first, stop = first + part.h * each, first + part.h_stop * each
        return Shares(table, first, stop, items)

    def slices(self, key_heads: int) -> Numbers:
        """Return the slice of each item, counted from the first of the round. The last is first."""
        each = [np.tile(np.arange(count)[::-1], key_heads) for count in self.items]
        return np.concatenate(each) if each else np.zeros(0, np.int64)


def in_pages(total: Tensor, placed: Placed, like: Tensor) -> Tensor:
    """Return sums by position [B, H, positions, D] added up in pages, which may be shared."""
    table, sequences = placed.page_table, placed.sequences
    assert table is not None, "keys must be in pages"
    num_pages, heads, size, _ = like.shape
    rows = total.new_zeros(num_pages * size, heads, total.shape[-1])
    for b, (begin, end) in enumerate(zip(sequences.kv_begin, sequences.kv_end, strict=True)):
        positions = torch.arange(int(begin), int(end), device=table.device)
        at = table[b, positions // size].long() * size + positions % size
        rows.index_add_(0, at, total[b, :, positions].transpose(0, 1))
    return rows.view(num_pages, size, heads, -1).transpose(1, 2)


class Touched:
    """The rows of keys that each slice of a round has added to."""

    def __init__(self) -> None:
        self._ends: dict[int, tuple[int, int]] = {}

    def note(self, slices: Numbers, rows: Numbers) -> None:
        """Take in the rows [first, end) that shares of these slices have touched."""
        for number in set(slices.tolist()):
            found = rows[(slices == number) & (rows[:, 0] < rows[:, 1])]
            if len(found):
                first, end = self._ends.get(number, (found[0, 0], 0))
                low, high = found[:, 0].min(), found[:, 1].max()
                self._ends[number] = int(min(first, low)), int(max(end, high))

    def __getitem__(self, number: int) -> slice:
        return slice(*self._ends.get(number, (0, 0)))


def untouched_zeros(size: int) -> Tensor:
    """Return bytes of 0 that take memory only where something is written to them; see calloc."""
    memory = torch.from_numpy(np.zeros(size + ALIGNED, np.uint8))
    first = -memory.data_ptr() % ALIGNED
    return memory[first : first + size]


class KeptMemory:
    """Memory for keys and values, or for their sums, that passes use one after another.

    New memory is slow when it is first touched, above all where a virtual machine gets it from its
    host.
    """

    def __init__(self) -> None:
        self._free: deque[Tensor] = deque(maxlen=2)  # for keys and for values

    def take(self, size: int) -> Tensor:
        """Return at least `size` bytes as they were given back; new ones are 0."""
        while self._free:
            with contextlib.suppress(IndexError):  # another thread took it
                memory = self._free.popleft()
                if memory.nbytes >= size:
                    return memory
        return untouched_zeros(size)

    def give_back(self, memory: Tensor) -> None:
        """Keep memory for the next pass."""
        self._free.append(memory)


class SumsOfRows:
    """Sums for the rows of keys or values: [slices, B, H, rows, columns], and their total.

    If a share is all slices, the kernel adds them, and there is one slice here.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, kept: KeptMemory | None = None
    ) -> None:
        size = math.prod(shape) * dtype.itemsize
        self.memory = untouched_zeros(size) if kept is None else kept.take(size)
        self.sums = self.memory[:size].view(dtype).view(shape)
        self._total: Tensor | None = None

    def add_slices(self, touched: Touched, *, last: bool) -> None:
        """Add the slices of a round, in order."""
        first = int(self._total is None)
        if self._total is None:
            self._total = self.sums[0] if last else self.sums[0].clone()
        for number, part in enumerate(self.sums[first:], first):
            self._total[:, :, touched[number]] += part[:, :, touched[number]]
        if not last:
            self.clear(touched)

    def clear(self, touched: Touched) -> None:
        """Begin at zero again."""
        for number, part in enumerate(self.sums):
            part[:, :, touched[number]] = 0

    @property
    def total(self) -> Tensor:
        """Return the sums over all slices."""
        return self.sums[0] if self._total is None else self._total


class Taking(NamedTuple):
    """Somebody who adds up slices of `size` queries himself, `at_once` at a time.

    After each round, `take` gets it and the sums of keys and values: [slices, b, key heads, rows,
    columns]. All slices of a sequence are in one round. `at_once` decides nothing if captured
    tensors have gradients, since it would decide in which order these are added.
    """

    size: int
    at_once: AtOnce
    take: Callable[[Round, dict[str, Tensor]], None]
    kept: KeptMemory  # the memory of the sums, which is 0 between passes

    def fields(
        self, fields: dict[str, int | float], sums: dict[str, SumsOfRows], part: Round
    ) -> dict[str, int | float]:
        """Return the fields of a round, whose sums all rounds share."""
        moved = {}
        for name, each in ((f"grad_{name}", each) for name, each in sums.items()):
            before = part.b * fields[f"{name}_batch"] + part.h * fields[f"{name}_head"]
            moved[name] = fields[name] - before * each.sums.itemsize
        return fields | moved

    def end(
        self, sums: dict[str, SumsOfRows], part: Round, touched: Touched, *, last: bool
    ) -> None:
        """Let the sums of a round be taken, and begin at zero again."""
        size = (slice(None), slice(part.b_stop - part.b), slice(part.h_stop - part.h))
        self.take(part, {name: each.sums[size] for name, each in sums.items()})
        for each in sums.values():
            each.clear(touched)
            if last:
                self.kept.give_back(each.memory)
