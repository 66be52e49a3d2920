"""A cache of keys and values in pages, for many sequences and all layers of a model.

    cache = PagedKVCache(layers=32, heads=8, head_dim=128, page_size=16, max_bytes=8 << 30)
    a, b = cache.sequence(), cache.sequence()
    rows = cache.extend([a, b], [5, 1])                  # reserves 6 rows in every layer
    for layer in range(32):
        cache.write(layer, rows, key, value)             # [6, Hkv, D]: five of a, then one of b
        memory = cache.memory(layer, [a, b])             # pages, page table and lengths
    c = cache.fork(a)                                    # shares all pages until one is extended

A sequence is known by its handle. Layers that keep the same positions form a group, which has one
pool of pages and one table. A group with a sliding window keeps only the pages that the window
reaches. Each call checks its arguments before it changes anything, so a call that raises leaves the
cache as it was. Only one thread may use a cache at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.checks.arguments import whole_number
from quire.errors import ArgumentError
from quire.kv import files, survey
from quire.kv.files import SavedSequence
from quire.kv.groups import Budget, Group, LayerGroup, checked_groups, prefix_cache
from quire.kv.handles import Roster, Rows, SequenceHandle, counts_of, token_counts
from quire.kv.page_map import PageMap
from quire.kv.pages import PageShape, View
from quire.kv.paths import kept_by
from quire.kv.prefix import PrefixCache
from quire.kv.survey import Statistics
from quire.kv.table import spread
from quire.memory import Dense, Paged
from quire.memory.tables import Numbers
from quire.runtime.append import SlotWriter, form_of

Tokens = Sequence[int] | NDArray[np.int64]


class PagedKVCache:
    """Keys and values of sequences, in pages that several sequences can share.

    Give `layers`, or `groups` if some layers have windows. Each token has `heads` key heads of
    `head_dim` numbers; those of values have `value_dim`, by default the same. With `latent=512`,
    values are the first 512 numbers of keys, and are not stored. `n_pages` limits the pages of each
    group, and `max_bytes` the memory of all groups. Memory is allocated when it is
    needed, `growth` times as much each time. Rows of int8 and float8 have a scale each; with
    `scales=False`, numbers of float8 are as `.to(dtype)` makes them. With `prefix=True`, `keep`
    remembers full pages by their tokens, and `sequence(tokens)` finds them again.
    """

    def __init__(
        self,
        layers: int | None = None,
        *,
        heads: int,
        head_dim: int,
        value_dim: int | None = None,
        latent: int | None = None,
        page_size: int = 16,
        n_pages: int | None = None,
        max_bytes: int | None = None,
        growth: float = 2.0,
        dtype: torch.dtype = torch.float32,
        scales: bool | None = None,
        groups: Iterable[Group] | None = None,
        prefix: bool = False,
    ) -> None:
        self.shape = PageShape.checked(
            dtype,
            scales,
            latent=latent,
            heads=heads,
            head_dim=head_dim,
            page_size=page_size,
            value_dim=value_dim,
        )
        self._budget = Budget(n_pages, max_bytes, growth)
        self._groups = [LayerGroup.of(each, self.shape) for each in checked_groups(layers, groups)]
        self._place = {
            layer: place for place, group in enumerate(self._groups) for layer in group.layers
        }
        self._roster = Roster()
        self._prefix = prefix_cache(self._groups, self.shape.page_size) if prefix else None
        # The last result of `memory` for each group: its other layers ask for the same.
        self._views: dict[int, tuple[tuple[list[SequenceHandle], int], View]] = {}

    def __repr__(self) -> str:
        now = self.statistics()
        return (
            f"PagedKVCache({self.num_layers} layers, {now.sequences} sequences, {now.tokens} "
            f"tokens, {now.free} of {now.pages} pages free)"
        )

    @property
    def limits(self) -> str:
        """The limits of the cache in words."""
        return str(self._budget)

    @property
    def num_layers(self) -> int:
        """The number of layers in all groups."""
        return len(self._place)

    # --- sequences

    def sequence(self, tokens: Tokens | None = None, *, salt: bytes = b"") -> SequenceHandle:
        """Return a new sequence: empty, or with the pages of `tokens` that `keep` remembers.

        `tokens` [n] are the ids of the prompt. `length` returns how many of them these pages hold.
        To compute the output of the last token, give `tokens` without it. Sequences with another
        `salt` do not share pages.
        """
        if tokens is None:
            return self._new_sequence()
        pages = self._prefixes().match(tokens, salt=salt)
        handle = self._new_sequence()
        self._groups[0].table.adopt(handle.row, pages)
        self._roster.lengths[handle.row] = len(pages) * self.shape.page_size
        return handle

    def _new_sequence(self) -> SequenceHandle:
        handle = self._roster.add()
        for group in self._groups:
            group.table.reserve(len(self._roster))
        return handle

    def length(self, sequence: SequenceHandle) -> int:
        """The number of tokens of a sequence, including those before a window."""
        return int(self._roster.lengths[self._roster.row(sequence)])

    def start(self, layer: int, sequence: SequenceHandle) -> int:
        """The first position of a sequence that a layer still holds."""
        return self._group(layer).table.start(self._roster.row(sequence))

    def fork(self, sequence: SequenceHandle) -> SequenceHandle:
        """Return a new sequence with the same tokens. It shares all pages until one is extended."""
        row = self._written_row(sequence)
        child = self._new_sequence()
        for group in self._groups:
            group.table.fork(row, child.row)
        self._roster.lengths[child.row] = self._roster.lengths[row]
        return child

    def truncate(self, sequence: SequenceHandle, length: int) -> None:
        """Drop all tokens from position `length` on, for example a draft that was rejected."""
        row = self._roster.row(sequence)
        now = int(self._roster.lengths[row])
        if whole_number("length", length, minimum=0, advice="Say how many tokens stay.") > now:
            raise ArgumentError(
                f"length must be at most {now}, as the sequence has {now} tokens, but is {length}. "
                f"Add tokens with extend."
            )
        waiting = self._roster.unwritten_of(sequence)
        if waiting is not None and length > waiting.before[sequence]:
            self._roster.refuse_unwritten([sequence])
        for group in self._groups:
            group.expect_window(row, length)
        self._roster.give_up(sequence)
        for group in self._groups:
            group.table.truncate(row, length)
        self._roster.lengths[row] = length
        self._views.clear()

    def accept(
        self,
        sequences: Sequence[SequenceHandle],
        prefix_length: int | Tensor | Sequence[int],
        paths: Tensor | Sequence[Tensor | Sequence[int]],
    ) -> None:
        """Keep the drafts on one path of a tree, and drop the other drafts.

        Drafts are the tokens from position `prefix_length` on, one number or [B], in the order of
        the nodes of `quire.mods.tree`. `paths`, such as [[0, 2, 4], []], has a list of nodes for
        each sequence, from a root on. The keys and values of accepted drafts move to the positions
        after the prefix. Pages that other sequences share are copied first.
        """
        rows = self._roster.rows(sequences)
        self._roster.refuse_unwritten(sequences)
        kept = kept_by(prefix_length, paths, self._roster.lengths[rows])
        for group in self._groups:
            for row, length in zip(rows.tolist(), kept.lengths.tolist(), strict=True):
                group.expect_window(row, length)
        plans = [group.table.plan_kept(rows, kept) for group in self._groups]
        self._budget.make_room(self._groups, [plan for plan, _ in plans], self._prefix)
        for group, plan in zip(self._groups, plans, strict=True):
            group.keep(*plan)
        self._roster.lengths[rows] = kept.lengths
        self._views.clear()

    def free(self, *sequences: SequenceHandle) -> None:
        """Release all pages of sequences. Their handles are invalid afterwards."""
        self._roster.rows(sequences)
        for sequence in sequences:
            self._roster.give_up(sequence)
            for group in self._groups:
                group.table.clear(sequence.row)
            self._roster.remove(sequence)
        self._views.clear()

    # --- tokens

    def extend(self, sequences: Sequence[SequenceHandle], counts: Sequence[int] | int) -> Rows:
        """Reserve rows for `counts` new tokens of each sequence, in every layer.

        `counts` is one number for each sequence, or one for all. `write` fills the rows that are
        returned. Shared pages are copied before they are written to, and pages that a window no
        longer reaches are released. `length` includes the new tokens at once.
        """
        rows = self._roster.rows(sequences)
        return self._extend(sequences, rows, token_counts(counts, len(rows)))

    def _extend(self, sequences: Sequence[SequenceHandle], rows: Numbers, number: Numbers) -> Rows:
        self._roster.refuse_unwritten(sequences)
        lengths = self._roster.lengths[rows]
        plans = [group.table.plan(rows, lengths, number) for group in self._groups]
        self._budget.make_room(self._groups, plans, self._prefix)
        for group, plan in zip(self._groups, plans, strict=True):
            group.commit(plan)
        self._roster.lengths[rows] += number
        self._views.clear()
        places = spread(rows, lengths, number)
        waiting: dict[int, SlotWriter] = {}
        for group in self._groups:
            slots = group.writer.at(torch.from_numpy(group.table.slots(*places)))
            waiting |= dict.fromkeys(group.layers, slots)
        return Rows(self._roster, sequences, lengths, len(places[0]), waiting)

    def write(self, layer: int, rows: Rows, key: Tensor, value: Tensor | None = None) -> None:
        """Write `key` [tokens, Hkv, D] and `value` [tokens, Hkv, Dv] to the new rows of a layer.

        A latent cache has no `value`.
        """
        value = self.shape.value_rows(key, value)
        slots = rows.waiting.get(layer)
        if (
            slots is None
            or slots.form is None
            or slots.form != form_of(key, value)
            or rows.roster is not self._roster
        ):
            slots = self._checked_slots(layer, rows, key, value)
        slots.write(layer, key, value)
        rows.done(layer)

    def _checked_slots(self, layer: int, rows: Rows, key: Tensor, value: Tensor) -> SlotWriter:
        """Check rows, key and value, and return what writes them.

        Later layers with tensors of the same form are not checked again.
        """
        self._group(layer)
        for side, tensor in zip(self.shape.sides, (key, value), strict=False):
            self.shape.expect_rows(side, tensor, tensor.shape, rows.num_tokens)
        slots = rows.expect_layer(layer, self._roster)
        slots.expect(key, value)
        return slots

    def append(
        self,
        sequences: Sequence[SequenceHandle],
        key: Tensor,
        value: Tensor | None = None,
        counts: Sequence[int] | int | None = None,
    ) -> None:
        """Add tokens to sequences, in all layers.

        `key` is [layers, tokens, Hkv, D] and `value` [layers, tokens, Hkv, Dv], or None in a latent
        cache; tokens of the first sequence come first. `counts` says how many tokens belong to each
        sequence. By default all sequences get equally many.
        """
        value = self.shape.value_rows(key, value)
        for side, tensor in zip(self.shape.sides, (key, value), strict=False):
            self.shape.expect_layers(side, tensor, self.num_layers, key)
        held = self._roster.rows(sequences)
        number = counts_of(key.shape[1], counts, len(held))
        for group in self._groups:
            group.writer.kernel(key, value)  # raises before rows are reserved if it cannot compile
        rows = self._extend(sequences, held, number)
        for group in self._groups:
            rows.waiting[next(iter(group.layers))].write_all(key, value)
        rows.all_done()

    def has_room(self, lengths: Sequence[int], step: int, *, alone: bool = False) -> bool:
        """Return whether new sequences would fit that grow to these lengths by `step` at most.

        With `alone`, return whether they would fit if the cache held nothing else.
        """
        wanted = [
            sum(group.table.most_pages(each, step) for each in lengths) for group in self._groups
        ]
        return self._budget.has_room(self._groups, wanted, self._prefix, alone=alone)

    # --- reading

    def memory(
        self, layer: int, sequences: Sequence[SequenceHandle], *, first_page: int = 0
    ) -> Paged:
        """Return the pages, page table and lengths of sequences, which `attention` reads.

        It is a snapshot: call it again after sequences were extended, truncated or freed. If other
        ranks have the first pages of the sequences, `first_page` is the number of these.
        """
        group, place = self._group(layer), self._place[layer]
        known = self._views.get(place)
        if known is None or known[0] != (list(sequences), first_page):
            advice = "Give the number of pages that other ranks have."
            whole_number("first_page", first_page, minimum=0, advice=advice)
            rows = self._roster.rows(sequences)
            view = group.view(rows, self._roster.lengths[rows], first_page)
            known = (list(sequences), first_page), view
            self._views[place] = known
        return group.memory(layer, known[1])

    def dense(self, layer: int, sequence: SequenceHandle) -> Dense:
        """Return a copy of the rows that a layer holds: key [1, Hkv, S, D], value [1, Hkv, S, Dv].

        Rows that have scales are returned as float32.
        """
        row, group = self._roster.row(sequence), self._group(layer)
        slots = group.held_slots(row, int(self._roster.lengths[row]))
        key, value = group.layers[layer].rows(slots)
        start = group.table.start(row)
        return Dense(key.transpose(0, 1)[None], value.transpose(0, 1)[None], start)

    # --- prefixes

    def keep(self, sequence: SequenceHandle, tokens: Tokens, *, salt: bytes = b"") -> int:
        """Remember the full pages of a sequence, so that `sequence(tokens)` finds them later.

        `tokens` [n] are the ids of the tokens from the first one on. Kept pages stay when the
        sequence is freed, and are evicted when pages run out. Returns the number of new ones.
        """
        prefixes, row = self._prefixes(), self._written_row(sequence)
        length = int(self._roster.lengths[row])
        if len(tokens) > length:
            raise ArgumentError(
                f"tokens must be at most {length}, as the sequence has so many, but are "
                f"{len(tokens)}. Give the tokens that are written."
            )
        return prefixes.insert(tokens, self._groups[0].table.held(row), salt=salt)

    def evict(self, count: int) -> int:
        """Release up to `count` kept pages that no sequence uses. Return how many."""
        return self._prefixes().evict(count)

    def _prefixes(self) -> PrefixCache:
        if self._prefix is None:
            raise ArgumentError(
                "the cache must have a prefix cache to find pages by tokens, but has none. Make it "
                "with prefix=True."
            )
        return self._prefix

    # --- copies and files

    def copy_out(self, sequence: SequenceHandle) -> SavedSequence:
        """Return a copy of what a sequence holds, outside of pages. `restore` brings it back."""
        row = self._written_row(sequence)
        length = int(self._roster.lengths[row])
        header = files.Header.of(self.shape, self._groups, row, length)
        return SavedSequence(header, files.rows_of(self._groups, row, length))

    def restore(self, saved: SavedSequence) -> SequenceHandle:
        """Return a new sequence with what `copy_out` has copied, from this cache or one like it."""
        plans = files.plans_of(saved.header, self.shape, self._groups)
        self._budget.make_room(self._groups, plans, self._prefix)
        handle = self._new_sequence()
        try:
            self._roster.lengths[handle.row] = saved.header.length
            for group, plan in zip(self._groups, plans, strict=True):
                group.commit(plan._replace(rows=np.array([handle.row])))
            files.place(self._groups, handle.row, saved)
        except BaseException:
            self.free(handle)
            raise
        return handle

    def save(self, sequence: SequenceHandle, path: str | os.PathLike[str]) -> None:
        """Write a sequence to a file. If that fails, an old file with that name stays whole."""
        files.save(path, self.copy_out(sequence))

    def load(self, path: str | os.PathLike[str]) -> SequenceHandle:
        """Return a new sequence with the exact content of a file that `save` has written."""
        return self.restore(files.load(path, self.shape, self._groups))

    # --- looking at itself

    def page_map(self, layer: int = 0) -> PageMap:
        """Return who holds which page of a layer now. `print` shows it as text."""
        return survey.page_map(self._group(layer).table, self._roster, self._prefix)

    def statistics(self) -> Statistics:
        """Return what the cache holds now."""
        return survey.statistics(self._groups, self._roster, self._prefix)

    def check_integrity(self) -> None:
        """Raise PageError unless each page is free, or is held as often as its count says."""
        survey.check_integrity(self._groups, self._roster, self._prefix)

    # --- checks

    def _written_row(self, sequence: SequenceHandle) -> int:
        row = self._roster.row(sequence)
        self._roster.refuse_unwritten([sequence])
        return row

    def _group(self, layer: int) -> LayerGroup:
        place = self._place.get(layer)
        if place is None:
            raise ArgumentError(
                f"layer must be from 0 to {self.num_layers - 1}, but is {layer!r}. Count from 0."
            )
        return self._groups[place]
