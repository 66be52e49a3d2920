"""The rows of a batch in a paged cache: which sequence each row is, and what a step adds to it.

tokens of a step         .  .  a  b        padding before the first token is not stored:
origins                  2                 position 3 of transformers is position 1 in pages

rows 0 and 1 are equal: sequences  s  s  t     rows share s until they differ or are extended
beams 1, 1, 0:          sequences  t  t  s     the second t is forked when it is extended
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.errors import ArgumentError
from quire.integrations.transformers.mask import Padding
from quire.kv import PagedKVCache, Rows, SequenceHandle
from quire.memory import Dense, Paged
from quire.memory.tables import Numbers


class WrittenPart(NamedTuple):
    """Reserved rows in pages, and the tokens that are written to them."""

    rows: Rows
    tokens: Tensor | None  # [n] indices into all tokens of the step, [B * L]. None for all of them


@dataclass
class WriteStep:
    """A step: new tokens of every row, which each layer writes in turn."""

    before: int
    count: int
    dropped: Tensor | None  # [B] how many tokens of padding are not stored. None if all are 0
    hides: bool  # whether a mask has to hide padding that is stored
    parts: list[WrittenPart]
    equal: dict[int, int]  # a row that is not written -> the earlier row that it equals
    layers: list[int] = field(default_factory=list)  # that have written


class Written(NamedTuple):
    """What a layer attends to after it has written its tokens."""

    memory: Paged
    step: WriteStep
    origins: Tensor | None  # [B], None if all are 0


class CachedRows:
    """A batch of sequences that grows by the same number of tokens in every row."""

    def __init__(self, pages: PagedKVCache) -> None:
        self.pages = pages
        self.sequences: list[SequenceHandle] = []  # one for each row; rows may share one
        self._origins: Numbers = np.zeros(0, np.int64)
        self._origins_tensor: Tensor | None = None
        self._step: WriteStep | None = None

    # --- a step

    def write(
        self, layer: int, before: int, key: Tensor, value: Tensor | None, padding: Padding | None
    ) -> Written:
        """Write new keys and values [B, Hkv, L, D] of a layer after its `before` earlier tokens.

        There are no values if they are a part of the keys.
        """
        step = self._step
        if step is None or (step.before, step.count) != (before, key.shape[2]):
            step = self._step = self._begin(before, key, value, padding)
        if step.equal:
            self._split(step, layer, key, value)
        flat = [x.transpose(1, 2).flatten(0, 1) for x in (key, value) if x is not None]
        for rows, tokens in step.parts:
            self.pages.write(layer, rows, *(x if tokens is None else x[tokens] for x in flat))
        step.layers.append(layer)
        return Written(self._memory(layer), step, self._origins_tensor)

    def _begin(
        self, before: int, key: Tensor, value: Tensor | None, padding: Padding | None
    ) -> WriteStep:
        batch, _, count, _ = key.shape
        starts = np.zeros(batch, np.int64) if padding is None else padding.starts.numpy()
        equal: dict[int, int] = {}
        if self.sequences:
            self._fit(batch)
        else:
            equal = _equal_rows(key, value, starts)
            self._origins = np.zeros(batch, np.int64)
            for row in range(batch):
                like = equal.get(row)
                new = self.pages.sequence() if like is None else self.sequences[like]
                self.sequences.append(new)
        dropped = np.clip(starts - before, 0, count)
        if dropped.any():  # padding after the first token of a row is stored
            dropped[[self.pages.length(each) > 0 for each in self.sequences]] = 0
        self._move_origins(dropped)
        hides = padding is not None and self._hides(padding, before + count)
        members = [row for row in range(batch) if row not in equal]
        part = self._extend(members, count, dropped)
        gone = torch.from_numpy(dropped) if dropped.any() else None
        return WriteStep(before, count, gone, hides, parts=[part], equal=equal)

    def _extend(self, members: list[int], count: int, dropped: Numbers) -> WrittenPart:
        padded = bool(dropped.any())
        counts = (count - dropped[members]).tolist() if padded else count
        rows = self.pages.extend([self.sequences[row] for row in members], counts)
        if len(members) == len(dropped) and not padded:
            return WrittenPart(rows, None)
        tokens = [np.arange(row * count + dropped[row], (row + 1) * count) for row in members]
        return WrittenPart(rows, torch.from_numpy(np.concatenate(tokens)))

    def _move_origins(self, dropped: Numbers) -> None:
        if dropped.any():
            self._origins = self._origins + dropped
        self._origins_tensor = torch.from_numpy(self._origins) if self._origins.any() else None

    def _hides(self, padding: Padding, end: int) -> bool:
        starts = padding.starts.numpy()
        if (starts < self._origins).any():
            row = int((starts < self._origins).argmax())
            raise ArgumentError(
                f"attention_mask must hide the padding at the start of row {row}, its first "
                f"{self._origins[row]} positions, which are not in the cache, but shows position "
                f"{starts[row]}. Give the mask that the cache was filled with, extended by new "
                f"tokens."
            )
        alike = (starts == self._origins).all() and bool((padding.ends == end).all())
        return not alike or padding.has_gaps

    def _split(self, step: WriteStep, layer: int, key: Tensor, value: Tensor | None) -> None:
        """Give own sequences to rows that were equal in earlier layers and differ in this one."""
        differ = [row for row, like in step.equal.items() if not _alike(key, value, row, like)]
        if not differ:
            return
        originals = [self.sequences[row] for row in differ]
        for row in differ:
            del step.equal[row]
            self.sequences[row] = self.pages.sequence()
        dropped = np.zeros(len(key), np.int64) if step.dropped is None else step.dropped.numpy()
        part = self._extend(differ, step.count, dropped)
        for done in step.layers:
            copies = [self.pages.dense(done, each) for each in originals]
            sides = self.pages.shape.sides
            copied = [[getattr(copy, side)[0].transpose(0, 1) for copy in copies] for side in sides]
            self.pages.write(done, part.rows, *map(torch.cat, copied))
        step.parts.append(part)

    def _memory(self, layer: int) -> Paged:
        distinct = list(dict.fromkeys(self.sequences))
        memory = self.pages.memory(layer, distinct)
        if len(distinct) == len(self.sequences):
            return memory
        places = {sequence: place for place, sequence in enumerate(distinct)}
        chosen = torch.tensor([places[sequence] for sequence in self.sequences])
        view = {"page_table": memory.page_table[chosen]}
        for name in ("lengths", "first_page"):
            numbers = getattr(memory, name)
            if numbers is not None:
                view[name] = torch.as_tensor(numbers)[chosen]
        return replace(memory, **view)

    def copy_of(self, layer: int, width: int) -> Dense:
        """Return a copy of the last `width` positions of each row. Padding before them is 0.

        Of rows that hold latents, the key is the latent, and the value is what follows it.
        """
        held = {each: self.pages.dense(layer, each) for each in dict.fromkeys(self.sequences)}
        rows = [held[each] for each in self.sequences]
        key, value = (
            torch.cat([torch.nn.functional.pad(x, (0, 0, width - x.shape[2], 0)) for x in states])
            for states in ([row.key for row in rows], [row.value for row in rows])
        )
        if self.pages.shape.latent:
            key, value = key.tensor_split((value.shape[3],), dim=3)
        return Dense(key, value)

    # --- rows

    def _fit(self, batch: int) -> None:
        """Repeat rows if a step has more, and give each row its own sequence."""
        have = len(self.sequences)
        if batch != have:
            if batch % have:
                raise ArgumentError(
                    f"a step must have {have} rows, as the cache has, or a multiple, but has "
                    f"{batch}. Use a cache for each batch, or reset it."
                )
            self.select([row for row in range(have) for _ in range(batch // have)])
        seen: set[SequenceHandle] = set()
        for row, sequence in enumerate(self.sequences):
            if sequence in seen:
                self.sequences[row] = self.pages.fork(sequence)
            seen.add(sequence)

    def select(self, rows: Sequence[int]) -> None:
        """Continue with these rows, which may repeat. The pages of the others are released."""
        kept = [self.sequences[row] for row in rows]
        gone = set(self.sequences) - set(kept)
        self.pages.free(*gone)
        self.sequences, self._step = kept, None
        self._origins = self._origins[list(rows)]
        self._move_origins(np.zeros(len(kept), np.int64))

    def truncate(self, count: int) -> None:
        """Drop the last `count` tokens of every row."""
        for sequence in dict.fromkeys(self.sequences):
            self.pages.truncate(sequence, max(0, self.pages.length(sequence) - count))
        self._step = None

    def clear(self) -> None:
        """Drop all rows."""
        self.select([])


def _equal_rows(key: Tensor, value: Tensor | None, starts: Numbers) -> dict[int, int]:
    """Return {row: first of its run} for rows that equal the row before, as samples of a prompt."""
    equal: dict[int, int] = {}
    for row in range(1, len(key)):
        like = equal.get(row - 1, row - 1)
        if starts[row] == starts[like] and _alike(key, value, row, like):
            equal[row] = like
    return equal


def _alike(key: Tensor, value: Tensor | None, row: int, like: int) -> bool:
    """Return whether two rows are equal up to rounding.

    Equal inputs may differ in the last bits, since a matrix product may sum a row in another order.
    """
    for states in (key,) if value is None else (key, value):
        one, other = states[row], states[like]
        bound = torch.finfo(states.dtype).eps ** 0.5 * float(other.abs().max())
        if float((one - other).abs().max()) > bound:
            return False
    return True
