"""The forward pass on compiled kernels: a plan is made once for a layout of operands, then run."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from quire.aux_outputs import AuxRequest
from quire.codegen.convention import EMPTY, FULL, KEYS_OF_RUN, PARTIAL
from quire.config import config
from quire.errors import TensorKindError
from quire.memory import One, Placed
from quire.memory.tables import Sequences
from quire.request import Call, Problem
from quire.results import NOWHERE, Result, output_layout
from quire.runtime.backward import key_mass
from quire.runtime.blocks import TileLists
from quire.runtime.division import FormPart, by_form, heads_of_item, parts_of
from quire.runtime.gather import gather
from quire.runtime.launch import Launcher, Records
from quire.runtime.mods import ORIGIN, graphs_of
from quire.runtime.prepare import make_launcher, records_of
from quire.support.bounded import BoundedDict
from quire.support.torch_private import has_memory

STEPS = 4
"""How many tables of sequences a plan remembers: all layers share one, or those of a group do."""

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
        if not request.aux.argmax:  # gathered keys have other positions
            problem, placed = gather(problem, placed)
        opens = problem.has_holes and lists_holes(request.aux) and fits_runs(placed)
        if opens:
            problem = problem.opened()
        origin = rows if isinstance(rows, One) else ORIGIN
        stays_open = stays_open or problem.weighting == "sums"
        parts = tuple(
            _planned(part, problem, placed, results, origin=origin, stays_open=stays_open)
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
            captures = problem.opened().captures
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
            fill_holes(results, placed.rows)
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
                records_of(part.launcher, placed, some, part.listed_kind)
                for part, some in zip(self.parts, every, strict=True)
            ]
            if key is not None:
                self.steps.keep(key, known)
        return known


def division_of(call: Call, problem: Problem, placed: Placed) -> list[FormPart]:
    """Return how the forward pass of a call is divided, with its keys perhaps gathered."""
    aux, rows = call.request.aux, call.placed.rows
    kv_begin = rows.kv_begin if isinstance(rows, One) else 0
    return parts_of(placed, problem.block_mask, kv_begin, observes=not lists_holes(aux))


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
    origin: One,
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
    if placed.holes is not None and results.argmax is None and results.entropy is None:
        listed_kind = FULL if graphs.always is None else PARTIAL
    return FormPlan(launcher, lists, loaded[len(problem.captures) :], listed_kind)


def fill_holes(results: Result, sequences: Sequences) -> None:
    """Set the results of rows that belong to no sequence to `NOWHERE`."""
    holes = sequences.unowned(results.out.shape[2])
    if holes is None:
        return
    where = torch.from_numpy(holes)
    for name, rows in results.by_query.items():
        rows[:, :, where] = NOWHERE[name]
