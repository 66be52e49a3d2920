"""torch.vmap over attention: many calls become one with a larger batch.

Entry b of call n is entry b' = n * B + b of the batch. A captured tensor that is mapped gets one
more dimension, and mods compute n and b from b':

    bias[b, h]      becomes      bias[b' // B, b' % B, h]

A batch entry has the same bits whatever its batch, so the results are those of a loop. What cannot
be folded is computed in a loop: ragged and paged memory, mods without a graph, a mapped sink.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from quire.ir.graph import Node, rebuild, walk
from quire.ir.simplify import simplest
from quire.ir.terms import term, whole
from quire.ir.trace import Traced
from quire.request import Problem
from quire.results import folded
from quire.support.torch_private import outside_transforms

if TYPE_CHECKING:
    from quire.autograd.steps import Step


class Change(Protocol):
    """Turns a problem into one whose batch is `size` times as large."""

    @property
    def size(self) -> int:
        """Return by how much it is larger."""

    def problem(self, problem: Problem) -> Problem:
        """Return the other problem."""


class Role(NamedTuple):
    """The role of a tensor, which decides how torch.vmap maps it.

    rows        [B, ...], queries, results, and what is like them
    keys        [B or 1, ...], keys and values
    heads       [Hq], the sink
    drawn       the seed of dropout; it is mapped if each call draws its own
    captured    any shape, the captured tensor of that number
    """

    name: str
    number: int = 0


@dataclass(frozen=True, eq=False)
class Fold:
    """How `size` calls with `batch` entries each become one.

    `keys` is the batch of the keys, `shared` says whether all calls read the same. `captured` are
    the indices of the captured tensors that are mapped. With `differs`, calls drop other weights.
    """

    size: int
    batch: int
    keys: int
    shared: bool
    captured: frozenset[int]
    differs: bool

    @staticmethod
    def of(step: Step, size: int, dims: Sequence[int | None], given: Sequence[Any]) -> Fold | None:
        """Return how the calls of a step become one; None if they cannot."""
        problem = step.passes.problem
        traced = all(isinstance(mod, Traced) for mod in problem.mods.values())
        if not (step.shell.is_dense and traced):
            return None
        batch = keys = 0
        shared = not any(role.name == "keys" for role in step.outputs)
        captured = {role.number for role in step.outputs if role.name == "captured"}
        differs = False
        for role, dim, x in zip(step.inputs, dims, given, strict=True):
            if x is None:
                continue
            mapped, first = dim is not None, x.shape[1 if dim == 0 else 0] if x.dim() else 0
            match role.name:
                case "heads" if mapped:
                    return None
                case "rows":
                    batch = first
                case "keys":
                    keys = first
                    shared &= first == 1 and not mapped
                case "captured" if mapped:
                    captured.add(role.number)
                case "drawn":
                    differs = mapped
        return Fold(size, batch, keys, shared, captured=frozenset(captured), differs=differs)

    def put(self, role: Role, x: Tensor | None, dim: int | None) -> Tensor | None:
        """Return an input of all calls as an input of the one call."""
        if x is None or role.name == "heads" or (role.name == "keys" and self.shared):
            return x
        if role.name == "drawn":
            return x if dim is None else x.select(dim, 0)
        if role.name == "captured" and role.number not in self.captured:
            return x
        each: Tensor = x.expand(self.size, *x.shape) if dim is None else x.movedim(dim, 0)
        if role.name == "captured":
            return each
        if role.name == "keys":
            every: Tensor = each.expand(-1, self.batch, *(-1,) * (each.dim() - 2)).flatten(0, 1)
            return every
        rows: Tensor = each.flatten(0, 1)
        return rows.contiguous() if dim is None else rows  # results are laid out like the query

    def take(self, role: Role, x: Tensor | None) -> Tensor | None:
        """Return an output of the one call as that of all calls; their dimension comes first."""
        if x is None or role.name == "captured":
            return x
        each: Tensor = x.unflatten(0, (self.size, self.batch))
        if role.name == "keys" and self.keys != self.batch:  # a batch of one, which all share
            return folded(each.transpose(0, 1).clone()).unsqueeze(1)
        return each

    def problem(self, problem: Problem) -> Problem:
        """Return the problem of the one call. Mapped tensors have one more dimension."""
        changed, first = problem._replace(open_mask=None, has_holes=False), 0
        for name, mod in problem.mods.items():
            assert isinstance(mod, Traced), "only graphs can be folded"
            slots = range(first, first + len(mod.captures))
            mapped = tuple(slot in self.captured for slot in slots)
            changed = changed._replace(**{name: self._mod(mod, mapped)})  # type: ignore[arg-type]
            first = slots.stop
        mask, dropout = problem.block_mask, problem.dropout
        if mask is not None and mask.kv_num_blocks.shape[0] > 1:
            with outside_transforms():
                several = mask[torch.arange(self.batch, device=mask.device).repeat(self.size)]
            changed = changed._replace(block_mask=several)
        if dropout is not None and not self.differs:
            changed = changed._replace(dropout=replace(dropout, mask=self._mod(dropout.keep, ())))
        return changed

    def _mod(self, mod: Traced, mapped: tuple[bool, ...]) -> Traced:
        """Return a mod of the one call."""
        place = Node("input", (), torch.int64, "b")
        call = term("floordiv", place, whole(self.batch)) if self.batch > 1 else place
        entry = term("mod", place, whole(self.batch)) if self.batch > 1 else whole(0)

        def moved(node: Node, args: tuple[Node, ...]) -> Node:
            if node is place:
                return entry
            if node.op == "load" and mapped[int(node.payload or 0)]:
                return Node("load", (call, *args), node.dtype, node.payload)
            return simplest(rebuild(node, args))

        return rewritten(mod, moved)


class Shift(NamedTuple):
    """The dropout of batch entries from `entries` on, for one call of a loop."""

    entries: int
    size: int = 1

    def problem(self, problem: Problem) -> Problem:
        """Return the problem with that dropout."""
        dropout = problem.dropout
        if dropout is None:
            return problem
        place = Node("input", (), torch.int64, "b")
        there = term("add", place, whole(self.entries))
        keep = rewritten(
            dropout.keep, lambda node, args: there if node is place else rebuild(node, args)
        )
        return problem._replace(dropout=replace(dropout, mask=keep))


def rewritten(mod: Traced, visit: Callable[[Node, tuple[Node, ...]], Node]) -> Traced:
    """Return a mod whose every node is replaced; each new node has the line of the old one."""
    new: dict[Node, Node] = {}
    for node in walk(mod.output):
        new[node] = visit(node, tuple(new[arg] for arg in node.args))
    lines = {new[node]: line for node, line in mod.lines.items() if node in new}
    return replace(mod, output=new[mod.output], lines=lines)


def mapped(
    apply: Callable[..., Any], step: Step, info: Any, in_dims: Sequence[Any], given: Sequence[Any]
) -> tuple[tuple[Tensor | None, ...], tuple[int | None, ...]]:
    """Return the results of many calls of a step, and where their dimension is.

    The rule of torch.vmap for a Function: `apply` calls it, `in_dims` has the dimension of each
    input that is mapped, and None for the others.
    """
    fold = Fold.of(step, info.batch_size, in_dims, given)
    if fold is None:
        found = _looped(apply, step, info.batch_size, in_dims, given)
    else:
        inputs = map(fold.put, step.inputs, given, in_dims)
        found = tuple(map(fold.take, step.outputs, apply(step.changed(fold), *inputs)))
    return found, tuple(None if x is None else 0 for x in found)


def _looped(
    apply: Callable[..., Any], step: Step, size: int, dims: Sequence[Any], given: Sequence[Any]
) -> tuple[Tensor | None, ...]:
    """Return the results of many calls, computed one after the other."""
    every, place = [], step.inputs.index(Role("drawn"))
    shell, rows = step.shell, step.inputs.index(Role("rows"))
    entries = shell.sequences.num
    if shell.is_dense:
        entries = given[rows].shape[1 if dims[rows] == 0 else 0]
    for number in range(size):
        inputs = [
            x if x is None or dim is None else x.select(dim, number)
            for x, dim in zip(given, dims, strict=True)
        ]
        here = step if dims[place] is None else step.changed(Shift(number * entries))
        every.append(apply(here, *inputs))
    return tuple(
        None if parts[0] is None else torch.stack(parts) for parts in zip(*every, strict=True)
    )
