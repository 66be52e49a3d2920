"""Operations on vectors, made of the operations on single numbers.

`elementwise` lets a form take vectors: it is applied to each element, with torch's broadcasting and
its promotion of dtypes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.ir.captured import PartialLoad
from quire.ir.promote import converted, promote
from quire.ir.symbol import Recorded, Recorder, Symbol, find_recorder, unsupported
from quire.ir.vector import Array, Vector, filled_array


def array_of(value: Any, recorder: Recorder) -> Array:
    """A symbol, a vector, a captured tensor or a part of one as an array of symbols."""
    match value:
        case Vector():
            return value.array
        case Symbol():
            return filled_array([value], ())
        case PartialLoad():
            return value.array()
        case Tensor() if value.dim():
            return PartialLoad.whole(value, recorder).array()
    lifted = recorder.lift(value)
    dtype = promote([lifted])
    return filled_array([Symbol(recorder.node(lifted, dtype), recorder)], ())


def elementwise(form: Callable[..., Any]) -> Callable[..., Any]:
    """A form of numbers that takes vectors, too: for these, it is applied to their elements."""

    def spread(*operands: Any, **named: Any) -> Any:
        for operand in (*operands, *named.values()) if named else operands:
            if type(operand) is not Symbol and isinstance(operand, _MAY_BE_WIDE) and operand.dim():
                return _spread(form, operands, named)
        return form(*operands, **named)

    return spread


def of_elements(form: Callable[..., Any]) -> Callable[..., Any]:
    """A form of one number that takes a vector, too. Its other arguments are no operands."""
    return lambda x, *args, **kwargs: elementwise(lambda x: form(x, *args, **kwargs))(x)


_MAY_BE_WIDE = (Recorded, Tensor)


def _spread(form: Callable[..., Any], operands: Sequence[Any], named: dict[str, Any]) -> Any:
    recorder = find_recorder([*operands, *named.values()])
    assert recorder is not None, "a form without a symbol"
    arrays = _promoted(
        {
            key: array_of(value, recorder)
            for key, value in (*enumerate(operands), *named.items())
            if isinstance(value, _MAY_BE_WIDE)
        }
    )
    try:
        shape = np.broadcast_shapes(*(array.shape for array in arrays.values()))
    except ValueError as error:
        shapes = " and ".join(str(list(array.shape)) for array in arrays.values())
        raise unsupported(f"an operation on vectors of the shapes {shapes}") from error
    wide = {key: np.broadcast_to(array, shape) for key, array in arrays.items()}

    def at(place: tuple[int, ...]) -> Any:
        args = [wide[n][place] if n in wide else value for n, value in enumerate(operands)]
        return form(*args, **{n: wide[n][place] if n in wide else v for n, v in named.items()})

    return Vector.of(filled_array(map(at, np.ndindex(shape)), shape), recorder)


def _promoted(arrays: dict[Any, Array]) -> dict[Any, Array]:
    """Operands without dimensions in the dtype of those with dimensions, if these prevail.

    In torch, a scalar tensor changes the dtype of a vector only if it is of a higher category:
    truth values, integers, floats.
    """
    vectors = promote([array.flat[0] for array in arrays.values() if array.ndim])

    def prevail(symbol: Symbol) -> Symbol:
        same = _category(symbol.dtype) == _category(vectors)
        return converted(symbol, vectors) if same else symbol

    return {
        key: array if array.ndim else filled_array([prevail(array.item())], ())
        for key, array in arrays.items()
    }


def _category(dtype: torch.dtype) -> int:
    return 2 if dtype.is_floating_point else int(dtype is not torch.bool)
