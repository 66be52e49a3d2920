"""The names of the variables that hold a mod's captured tensors."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from types import CellType, FunctionType, MethodType

import torch
from torch import Tensor


def variable_names(mod: object, captures: Sequence[Tensor]) -> list[str]:
    """The name of the variable of each captured tensor; `captured0` and so on if there is none."""
    found: dict[int, str] = {}
    for name, value in _reachable("", mod, set()):
        if isinstance(value, Tensor):
            found.setdefault(id(value), name)
    return [found.get(id(tensor), f"captured{slot}") for slot, tensor in enumerate(captures)]


def _reachable(name: str, value: object, seen: set[int]) -> Iterator[tuple[str, object]]:
    """Everything that can be reached from a function, with names."""
    if id(value) in seen:
        return
    seen.add(id(value))
    yield name, value
    for inner, held in _held(name, value):
        yield from _reachable(inner, held, seen)


def _held(name: str, value: object) -> Iterator[tuple[str, object]]:
    match value:
        case FunctionType():
            code = value.__code__
            cells = zip(code.co_freevars, value.__closure__ or (), strict=True)
            yield from ((free, cell.cell_contents) for free, cell in cells if _is_filled(cell))
            known = value.__globals__
            yield from ((used, known[used]) for used in code.co_names if used in known)
        case functools.partial():
            yield from (("", value.func), *value.keywords.items())
            parameters = getattr(getattr(value.func, "__code__", None), "co_varnames", ())
            yield from itertools.zip_longest(parameters[: len(value.args)], value.args)
        case _ if isinstance(fields := getattr(value, "fields", None), dict):
            yield from (("", getattr(value, "function", None)), *fields.items())
        case MethodType():
            yield from (("", value.__func__), ("self", value.__self__))
        case tuple() | list():
            yield from ((f"{name}[{number}]", item) for number, item in enumerate(value))
        case dict():
            yield from ((f"{name}[{key!r}]", item) for key, item in value.items())
        case torch.nn.Module():
            tensors = itertools.chain(value.named_parameters(), value.named_buffers())
            yield from ((f"{name or 'self'}.{inner}", held) for inner, held in tensors)
        case _ if name == "self" or (not name and callable(value) and hasattr(value, "__dict__")):
            yield from ((f"self.{inner}", held) for inner, held in vars(value).items())


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
