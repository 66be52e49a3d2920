"""How many floating-point operations a call takes, for what its mask leaves.

    scores   the elements of the score matrix that are computed, see `read_keys.py`
    forward  2 (D + Dv) for each score: two products, a multiplication and an addition each
    backward 2 (3 D + 2 Dv): five products

This is how PyTorch counts (`torch.utils.flop_counter`), but PyTorch counts all scores. Lanes of a
panel without a query are not counted, and neither are mods, softmax, and gradients of captured
tensors. Tiles have the size of those of compiled kernels, whichever backend computes the call. The
operands may be fake: only their shapes are used. All scores are counted if the mask cannot be
traced, loads from a tensor without values or is a fake block mask, and if lengths are symbols.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.block_mask import BlockMask, BlockRows
from quire.block_mask.blocks import FULL, Runs
from quire.codegen.convention import BLOCK_Q, KEYS_OF_PIECE, KEYS_OF_RUN, MOST_ROWS
from quire.codegen.llvm.target import Target
from quire.codegen.llvm.types import F32, F64
from quire.errors import BackendError
from quire.ir.graph import inputs
from quire.ir.trace import Traced
from quire.memory import One, Placed, longest
from quire.memory.tables import Numbers, Sequences
from quire.request import Call, Problem, ReadyMod
from quire.runtime.blocks import EVERY_RUN, cut_tiles, tile_runs, within_blocks
from quire.runtime.chosen import turned
from quire.runtime.forward import FormPart, division_of
from quire.runtime.gather import gather
from quire.runtime.launch import num_products
from quire.runtime.read_keys import MaskBounds, Panels, Tiling, Units
from quire.runtime.shared_prefix import shared_pieces
from quire.support.torch_private import has_memory, is_wrapped, without_modes


class Flops(NamedTuple):
    """Floating-point operations of a call: forward, backward, and forward without a mask."""

    forward: int
    backward: int
    unmasked: int

    def __str__(self) -> str:
        part = (
            f" ({100 * self.forward / self.unmasked:.1f} % of all scores)" if self.unmasked else ""
        )
        return f"forward {_amount(self.forward)}{part}, backward {_amount(self.backward)}"


def _amount(flops: int) -> str:
    """Write a number of operations with three digits: '1.07 GFLOP'."""
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if flops >= 0.9995 * 10**power:
            return f"{flops / 10**power:#.3g}".rstrip(".") + f" {prefix}FLOP"
    return f"{flops} FLOP"


def flops_of(call: Call) -> Flops:
    """Return the floating-point operations of a call, from its masks and the shapes of its tensors.

    `torch.utils.flop_counter.register_flop_formula(..., get_raw=True)` can give it a call.
    """
    placed = call.placed
    head_dim, value_dim = placed.query.shape[3], placed.value.shape[3]
    unmasked = _all_scores(placed, placed.rows)
    forward = backward = unmasked
    if _can_be_counted(unmasked):
        with without_modes(), torch.no_grad():
            forward, backward = _computed_scores(call)
    each = 2 * (head_dim + value_dim)
    return Flops(each * forward, 2 * (3 * head_dim + 2 * value_dim) * backward, each * unmasked)


def _all_scores(placed: Placed, rows: One | Sequences) -> int:
    heads = placed.query.shape[1]
    if isinstance(rows, One):
        return placed.query.shape[0] * heads * rows.q_len * (rows.kv_end - rows.kv_begin)
    return int(np.vdot(rows.q_len, rows.kv_len)) * heads


def _can_be_counted(unmasked: int) -> bool:
    """Return whether lengths are numbers, and there are kernels for this machine."""
    try:
        Target.host()
    except BackendError:
        return False
    return type(unmasked) is int and unmasked > 0


def _computed_scores(call: Call) -> tuple[int, int]:
    """Return how many scores are computed in the forward and in the backward pass."""
    problem, placed = call.problem, call.placed
    origin, mask = placed.rows, problem.block_mask
    if mask is not None and not _has_values(mask):
        whole = _all_scores(placed, placed.rows)
        return whole, whole
    blocks = None if mask is None else mask.rows(*placed.lengths)
    if blocks is not None and _all_turned(problem, placed, blocks):
        backward = _listed_scores(blocks, placed)
    else:
        whole_tiles = FormPart("backward", placed.rows, BLOCK_Q)
        backward = Counting(problem, placed, origin).scores(whole_tiles)
    if not call.request.aux.argmax:  # as `ForwardPlan` does
        problem, placed = gather(problem, placed)
    parts = division_of(call, problem, placed)
    if mask is None and all(part.form == "panel" for part in parts):
        return backward, backward  # both passes compute the same keys of the same panels
    counting = Counting(problem, placed, origin)
    return sum(map(counting.scores, parts)), backward


def _all_turned(problem: Problem, placed: Placed, blocks: BlockRows) -> bool:
    """Return whether the backward pass computes the blocks of a mask alone."""
    return cut_tiles(blocks) and bool(turned(problem, placed, blocks, learns=False).all())


def _listed_scores(blocks: BlockRows, placed: Placed) -> int:
    """Return how many scores the blocks of a mask have, in all heads."""
    (batches, lists, num_rows, columns), size = blocks.runs.shape, blocks.block_size
    heads, rows = placed.query.shape[1], placed.rows
    if isinstance(rows, One):
        stand_for = placed.query.shape[0] * heads // (batches * lists)
        return blocks.runs.num_elements(placed.lengths, size) * stand_for
    each, total = np.arange(lists * num_rows), 0
    for b, *lengths in zip(*(x.tolist() for x in (rows.b, rows.q_len, rows.kv_end)), strict=True):
        shape = (1, lists, num_rows, columns)
        own = blocks.runs.pick(each + min(b, batches - 1) * len(each), shape)
        total += own.num_elements((lengths[0], lengths[1]), size)
    return total * (heads // lists)


def _has_values(mask: BlockMask) -> bool:
    return mask._runs is not None or has_memory(mask.kv_num_blocks)


def _known(mod: ReadyMod | None) -> Traced | None:
    """Return a mask if it was traced and the values that it loads are in memory; else None."""
    if not isinstance(mod, Traced):
        return None
    known = all(has_memory(tensor) and not is_wrapped(tensor) for tensor in mod.captures)
    return mod if known else None


class Counting(NamedTuple):
    """Counts the scores that kernels compute. A block mask counts from the positions `origin`."""

    problem: Problem
    placed: Placed
    origin: One | Sequences

    def scores(self, part: FormPart) -> int:
        """Return how many scores a part of a call computes."""
        form, rows = part.form, part.rows
        table = rows if isinstance(rows, Sequences) else Sequences.one(*rows[:5])
        if self.problem.block_mask is not None:
            return self._listed(part, table, self.problem.block_mask)
        mask = _known(self.problem.mask_mod)
        if mask is None:
            return _all_scores(self.placed, rows)
        bounds = MaskBounds(mask, self.placed.end, num_products(self.placed, rows))
        table = table.where(table.q_len > 0)
        if form != "row":
            panels, stand_for = self._panels(table, inputs(mask.output), self.width)
            return Tiling([mask], self.width, self.block).num_scores(panels, bounds) * stand_for
        if bounds.tell_nothing:
            return _all_scores(self.placed, rows)
        panels, stand_for = self._panels(table, bounds.inputs, MOST_ROWS)  # one per sequence
        return self._units(table, panels).num_scores(bounds, self.block) * stand_for

    @property
    def width(self) -> int:
        """Return how many queries a panel has."""
        return Target.host().panel(F64 if self.placed.query.dtype == torch.float64 else F32)

    @property
    def block(self) -> int:
        """Return how many keys a block has."""
        return Target.host().block_kv

    def _panels(self, table: Sequences, reads: Collection[str], width: int) -> tuple[Panels, int]:
        """Return the panels of some sequences, and how many batch entries and heads each is for.

        They are numbered by batch entry, by head, by sequence, then by their queries.
        """
        all_batches, all_heads = self.placed.batches, self.placed.query.shape[1]
        batches, heads = all_batches if "b" in reads else 1, all_heads if "h" in reads else 1
        number, place = _enumerated(np.tile(-(-table.q_len // width), batches * heads))
        copy, sequence = np.divmod(number, max(1, table.num))
        columns = (
            table.b[sequence] + copy // heads,
            copy % heads,
            table.q_start[sequence] + place * width,
            np.minimum(table.q_len[sequence] - place * width, width),
            table.kv_begin[sequence],
            table.kv_end[sequence],
        )
        stand_for = all_batches * all_heads // (batches * heads)
        return Panels(*map(torch.from_numpy, columns)), stand_for

    def _units(self, table: Sequences, panels: Panels) -> Units:
        """Return what the decode kernel computes at once: whole sequences, and what some share."""
        units = np.arange(table.num).reshape(1, -1), table.kv_begin, table.kv_end
        pages = self.placed.page_table
        if pages is not None and has_memory(pages) and longest(table.kv_end) >= KEYS_OF_PIECE:
            units = _shared_units(table, pages, self.placed.key.shape[2])
        members, *ends = units
        copies = len(panels.b) // max(1, table.num)
        first = np.repeat(np.arange(copies) * table.num, members.shape[1])
        every = np.tile(members, copies)
        numbers = np.where(every < 0, every, every + first)
        begin, end = (torch.from_numpy(np.tile(x, copies)) for x in ends)
        return Units(panels, torch.from_numpy(numbers), begin, end)

    # --- block masks

    def _listed(self, part: FormPart, table: Sequences, mask: BlockMask) -> int:
        """Return the scores of the tiles that a block mask lists, for blocks of queries.

        A full tile is computed as a whole, and with few queries a partial one, too.
        """
        placed = self.placed._replace(rows=part.rows)
        rows, mixed = mask.rows(*placed.lengths), part.lists.mixed
        if part.lists.runs is None:
            runs, mixed = tile_runs(rows, part.block_q, self.block, self.origin.kv_origin)
            blocks, first, keys, kinds = self._runs(runs, table, part.block_q)
            batches, lists = runs.shape[:2]
        else:
            blocks, first, keys, kinds = self._entries(part, table)
            batches, lists = rows.runs.shape[0], part.lists.heads
        if isinstance(self.origin, Sequences):  # they are counted one by one
            batches = table.num
        heads = self.placed.query.shape[1]
        stand_for = self.placed.batches * table.num // max(1, batches) * (heads // lists)
        masks = () if part.form == "row" else self._partial_masks(mixed)
        partial = torch.from_numpy(kinds != FULL) & bool(masks)
        held = (keys - (blocks.kv_begin - first).clamp(min=0)).clamp(min=0)
        total = int((blocks.q_count * held)[~partial].sum()) * stand_for
        rest = blocks.pick(partial), first[partial], keys[partial]
        if not len(rest[1]):
            return total
        reads = inputs(*(mask.output for mask in masks))
        for name, shared in (("b", batches == 1), ("h", lists == 1)):
            count = heads if name == "h" else self.placed.batches * table.num
            if shared and name in reads:
                rest, stand_for = _repeated(*rest, name, count), stand_for // count
        return total + Tiling(masks, self.width, self.block).num_listed(*rest) * stand_for

    def _runs(
        self, runs: Runs, table: Sequences, block_q: int
    ) -> tuple[Panels, Tensor, Tensor, NDArray[np.int8]]:
        """Return the block of queries of each run, its first position, how many it has, its kind.

        The first tile may begin before the first key.
        """
        blocks, of = self._blocks(runs.row_ids(), runs.shape[:3], table, block_q)
        tile = self.origin.kv_origin // self.block
        first, stop = (torch.from_numpy((tile + x[of]) * self.block) for x in runs[2:4])
        keys = (torch.minimum(stop, blocks.kv_end) - first).clamp(min=0)
        return blocks, first, keys, runs.kinds[of]

    def _blocks(
        self, number: Numbers, shape: tuple[int, int, int], table: Sequences, block_q: int
    ) -> tuple[Panels, Numbers]:
        """Return blocks of queries by the numbers of rows of lists, and the place of each number.

        The lists are for batch entries, heads and rows. Those of all sequences are repeated.
        """
        batches, heads, num_rows = shape
        of = np.arange(len(number))
        if isinstance(self.origin, Sequences) and batches == 1:
            number, of = np.tile(number, table.num), np.tile(of, table.num)
        pair, row = np.divmod(number, num_rows)
        b, h = np.divmod(pair, heads)
        sequence = np.minimum(b, table.num - 1)  # one for all in dense memory
        if isinstance(self.origin, Sequences):
            sequence = np.arange(table.num).repeat(len(number) // max(1, table.num))
            if batches > 1:
                place = np.full(batches, -1)
                place[table.b] = np.arange(table.num)
                sequence = place[b]
                there = sequence >= 0
                sequence, of, h, row = (x[there] for x in (sequence, of, h, row))
            b = table.b[sequence] - table.b[:1]
        columns = (
            table.b[:1] + b,
            h,
            table.q_start[sequence] + row * block_q,
            np.clip(table.q_len[sequence] - row * block_q, 0, block_q),
            table.kv_begin[sequence],
            table.kv_end[sequence],
        )
        return Panels(*map(torch.from_numpy, columns)), of

    def _entries(
        self, part: FormPart, table: Sequences
    ) -> tuple[Panels, Tensor, Tensor, NDArray[np.int8]]:
        """Return the same for each entry of lists with runs, and its kind.

        If keys are left out between others, all others are computed, as in a full tile.
        """
        lists, size = part.lists, part.block_q
        assert lists.runs is not None, "some tiles are cut"
        number = np.repeat(np.arange(len(lists.offsets) - 1), np.diff(lists.offsets))
        num_rows = -(-self.placed._replace(rows=part.rows).lengths[0] // size)
        batches = (len(lists.offsets) - 1) // max(1, lists.heads * num_rows)
        blocks, of = self._blocks(number, (batches, lists.heads, num_rows), table, size)
        entries = lists.entries[of]
        kind = entries & 3
        runs = np.where(lists.runs[of] == 0, kind * EVERY_RUN, lists.runs[of])
        there = np.stack([runs >> 2 * run & 3 for run in range(8)], axis=1)
        low, high = (there > 0).argmax(axis=1), 8 - (there[:, ::-1] > 0).argmax(axis=1)
        first = (entries >> 2).astype(np.int64) * self.block + low * KEYS_OF_RUN
        stop = first + (high - low) * KEYS_OF_RUN
        alone = ((there > 0).sum(axis=1) == high - low) & (
            (runs & EVERY_RUN == 0) | (runs & 2 * EVERY_RUN == 0)
        )
        begin, end = (torch.from_numpy(x) for x in (first, stop))
        blocks = blocks._replace(
            kv_begin=torch.maximum(blocks.kv_begin, begin),
            kv_end=torch.minimum(blocks.kv_end, end),
        )
        left_out = torch.from_numpy((high - low - (there > 0).sum(axis=1)) * KEYS_OF_RUN)
        keys = (blocks.kv_end - begin - left_out).clamp(min=0)
        return blocks, begin, keys, np.where(alone, kind, FULL).astype(np.int8)

    def _partial_masks(self, mixed: BlockRows | None) -> tuple[Traced, ...]:
        """Return the masks of partial tiles; none of them if one is not known."""
        mods = self.problem.masks(full=False)
        known = tuple(mod for mod in map(_known, mods) if mod is not None)
        if len(known) < len(mods) or mixed is None:
            return known if len(known) == len(mods) else ()
        return (*known[:-1], within_blocks(known[-1], mixed, self.origin))


def _repeated(
    blocks: Panels, first: Tensor, keys: Tensor, name: str, count: int
) -> tuple[Panels, Tensor, Tensor]:
    """Repeat runs of tiles for every batch entry or head."""
    number = torch.arange(count, device="cpu").repeat_interleave(len(first))
    blocks = Panels(*(column.repeat(count) for column in blocks))
    added = getattr(blocks, name) + number
    return blocks._replace(**{name: added}), first.repeat(count), keys.repeat(count)


# --- sequences that begin with the same pages ----------------------------------------------------


def _shared_units(table: Sequences, pages: Tensor, page: int) -> tuple[Numbers, Numbers, Numbers]:
    """Return members [m, n], first key and end of what is computed for sequences over pages."""
    order, shared, sizes = shared_pieces(table, pages, page, table.largest_first())
    if shared is None or sizes is None:
        return np.arange(table.num).reshape(1, -1), table.kv_begin, table.kv_end
    common = np.zeros(table.num, np.int64)
    common[order] = shared * KEYS_OF_PIECE
    leaders = np.flatnonzero(sizes > 1)
    members = np.full((longest(sizes), table.num + len(leaders)), -1)
    members[0, : table.num] = np.arange(table.num)
    for unit, place in enumerate(leaders, table.num):
        size = sizes[place]
        members[:size, unit] = order[place : place + size]
    begin = np.concatenate([np.maximum(table.kv_begin, common), 0 * leaders])
    return members, begin, np.concatenate([table.kv_end, common[order[leaders]]])


def _enumerated(counts: Numbers) -> tuple[Numbers, Numbers]:
    """Return the number of the list and the place in it, for each entry of lists of `counts`."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
