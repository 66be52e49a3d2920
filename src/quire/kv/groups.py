"""Groups of layers that keep the same positions, and the limits of their memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.checks.arguments import whole_number
from quire.errors import ArgumentError, OutOfPages, ReleasedRowsError
from quire.kv.pages import LayerPages, PageShape, View
from quire.kv.pool import PagePool
from quire.kv.prefix import PrefixCache
from quire.kv.table import Moves, PagePlan, PageTable
from quire.memory import Paged
from quire.memory.tables import Numbers
from quire.runtime.append import PageTensors, PageWriter

FIRST_PAGES = 16  # the size of a new pool, and the least number of pages that it grows by
NO_LIMIT = 2**62


class Group(NamedTuple):
    """Layers that keep the same positions: all positions, or those that a `window` reaches.

    As in `quire.mods.sliding_window`, a query sees itself and `window` positions before it.
    """

    layers: Sequence[int]
    window: int | None = None


@dataclass(eq=False)
class LayerGroup:
    """A group of layers with its page table and the pages of each layer."""

    layers: dict[int, LayerPages]
    table: PageTable
    page_bytes: int  # of one page in all layers
    writer: PageWriter  # writes rows to the current tensors of all layers

    @classmethod
    def of(cls, group: Group, shape: PageShape) -> LayerGroup:
        """Return a group without pages."""
        layers = {layer: LayerPages(shape) for layer in group.layers}
        table = PageTable(PagePool(0), shape.page_size, group.window)
        return cls(layers, table, len(layers) * shape.num_bytes, PageWriter(_tensors(layers)))

    @property
    def pool(self) -> PagePool:
        """The pages of the group."""
        return self.table.pool

    @property
    def num_bytes(self) -> int:
        """The memory of all pages of the group."""
        return self.pool.num_pages * self.page_bytes

    def held_slots(self, row: int, length: int) -> Tensor:
        """The slots of all held positions of a sequence that has `length` tokens."""
        positions = np.arange(self.table.start(row), length)
        return torch.from_numpy(self.table.slots(np.full(len(positions), row), positions))

    def expect_window(self, row: int, length: int) -> None:
        """Raise if the window reaches released pages once the sequence has `length` tokens."""
        table = self.table
        if table.first[row] > table.reach(length):
            raise ReleasedRowsError(
                f"length must be one from which the window of {table.window} reaches back no "
                f"further than position {table.start(row)}, as the pages before are released, but "
                f"is {length}. Free the sequence and compute it again."
            )

    def commit(self, plan: PagePlan) -> None:
        """Extend sequences. Copy the pages that they can no longer share."""
        copies = self.table.commit(plan)
        if len(copies.source):
            for pages in self.layers.values():
                pages.copy(copies)

    def keep(self, plan: PagePlan, moves: Moves) -> None:
        """Drop tokens of sequences, and move the tokens that stay."""
        source = torch.from_numpy(self.table.slots(moves.rows, moves.source))
        copies = self.table.commit(plan)
        if len(source):
            target = torch.from_numpy(self.table.slots(moves.rows, moves.target))
            for pages in self.layers.values():
                rows = pages.read(source)  # before anything is written
                pages.copy(copies)
                pages.place(target, rows)

    def view(self, rows: Numbers, lengths: Numbers, elsewhere: int = 0) -> View:
        """Return the current view of the sequences in `rows`, which have `lengths` tokens here.

        The first `elsewhere` pages of each are not in this cache.
        """
        table = self.table
        pages, first = table.view(rows), None if table.window is None else table.first[rows]
        if elsewhere:
            pages = np.pad(pages, ((0, 0), (elsewhere, 0)), constant_values=-1)
            first = (np.zeros_like(lengths) if first is None else first) + elsewhere
            lengths = lengths + elsewhere * table.page_size
        begins = None if first is None else torch.from_numpy(first)
        return torch.from_numpy(pages), torch.from_numpy(lengths), begins

    def memory(self, layer: int, view: View) -> Paged:
        """Return the memory of the sequences of a view, in the pages of one layer."""
        return self.layers[layer].memory(view)

    def grow(self, more: int, most: int) -> None:
        """Add `more` pages to each layer, which has `most` pages at last.

        If memory runs out, only the first layers have them.
        """
        num_pages = self.pool.num_pages + more
        try:
            for pages in self.layers.values():
                pages.grow(num_pages, most)
        finally:
            self.writer.turn_to(_tensors(self.layers))
        self.pool.grow(num_pages)


def _tensors(layers: dict[int, LayerPages]) -> dict[int, PageTensors]:
    return {layer: pages.tensors for layer, pages in layers.items()}


def checked_groups(layers: int | None, groups: Iterable[Group] | None) -> list[Group]:
    """Return one group of all layers, or `groups` if they name each layer once."""
    if (layers is None) == (groups is None):
        raise ArgumentError(
            f"either layers or groups must be given, but layers is {layers} and groups is "
            f"{groups}. Give the number of layers, or groups of them if some have windows."
        )
    if groups is None:
        count = whole_number("layers", layers, minimum=1, advice="Say how many layers there are.")
        return [Group(range(count))]
    made = [Group(*group) for group in groups]
    named = sorted(layer for group in made for layer in group.layers)
    if not named or named != list(range(len(named))) or not all(group.layers for group in made):
        raise ArgumentError(
            f"groups must name every layer from 0 on once, but name {named}. Put each layer into "
            f"one group."
        )
    for group in made:
        if group.window is not None:
            advice = "Say how many positions before its own a query sees."
            whole_number("window", group.window, minimum=1, advice=advice)
    return made


def prefix_cache(groups: Sequence[LayerGroup], page_size: int) -> PrefixCache:
    """Return a cache of prompts for one group of layers without a window."""
    if len(groups) > 1 or groups[0].table.window is not None:
        raise ArgumentError(
            "prefix=True must have one group of layers without a window, since pages before a "
            "window are released, but there are several groups, or a window. Leave prefix out, or "
            "put all layers into one group."
        )
    return PrefixCache(groups[0].pool, page_size)


class Budget:
    """The limits of a cache: pages of each group, and bytes of all groups."""

    def __init__(self, n_pages: int | None, max_bytes: int | None, growth: float = 2.0) -> None:
        if n_pages is None and max_bytes is None:
            raise ArgumentError(
                "n_pages or max_bytes must be given, but both are None. Give the largest size of "
                "the cache."
            )
        self._pages = _limit("n_pages", n_pages)
        self._bytes = _limit("max_bytes", max_bytes)
        if not 1 < growth <= 2:
            raise ArgumentError(
                f"growth must be above 1 and at most 2, but is {growth!r}. With 1.125 a full cache "
                f"allocates an eighth more memory."
            )
        self._growth_rate = growth

    def __str__(self) -> str:
        both = {"pages": self._pages, "bytes": self._bytes}
        return " and ".join(f"{limit:,} {unit}" for unit, limit in both.items() if limit < NO_LIMIT)

    def make_room(
        self, groups: Sequence[LayerGroup], plans: Sequence[PagePlan], prefix: PrefixCache | None
    ) -> None:
        """Make enough pages free for the plans: grow, then evict. Or raise, and change nothing."""
        wanted = [
            max(0, plan.shortage - group.pool.num_free)
            for group, plan in zip(groups, plans, strict=True)
        ]
        if not any(wanted):
            return
        grown = self._growth(groups, wanted)
        missing = [max(0, want - more) for want, more in zip(wanted, grown, strict=True)]
        if any(missing) and not (prefix is not None and prefix.can_evict(missing[0])):
            raise OutOfPages(self._shortage(groups, plans, missing, prefix))
        for group, more in zip(groups, grown, strict=True):
            if more:
                _grow(group, more, min(self._pages, self._bytes // group.page_bytes))
        if prefix is not None:
            prefix.evict(missing[0])

    def has_room(
        self,
        groups: Sequence[LayerGroup],
        wanted: Sequence[int],
        prefix: PrefixCache | None,
        *,
        alone: bool,
    ) -> bool:
        """Return whether each group could have so many pages, now or if it were `alone`."""
        if alone:
            size = sum(n * group.page_bytes for n, group in zip(wanted, groups, strict=True))
            return max(wanted) <= self._pages and size <= self._bytes
        lacking = [
            max(0, count - group.pool.num_free) for count, group in zip(wanted, groups, strict=True)
        ]
        grown = self._growth(groups, lacking) if any(lacking) else lacking
        missing = [max(0, want - more) for want, more in zip(lacking, grown, strict=True)]
        return not any(missing) or (prefix is not None and prefix.can_evict(missing[0]))

    def _growth(self, groups: Sequence[LayerGroup], wanted: list[int]) -> list[int]:
        """How many pages to add to each group.

        A group gets the pages that it needs. It also grows in proportion to its size, as long as
        each group after it keeps its share of the bytes that are left.
        """
        left = self._bytes - sum(group.num_bytes for group in groups)
        grown = []
        for least, group in zip(wanted, groups, strict=True):
            most = max(0, min(self._pages - group.pool.num_pages, left // group.page_bytes))
            grown.append(min(least, most))
            left -= grown[-1] * group.page_bytes
        for place, group in enumerate(groups):
            if wanted[place] and grown[place] == wanted[place]:
                share = left // sum(each.page_bytes for each in groups[place:])
                more = max(int(group.pool.num_pages * (self._growth_rate - 1)), FIRST_PAGES)
                most = min(more, self._pages - group.pool.num_pages, grown[place] + share)
                left -= max(0, most - grown[place]) * group.page_bytes
                grown[place] = max(grown[place], most)
        return grown

    def _shortage(
        self,
        groups: Sequence[LayerGroup],
        plans: Sequence[PagePlan],
        missing: list[int],
        prefix: PrefixCache | None,
    ) -> str:
        place = next(place for place, count in enumerate(missing) if count)
        pool = groups[place].pool
        kept = "" if prefix is None else f", {len(prefix)} are kept for prompts to come"
        return (
            f"there must be {plans[place].num_pages} free pages, but only {pool.num_free} of "
            f"{pool.num_pages} are free{kept}, and the limit is {self}. Free or truncate "
            f"sequences, or allow more."
        )


def _grow(group: LayerGroup, more: int, most: int) -> None:
    try:
        group.grow(more, most)
    except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError
        raise OutOfPages(
            f"the system must have memory for {more} more pages, {more * group.page_bytes:,} "
            f"bytes, but has not: {error}. Free sequences, or set a lower limit."
        ) from error


def _limit(name: str, limit: int | None) -> int:
    if limit is None:
        return NO_LIMIT
    return whole_number(name, limit, minimum=1, advice="Say how large the cache may become.")
