"""Handles of sequences, and rows that are reserved but not written yet.

row of the tables    0   1   2
handles              a   .   c        b was freed: the next sequence gets its row,
lengths              9   0   4        and calls with the handle b raise from then on
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from quire.checks.arguments import whole_number
from quire.errors import ArgumentError, SequenceError, ShapeError, UnwrittenRowsError
from quire.memory.tables import Numbers
from quire.runtime.append import SlotWriter

MOST_TOKENS = 1 << 40  # of one sequence in one call, so that sums do not overflow


@dataclass(slots=True, eq=False)
class SequenceHandle:
    """A sequence of a cache. The handle is invalid once the sequence is freed."""

    row: int
    serial: int  # the number of sequences that the cache made before this one


class Rows:
    """Reserved rows for new tokens of some sequences. Each layer writes them once."""

    def __init__(
        self,
        roster: Roster,
        sequences: Sequence[SequenceHandle],
        lengths: Numbers,
        num_tokens: int,
        waiting: dict[int, SlotWriter],
    ) -> None:
        self.roster = roster
        self.num_tokens = num_tokens
        self.waiting = waiting  # for each layer that has not written yet, what writes its rows
        self._sequences, self._lengths = list(sequences), lengths
        self._open = True
        if num_tokens:
            roster.unwritten.append(self)

    @functools.cached_property
    def before(self) -> dict[SequenceHandle, int]:
        """The length that each sequence had before these rows were reserved."""
        return dict(zip(self._sequences, self._lengths.tolist(), strict=True))

    def expect_layer(self, layer: int, roster: Roster) -> SlotWriter:
        """Return what writes the rows of a layer. Raise if they are not this layer's to write."""
        if self.roster is not roster:
            raise SequenceError(
                "rows must come from extend of this cache, but come from another cache. Write them "
                "there."
            )
        if layer not in self.waiting:
            why = "it has written them" if self._open else "they were truncated or freed"
            raise UnwrittenRowsError(
                f"rows must be reserved by extend and not yet written in layer {layer}, but {why}. "
                f"Extend the sequences, and write each layer once."
            )
        return self.waiting[layer]

    def done(self, layer: int) -> None:
        """Note that a layer has written the rows."""
        del self.waiting[layer]
        if not self.waiting:
            self.all_done()

    def all_done(self) -> None:
        """Note that all layers have written the rows."""
        self.waiting = {}
        if self.num_tokens:
            self.roster.unwritten.remove(self)

    def give_up(self, sequence: SequenceHandle) -> None:
        """Cancel the rows for all sequences, since `sequence` is truncated or freed."""
        self._open, self.waiting = False, {}
        del self.before[sequence]
        if not self.before:
            self.roster.unwritten.remove(self)


class Roster:
    """The handles and lengths of all sequences of a cache, by their rows in the tables."""

    def __init__(self) -> None:
        self.lengths: Numbers = np.zeros(0, np.int64)
        self._handles: list[SequenceHandle | None] = []
        self._free: list[int] = []
        self._num_made = 0
        self.unwritten: list[Rows] = []  # rows that some layers have not written yet
        # The last argument and result of `rows`: the next step asks for the same sequences.
        self._known: tuple[list[SequenceHandle], Numbers] = [], np.zeros(0, np.int64)

    def __len__(self) -> int:
        """The number of rows, including free ones."""
        return len(self._handles)

    @property
    def living(self) -> list[SequenceHandle]:
        """The sequences that are not freed."""
        return [handle for handle in self._handles if handle is not None]

    def add(self) -> SequenceHandle:
        """Return a new sequence without tokens."""
        if not self._free:
            self._free.append(len(self._handles))
            self._handles.append(None)
            self.lengths = np.append(self.lengths, 0)
        handle = SequenceHandle(self._free.pop(), self._num_made)
        self._num_made += 1
        self._handles[handle.row] = handle
        return handle

    def remove(self, sequence: SequenceHandle) -> None:
        """Free the row of a sequence."""
        self._handles[sequence.row] = None
        self.lengths[sequence.row] = 0
        self._free.append(sequence.row)
        self._known = [], np.zeros(0, np.int64)

    def row(self, sequence: SequenceHandle) -> int:
        """Return the row of a sequence. Raise if it was freed or belongs to another cache."""
        known = isinstance(sequence, SequenceHandle) and sequence.row < len(self._handles)
        if not known or self._handles[sequence.row] is not sequence:
            raise SequenceError(
                f"sequence must be one that this cache holds, but {sequence!r} was freed or "
                f"belongs to another cache. Make a new one with cache.sequence()."
            )
        return sequence.row

    def rows(self, sequences: Sequence[SequenceHandle]) -> Numbers:
        """Return the rows of several sequences, which must all be different."""
        wanted = list(sequences)
        if wanted != self._known[0]:
            rows = list(map(self.row, wanted))
            if len(set(rows)) < len(rows):
                raise SequenceError(
                    "each sequence must be given once, but one is given twice. Leave one out."
                )
            self._known = wanted, np.array(rows, np.int64)
        return self._known[1]

    def unwritten_of(self, sequence: SequenceHandle) -> Rows | None:
        """The reserved rows of a sequence that some layers have not written, or None."""
        return next((rows for rows in self.unwritten if sequence in rows.before), None)

    def refuse_unwritten(self, sequences: Iterable[SequenceHandle]) -> None:
        """Raise if one of the sequences has rows that some layers have not written."""
        if not self.unwritten:
            return
        for sequence in sequences:
            rows = self.unwritten_of(sequence)
            if rows is not None:
                before = rows.before[sequence]
                raise UnwrittenRowsError(
                    f"all rows of a sequence must be written in every layer, but those from "
                    f"position {before} on are not. Write them in the layers that are left, or "
                    f"truncate the sequence to {before}."
                )

    def give_up(self, sequence: SequenceHandle) -> None:
        """Cancel the rows that one `extend` reserved, for all its sequences."""
        rows = self.unwritten_of(sequence)
        if rows is not None:
            rows.give_up(sequence)


def token_counts(counts: Sequence[int] | int, num_sequences: int) -> Numbers:
    """Return a number of tokens for each sequence."""
    return one_each("counts", counts, num_sequences, "Say how many tokens a sequence gets.")


def counts_of(tokens: int, counts: Sequence[int] | int | None, num_sequences: int) -> Numbers:
    """Return how many of `tokens` each sequence gets; equally many if `counts` is None."""
    equal = tokens // max(1, num_sequences)
    number = token_counts(equal if counts is None else counts, num_sequences)
    if int(number.sum()) != tokens:
        raise ShapeError(
            f"key must have {int(number.sum())} tokens, as the counts of {num_sequences} sequences "
            f"add up to, but has {tokens}. Give counts that add up to the tokens."
        )
    return number


def one_each(name: str, given: object, num_sequences: int, advice: str) -> Numbers:
    """Return a number for each sequence. `given` is one number for all, or one for each."""
    each = listed(given)
    if each is not None and len(each) != num_sequences:
        raise ShapeError(
            f"{name} must have a number for each of {num_sequences} sequences, but has "
            f"{len(each)}. Give one number for all, or one for each."
        )
    numbers = [
        whole_number(name, number, minimum=0, advice=advice)
        for number in ([given] if each is None else each)
    ]
    if max(numbers, default=0) > MOST_TOKENS:
        raise ArgumentError(
            f"{name} must be at most {MOST_TOKENS:,}, but is {max(numbers)}. Give the number of "
            f"tokens that there are."
        )
    if each is None:
        return np.full(num_sequences, numbers[0], np.int64)
    return np.array(numbers, np.int64)


def listed(given: object) -> list[object] | None:
    """Return `given` as a list, or None if it is not a sequence: a number, or a 0-D tensor."""
    try:
        return list(given)  # type: ignore[call-overload, no-any-return]  # it raises for other types
    except TypeError:
        return None
