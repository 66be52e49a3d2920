"""Functions of vectors: sums, extremes, products of vectors, and vectors made of parts.

Sums, products and extremes are trees: neighbours are joined, then their results, and so on. Floats
of 16 bits are summed in float32 and rounded once. At a tie of more than two numbers, the gradient
of an extreme goes to all of them, but in unequal shares.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from quire.ir.elementwise import array_of, elementwise
from quire.ir.graph import Number
from quire.ir.promote import WORKING, apply, converted, promote
from quire.ir.spelling import Form, of_two, power
from quire.ir.symbol import Recorder, Symbol, find_recorder, unsupported
from quire.ir.vector import Array, Vector, filled_array

Dims: TypeAlias = int | Sequence[int] | None
Join: TypeAlias = Callable[[list[Symbol]], Symbol]


def _lifted(*values: Any) -> tuple[Recorder, list[Array]]:
    recorder = find_recorder(values)
    assert recorder is not None, "a form without a symbol"
    return recorder, [array_of(value, recorder) for value in values]


def _along(x: Any, dim: Dims, keepdim: bool, join: Join) -> Any:
    """Join the symbols along some dimensions, or all, into one."""
    recorder, (array,) = _lifted(x)
    dims = range(array.ndim) if dim is None else ([dim] if isinstance(dim, int) else dim)
    axes = {_axis(each, array.ndim) for each in dims if array.ndim}
    kept = [axis for axis in range(array.ndim) if axis not in axes]
    rows = array.transpose(*kept, *sorted(axes))
    shape = tuple(array.shape[axis] for axis in kept)
    rows = rows.reshape(*shape, -1)
    joined = filled_array((join(list(rows[place])) for place in np.ndindex(shape)), shape)
    if keepdim:
        joined = np.expand_dims(joined, tuple(sorted(axes)))
    return Vector.of(joined, recorder)


def _axis(dim: int, ndim: int) -> int:
    if not isinstance(dim, int) or not -ndim <= dim < ndim:
        raise unsupported(f"dimension {dim!r} of a vector of {ndim}")
    return dim % ndim


def _tree(op: str, symbols: list[Symbol]) -> Symbol:
    """Neighbours joined by an op, then their results, until one is left."""
    while len(symbols) > 1:
        pairs = zip(symbols[::2], symbols[1::2], strict=False)
        rest = symbols[len(symbols) // 2 * 2 :]
        symbols = [*(apply(op, a, b) for a, b in pairs), *rest]
    return symbols[0]


def _working(symbol: Symbol) -> Symbol:
    return converted(symbol, WORKING.get(symbol.dtype, symbol.dtype))


# --- sums and products ----------------------------------------------------------------------------


def _total(op: str, symbols: list[Symbol], dtype: torch.dtype | None = None) -> Symbol:
    """A sum or product; that of integers and truth values is int64, as in torch."""
    given = symbols[0].dtype
    result = dtype or (given if given.is_floating_point else torch.int64)
    terms = [_working(converted(symbol, result)) for symbol in symbols]
    return converted(_tree(op, terms), result)


def total(op: str) -> Form:
    """sum and prod."""

    def form(x: Any, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
        return _along(x, dim, keepdim, lambda symbols: _total(op, symbols, dtype))

    return form


def mean(x: Any, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """The sum divided by the count; only of floats, as in torch."""

    def join(symbols: list[Symbol]) -> Any:
        if not (dtype or symbols[0].dtype).is_floating_point:
            raise unsupported(f"mean of {symbols[0].dtype}")
        return apply("div", _total("add", symbols, dtype), len(symbols))

    return _along(x, dim, keepdim, join)


def matmul(x: Any, y: Any) -> Any:
    """x @ y of vectors and matrices."""
    recorder, (a, b) = _lifted(x, y)
    if not 1 <= a.ndim <= 2 or not 1 <= b.ndim <= 2 or a.shape[-1] != b.shape[0]:
        raise unsupported(f"a product of {list(a.shape)} and {list(b.shape)}")
    if a.flat[0].dtype is not b.flat[0].dtype or a.flat[0].dtype is torch.bool:
        raise unsupported(f"a product of {a.flat[0].dtype} and {b.flat[0].dtype}")
    rows, columns = a.reshape(-1, a.shape[-1]), b.reshape(b.shape[0], -1)
    shape = (*a.shape[:-1], *b.shape[1:])
    found = (_product(row, column) for row in rows for column in columns.T)
    return Vector.of(filled_array(found, shape), recorder)


def _product(row: Array, column: Array) -> Symbol:
    """The sum of products, which is rounded to a narrow dtype at the end."""
    products = [_working(a) * _working(b) for a, b in zip(row, column, strict=True)]  # type: ignore[operator]
    return converted(_tree("add", products), row[0].dtype)


def dot(x: Any, y: Any) -> Any:
    """The product of two vectors."""
    _, (a, b) = _lifted(x, y)
    if a.ndim != 1 or b.ndim != 1:
        raise unsupported(f"dot of {list(a.shape)} and {list(b.shape)}")
    return matmul(x, y)


def cross(x: Any, y: Any, dim: int = -1) -> Any:
    """The product of vectors in space, which stands upright on both."""
    recorder, (a, b) = _lifted(x, y)
    if a.shape != (3,) or b.shape != (3,) or _axis(dim, 1):
        raise unsupported(f"cross of {list(a.shape)} and {list(b.shape)}")
    turns = ((1, 2), (2, 0), (0, 1))
    found = [a[i] * b[j] - a[j] * b[i] for i, j in turns]
    return Vector.of(filled_array(found, (3,)), recorder)


# --- norms ----------------------------------------------------------------------------------------


def norm(
    x: Any,
    p: Any = 2,
    dim: Dims = None,
    keepdim: bool = False,
    dtype: torch.dtype | None = None,
    *,
    ord: Any = None,
) -> Any:
    """A norm of a vector; of a matrix along one dimension. Its gradient at 0 is 0."""
    kind = p if ord is None else ord
    kind = 2 if kind in (None, "fro") else kind
    if (x.dim() > 1 and not isinstance(dim, int)) or not isinstance(kind, int | float):
        raise unsupported(f"norm of {list(x.shape)} with {kind!r} along {dim!r}")

    def join(symbols: list[Symbol]) -> Symbol:
        given = dtype or symbols[0].dtype
        if not given.is_floating_point:
            raise unsupported(f"norm of {given}")
        return converted(_norm([_working(converted(x, given)) for x in symbols], kind), given)

    return _along(x, dim, keepdim, join)


def _norm(symbols: list[Any], kind: Number) -> Any:
    sizes = [abs(x) for x in symbols]
    if math.isinf(kind):
        return _tree("max" if kind > 0 else "min", sizes)
    if kind == 0:
        return _tree("add", [(x != 0).to(x.dtype) for x in symbols])
    if kind == 1:
        return _tree("add", sizes)
    powers = [x * x for x in symbols] if kind == 2 else [power(x, kind) for x in sizes]
    sum_of_powers: Any = _tree("add", powers)
    zero = sum_of_powers == 0  # there the root has no derivative
    root = power(apply("where", zero, 1.0, sum_of_powers), 1 / kind)
    return apply("where", zero, 0.0, root)


def dist(x: Any, y: Any, p: Any = 2) -> Any:
    """The norm of x - y."""
    return norm(x - y, p)


# --- extremes -------------------------------------------------------------------------------------


class Extreme(NamedTuple):
    """What max(dim) and min(dim) return."""

    values: Any
    indices: Any


def extreme(op: str) -> Form:
    """amax and amin."""

    def form(x: Any, dim: Dims = None, keepdim: bool = False) -> Any:
        dims = None if dim == () else dim
        return _along(x, dims, keepdim, functools.partial(_tree, op))

    return form


def place_of_extreme(op: str) -> Form:
    """argmax and argmin: the first place of the extreme. A NaN is larger and smaller than all."""

    def join(symbols: list[Any]) -> Any:
        best, place = symbols[0], apply("where", True, 0, symbols[0].long() * 0)
        for number, x in enumerate(symbols[1:], start=1):
            wins = (x > best) if op == "max" else (x < best)
            wins = wins | ((x != x) & (best == best))
            best, place = apply("where", wins, x, best), apply("where", wins, number, place)
        return place

    def form(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        return _along(x, dim, keepdim, join)

    return form


def largest_or_smallest(op: str) -> Form:
    """max and min: of a vector, along a dimension with the places, or of two operands."""
    two = elementwise(of_two(op))

    def form(x: Any, other: Any = None, keepdim: bool = False, *, dim: int | None = None) -> Any:
        dim = other if type(other) is int else dim
        if other is not None and dim is None:
            return two(x, other)
        values = extreme(op)(x, dim, keepdim)
        return values if dim is None else Extreme(values, place_of_extreme(op)(x, dim, keepdim))

    return form


# --- truth ----------------------------------------------------------------------------------------


def truth(op: str) -> Form:
    """any and all."""

    def join(symbols: list[Symbol]) -> Symbol:
        result = torch.uint8 if symbols[0].dtype is torch.uint8 else torch.bool
        return converted(_tree(op, [converted(x, torch.bool) for x in symbols]), result)

    def form(x: Any, dim: Dims = None, keepdim: bool = False) -> Any:
        return _along(x, dim, keepdim, join)

    return form


# --- shapes ---------------------------------------------------------------------------------------


def _parts(tensors: Sequence[Any]) -> tuple[Recorder, list[Array]]:
    """Parts of a new vector, in their common dtype."""
    recorder, arrays = _lifted(*tensors)
    dtype = promote([array.flat[0] for array in arrays])
    return recorder, [
        filled_array((converted(x, dtype) for x in array.flat), array.shape) for array in arrays
    ]


def stack(tensors: Sequence[Any], dim: int = 0) -> Any:
    """A vector of numbers, or a matrix of vectors."""
    recorder, arrays = _parts(tensors)
    if len({array.shape for array in arrays}) > 1:
        raise unsupported("stack of different shapes")
    return Vector.of(np.stack(arrays, _axis(dim, arrays[0].ndim + 1)), recorder)


def cat(tensors: Sequence[Any], dim: int = 0) -> Any:
    """Vectors one after the other."""
    recorder, arrays = _parts(tensors)
    axis = _axis(dim, arrays[0].ndim)
    if len({(*array.shape[:axis], *array.shape[axis + 1 :], array.ndim) for array in arrays}) > 1:
        raise unsupported("cat of different shapes")
    return Vector.of(np.concatenate(arrays, axis), recorder)


def unbind(x: Any, dim: int = 0) -> tuple[Any, ...]:
    """The parts of a vector along a dimension."""
    recorder, (array,) = _lifted(x)
    parts = np.moveaxis(array, _axis(dim, array.ndim), 0)
    return tuple(Vector(parts, recorder))


def unsqueeze(x: Any, dim: int) -> Any:
    """A new dimension of size 1."""
    recorder, (array,) = _lifted(x)
    return Vector.of(np.expand_dims(array, _axis(dim, array.ndim + 1)), recorder)


def squeeze(x: Any, dim: int | None = None) -> Any:
    """Without dimensions of size 1."""
    recorder, (array,) = _lifted(x)
    dims = range(array.ndim) if dim is None else [_axis(dim, array.ndim)] if array.ndim else []
    axes = tuple(axis for axis in dims if array.shape[axis] == 1)
    return Vector.of(array.squeeze(axes), recorder)


REDUCTIONS: dict[str, Form] = {
    "sum": total("add"),
    "prod": total("mul"),
    "mean": mean,
    "amax": extreme("max"),
    "amin": extreme("min"),
    "argmax": place_of_extreme("max"),
    "argmin": place_of_extreme("min"),
    "any": truth("or"),
    "all": truth("and"),
    "norm": norm,
    "vector_norm": norm,
    "dist": dist,
    "matmul": matmul,
    "rmatmul": lambda a, b: matmul(b, a),
    "dot": dot,
    "cross": cross,
    "stack": stack,
    "cat": cat,
    "unbind": unbind,
    "unsqueeze": unsqueeze,
    "squeeze": squeeze,
}
"""The forms of vectors. All others work on their elements."""
