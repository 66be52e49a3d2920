"""The symbolic scalars a mod is run on.

A `Symbol` stands for one number for each (b, h, q_idx, kv_idx). Operators, methods and torch
functions on it are looked up in one table, `FORMS`, which writes them in the ops of the table. Its
recorder keeps the source lines of nodes and the captured tensors. Short vectors of symbols are in
`vector.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from quire.errors import (
    ModError,
    ModValueError,
    RandomModError,
    TracedBranchError,
    UnsupportedOpError,
)
from quire.ir.graph import Node, Number, Payload, cast, const, rewrite
from quire.ir.ops import DTYPES
from quire.ir.simplify import simplest
from quire.ir.source import Location, here, user_location

FORMS: dict[str, Callable[..., Any]] = {}
"""Every way to write an operation, by name; `forms.py` and `captured.py` fill it."""


class Recorder:
    """The captured tensors of one trace, and the source line of each node."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.captures: list[Tensor] = []
        self.lines: dict[Node, Location] = {}
        self._slots: dict[int, int] = {}
        self._grad_mode = torch.is_grad_enabled()

    def symbol(
        self, op: str, args: tuple[Node, ...], dtype: torch.dtype, payload: Payload = None
    ) -> Symbol:
        """A new node in its simplest form."""
        return self.record(simplest(Node(op, args, dtype, payload)))

    def record(self, node: Node) -> Symbol:
        """The symbol of a node; remembers the user's line that wrote it."""
        if torch.is_grad_enabled() is not self._grad_mode:
            raise unsupported("torch.no_grad or torch.enable_grad inside a mod")
        if node not in self.lines:
            self.lines[node] = user_location()
        return Symbol(node, self)

    def inputs(self, nodes: Iterable[Node]) -> list[Symbol]:
        """The symbols that a mod is called with."""
        return [Symbol(node, self) for node in nodes]

    def slot(self, tensor: Tensor) -> int:
        """The index of a captured tensor; a new one is added to the list."""
        if tensor.dtype not in DTYPES or tensor.layout is not torch.strided:
            raise unsupported(f"a captured tensor of {tensor.dtype} and {tensor.layout}")
        slot = self._slots.setdefault(id(tensor), len(self.captures))
        if slot == len(self.captures):
            self.captures.append(tensor)
        return slot

    def lift(self, value: object) -> Symbol | Number:
        """An operand as a symbol, or as a Python number."""
        match value:
            case Symbol() if value.recorder is self:
                return value
            case bool() | float():
                return value
            case int() if -(2**63) <= value < 2**63:
                return value
            case np.generic():
                return self.lift(value.item())
            case np.ndarray() if value.ndim == 0:
                return self.lift(value.item())
            case Tensor() if value.dim() == 0:
                return self.symbol("load", (), value.dtype, self.slot(value))
            case Symbol():
                what = "a symbol that an earlier call of a mod left behind"
            case Tensor() | Recorded():
                raise not_one_number(value)
            case int():
                raise no_operand("an integer of more than 64 bits", "Write it as a float.")
            case complex():
                raise no_operand("a complex number", "Compute with its real and imaginary part.")
            case np.ndarray():
                raise array_as_a_tensor(value)
            case _:
                what = f"a {type(value).__name__}"
        raise UnsupportedOpError(
            f"{what} cannot take part in a mod{here()}. Use numbers and tensors."
        )

    def node(self, value: Symbol | Number, dtype: torch.dtype) -> Node:
        """A lifted operand as a node of some dtype."""
        return as_node(value.node if isinstance(value, Symbol) else value, dtype)

    def splice(
        self,
        output: Node,
        captures: Sequence[Tensor],
        lines: Mapping[Node, Location],
        args: Mapping[str, object],
    ) -> Symbol:
        """Insert the graph of another trace, with `args` in place of its inputs."""
        lifted = {name: self.lift(value) for name, value in args.items()}
        slots = [self.slot(tensor) for tensor in captures]

        def visit(node: Node, new: tuple[Node, ...]) -> Node:
            match node.op:
                case "input":
                    return self.node(lifted[str(node.payload)], node.dtype)
                case "load":
                    assert isinstance(node.payload, int)
                    inserted = Node("load", new, node.dtype, slots[node.payload])
                case _:
                    inserted = simplest(Node(node.op, new, node.dtype, node.payload))
            if node in lines:
                self.lines.setdefault(inserted, lines[node])
            return inserted

        return Symbol(rewrite(output, visit), self)


def as_node(value: Node | Number, dtype: torch.dtype) -> Node:
    """A node or a number as a node of some dtype."""
    if not isinstance(value, Node):
        return const(value, dtype)
    return value if value.dtype is dtype else simplest(cast(value, dtype))


class Recorded:
    """What a mod gets in place of tensors. `forms.py` adds the operators."""

    __slots__ = ("recorder",)

    recorder: Recorder

    __array_ufunc__ = None  # numpy scalars then leave operators to this class

    def __array__(self, *unused: object, **also_unused: object) -> NoReturn:
        raise array_as_a_tensor(None)

    __hash__ = object.__hash__

    requires_grad = False

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: object, args: tuple[Any, ...], kwargs: Any = None
    ) -> Any:
        return dispatch(func, args, kwargs or {})

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the tensor would have."""
        raise NotImplementedError

    @property
    def shape(self) -> torch.Size:
        """The sizes that the tensor would have."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Where the mod's result is wanted."""
        return self.recorder.device

    @property
    def ndim(self) -> int:
        """The number of dimensions; that of a scalar is 0."""
        return len(self.shape)

    def dim(self) -> int:
        """The number of dimensions; that of a scalar is 0."""
        return len(self.shape)

    def numel(self) -> int:
        """The number of elements; a scalar has one."""
        return math.prod(self.shape)

    def size(self, dim: int | None = None) -> Any:
        """The shape, or the size of one dimension."""
        return self.shape if dim is None else self.shape[dim]

    def is_floating_point(self) -> bool:
        """Whether the dtype is a floating-point one."""
        return self.dtype.is_floating_point

    def where(self, condition: object, other: object) -> Any:
        """self.where(condition, other) is torch.where(condition, self, other)."""
        return FORMS["where"](condition, self, other)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"a traced number has no attribute {name!r}")
        if name not in FORMS:
            if name.removesuffix("_") in RANDOM:
                raise random_numbers(f"Tensor.{name}")
            raise unsupported(f"Tensor.{name}")
        return functools.partial(_perform, f"Tensor.{name}", FORMS[name], self)

    def __bool__(self) -> NoReturn:
        raise TracedBranchError(
            f"a Python branch on a traced value{here()}. A mod runs once for all elements, so "
            f"Python cannot choose for each: write torch.where(condition, a, b), and & | ~ in "
            f"place of and, or, not."
        )

    def _no_python_value(self, *unused: object) -> NoReturn:
        raise TracedBranchError(
            f"the value of a traced number was asked for{here()}. A mod runs once for all "
            f"elements, so there is no single value: use tensor operations only; to index a Python "
            f"list, make it a tensor first."
        )

    __int__ = __float__ = __complex__ = __index__ = _no_python_value
    __contains__ = item = tolist = _no_python_value


class Symbol(Recorded):
    """A scalar that is different for each element; every operation on it is recorded."""

    __slots__ = ("node",)

    def __init__(self, node: Node, recorder: Recorder) -> None:
        self.node = node
        self.recorder = recorder

    shape = torch.Size([])

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the tensor would have."""
        return self.node.dtype

    def __getitem__(self, index: object) -> NoReturn:
        raise unsupported("indexing a single number")

    __len__ = __iter__ = Recorded._no_python_value

    def __repr__(self) -> str:
        return f"Symbol({self.node!r})"


def unsupported(what: str) -> UnsupportedOpError:
    """The error for an operation that is not in the table."""
    return UnsupportedOpError(
        f"{what} has no row in quire's table of ops{here()}. The call still runs, on the slower "
        f"eager path; to have it compiled write it with the ops of the table."
    )


def not_one_number(value: Any) -> UnsupportedOpError:
    """The error for a captured tensor, or a row of one, in place of a single number."""
    return UnsupportedOpError(
        f"a single number is needed, but a captured tensor of shape {list(value.shape)} takes part "
        f"as a whole{here()}. Index all of its dimensions, as in bias[h, q_idx]."
    )


def no_operand(what: str, advice: str) -> ModValueError:
    """The error for a value that torch could not compute with either."""
    return ModValueError(
        f"a mod must compute with numbers of 64 bits and tensors, but uses {what}{here()}. {advice}"
    )


def array_as_a_tensor(array: np.ndarray[Any, Any] | None) -> ModValueError:
    """The error for a numpy array in place of a tensor; None if the array is not known."""
    kind = "an array" if array is None else f"an array of shape {list(array.shape)}"
    return no_operand(
        f"{kind} of numpy",
        "Make it a tensor before, table = torch.from_numpy(array), and use that.",
    )


def random_numbers(name: str) -> RandomModError:
    """The error for a function that draws random numbers."""
    return RandomModError(
        f"a mod must return the same whenever it is called, but {name} draws random numbers"
        f"{here()}. It would run once, and all elements would get the same number. Write "
        f"quire.random(seed, b, h, q_idx, kv_idx), which gives each its own; to drop weights give "
        f"dropout_p."
    )


# --- from what was written to a form -------------------------------------------------------------


class TraceMode(TorchFunctionMode):
    """Sends torch functions to `dispatch`; without it tensor[symbol] would not get there."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: Any = None,
    ) -> Any:
        return dispatch(func, args, kwargs or {})


def find_recorder(values: Iterable[object]) -> Recorder | None:
    """The recorder of the first symbol in `values`, also inside lists and tuples."""
    for value in values:
        if isinstance(value, Recorded):
            return value.recorder
        if isinstance(value, (tuple, list)):
            found = find_recorder(value)
            if found is not None:
                return found
    return None


def dispatch(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a torch function: by its form if an argument is a symbol, else as it is."""
    if func is _GETITEM and type(args[1]) is Symbol:  # nearly always
        return FORMS["getitem"](*args)
    recorder = find_recorder(args) or (find_recorder(kwargs.values()) if kwargs else None)
    if recorder is None:
        _refuse_random(func)
        return func(*args, **kwargs)
    if func is _GETITEM:
        return FORMS["getitem"](*args)
    name = getattr(func, "__name__", str(func))
    bare = _bare(name)
    if bare not in FORMS:
        _refuse_random(func)
        raise unsupported(f"torch.{name}")
    args = tuple([recorder.lift(v) if isinstance(v, _LIFTED) and not v.dim() else v for v in args])
    if func is Tensor.where:
        args = (args[1], args[0], *args[2:])
    return _perform(f"torch.{name}", FORMS[bare], *args, **kwargs)


def _refuse_random(func: Callable[..., Any]) -> None:
    name = getattr(func, "__name__", "")
    if name.removesuffix("_") in RANDOM:
        raise random_numbers(f"torch.{name}" if hasattr(torch, name) else f"Tensor.{name}")


_RANDOM = """
    rand rand_like randint randint_like randn randn_like randperm bernoulli binomial cauchy
    exponential geometric log_normal multinomial normal poisson random uniform gumbel_softmax rrelu
    dropout dropout1d dropout2d dropout3d alpha_dropout native_dropout feature_dropout
    feature_alpha_dropout
"""
RANDOM = frozenset(_RANDOM.split())
"""Torch functions that draw random numbers; in-place ones have an underscore more."""

_LIFTED = (Tensor, Recorded)
_GETITEM = Tensor.__getitem__


@functools.lru_cache(maxsize=1024)
def _bare(name: str) -> str:
    """`__add__` is add, `special_erf` is erf, `linalg_cross` is cross."""
    name = name.removeprefix("special_").removeprefix("linalg_")
    return name[2:-2] if name.startswith("__") and name.endswith("__") else name


_POSITIONAL = ("condition", "input", "other", "exponent")
"""Names of parameters that forms take by position, in this order."""


def _perform(what: str, form: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    named = [kwargs.pop(name) for name in _POSITIONAL if name in kwargs] if kwargs else []
    if "out" in kwargs and kwargs["out"] is None:
        del kwargs["out"]
    try:
        return form(*args, *named, **kwargs)
    except TypeError as error:
        if isinstance(error, ModError):
            raise
        raise unsupported(f"this form of {what}") from error
