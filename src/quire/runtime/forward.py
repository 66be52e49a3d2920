"""The forward pass on compiled kernels: a plan is made once for a layout of operands, then run.

The second half divides the work of a call: which kernel computes which sequences, in which blocks.
Results do not depend on that, only the time.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from quire.aux_outputs import AuxRequest
from quire.block_mask import BlockMask
from quire.block_mask.blocks import Runs
from quire.codegen.convention import (
    EMPTY,
    FEW_ROWS,
    FULL,
    KEYS_OF_RUN,
    MANY_KEYS,
    MOST_ROWS,
    PARTIAL,
    Form,
    choose_block_q,
    choose_heads,
)
from quire.codegen.llvm.target import Target
from quire.codegen.llvm.types import F32, F64
from quire.codegen.phases.tiles import TileShape
from quire.config import config
from quire.errors import TensorKindError
from quire.memory import One, Placed, longest, output_layout
from quire.memory.tables import Sequences
from quire.request import Call, Problem
from quire.results import Result, nowhere
from quire.runtime.backward import key_mass
from quire.runtime.blocks import NO_LISTS, TileLists, num_tiles, read_lists
from quire.runtime.gather import gather
from quire.runtime.launch import Launcher, Records, num_threads
from quire.runtime.mods import graphs_of
from quire.runtime.prepare import make_launcher, records_of
from quire.support.bounded import BoundedDict
from quire.support.torch_private import has_memory

STEPS = 4
"""How many tables of sequences a plan remembers: all layers share one, or those of a group do."""

SMALLEST_BLOCK = 64

TILE = 128
"""Queries and keys of a tile, about, for an estimate of what tiles would cost."""

LANES = 16
"""Queries that a panel computes at once, about."""

WORTH = 0.75
"""Cut tiles if the blocks that are listed take at most this part of the time of whole tiles."""

ROW_COST = 2
"""How much longer a score takes in the kernel for few queries, about."""

MOST_CELLS = 2**24
"""The most blocks of a mask that are put into a table, to look up the block of each element."""


_CPU = torch.device("cpu")


class ResultLayout(NamedTuple):
    """Shape, strides and dtype of the output, and the dtypes of the other results [B, Hq, L]."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    others: dict[str, torch.dtype]

    @staticmethod
    def of(call: Call, learns: bool) -> ResultLayout:
        """Return the layout for a call. A backward pass needs lse, and `out` in working dtype."""
        placed, wanted = call.placed, call.request.aux
        if config().check_rows:
            wanted = wanted._replace(lse=True, max_scores=True)
        wanted = wanted._replace(lse=wanted.lse or learns or wanted.key_mass, key_mass=False)
        shape, strides = output_layout(placed.query, placed.value.shape[3])
        others = {
            name: torch.int64 if name == "argmax" else placed.dtype
            for name, asked in wanted._asdict().items()
            if asked
        }
        return ResultLayout(shape, strides, placed.dtype if learns else placed.query.dtype, others)

    def make(self) -> Result:
        """Return new tensors, uninitialised."""
        out = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=_CPU)
        if type(out) is not Tensor and not has_memory(out):
            raise TensorKindError(
                f"the output must be a plain tensor, but an active mode makes a "
                f"{type(out).__name__} of every new tensor. Call attention outside of the mode."
            )
        if not self.others:
            return Result(out)
        shape = self.shape[:3]
        return Result(
            out, **{name: out.new_empty(shape, dtype=dtype) for name, dtype in self.others.items()}
        )


class FormPlan(NamedTuple):
    """Computes the sequences of one form."""

    launcher: Launcher
    lists: TileLists
    added_captures: tuple[Tensor, ...]  # tensors that mods load from, besides the user's captures
    listed_kind: int  # of tiles in the lists of sequences with holes; EMPTY: there are no lists


class ForwardPlan(NamedTuple):
    """All that a forward pass needs, except its tensors."""

    parts: tuple[FormPlan, ...]
    layout: ResultLayout
    gathers: bool  # whether to gather the pages that a block mask lists
    opens: bool  # whether tile lists leave out holes, so that no mask has to
    steps: BoundedDict[object, list[Records]]

    @staticmethod
    def of(call: Call, learns: bool, *, stays_open: bool = False) -> ForwardPlan:
        """Return the plan for calls with the same key as this one.

        With `stays_open`, `out` is not divided by the sums, which `lse` has; see `pieces.py`.
        """
        layout = ResultLayout.of(call, learns)
        request, placed, problem, *_ = call
        results, rows = layout.make(), placed.rows
        mask = problem.block_mask
        if mask is not None and mask.lists_pages and not request.aux.argmax:
            problem, placed = gather(problem, placed)  # gathered keys have other positions
        opens = problem.has_holes and mask is None and lists_holes(request.aux)
        opens = opens and fits_runs(placed)
        if opens:
            problem = problem.opened()
        stays_open = stays_open or problem.weighting == "sums"
        parts = tuple(
            _planned(part, problem, placed, results, origin=rows, stays_open=stays_open)
            for part in division_of(call, problem, placed)
        )
        gathers = placed is not call.placed
        return ForwardPlan(parts, layout, gathers, opens, BoundedDict(STEPS))

    def run(self, call: Call) -> Result | None:
        """Return the results; None if a mod used an index out of range, which torch must report."""
        request, placed, problem, captures, _ = call
        if self.gathers:
            problem, placed = gather(problem, placed)
            captures = problem.captures
        if self.opens:
            captures = problem.open_captures(captures)
        results, sink, wrong = self.layout.make(), request.sink, False
        if sink is not None:
            sink = sink.to(placed.dtype).contiguous()
        every = self._records(placed)
        for (launcher, lists, added, _), records in zip(self.parts, every):  # noqa: B905  it is slower
            loaded = (*captures, *added) if added else captures
            wrong |= launcher.launch(placed, records, results, loaded, sink=sink, lists=lists)
        if wrong:
            return None
        if isinstance(placed.rows, Sequences) and placed.content is None:
            fill_holes(results, placed.rows, call.problem.weighting)
        if not request.aux.key_mass:
            return results
        mass = key_mass(call.problem, call.placed, results)
        return None if mass is None else results._replace(key_mass=mass)

    def _records(self, placed: Placed) -> list[Records]:
        """Return the table of sequences for each launch. All layers of a step share it."""
        rows, content = placed.rows, placed.content
        key = rows if isinstance(rows, One) else content
        known = self.steps.get(key)
        if known is None:
            every = [rows]
            if len(self.parts) > 1:
                every = [some for _, some in by_form(rows, placed.key.dtype)]
            known = [
                records_of(part.launcher, placed, some, part.listed_kind, part.lists)
                for part, some in zip(self.parts, every, strict=True)
            ]
            if key is not None:
                self.steps.keep(key, known)
        return known


def division_of(call: Call, problem: Problem, placed: Placed) -> list[FormPart]:
    """Return how the forward pass of a call is divided, with its keys perhaps gathered."""
    aux, origin = call.request.aux, call.placed.rows.kv_origin
    return parts_of(placed, problem.block_mask, origin, observes=not lists_holes(aux))


def lists_holes(aux: AuxRequest) -> bool:
    """Return whether kernels can leave out runs of a tile: if nothing observes their scores."""
    return not (aux.argmax or aux.entropy)


def fits_runs(placed: Placed) -> bool:
    """Return whether each run of keys is on one page."""
    return placed.key.shape[2] % KEYS_OF_RUN == 0


def _planned(
    part: FormPart,
    problem: Problem,
    placed: Placed,
    results: Result,
    *,
    origin: One | Sequences,
    stays_open: bool,
) -> FormPlan:
    """Return what computes a part."""
    form, rows, block_q, lists = part
    graphs, loaded = graphs_of(problem, placed.dtype, placed.end, lists.mixed, origin)
    launcher = make_launcher(
        form,
        placed,
        results,
        graphs,
        loaded,
        scale=problem.scale,
        block_q=block_q,
        lists=lists,
        item_heads=heads_of_item(form, placed, rows, block_q),
        stays_open=stays_open,
    )
    listed_kind = EMPTY
    unlisted = placed.holes is not None and problem.block_mask is None
    if unlisted and results.argmax is None and results.entropy is None:
        listed_kind = FULL if graphs.always is None else PARTIAL
    return FormPlan(launcher, lists, loaded[len(problem.captures) :], listed_kind)


def fill_holes(results: Result, sequences: Sequences, weighting: str) -> None:
    """Set the results of rows that belong to no sequence, which read no key."""
    holes = sequences.unowned(results.out.shape[2])
    if holes is None:
        return
    where, nothing = torch.from_numpy(holes), nowhere(weighting)
    for name, rows in results.by_query.items():
        rows[:, :, where] = nothing[name]


# --- how work is divided


class FormPart(NamedTuple):
    """Sequences that one kernel computes, `block_q` queries of a head at a time."""

    form: Form
    rows: One | Sequences
    block_q: int
    lists: TileLists = NO_LISTS


def parts_of(
    placed: Placed, mask: BlockMask | None, kv_begin: int = 0, *, observes: bool = False
) -> list[FormPart]:
    """Return how the forward pass is divided.

    A block mask counts from the position `kv_begin`. A kernel that observes scores computes whole
    tiles.
    """
    parts = [
        FormPart(form, rows, queries_of_item(form, placed, rows, mask))
        for form, rows in by_form(placed.rows, placed.key.dtype)
    ]
    if mask is None:
        return parts
    return [_with_lists(part, placed, mask, kv_begin, cuts=not observes) for part in parts]


def _with_lists(
    part: FormPart, placed: Placed, mask: BlockMask, kv_begin: int, *, cuts: bool
) -> FormPart:
    """Return a part with the lists of a mask, in the blocks of the mask if they are small."""
    placed = placed._replace(rows=part.rows)
    size, lengths = mask.BLOCK_SIZE, placed.lengths
    small = size[0] % part.block_q != 0 and lengths[0] > size[0]
    if small and cuts and _is_worth(mask, placed, part.form):
        form: Form = "row" if size[0] <= MOST_ROWS else "panel"
        part = part._replace(form=form, block_q=size[0])
    key_heads = placed.key.shape[1] if part.form == "row" else 0
    block_kv = Target.host().block_kv
    lists = read_lists(
        mask, lengths, part.block_q, block_kv, kv_begin, cuts=cuts, key_heads=key_heads
    )
    return part._replace(lists=lists)


def _is_worth(mask: BlockMask, placed: Placed, form: Form) -> bool:
    """Return whether the listed blocks take less time than tiles that hold them."""
    lengths, groups = placed.lengths, placed.key.shape[1]
    key = (mask.content(), lengths, groups, form)
    known = _known.get(key)
    if known is None:
        runs = mask.rows(*lengths, groups=groups).runs
        known = _known.keep(key, _is_less(runs, mask.BLOCK_SIZE, lengths[0], form))
    return known


_known: BoundedDict[tuple[object, ...], bool] = BoundedDict(16)


def _is_less(runs: Runs, size: tuple[int, int], q_len: int, form: Form) -> bool:
    """Return whether listed blocks take less time than tiles that hold them, by an estimate."""
    q_size, kv_size = size
    if math.prod(runs.shape) > MOST_CELLS:
        return True
    cost = int((runs.stops - runs.starts).sum()) * q_size * kv_size * _score_cost(q_size)
    tall, wide = max(TILE, q_size), max(TILE, kv_size)
    area = int(num_tiles(runs, size, tall, wide).sum()) * wide * min(tall, q_len)
    if form == "row":
        area *= ROW_COST
    return cost <= WORTH * area


def _score_cost(queries: int) -> float:
    """Return how long a score takes if a block has so many queries; in a tile it takes 1."""
    return ROW_COST if queries <= MOST_ROWS else -(-queries // LANES) * LANES / queries


def by_form(rows: One | Sequences, dtype: torch.dtype) -> list[tuple[Form, One | Sequences]]:
    """Split sequences by the kernel that computes them: "row" for few queries, else "panel".

    Both give the same bits. "row" reads keys of that `dtype` once for all heads that share them.
    """
    if isinstance(rows, One):
        few_rows = has_few(rows.q_len, rows.kv_end - rows.kv_begin, dtype)
        return [("row" if few_rows else "panel", rows)]
    most = _most_rows(dtype)
    few = (rows.q_len <= FEW_ROWS) | ((rows.q_len <= most) & (rows.kv_len >= MANY_KEYS))
    if not few.any():
        return [("panel", rows)]
    if few.all():
        return [("row", rows)]
    return [("row", rows.where(few)), ("panel", rows.where(~few))]


def has_few(queries: int, keys: int, dtype: torch.dtype) -> bool:
    """Return whether a sequence has few queries for its keys."""
    return queries <= (_most_rows(dtype) if keys >= MANY_KEYS else FEW_ROWS)


def _most_rows(dtype: torch.dtype) -> int:
    """Return the most queries for which the decode kernel is faster if there are many keys."""
    return MOST_ROWS if dtype.itemsize < torch.float32.itemsize else FEW_ROWS


def queries_of_item(
    form: Form, placed: Placed, rows: One | Sequences, mask: BlockMask | None
) -> int:
    """Return how many queries of a head a thread computes at once."""
    if form == "row":
        return max(1, rows.q_len if isinstance(rows, One) else longest(rows.q_len))
    query, value = placed.query, placed.value
    tile = TileShape(Target.host(), F64 if query.dtype == torch.float64 else F32)
    panels = 2 if form == "tangent" else 1  # tangents have panels of their own
    head_dim, value_dim = (panels * x.shape[3] for x in (query, value))
    count = num_rows(placed, rows)
    block_q = choose_block_q(tile, head_dim, value_dim, count, num_threads())
    if mask is None:
        return block_q
    # A block of queries should be within one block of the mask, unless it becomes tiny.
    divisor = math.gcd(block_q, mask.BLOCK_SIZE[0])
    return divisor if divisor >= SMALLEST_BLOCK else block_q


def heads_of_item(form: Form, placed: Placed, rows: One | Sequences, block_q: int) -> int:
    """Return how many heads a thread computes one after the other."""
    if form == "row":
        return 1
    batch, heads, *_ = placed.query.shape
    if isinstance(rows, One):
        q_len, alike = rows.q_len, batch if rows.q_len * (rows.kv_end - rows.kv_begin) else 0
    else:
        products = rows.q_len * rows.kv_len
        q_len, alike = longest(rows.q_len), int(products.sum()) // max(1, longest(products))
    return choose_heads(heads, q_len, alike, block_q, num_threads())


def num_rows(placed: Placed, rows: One | Sequences) -> int:
    """Return the number of query rows of some sequences, in all heads."""
    count = rows.q_len if isinstance(rows, One) else int(rows.q_len.sum())
    return count * placed.query.shape[1] * placed.batches
