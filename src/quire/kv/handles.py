"""Handles of sequences, and the rows that are made room for: who may be asked for what.

row of the tables    0   1   2
handles              a   .   c        b was freed: its row is given to the next sequence,
lengths              9   0   4        and b itself is refused from then on
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import numpy as np

from quire.checks.arguments import whole_number
from quire.errors import ArgumentError, SequenceError, ShapeError, UnwrittenRowsError
from quire.kv.table import Numbers
from quire.runtime.append import SlotWriter

MOST_TOKENS = 1 << 40  # of one sequence in one call: more would overflow what they add up to


class SequenceHandle:
    """A sequence of a cache. It means nothing once it is freed."""

    __slots__ = ("row", "serial")

    def __init__(self, row: int, serial: int) -> None:
        self.row = row
        self.serial = serial  # how many sequences the cache has made before


class Rows:
    """Room for new tokens of some sequences, to be written once in each layer."""

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
        self.waiting = waiting  # where each layer that has not written yet will do so
        self._sequences, self._lengths = list(sequences), lengths
        self._open = True
        if num_tokens:
            roster.unwritten.append(self)

    @functools.cached_property
    def before(self) -> dict[SequenceHandle, int]:
        """How many tokens sequences had that these rows are still to be written of."""
        return dict(zip(self._sequences, self._lengths.tolist(), strict=True))

    def expect_layer(self, layer: int, roster: Roster) -> SlotWriter:
        """Where a layer of the cache with this roster writes, or an error if it may not now."""
        if self.roster is not roster:
            raise SequenceError(
                "expected rows that extend of this cache made room for, got some of another cache. "
                "Write them there."
            )
        if layer not in self.waiting:
            why = "this layer has written" if self._open else "were truncated or freed"
            raise UnwrittenRowsError(
                f"expected rows that extend made room for and that layer {layer} waits for, got "
                f"some that {why}. Extend the sequences, and write each layer once."
            )
        return self.waiting[layer]

    def done(self, layer: int) -> None:
        """A layer has written them."""
        del self.waiting[layer]
        if not self.waiting:
            self.all_done()

    def all_done(self) -> None:
        """All layers have written them."""
        self.waiting = {}
        if self.num_tokens:
            self.roster.unwritten.remove(self)

    def give_up(self, sequence: SequenceHandle) -> None:
        """Nobody may write them any more, since those of one sequence are gone."""
        self._open, self.waiting = False, {}
        del self.before[sequence]
        if not self.before:
            self.roster.unwritten.remove(self)


class Roster:
    """The sequences of a cache: their handles and lengths, by their rows in the tables."""

    def __init__(self) -> None:
        self.lengths: Numbers = np.zeros(0, np.int64)
        self._handles: list[SequenceHandle | None] = []
        self._free: list[int] = []
        self._num_made = 0
        self.unwritten: list[Rows] = []  # some of whose sequences wait for some of their layers
        # The sequences that were asked for last, which the next step asks for again.
        self._known: tuple[list[SequenceHandle], Numbers] = [], np.zeros(0, np.int64)

    def __len__(self) -> int:
        """How many rows there are, free ones among them."""
        return len(self._handles)

    @property
    def living(self) -> list[SequenceHandle]:
        """The sequences that are not freed."""
        return [handle for handle in self._handles if handle is not None]

    def add(self) -> SequenceHandle:
        """A sequence without tokens."""
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
        """The row of a sequence that is not freed."""
        known = isinstance(sequence, SequenceHandle) and sequence.row < len(self._handles)
        if not known or self._handles[sequence.row] is not sequence:
            raise SequenceError(
                f"expected a sequence that this cache holds, got {sequence!r}, which was freed or "
                f"belongs to another cache. cache.sequence() makes a new one."
            )
        return sequence.row

    def rows(self, sequences: Sequence[SequenceHandle]) -> Numbers:
        """The rows of several sequences."""
        wanted = list(sequences)
        if wanted != self._known[0]:
            rows = list(map(self.row, wanted))
            if len(set(rows)) < len(rows):
                raise SequenceError("expected each sequence once, got one twice. Leave one out.")
            self._known = wanted, np.array(rows, np.int64)
        return self._known[1]

    def unwritten_of(self, sequence: SequenceHandle) -> Rows | None:
        """The rows of a sequence that not all layers have written."""
        return next((rows for rows in self.unwritten if sequence in rows.before), None)

    def refuse_unwritten(self, sequences: Iterable[SequenceHandle]) -> None:
        """An error if one of the sequences has rows that not all layers have written."""
        if not self.unwritten:
            return
        for sequence in sequences:
            rows = self.unwritten_of(sequence)
            if rows is not None:
                before = rows.before[sequence]
                raise UnwrittenRowsError(
                    f"expected a sequence whose rows are written in every layer, got one with rows "
                    f"that are not, from position {before} on. Write them in the layers that are "
                    f"left, or truncate the sequence to {before}."
                )

    def give_up(self, sequence: SequenceHandle) -> None:
        """Rows that a sequence waits for are not written any more, by nobody in its batch."""
        rows = self.unwritten_of(sequence)
        if rows is not None:
            rows.give_up(sequence)


def token_counts(counts: Sequence[int] | int, num_sequences: int) -> Numbers:
    """A number of tokens for each sequence."""
    return one_each("counts", counts, num_sequences, "Say how many tokens a sequence gets.")


def one_each(name: str, given: object, num_sequences: int, advice: str) -> Numbers:
    """A number for each sequence: the same for all, or one for each of them."""
    each = listed(given)
    if each is None:
        number = whole_number(name, given, minimum=0, advice=advice)
        _refuse_overflow(name, number)
        return np.full(num_sequences, number, np.int64)
    if len(each) != num_sequences:
        raise ShapeError(
            f"expected {name} for each of {num_sequences} sequences, got {len(each)}. Give one "
            f"number for all, or one for each."
        )
    checked = [whole_number(name, number, minimum=0, advice=advice) for number in each]
    _refuse_overflow(name, max(checked, default=0))
    return np.array(checked, np.int64)


def listed(given: object) -> list[object] | None:
    """What can be listed, or None; a tensor of one number cannot."""
    try:
        return list(given)  # type: ignore[call-overload, no-any-return]  # that is the question
    except TypeError:
        return None


def _refuse_overflow(name: str, number: int) -> None:
    if number > MOST_TOKENS:
        raise ArgumentError(
            f"{name} must be at most {MOST_TOKENS:,}, got {number}. No cache holds as many tokens."
        )
