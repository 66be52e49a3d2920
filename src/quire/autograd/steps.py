"""The functions that autograd differentiates, of every order. Each is a value.

    GradientStep           gradients of attention: also those of its results -> those of its inputs
    TangentStep            its tangents: also those of its inputs -> those of its results
    Pulled(step)           the reverse derivative of any step but the first
    Pushed(step)           the forward derivative of any step but the first

A step computes on plain tensors, without autograd: `compute`. `in_torch` is the same in operations
of torch, which can be recorded. The role of each tensor says how torch.vmap maps it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from quire.autograd.folding import Change, Role
from quire.memory import Placed
from quire.request import Call, Problem
from quire.results import Above, Gradients, Moved, Result, Tangents, Wanted
from quire.support.torch_private.transforms import (
    forward_mode,
    make_dual,
    saved_tensor_hooks,
    tangent_of,
)

Tensors: TypeAlias = tuple[Tensor | None, ...]

ROWS, KEYS, HEADS, DRAWN = (Role(name) for name in ("rows", "keys", "heads", "drawn"))


class Passes(Protocol):
    """Computes a call and its derivatives. With `in_torch`, autograd can record what is done."""

    problem: Problem

    def forward(self, call: Call) -> Result:
        """Return the results without autograd: `out` in the working dtype, and always `lse`."""

    def backward(
        self, placed: Placed, wanted: Wanted, above: Above, *, in_torch: bool = False
    ) -> Gradients:
        """Return the gradients. The mods load from `wanted.captures`."""

    def tangent(
        self,
        placed: Placed,
        captures: tuple[Tensor, ...],
        above: Above,
        along: Tangents,
        *,
        in_torch: bool = False,
    ) -> Result:
        """Return the tangents of out and lse. The mods load from `captures`."""

    def moved(self, call: Call, along: Tangents) -> Moved | None:
        """Return the results of a call and their tangents; None if one launch cannot give both."""

    def changed(self, change: Change) -> Passes:
        """Return what computes another problem."""


class Step:
    """A function of tensors, of the roles `inputs`, to tensors of the roles `outputs`.

    `shell` says where the rows of the operands are; its own tensors are not used.
    """

    def __init__(
        self, passes: Passes, shell: Placed, inputs: Iterable[Role], outputs: Iterable[Role]
    ) -> None:
        self.passes, self.shell = passes, shell
        self.inputs, self.outputs = tuple(inputs), tuple(outputs)

    def compute(self, *tensors: Tensor | None) -> Tensors:
        """Compute on plain tensors, without autograd."""
        return self._run(tensors, in_torch=False)

    def in_torch(self, *tensors: Tensor | None) -> Tensors:
        """Compute in operations of torch, which can be recorded."""
        return self._run(tensors, in_torch=True)

    def changed(self, change: Change) -> Step:
        """Return the step of another problem: of many calls as one, for instance."""
        other = copy.copy(self)
        other.passes = self.passes.changed(change)
        return other

    def _run(self, tensors: Tensors, *, in_torch: bool) -> Tensors:
        raise NotImplementedError


# --- the first order ------------------------------------------------------------------------------


class Operands(NamedTuple):
    """What every derivative reads: results of the forward pass, operands and captures."""

    out: Tensor
    lse: Tensor
    query: Tensor
    key: Tensor
    value: Tensor
    sink: Tensor | None
    captures: tuple[Tensor, ...]

    @staticmethod
    def of(tensors: Sequence[Tensor | None]) -> Operands:
        """Return them from out, lse, query, key, value, sink, the seed, *captures."""
        out, lse, query, key, value, sink, _, *captures = tensors
        assert out is not None and lse is not None
        assert query is not None and key is not None and value is not None
        return Operands(out, lse, query, key, value, sink=sink, captures=_present(captures))

    @staticmethod
    def roles(num_captures: int) -> tuple[Role, ...]:
        """Return the roles of those tensors."""
        return ROWS, ROWS, ROWS, KEYS, KEYS, HEADS, DRAWN, *captured_roles(num_captures)


class GradientStep(Step):
    """Takes the tensors of `Operands`, then the gradients of out and lse.

    Returns the gradients of query, key, value and captures, with delta and lse of each row behind
    the value if the sink needs them. `wants` is for query, key, value and sink, `learned` for each
    captured tensor.
    """

    def __init__(
        self,
        passes: Passes,
        shell: Placed,
        wants: tuple[bool, bool, bool, bool],
        learned: tuple[bool, ...],
    ) -> None:
        captured = captured_roles(len(learned))
        inputs = (*Operands.roles(len(learned)), ROWS, ROWS)
        super().__init__(passes, shell, inputs, (ROWS, KEYS, KEYS, ROWS, ROWS, *captured))
        self.wants, self.learned = wants, learned

    def _run(self, tensors: Tensors, *, in_torch: bool) -> Tensors:
        *others, grad_out, grad_lse = tensors
        given, (query, key, value, sink) = Operands.of(others), self.wants
        captures = tuple(
            _leaf(x) if wants else x for x, wants in zip(given.captures, self.learned, strict=True)
        )
        indices = tuple(index for index, wants in enumerate(self.learned) if wants)
        found = self.passes.backward(
            self.shell.on(given.query, given.key, given.value),
            Wanted(query, key, value, captures, indices),
            Above(given.out, given.lse, grad_out, grad_lse, given.sink),
            in_torch=in_torch,
        )
        every = (found.query, found.key, found.value, found.delta, found.lse, *found.captures)
        wanted = (query, key, value, sink, sink, *self.learned)
        return tuple(x if wants else None for x, wants in zip(every, wanted, strict=True))


class TangentStep(Step):
    """Takes the tensors of `Operands`, then the tangents of query, key, value, sink and captures.

    Returns the tangents of out and lse.
    """

    def __init__(self, passes: Passes, shell: Placed, num_captures: int) -> None:
        moved = (ROWS, KEYS, KEYS, HEADS, *captured_roles(num_captures))
        super().__init__(passes, shell, (*Operands.roles(num_captures), *moved), (ROWS, ROWS))
        self.num_given = len(self.inputs) - len(moved)

    def _run(self, tensors: Tensors, *, in_torch: bool) -> Tensors:
        given = Operands.of(tensors[: self.num_given])
        query, key, value, sink, *captures = tensors[self.num_given :]
        found = self.passes.tangent(
            self.shell.on(given.query, given.key, given.value),
            given.captures,
            Above(given.out, given.lse, None, None, given.sink),
            Tangents(query, key, value, sink, tuple(captures)),
            in_torch=in_torch,
        )
        return found.out, found.lse


# --- higher orders --------------------------------------------------------------------------------


class Pulled(Step):
    """The reverse derivative: takes the inputs of a step, then the gradients of its outputs.

    Returns the gradients of those inputs that `wants` names.
    """

    def __init__(self, step: Step, wants: tuple[bool, ...]) -> None:
        super().__init__(step.passes, step.shell, (*step.inputs, *step.outputs), step.inputs)
        self.step, self.wants = step, wants

    def changed(self, change: Change) -> Pulled:
        """Return the step of another problem."""
        return Pulled(self.step.changed(change), self.wants)

    def _run(self, tensors: Tensors, *, in_torch: bool) -> Tensors:
        count = len(self.step.inputs)
        with torch.enable_grad(), saved_tensor_hooks():
            inputs = _leaves_where(tensors[:count], self.wants)
            sources = [x for x, wants in zip(inputs, self.wants, strict=True) if wants]
            pairs = zip(self.step.in_torch(*inputs), tensors[count:], strict=True)
            used = [(x, grad) for x, grad in pairs if x is not None and grad is not None]
            found = iter(_gradients(*_columns(used), _present(sources), again=in_torch))
        return tuple(next(found) if wants else None for wants in self.wants)


class Pushed(Step):
    """The forward derivative: takes the inputs of a step, then their tangents or None.

    Returns the tangents of its outputs.
    """

    def __init__(self, step: Step) -> None:
        super().__init__(step.passes, step.shell, step.inputs * 2, step.outputs)
        self.step = step

    def changed(self, change: Change) -> Pushed:
        """Return the step of another problem."""
        return Pushed(self.step.changed(change))

    def _run(self, tensors: Tensors, *, in_torch: bool) -> Tensors:
        count = len(self.step.inputs)
        inputs, tangents = tensors[:count], tensors[count:]
        if in_torch:
            return self._by_two_gradients(inputs, tangents)
        with forward_mode():
            outputs = self.step.in_torch(*map(_dual, inputs, tangents))
            return tuple(None if x is None else tangent_of(x) for x in outputs)

    def _by_two_gradients(self, inputs: Tensors, tangents: Tensors) -> Tensors:
        """Return the tangents J t: u -> u J is linear in u, and its own gradient is J t."""
        with torch.enable_grad(), saved_tensor_hooks():
            inputs = _leaves_where(inputs, [x is not None for x in tangents])
            outputs = self.step.in_torch(*inputs)
            pairs = [
                (x, t)
                for x, t in zip(inputs, tangents, strict=True)
                if x is not None and t is not None
            ]
            factors = [torch.zeros_like(x).requires_grad_() for x in outputs if x is not None]
            sources = [x for x, _ in pairs]
            pulled = _gradients(_present(outputs), factors, sources, again=True)
            linear = [(x, t) for x, (_, t) in zip(pulled, pairs, strict=True) if x is not None]
            found = iter(_gradients(*_columns(linear), factors, again=True))
        return tuple(None if x is None else next(found) for x in outputs)


def _gradients(
    outputs: Sequence[Tensor], grads: Sequence[Tensor], inputs: Sequence[Tensor], *, again: bool
) -> Tensors:
    """Return torch.autograd.grad, with None for inputs that no output depends on."""
    used = [(x, grad) for x, grad in zip(outputs, grads, strict=True) if x.requires_grad]
    if not used or not inputs:
        return (None,) * len(inputs)
    outputs, grads = _columns(used)
    return torch.autograd.grad(outputs, inputs, grads, create_graph=again, allow_unused=True)


def _columns(pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[list[Tensor], list[Tensor]]:
    return [x for x, _ in pairs], [y for _, y in pairs]


def captured_roles(count: int) -> tuple[Role, ...]:
    """Return the roles of captured tensors."""
    return tuple(Role("captured", number) for number in range(count))


def _present(tensors: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    return tuple(x for x in tensors if x is not None)


def _leaves_where(tensors: Tensors, wants: Sequence[bool]) -> Tensors:
    pairs = zip(tensors, wants, strict=True)
    return tuple(_leaf(x) if x is not None and wanted else x for x, wanted in pairs)


def _leaf(x: Tensor) -> Tensor:
    """Return a view of `x` that requires a gradient. Its tangent and its history stay."""
    return x.view_as(x).requires_grad_()


def _dual(x: Tensor | None, tangent: Tensor | None) -> Tensor | None:
    """Return `x` with a tangent, and without one that it may have already.

    PyTorch lays the tangent out as `x`. An expanded one has no place for each number.
    """
    if x is None:
        return None
    return x.detach() if tangent is None else make_dual(x.detach().contiguous(), tangent)
