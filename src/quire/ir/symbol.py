"""The symbolic scalars a mod is run on.

A `Symbol` stands for one number per (b, h, q_idx, kv_idx). Operators, methods and `torch.`
functions on it all end in one table, `FORMS`, that spells what was written in the ops of the op
table. A captured tensor indexed by symbols is a `PartialLoad` until every dimension has its index.
"""

from __future__ import annotations

import functools
import linecache
import os
import sys
from collections.abc import Callable, Iterator
from types import EllipsisType
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from quire.errors import ModResultError, TracedBranchError, UnsupportedOpError
from quire.ir.graph import Node, Number, Payload, cast, const, renumber_captures, rewrite
from quire.ir.ops import OPS, Typing
from quire.ir.simplify import simplest

Location: TypeAlias = tuple[str, int]
"""A line of the user's source: file name and line number."""

Operand: TypeAlias = "Symbol | Tensor | Number"

_OURS = (__file__, os.path.dirname(torch.__file__) + os.sep, functools.__file__)


def user_location() -> Location:
    """Where the innermost frame outside of this module and PyTorch stands."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def describe(location: Location | None) -> str:
    """' at file.py:3: `the line`', or nothing where the line is not known."""
    if location is None:
        return ""
    filename, lineno = location
    line = linecache.getline(filename, lineno).strip()
    return f" at {os.path.basename(filename)}:{lineno}" + (f": `{line}`" if line else "")


class Recorder:
    """What one trace has met so far: captured tensors, and the source line of each node."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.captures: list[Tensor] = []
        self.lines: dict[Node, Location] = {}

    def symbol(
        self, op: str, args: tuple[Node, ...], dtype: torch.dtype, payload: Payload = None
    ) -> Symbol:
        node = simplest(Node(op, args, dtype, payload))
        if node not in self.lines:
            self.lines[node] = user_location()
        return Symbol(node, self)

    def slot(self, tensor: Tensor) -> int:
        for slot, known in enumerate(self.captures):
            if known is tensor:
                return slot
        self.captures.append(tensor)
        return len(self.captures) - 1

    def lift(self, value: object) -> Symbol | Number:
        """An operand as a symbol, or as the Python number it is."""
        match value:
            case Symbol() | bool() | int() | float():
                return value
            case np.generic():
                return self.lift(value.item())
            case Tensor() if value.dim() == 0:
                return self.symbol("load", (), value.dtype, self.slot(value))
            case Tensor() | PartialLoad():
                raise UnsupportedOpError(
                    f"a mod works on single numbers, but a captured tensor of shape "
                    f"{list(value.shape)} takes part as a whole{describe(user_location())}. "
                    f"Index all of its dimensions, as in bias[h, q_idx]."
                )
        raise UnsupportedOpError(
            f"a {type(value).__name__} cannot take part in a mod{describe(user_location())}. "
            f"Use numbers and tensors."
        )

    def splice(
        self, output: Node, captures: tuple[Tensor, ...], args: dict[str, Symbol | Number]
    ) -> Symbol:
        """Another trace's graph inserted into this one, its inputs replaced by `args`."""
        slots = {old: self.slot(tensor) for old, tensor in enumerate(captures)}

        def visit(node: Node, new: tuple[Node, ...]) -> Node:
            if node.op == "input":
                return self.node(args[str(node.payload)], node.dtype)
            return Node(node.op, new, node.dtype, node.payload)

        return Symbol(rewrite(renumber_captures(output, slots), visit), self)

    def node(self, value: Symbol | Number, dtype: torch.dtype) -> Node:
        return cast(value.node, dtype) if isinstance(value, Symbol) else const(value, dtype)


class Symbol:
    """A scalar that is different for each element; every operation on it is recorded."""

    __slots__ = ("node", "recorder")

    def __init__(self, node: Node, recorder: Recorder) -> None:
        self.node = node
        self.recorder = recorder

    @property
    def dtype(self) -> torch.dtype:
        return self.node.dtype

    @property
    def device(self) -> torch.device:
        return self.recorder.device

    shape = torch.Size([])
    ndim = 0
    requires_grad = False

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...], kwargs: Any = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Callable[..., Any]:
        form = FORMS.get(name)
        if form is not None:
            return functools.partial(form, self)
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(name)
        raise unsupported(f"Tensor.{name}")

    def dim(self) -> int:
        return 0

    def numel(self) -> int:
        return 1

    def size(self, dim: int | None = None) -> torch.Size:
        return self.shape

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __bool__(self) -> NoReturn:
        raise TracedBranchError(
            f"a Python branch on a traced value{describe(user_location())}. A mod runs once for "
            f"all elements, so Python cannot choose for each: write torch.where(condition, a, b), "
            f"and & | ~ in place of and, or, not."
        )

    def _no_python_value(self, *unused: object) -> NoReturn:
        raise TracedBranchError(
            f"the value of a traced number was asked for{describe(user_location())}. A mod runs "
            f"once for all elements, so there is no single value: keep to tensor operations; to "
            f"index a Python list, make it a tensor first."
        )

    __int__ = __float__ = __index__ = __len__ = __iter__ = item = tolist = _no_python_value
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"Symbol({self.node!r})"


class PartialLoad:
    """A captured tensor of which some dimensions have been indexed by symbols."""

    __slots__ = ("indices", "recorder", "tensor")

    def __init__(self, tensor: Tensor, indices: tuple[Node | None, ...], recorder: Recorder):
        self.tensor = tensor
        self.indices = indices
        self.recorder = recorder

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> torch.Size:
        sizes = zip(self.tensor.shape, self.indices, strict=True)
        return torch.Size([size for size, index in sizes if index is None])

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...], kwargs: Any = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(name)
        raise unsupported(f"Tensor.{name} of a row of a captured tensor")

    def __getitem__(self, index: object) -> Symbol | PartialLoad:
        items = index if isinstance(index, tuple) else (index,)
        free = [dim for dim, bound in enumerate(self.indices) if bound is None]
        indices = list(self.indices)
        for dim, item in _match_dimensions(items, free):
            indices[dim] = self._index_node(item)
        if any(bound is None for bound in indices):
            return PartialLoad(self.tensor, tuple(indices), self.recorder)
        args = tuple(bound for bound in indices if bound is not None)
        slot = self.recorder.slot(self.tensor)
        return self.recorder.symbol("load", args, self.tensor.dtype, slot)

    def _index_node(self, item: object) -> Node:
        value = self.recorder.lift(item)
        integral = isinstance(value, int) or (
            isinstance(value, Symbol) and not value.dtype.is_floating_point
        )
        if not integral or isinstance(value, bool) or getattr(value, "dtype", None) == torch.bool:
            kind = value.dtype if isinstance(value, Symbol) else type(value).__name__
            raise ModResultError(
                f"a captured tensor was indexed by a {kind}{describe(user_location())}. Indices "
                f"are integers: convert with .long(), or use torch.where for a condition."
            )
        return self.recorder.node(value, torch.int64)


def _match_dimensions(items: tuple[object, ...], free: list[int]) -> Iterator[tuple[int, object]]:
    """Pairs each index with the free dimension it binds; full slices bind nothing."""
    dims = list(free)
    dots = sum(item is Ellipsis for item in items)
    if dots > 1 or len(items) > len(free) + dots:
        raise ModResultError(
            f"{len(items)} indices for {len(free)} dimensions of a captured tensor"
            f"{describe(user_location())}. Index each dimension once."
        )
    for position, item in enumerate(items):
        match item:
            case EllipsisType():
                rest = len(items) - position - 1
                dims = dims[len(dims) - rest :] if rest else []
            case slice(start=None, stop=None, step=None):
                dims = dims[1:]
            case slice() | None | list() | np.ndarray():
                raise unsupported(f"indexing a captured tensor by {item!r} and a traced number")
            case _:
                yield dims[0], item
                dims = dims[1:]


FORMS: dict[str, Callable[..., Any]] = {}
"""Every way to write an operation, by name; `forms.py` fills it."""


# --- from what was written to ops --------------------------------------------------------------


def unsupported(what: str) -> UnsupportedOpError:
    return UnsupportedOpError(
        f"{what} has no row in quire's table of ops{describe(user_location())}. The call still "
        f"runs, on the slower eager path; to have it compiled write it with the ops of the table."
    )


class TraceMode(TorchFunctionMode):
    """Sends every torch function that meets a symbol to `dispatch`, and lets the others run."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(value, Symbol | PartialLoad) for value in _flat(args, kwargs)):
            return dispatch(func, args, kwargs)
        return func(*args, **kwargs)


def _flat(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[object]:
    for value in (*args, *kwargs.values()):
        if isinstance(value, tuple | list):
            yield from value
        else:
            yield value


def dispatch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A torch function of symbols: its name is looked up in `FORMS`."""
    name = getattr(func, "__name__", str(func))
    if name == "__getitem__":
        return _getitem(args[0], args[1])
    form = FORMS.get(name[2:-2] if name.startswith("__") and name.endswith("__") else name)
    if form is None:
        raise unsupported(f"torch.{name}")
    try:
        return form(*args, **kwargs)
    except TypeError as error:
        if isinstance(error, TracedBranchError | ModResultError):
            raise
        raise unsupported(f"this form of torch.{name}") from error


def _getitem(tensor: Any, index: object) -> Symbol | PartialLoad:
    if isinstance(tensor, PartialLoad):
        return tensor[index]
    items = index if isinstance(index, tuple) else (index,)
    recorder = next(item.recorder for item in items if isinstance(item, Symbol | PartialLoad))
    return PartialLoad(tensor, (None,) * tensor.dim(), recorder)[index]


def apply(op: str, *operands: object) -> Symbol:
    """The op on operands of any kind, promoted as PyTorch promotes scalars."""
    recorder = next(value.recorder for value in operands if isinstance(value, Symbol))
    values = [recorder.lift(value) for value in operands]
    typing = OPS[op].typing
    free = values[1:] if typing is Typing.WHERE else values
    dtype = promote(free)
    if typing is Typing.FLOAT and not dtype.is_floating_point:
        dtype = torch.get_default_dtype()
    if typing is Typing.BITS and dtype.is_floating_point:
        raise unsupported(f"bitwise {op} of {dtype}")
    args = tuple(recorder.node(value, dtype) for value in free)
    if typing is Typing.WHERE:
        args = (recorder.node(values[0], torch.bool), *args)
    return recorder.symbol(op, args, torch.bool if typing is Typing.COMPARE else dtype)


def promote(values: list[Symbol | Number]) -> torch.dtype:
    """The common dtype: symbols promote each other, Python numbers only lift the category."""
    dtypes = [value.dtype for value in values if isinstance(value, Symbol)]
    if not dtypes:  # where(condition, 1, 0)
        return torch.result_type(*(torch.tensor(value) for value in values))
    result = dtypes[0]
    for dtype in dtypes:
        if dtype is not result:
            result = torch.promote_types(result, dtype)
    for value in values:
        if isinstance(value, float) and not result.is_floating_point:
            result = torch.get_default_dtype()
        elif isinstance(value, int) and not isinstance(value, bool) and result == torch.bool:
            result = torch.int64
    return result
