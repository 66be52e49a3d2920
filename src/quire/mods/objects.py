"""Mods as values: a function and the arguments it is bound to.

    >>> from quire.mods import causal, sliding_window
    >>> mask = causal & ~sliding_window(256)
    >>> mask
    and_masks(causal, not_mask(sliding_window(window_size=256)))

Whoever keeps a closure keeps the tensors it was made with, whatever becomes of them. A mod of this
kind has them as fields instead. So it is copied with the module that keeps it, and its tensors
become those of the copy; it can be pickled, compared and printed.

What a field does not follow is a parameter that a module exchanges for another one, as in
`load_state_dict(assign=True)` and `torch.func.functional_call`. The mods that are modules do, such
as `LearnedDistanceBias`: each looks its own parameters up whenever it is called.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from quire.block_mask.mask_mods import same_tensor
from quire.errors import NotCallableError
from quire.ir.trace import Kind, check_signature, mod_name


class Bound:
    """A function that is called with `fields` behind its other arguments.

    `function` is one that pickle finds by its name, so not a lambda and not one inside another.
    Two of a kind are equal if their functions and fields are. A tensor that requires grad equals
    itself alone, since gradients tell it from its copies; any other is compared by its values.
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
        """Whether it took the place of its function, as the result of a decorator does."""
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
    """A mod that was pickled or copied."""
    return kind(function, name, **fields)


def _same(one: Any, other: Any) -> bool:
    """Whether two fields, or dicts or tuples of them, are equal."""
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
    """A field in a repr: a tensor as its dtype and shape, a function as its name."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if callable(value) and not isinstance(value, Bound):
        return mod_name(value)
    return repr(value)


def check_callables(composer: str, *mods: object) -> None:
    """Raise unless every one of `mods` can be called."""
    for position, mod in enumerate(mods):
        if not callable(mod):
            raise NotCallableError(
                f"{composer} takes mods, that is functions such as causal or sliding_window(256), "
                f"got {mod!r} as number {position + 1}. Give each mod as an argument of its own."
            )
