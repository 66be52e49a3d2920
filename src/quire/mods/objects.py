"""Mods as values: a function together with the arguments that it is called with.

    >>> from quire.mods import causal, sliding_window
    >>> mask = causal & ~sliding_window(256)
    >>> mask
    and_masks(causal, not_mask(sliding_window(window_size=256)))

A closure hides the tensors that it captured. A mod of this kind keeps them as fields, so it can be
pickled, compared and printed, and `copy.deepcopy` of a module that keeps both a mod and its
parameter gives the copied mod the copied parameter.

A field still holds the old tensor after a module replaced its parameter by another one, as
`load_state_dict(assign=True)` and `torch.func.functional_call` do. For these, use a mod that is a
module, such as `LearnedDistanceBias`: it reads its own parameters whenever it is called.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from quire.checks.arguments import dtype_name
from quire.errors import NotCallableError
from quire.ir.trace import Kind, check_signature, mod_name


class Bound:
    """A function that is called with `fields` as keyword arguments after its positional ones.

    Pickle must find `function` by its name, so it is neither a lambda nor a nested function. Two
    mods of one class are equal if their functions and fields are equal. Tensors are compared by
    their values, except that one which requires grad is equal to itself alone.
    """

    kind: ClassVar[Kind]

    def __init__(self, function: Callable[..., Any], name: str | None = None, /, **fields: Any):
        if not fields:
            check_signature(function, self.kind)
            self.__wrapped__ = function
        self.function = function
        self.fields = fields
        self.__name__ = self.__qualname__ = mod_name(function) if name is None else name
        self.__module__ = getattr(function, "__module__", __name__)
        self.__doc__ = function.__doc__

    def __reduce__(self) -> str | tuple[object, ...]:
        if self._is_global():
            return self.__qualname__
        return _bound, (type(self), self.function, self.__name__, self.fields)

    def _is_global(self) -> bool:
        """Whether the mod is found under its name in its module, as a decorated function is."""
        try:
            found = operator.attrgetter(self.__qualname__)(sys.modules[self.__module__])
        except (AttributeError, KeyError):
            return False
        return found is self

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self is other or (
            self.function == other.function
            and self.__name__ == other.__name__
            and _same(self.fields, other.fields)
        )

    def __hash__(self) -> int:
        return hash((type(self), self.__name__))

    def __repr__(self) -> str:
        if not self.fields:
            return self.__name__
        written: list[str] = []
        for name, value in self.fields.items():
            parts = isinstance(value, tuple) and all(map(callable, value))
            written += map(_written, value) if parts else [f"{name}={_written(value)}"]
        return f"{mod_name(self.function).lstrip('_')}({', '.join(written)})"


def _bound(
    kind: type[Bound], function: Callable[..., Any], name: str, fields: dict[str, Any]
) -> Bound:
    """Make a mod again from what pickle or copy kept of it."""
    return kind(function, name, **fields)


def same_tensor(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same dtype, device, shape and values."""
    if one is other:
        return True
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)


def _same(one: Any, other: Any) -> bool:
    """Whether two fields are equal. Tuples, lists and dicts are compared entry by entry."""
    match one, other:
        case Tensor(), Tensor():
            learned = one.requires_grad or other.requires_grad
            return one is other or (not learned and same_tensor(one, other))
        case (tuple(), tuple()) | (list(), list()):
            return len(one) == len(other) and all(map(_same, one, other))
        case dict(), dict():
            return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
        case (Tensor(), _) | (_, Tensor()):
            return False
    return bool(one == other)


def _written(value: object) -> str:
    """A field as `repr` prints it: a tensor by dtype and shape, a function by its name."""
    if isinstance(value, Tensor):
        return f"{dtype_name(value.dtype)}{list(value.shape)}"
    if callable(value) and not isinstance(value, Bound):
        return mod_name(value)
    return repr(value)


def check_callables(composer: str, *mods: object) -> None:
    """Raise if one of `mods`, the arguments of the function `composer`, cannot be called."""
    for number, mod in enumerate(mods, 1):
        if not callable(mod):
            raise NotCallableError(
                f"argument {number} of {composer} must be a mod, that is a function such as causal "
                f"or sliding_window(256), but is {mod!r}. Give each mod as an argument of its own."
            )
