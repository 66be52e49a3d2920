"""From a problem to the graphs that are compiled: one list of captures, 32-bit where it fits."""

from __future__ import annotations

import functools
from typing import overload

import torch
from torch import Tensor

from quire.block_mask import BlockRows
from quire.block_mask.lists import FULL, PARTIAL
from quire.ir.bound import Bounds, bound
from quire.ir.graph import Node, cast, const, rebuild, rewrite
from quire.ir.narrow import narrow
from quire.ir.ranges import Range
from quire.ir.simplify import simplify
from quire.ir.terms import FALSE, TRUE
from quire.ir.trace import Traced
from quire.problem import Problem, ReadyMod
from quire.runtime.kernels import ModRoots

_POSITION_BITS = (20, 31, 62)
"""Positions are below one of these powers of two, so that few graphs stand for all lengths."""


class CaptureList:
    """The captured tensors of all mods, and graphs that refer to them by their place in it."""

    def __init__(self, longest: int) -> None:
        self.tensors: list[Tensor] = []
        self.bits = _bits(longest)

    def root(self, mod: Traced | None) -> Node | None:
        """The graph of a mod, ready to be compiled."""
        if mod is None:
            return None
        first = len(self.tensors)
        self.tensors.extend(tensor.resolve_neg() for tensor in mod.captures)
        return _ready(mod.output, first, self.bits)


def _bits(longest: int) -> int:
    return next(bits for bits in _POSITION_BITS if longest < 2**bits)


@functools.lru_cache(maxsize=4096)
def _ready(root: Node, first: int, bits: int) -> Node:
    if first:
        root = rewrite(root, functools.partial(_shifted, first))
    return narrow(root, _ranges(bits))


def _ranges(bits: int) -> dict[str, Range]:
    positions, places = (0, 2**bits - 1), (0, 2**31 - 1)
    return {"b": places, "h": places, "q_idx": positions, "kv_idx": positions}


def _shifted(first: int, node: Node, args: tuple[Node, ...]) -> Node:
    """A node whose loads count from `first`."""
    if node.op != "load":
        return rebuild(node, args)
    assert isinstance(node.payload, int)
    return Node("load", args, node.dtype, first + node.payload)


def mod_roots(
    problem: Problem, dtype: torch.dtype, longest: int, mixed: BlockRows | None
) -> tuple[ModRoots, tuple[Tensor, ...]]:
    """The graphs of a problem and the tensors that they load from.

    `mixed` is the block mask where its tiles touch blocks of several kinds.
    """
    captures = CaptureList(longest)
    score = captures.root(_traced(problem.score_mod))
    always = captures.root(_traced(problem.mask_mod))
    partial_mod = _traced(problem.partial_mod)
    if mixed is not None and partial_mod is not None:
        partial_mod = _within_blocks(partial_mod, mixed, problem)
    partial = captures.root(partial_mod)
    drop = None
    if problem.dropout is not None:
        drop = captures.root(_drop(problem.dropout.keep, problem.dropout.factor, dtype))
    tensors = tuple(captures.tensors)
    bounds = None
    if problem.block_mask is None and problem.mask_mod is not None:
        output = _traced(problem.mask_mod).output
        first = 0 if problem.score_mod is None else len(problem.score_mod.captures)
        shapes = tuple(tuple(tensor.shape) for tensor in tensors)
        bounds = _bounds(output, first, captures.bits, shapes)
        known = bounds.can is not TRUE or bounds.must is not FALSE
        bounds = bounds if known else None
    return ModRoots(score, always, partial, drop, bounds), tensors


@functools.lru_cache(maxsize=1024)
def _bounds(root: Node, first: int, bits: int, shapes: tuple[tuple[int, ...], ...]) -> Bounds:
    """What a mask can and must be in a tile."""
    if first:
        root = rewrite(root, functools.partial(_shifted, first))
    return bound(root, shapes, _ranges(bits))


def bounds_of(mask: Traced, longest: int) -> Bounds:
    """The bounds of a mask alone, whose captured tensors come first."""
    shapes = tuple(tuple(tensor.shape) for tensor in mask.captures)
    return _bounds(mask.output, 0, _bits(longest), shapes)


@overload
def _traced(mod: None) -> None: ...


@overload
def _traced(mod: ReadyMod) -> Traced: ...


def _traced(mod: ReadyMod | None) -> Traced | None:
    assert mod is None or isinstance(mod, Traced), "untraced mods do not come here"
    return mod


def _drop(keep: Traced, factor: float, dtype: torch.dtype) -> Traced:
    """Dropout on a weight. What is dropped keeps its sign: -0.0 marks what was never read."""
    weight = Node("input", (), dtype, "score")
    kept, dropped = (Node("mul", (weight, const(number, dtype)), dtype) for number in (factor, 0.0))
    output = Node("where", (keep.output, kept, dropped), dtype)
    return Traced(output, keep.captures, "score", keep.name)


def _within_blocks(mod: Traced, rows: BlockRows, problem: Problem) -> Traced:
    """A mask_mod that also asks the block mask about every element."""
    cells = torch.from_numpy(rows.runs.cells()).to(torch.int8)
    slot = len(mod.captures)

    def index(name: str, start: int, size: int) -> Node:
        position = Node("input", (), torch.int64, name)
        from_start = Node("sub", (position, const(start, torch.int64)), torch.int64)
        return Node("floordiv", (from_start, const(size, torch.int64)), torch.int64)

    def own(name: str, count: int) -> Node:
        return Node("input", (), torch.int64, name) if count > 1 else const(0, torch.int64)

    indices = (
        own("b", cells.shape[0]),
        own("h", cells.shape[1]),
        index("q_idx", problem.q_start, rows.block_size[0]),
        index("kv_idx", problem.kv_start, rows.block_size[1]),
    )
    cell = cast(Node("load", indices, torch.int8, slot), torch.int32)

    def kind(number: int) -> Node:
        return Node("eq", (cell, const(number, torch.int32)), torch.bool)

    held = Node("and", (kind(PARTIAL), mod.output), torch.bool)
    output = simplify(Node("or", (kind(FULL), held), torch.bool))
    return Traced(output, (*mod.captures, cells), "mask", mod.name, mod.lines)
