"""Whether a model is what transformers and `quire.linear.pack` made of it, and stays so.

A program takes the place of the forward functions of all modules. It must not if one of them is
somebody else's: of a subclass, put into an object, or a hook. And it has the addresses of tensors,
which may be exchanged, as by `load_state_dict(assign=True)`, or written to.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from operator import attrgetter, is_
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from quire.linear.families import attend
from quire.linear.rowwise import is_row_wise
from quire.support.torch_private import global_hooks, hooks_made, hooks_of, parts_of, version_of

_HOMES = ("transformers.models.", "quire.linear.", "torch.nn.modules.")
_FILES = (
    str(Path(torch.__file__).parent),
    str(Path(str(transformers.__file__)).parent),
    str(Path(__file__).parents[1]),
)


def is_original(model: nn.Module) -> bool:
    """Return whether all modules have the forward functions of their classes, or packed ones."""
    return all(_has_known_class(each) and _has_known_forward(each) for each in model.modules())


def _has_known_class(module: nn.Module) -> bool:
    """Return whether the class is the one of its name, with the forward function written there."""
    kind = type(module)
    home = sys.modules.get(kind.__module__)
    if not kind.__module__.startswith(_HOMES) or getattr(home, kind.__name__, None) is not kind:
        return False
    code = getattr(kind.forward, "__code__", None)
    return code is not None and code.co_filename.startswith(_FILES)


def _has_known_forward(module: nn.Module) -> bool:
    own = vars(module).get("forward")
    if isinstance(own, functools.partial):
        return own.func is attend and own.args == (module,)
    return own is None or is_row_wise(module)


class Snapshot:
    """What a model was made of: the parts of its modules, their functions, and their tensors."""

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        before_and_after = (each for module in modules for each in hooks_of(module)[:2])
        self._hooks = [*global_hooks(), *before_and_after]
        self._hooks_made, self._is_watched = (-1, -1), True  # as of the last two looks
        self._kinds = list({type(each) for each in modules})
        self._functions = [each.forward for each in self._kinds]
        entries = [each for module in modules for each in _entries(module)]
        self._owners, self._names, self._values = zip(*entries, strict=True)
        self._copied = [
            each
            for each, name in zip(self._values, self._names, strict=True)
            if isinstance(each, Tensor) and name != "packed"  # which is read where it lies
        ]
        self._versions = [*map(version_of, self._copied)]
        self._moved = [each for each in self._values if isinstance(each, nn.Parameter)]
        self._places = [*map(Tensor.data_ptr, self._moved)]
        self._memory = [each.detach() for each in self._moved]  # nothing else comes to lie there

    @property
    def is_watched(self) -> bool:
        """Whether somebody wants to see what goes in and out of modules."""
        made, last = hooks_made(), self._hooks_made
        if self._is_watched or made != last[0] or made != last[1]:
            # A hook is counted before it is added: so look again in the step after it was counted.
            self._hooks_made, self._is_watched = (last[1], made), any(self._hooks)
        return self._is_watched

    @property
    def holds(self) -> bool:
        """Whether the model has the same parts, functions and tensors as then."""
        now = map(dict.get, self._owners, self._names)
        return (
            all(map(is_, now, self._values))
            and all(map(is_, map(attrgetter("forward"), self._kinds), self._functions))
            and [*map(version_of, self._copied)] == self._versions
            and [*map(Tensor.data_ptr, self._moved)] == self._places
        )


def _entries(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yield what must stay in a module, each with the dict that it is in."""
    yield vars(module), "forward", vars(module).get("forward")
    for parts in parts_of(module):
        for name, part in parts.items():
            if part is not None:
                yield parts, name, part
