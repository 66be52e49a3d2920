"""A cache of keys and values in pages, for many sequences and all layers of a model.

    cache = PagedKVCache(layers=32, heads=8, head_dim=128, page_size=16, max_bytes=8 << 30)
    a, b = cache.sequence(), cache.sequence()
    rows = cache.extend([a, b], [5, 1])                  # room for 6 tokens, in every layer
    for layer in range(32):
        cache.write(layer, rows, key, value)             # [6, Hkv, D]: five of a, then one of b
        memory = cache.memory(layer, [a, b])             # pages, page table and lengths
    c = cache.fork(a)                                    # shares everything until one is extended

A sequence is a handle. Layers that keep the same positions form a group, with one pool of pages and
one table; a group with a sliding window holds what the window reaches. Everything is checked before
anything changes: a call that raises leaves the cache as it was. One thread at a time.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.checks.arguments import whole_number
from quire.errors import ArgumentError, ShapeError
from quire.kv import files, saved, survey
from quire.kv.groups import Budget, Group, LayerGroup, View, checked_groups
from quire.kv.handles import Roster, Rows, SequenceHandle, token_counts
from quire.kv.page_map import PageMap
from quire.kv.pages import PageShape
from quire.kv.paths import kept_by
from quire.kv.prefix import PrefixCache
from quire.kv.survey import Statistics
from quire.kv.table import Numbers, spread
from quire.memory import Dense, Paged
from quire.runtime.append import SlotWriter, dequantise, form_of

Tokens = Sequence[int] | NDArray[np.int64]


class PagedKVCache:
    """Keys and values of sequences, in pages that are shared, forked and found again.

    Give `layers`, or `groups` where some have windows. `n_pages` limits the pages of each group,
    `max_bytes` the memory of all; it is taken as it is needed, `growth` times as much each time.
    With `prefix`, `keep` and `sequence(tokens)` find full pages again by their tokens.
    """

    def __init__(
        self,
        layers: int | None = None,
        *,
        heads: int,
        head_dim: int,
        value_dim: int | None = None,
        page_size: int = 16,
        n_pages: int | None = None,
        max_bytes: int | None = None,
        growth: float = 2.0,
        dtype: torch.dtype = torch.float32,
        groups: Iterable[Group] | None = None,
        prefix: bool = False,
    ) -> None:
        self.shape = PageShape.checked(
            dtype,
            heads=heads,
            head_dim=head_dim,
            page_size=page_size,
            value_dim=head_dim if value_dim is None else value_dim,
        )
        self._budget = Budget(n_pages, max_bytes, growth)
        self._groups = [LayerGroup.of(each, self.shape) for each in checked_groups(layers, groups)]
        self._place = {
            layer: place for place, group in enumerate(self._groups) for layer in group.layers
        }
        self._roster = Roster()
        self._prefix = self._prefix_cache() if prefix else None
        # What `memory` gave last, which the next layer of a group asks for again.
        self._views: dict[int, tuple[list[SequenceHandle], View]] = {}

    def _prefix_cache(self) -> PrefixCache:
        if len(self._groups) > 1 or self._groups[0].table.window is not None:
            raise ArgumentError(
                "expected one group of layers without a window for prefix=True, since pages behind "
                "a window are gone, got others. Leave prefix out, or give all layers one group."
            )
        return PrefixCache(self._groups[0].pool, self.shape.page_size)

    def __repr__(self) -> str:
        now = self.statistics()
        return (
            f"PagedKVCache({self.num_layers} layers, {now.sequences} sequences, {now.tokens} "
            f"tokens, {now.free} of {now.pages} pages free)"
        )

    @property
    def num_layers(self) -> int:
        """How many layers there are, in all groups."""
        return len(self._place)

    # --- sequences

    def sequence(self, tokens: Tokens | None = None, *, salt: bytes = b"") -> SequenceHandle:
        """A new sequence: empty, or with the beginning of `tokens` that is known already.

        `length` says how many tokens that are. Whoever needs the output of the last token leaves
        it out here.
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
        """How many tokens a sequence has, those behind a window among them."""
        return int(self._roster.lengths[self._roster.row(sequence)])

    def start(self, layer: int, sequence: SequenceHandle) -> int:
        """The first position that a layer still holds of a sequence."""
        return self._group(layer).table.start(self._roster.row(sequence))

    def fork(self, sequence: SequenceHandle) -> SequenceHandle:
        """Another sequence with the same tokens, which takes no page until one is extended."""
        row = self._written_row(sequence)
        child = self._new_sequence()
        for group in self._groups:
            group.table.fork(row, child.row)
        self._roster.lengths[child.row] = self._roster.lengths[row]
        return child

    def truncate(self, sequence: SequenceHandle, length: int) -> None:
        """Forget all tokens from position `length` on, as after a draft that was rejected."""
        row = self._roster.row(sequence)
        now = int(self._roster.lengths[row])
        if whole_number("length", length, minimum=0, advice="Say how many tokens stay.") > now:
            raise ArgumentError(
                f"expected at most {now} tokens, which the sequence has, got {length}. extend adds "
                f"tokens."
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
        """Keep the drafts of a path, which are then the next tokens, and forget the other drafts.

        Drafts are the tokens from position `prefix_length` on, in the order of `quire.mods.tree`'s
        nodes, and a path names nodes from a root on. Their keys and values move to where they would
        be had they come alone; pages that others hold too are copied before.
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
        """Give back everything that sequences hold; the handles mean nothing afterwards."""
        self._roster.rows(sequences)
        for sequence in sequences:
            self._roster.give_up(sequence)
            for group in self._groups:
                group.table.clear(sequence.row)
            self._roster.remove(sequence)
        self._views.clear()

    # --- tokens

    def extend(self, sequences: Sequence[SequenceHandle], counts: Sequence[int] | int) -> Rows:
        """Room for `counts` new tokens of each sequence, in every layer; `write` fills it.

        Pages that others hold too are copied where they would be written to, and those that a
        window no longer reaches are released. The lengths count the new tokens from now on.
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

    def write(self, layer: int, rows: Rows, key: Tensor, value: Tensor) -> None:
        """Fill new rows of one layer: keys [tokens, Hkv, D] and values [tokens, Hkv, Dv]."""
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
        """What a layer writes with, once all is checked; the layers to come have the same form."""
        self._group(layer)
        self.shape.expect_rows("key", key, key.shape, rows.num_tokens)
        self.shape.expect_rows("value", value, value.shape, rows.num_tokens)
        slots = rows.expect_layer(layer, self._roster)
        slots.expect(key, value)
        return slots

    def append(
        self,
        sequences: Sequence[SequenceHandle],
        key: Tensor,
        value: Tensor,
        counts: Sequence[int] | int | None = None,
    ) -> None:
        """Add tokens to sequences in all layers: keys [layers, tokens, Hkv, D], values alike.

        Rows of the first sequence come first. Without `counts` each gets as many as the others.
        """
        for name, tensor in (("key", key), ("value", value)):
            if tensor.dim() != 4 or len(tensor) != self.num_layers:
                raise ShapeError(
                    f"expected {name} [layers, tokens, Hkv, width] of {self.num_layers} layers, "
                    f"got {list(tensor.shape)}. Stack the layers, or write one by one."
                )
            self.shape.expect_rows(name, tensor, tensor.shape[1:], key.shape[1])
        tokens = key.shape[1]
        held = self._roster.rows(sequences)
        number = token_counts(tokens // max(1, len(held)) if counts is None else counts, len(held))
        if int(number.sum()) != tokens:
            raise ShapeError(
                f"expected {int(number.sum())} tokens for {len(sequences)} sequences, got "
                f"{tokens}. Give the counts that the tokens add up to."
            )
        for group in self._groups:
            group.writer.kernel(key, value)  # what cannot be compiled is told before room is made
        rows = self._extend(sequences, held, number)
        for group in self._groups:
            slots = rows.waiting[next(iter(group.layers))]
            slots.write_all(key, value)
        rows.all_done()

    # --- reading

    def memory(self, layer: int, sequences: Sequence[SequenceHandle]) -> Paged:
        """Where the keys and values of sequences are: pages, page table and lengths.

        It is a snapshot: ask again after sequences were extended, truncated or freed.
        """
        group, place = self._group(layer), self._place[layer]
        known = self._views.get(place)
        if known is None or known[0] != list(sequences):
            rows = self._roster.rows(sequences)
            known = list(sequences), View.of(group.table, rows, self._roster.lengths[rows])
            self._views[place] = known
        return known[1].memory(group.layers[layer].tensors)

    def dense(self, layer: int, sequence: SequenceHandle) -> Dense:
        """A copy of the rows that a layer holds of a sequence, one after the other.

        Those of int8 are given in float32.
        """
        row, group = self._roster.row(sequence), self._group(layer)
        held = group.layers[layer].read(group.held_slots(row, int(self._roster.lengths[row])))
        key, value = held["key"], held["value"]
        if self.shape.dtype == torch.int8:
            key, value = dequantise(key, held["key_scale"]), dequantise(value, held["value_scale"])
        start = group.table.start(row)
        return Dense(key.transpose(0, 1)[None], value.transpose(0, 1)[None], start)

    # --- prefixes

    def keep(self, sequence: SequenceHandle, tokens: Tokens, *, salt: bytes = b"") -> int:
        """Let `sequence(tokens)` find the full pages of a sequence, also after it is freed.

        Returns how many pages were not known. They are evicted when pages run out.
        """
        prefixes, row = self._prefixes(), self._written_row(sequence)
        length = int(self._roster.lengths[row])
        if len(tokens) > length:
            raise ArgumentError(
                f"expected at most {length} tokens, which the sequence has, got {len(tokens)}. "
                f"Keep what is written."
            )
        return prefixes.insert(tokens, self._groups[0].table.held(row), salt=salt)

    def evict(self, count: int) -> int:
        """Let go of up to `count` kept pages that no sequence uses; returns how many."""
        return self._prefixes().evict(count)

    def _prefixes(self) -> PrefixCache:
        if self._prefix is None:
            raise ArgumentError(
                "expected a cache that finds pages by tokens, got one that does not. Make it with "
                "prefix=True."
            )
        return self._prefix

    # --- files

    def save(self, sequence: SequenceHandle, path: str | os.PathLike[str]) -> None:
        """Write a sequence to a file, which is the new one as a whole, or still the old one."""
        row = self._written_row(sequence)
        length = int(self._roster.lengths[row])
        tensors = saved.rows_of(self._groups, row, length)
        files.save(path, saved.header(self.shape, self._groups, row, length), tensors)

    def load(self, path: str | os.PathLike[str]) -> SequenceHandle:
        """A new sequence from a file that `save` has written, bit for bit."""
        header, tensors = files.load(path, saved.header(self.shape, self._groups))
        plans = saved.plans(path, header, self._groups)
        self._budget.make_room(self._groups, plans, self._prefix)
        handle = self._new_sequence()
        self._roster.lengths[handle.row] = header.length
        for group, plan in zip(self._groups, plans, strict=True):
            group.commit(plan._replace(rows=np.array([handle.row])))
        saved.place(self._groups, handle.row, header.length, tensors)
        return handle

    # --- looking at itself

    def page_map(self, layer: int = 0) -> PageMap:
        """Who holds which page of a layer now: text when it is printed."""
        return survey.page_map(self._group(layer).table, self._roster, self._prefix)

    def statistics(self) -> Statistics:
        """What it holds now."""
        return survey.statistics(self._groups, self._roster, self._prefix)

    def check_integrity(self) -> None:
        """A PageError unless every page is free, or held exactly as often as is counted."""
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
                f"expected a layer from 0 to {self.num_layers - 1}, got {layer!r}. Count from 0."
            )
        return self._groups[place]
