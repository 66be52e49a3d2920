"""From mods to machine code, step by step.

    trace      turn each mod into a graph (done when the request came in)
    shift      number the captured tensors of all mods in one list
    bound      make graphs that tell if a mask can be true, or must be true, in a tile
    narrow     turn 64-bit indices into 32-bit ones where they fit
    lower      turn all graphs into functions in LLVM's language
    compile    turn the functions into machine code, or find it in this process or on disk

`COLUMN` is this list. `graphs_of` does the steps up to `narrow`, `compiled` the others, and
`quire.kernel(...).stages` shows what comes out of each.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, overload

import torch
from torch import Tensor

from quire.block_mask import BlockRows
from quire.codegen.convention import Form
from quire.codegen.llvm import jit
from quire.codegen.llvm.builder import Module
from quire.codegen.mods.arguments import CaptureShape, ModArguments, literals
from quire.codegen.mods.derive import Derived, write_derive
from quire.codegen.mods.functions import (
    write_extent,
    write_rewrite,
    write_row_rewrite,
    write_verdict,
)
from quire.codegen.mods.push import write_push
from quire.codegen.mods.weigh import write_reweigh, write_row_reweigh, write_weigh
from quire.codegen.phases.softmax import LOG4_E
from quire.codegen.phases.tiles import TileShape
from quire.ir.bound import Bounds, bound
from quire.ir.differentiate import Derivatives, differentiate
from quire.ir.graph import Node, const, inputs, rebuild, rewrite, text
from quire.ir.narrow import narrow
from quire.ir.pyramid import Pyramid
from quire.ir.ranges import Range
from quire.ir.terms import FALSE, TRUE
from quire.ir.trace import Traced
from quire.memory import One
from quire.memory.tables import Sequences
from quire.request import Problem, ReadyMod
from quire.runtime.blocks import within_blocks
from quire.runtime.cache import cache_key, code_of

ORIGIN = One(0, 0, 0, 0)
"""Positions that begin at 0, for queries and keys."""

_POSITION_BITS = (20, 31, 62)
"""Limits of positions, as powers of two. With few limits, calls of many lengths share a graph."""


class ModGraphs(NamedTuple):
    """The graphs of one problem, over one list of captured tensors.

    The mask `always` applies to full and partial tiles, `partial` to partial tiles only. `drop` is
    the prob_mod with dropout behind it: a multiple of its input `score`, a weight. `bounds` are the
    bounds of `always`, if there is no block mask. `learned` are the indices of the captured tensors
    whose gradients are wanted.
    `tangent` is that of the score after the score_mod, if tangents are wanted and it is not 0.
    """

    score: Node | None = None
    always: Node | None = None
    drop: Node | None = None
    partial: Node | None = None
    bounds: Bounds | None = None
    learned: tuple[int, ...] = ()
    weighted: bool = False  # the score_mod returns weights
    tangent: Node | None = None

    def changed(self, change: Callable[[int, Node], Node]) -> ModGraphs:
        """Return `change(place, graph)` of score, always, drop and partial; bounds stay."""
        score, always, drop, partial = (
            None if root is None else change(place, root) for place, root in enumerate(self[:4])
        )
        return self._replace(score=score, always=always, drop=drop, partial=partial)

    @property
    def all(self) -> list[Node]:
        """Return the graphs of mods and bounds that are not None."""
        mods = [self.score, self.always, self.drop, self.partial]
        bounds = [] if self.bounds is None else [self.bounds.can, self.bounds.must]
        return [root for root in (*mods, *bounds) if root is not None]

    def everything(self, form: Form) -> list[Node]:
        """Return all graphs that the kernel of a form needs, derivatives included."""
        if form == "tangent" and self.tangent is not None:
            return [*self.all, self.tangent]
        if form != "backward":
            return self.all
        slope, loads = self.slopes
        loads = loads | self.slopes_of_drop
        return [*self.all, *([] if slope is None else [slope]), *loads, *loads.values()]

    @property
    def judges_heads(self) -> bool:
        """Return whether the tiles that can be skipped differ from head to head."""
        return self.bounds is not None and _depends_on_head(self.bounds.can, self.bounds.must)

    @property
    def pyramids(self) -> tuple[Pyramid, ...]:
        """Return the pyramids that the bounds load from."""
        return () if self.bounds is None else self.bounds.pyramids

    @property
    def masks(self) -> dict[str, list[Node]]:
        """Return the masks that apply to plain, full and partial tiles."""
        always = [] if self.always is None else [self.always]
        both = always if self.partial is None else [*always, self.partial]
        return {"plain": [], "full": always, "partial": both}

    @property
    def slopes(self) -> Derivatives:
        """Return the derivatives of the score_mod, and of its loads from learned tensors."""
        if self.score is None:
            return Derivatives(None, {})
        score, loads = derivatives(self.score)
        slope = const(0.0, self.score.dtype) if score is None else score
        return Derivatives(slope, self._learned(loads))

    @property
    def slopes_of_drop(self) -> dict[Node, Node]:
        """Return the derivatives of a weight, after `drop`, by loads from learned tensors."""
        return {} if self.drop is None else self._learned(derivatives(self.drop).loads)

    def _learned(self, loads: dict[Node, Node]) -> dict[Node, Node]:
        return {x: y for x, y in loads.items() if x.payload in self.learned}


@functools.lru_cache(maxsize=512)
def _depends_on_head(*graphs: Node) -> bool:
    return "h" in inputs(*graphs)


derivatives = functools.lru_cache(maxsize=512)(differentiate)


class ColumnScope(NamedTuple):
    """What the steps of the column need to know besides the graphs.

    `shapes` are those of all captured tensors: of score, always, drop and partial, in this order;
    `firsts` is the index of the first tensor of each.
    """

    firsts: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    bits: int  # positions are below 2**bits
    has_blocks: bool  # so tiles are listed, and no bounds are needed


def _shift(graphs: ModGraphs, scope: ColumnScope) -> ModGraphs:
    """Number the captured tensors of all mods in one list."""
    return graphs.changed(lambda place, root: _renumbered(root, scope.firsts[place]))


def _bound(graphs: ModGraphs, scope: ColumnScope) -> ModGraphs:
    """Make graphs that tell if a mask can be true, or must be true, in a tile."""
    if graphs.always is None or scope.has_blocks:
        return graphs
    bounds = _bounds(graphs.always, scope.bits, scope.shapes)
    tells_nothing = bounds.can is TRUE and bounds.must is FALSE
    return graphs if tells_nothing else graphs._replace(bounds=bounds)


def _narrow(graphs: ModGraphs, scope: ColumnScope) -> ModGraphs:
    """Turn 64-bit indices into 32-bit ones where they fit. Bounds are made with 32 bits."""
    return graphs.changed(lambda _, root: _narrowed(root, scope.bits))


GRAPH_STEPS: dict[str, Callable[[ModGraphs, ColumnScope], ModGraphs]] = {
    "trace": lambda graphs, _: graphs,  # a request is traced when it comes in
    "shift": _shift,
    "bound": _bound,
    "narrow": _narrow,
}
"""The steps from graph to graph, in order. `quire.kernel(...).stages` shows each of them."""

COLUMN = {**dict.fromkeys(GRAPH_STEPS, "graph"), "lower": "llvm", "compile": "asm"}
"""All steps, and the language of what comes out of each."""


@functools.lru_cache(maxsize=4096)
def _renumbered(root: Node, first: int) -> Node:
    return rewrite(root, functools.partial(_renumber, first)) if first else root


def _renumber(first: int, node: Node, args: tuple[Node, ...]) -> Node:
    """Rebuild a node; add `first` to the index of the tensor if it is a load."""
    if node.op != "load":
        return rebuild(node, args)
    assert isinstance(node.payload, int)
    return Node("load", args, node.dtype, first + node.payload)


@functools.lru_cache(maxsize=1024)
def _bounds(root: Node, bits: int, shapes: tuple[tuple[int, ...], ...]) -> Bounds:
    return bound(root, shapes, _ranges(bits))


@functools.lru_cache(maxsize=4096)
def _narrowed(root: Node, bits: int) -> Node:
    return narrow(root, _ranges(bits))


def _bits(end: int) -> int:
    return next(bits for bits in _POSITION_BITS if end < 2**bits)


def _ranges(bits: int) -> dict[str, Range]:
    positions, places = (0, 2**bits - 1), (0, 2**31 - 1)
    return {"b": places, "h": places, "q_idx": positions, "kv_idx": positions}


def graphs_of(
    problem: Problem,
    dtype: torch.dtype,
    end: int,
    mixed: BlockRows | None = None,
    rows: One | Sequences = ORIGIN,
) -> tuple[ModGraphs, tuple[Tensor, ...]]:
    """Return the graphs of a problem, and the tensors that they load from, its captures first.

    Positions are below `end`. `mixed` is the block mask, if a tile of the kernel touches blocks of
    several kinds; it counts from the first query and key of `rows`.
    """
    score, always = _traced(problem.score_mod), _traced(problem.mask_mod)
    partial, dropout = _traced(problem.partial_mod), problem.dropout
    if mixed is not None and partial is not None:
        partial = within_blocks(partial, mixed, rows)
    drop = problem.prob_mod
    if dropout is not None:
        drop = _dropped(drop, dropout.keep, dropout.factor, dtype)
    steps, tensors = graph_stages(
        (score, always, drop, partial), end, has_blocks=problem.block_mask is not None
    )
    *_, graphs = steps.values()
    return graphs._replace(weighted=problem.weighting != "softmax"), tensors


def graph_stages(
    mods: tuple[Traced | None, ...], end: int, *, has_blocks: bool = False
) -> tuple[dict[str, ModGraphs], tuple[Tensor, ...]]:
    """Return the graphs of score, always, drop and partial after each step, and their tensors."""
    captures = [() if mod is None else mod.captures for mod in mods]
    tensors = tuple(tensor.resolve_neg() for each in captures for tensor in each)
    firsts = (0, *itertools.accumulate(map(len, captures[:-1])))
    shapes = tuple(tuple(tensor.shape) for tensor in tensors)
    scope = ColumnScope(firsts, shapes, _bits(end), has_blocks)
    score, always, drop, partial = (None if mod is None else mod.output for mod in mods)
    graphs, stages = ModGraphs(score, always, drop, partial), {}
    for name, step in GRAPH_STEPS.items():
        graphs = stages[name] = step(graphs, scope)
    return stages, tensors


def bounds_of(mask: Traced, end: int) -> Bounds:
    """Return the bounds of a mask, with its own list of captured tensors."""
    return _bounds(mask.output, _bits(end), tuple(tuple(tensor.shape) for tensor in mask.captures))


@overload
def _traced(mod: None) -> None: ...


@overload
def _traced(mod: ReadyMod) -> Traced: ...


def _traced(mod: ReadyMod | None) -> Traced | None:
    assert mod is None or isinstance(mod, Traced), "a kernel needs mods that were traced"
    return mod


def _dropped(prob: Traced | None, keep: Traced, factor: float, dtype: torch.dtype) -> Traced:
    """Return dropout as a graph on a weight, behind the prob_mod if there is one."""
    weight = Node("input", (), dtype, "score") if prob is None else prob.output
    captures = () if prob is None else prob.captures
    kept = Node("mul", (weight, const(factor, dtype)), dtype)
    output = Node(
        "where", (_renumbered(keep.output, len(captures)), kept, const(0.0, dtype)), dtype
    )
    return Traced(output, (*captures, *keep.captures), "score", keep.name)


# --- code -----------------------------------------------------------------------------------------


FUNCTIONS = ("plain", "full", "partial", "drop", "extent", "verdict")


class ModCode(NamedTuple):
    """The mods of a problem as machine code. A function that is not needed has address 0."""

    arguments: ModArguments
    code: jit.Code | None
    addresses: dict[str, int]


def capture_shapes(
    captures: Sequence[Tensor], pyramids: Sequence[Pyramid]
) -> tuple[CaptureShape, ...]:
    """Return the shapes of captured tensors and their pyramids that code is generated for."""
    ranks = [captures[pyramid.slot].dim() for pyramid in pyramids]
    return (*map(CaptureShape.of, captures), *(CaptureShape(rank, None) for rank in ranks))


@functools.lru_cache(maxsize=512)
def compiled(
    form: Form, tile: TileShape, graphs: ModGraphs, shapes: tuple[CaptureShape, ...]
) -> ModCode:
    """Return the machine code of mods. Graphs that differ only in constants share their code.

    Nodes are interned, so this cache finds equal graphs by identity.
    """
    nodes = graphs.everything(form)
    arguments = ModArguments.of(nodes, shapes)
    names = _written(form, graphs)
    if not names:
        return ModCode(arguments, None, dict.fromkeys(FUNCTIONS, 0))
    values = [node.payload for node in literals(*nodes)]
    content = "\n".join(
        [
            form,
            repr(tile),
            repr(shapes),
            repr(names),
            repr(values),
            repr((graphs.learned, graphs.weighted, graphs.tangent is None)),
            text(*nodes, values=False),
        ]
    )
    code = _codes.get(content)
    if code is None:
        key = cache_key("mods", content)
        code = _codes[content] = code_of(
            key, tile.target, lambda: lower(form, tile, graphs, arguments), names
        )
    written = {name: _written_as(form, graphs, name) for name in FUNCTIONS}
    addresses = {name: code.address(same) if same else 0 for name, same in written.items()}
    return ModCode(arguments, code, addresses)


_codes: weakref.WeakValueDictionary[str, jit.Code] = weakref.WeakValueDictionary()


def _written_as(form: Form, graphs: ModGraphs, function: str) -> str | None:
    """Return the name of the function that serves as `function`; None if it is not needed."""
    if function == "drop":
        return "drop" if graphs.drop is not None and form != "backward" else None
    if function == "verdict":
        return "verdict" if graphs.bounds is not None else None
    if function == "extent":
        return "extent" if form != "row" and graphs.masks["partial"] else None
    masks = graphs.masks
    if graphs.score is None and not masks[function] and form != "backward":
        return None
    return next(name for name in ("plain", "full", "partial") if masks[name] == masks[function])


def _written(form: Form, graphs: ModGraphs) -> list[str]:
    return [name for name in FUNCTIONS if _written_as(form, graphs, name) == name]


def lower(form: Form, tile: TileShape, graphs: ModGraphs, arguments: ModArguments) -> Module:
    """Return a module with all functions that a problem needs, in LLVM's language."""
    module = Module()
    write = write_row_rewrite if form == "row" else write_rewrite
    for name in _written(form, graphs):
        if name == "drop":
            assert graphs.drop is not None
            reweigh = write_row_reweigh if form == "row" else write_reweigh
            reweigh(module, name, tile, arguments, graphs.drop)
        elif name == "extent":
            write_extent(module, name, tile, arguments, graphs.masks["partial"])
        elif name == "verdict":
            assert graphs.bounds is not None
            can, must, *_ = graphs.bounds
            write_verdict(module, name, tile, arguments, can=can, must=must)
        elif form == "backward":
            slope, loads = graphs.slopes
            masks = tuple(graphs.masks[name])
            derived = Derived(
                graphs.score,
                slope,
                tuple(loads.items()),
                masks,
                graphs.drop,
                of_drop=tuple(graphs.slopes_of_drop.items()),
                weighted=graphs.weighted,
            )
            write_derive(module, name, tile, arguments, derived)
        elif form == "tangent":
            push = functools.partial(write_push, tangent=graphs.tangent)
            push(module, name, tile, arguments, score=graphs.score, masks=graphs.masks[name])
        elif form == "panel" and graphs.weighted:
            assert graphs.score is not None
            masks = tuple(graphs.masks[name])
            write_weigh(module, name, tile, arguments, graphs.score, masks=masks)
        else:
            unit = 1.0 if graphs.weighted else LOG4_E
            masks = tuple(graphs.masks[name])
            write(module, name, tile, arguments, score=graphs.score, masks=masks, unit=unit)
    return module
