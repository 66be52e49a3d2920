"""Checks of single arguments. Each returns the argument, or raises an error that names it.

A message has three parts: what the argument must be, what it is, and `advice` on what to give. For
example: "window_size must be a whole number of at least 0, but is -1. Give how many ...".
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from quire.errors import ArgumentError, DtypeError, ShapeError


def whole_number(name: str, value: object, *, minimum: int | None = None, advice: str) -> int:
    """Return `value` as an int. Refuse bools, floats and ints below `minimum`."""
    if type(value) is int and (minimum is None or value >= minimum):  # the usual case, at once
        return value
    number = None if isinstance(value, bool) else _as_index(value)
    if number is None or (minimum is not None and number < minimum):
        floor = "" if minimum is None else f" of at least {minimum}"
        raise ArgumentError(f"{name} must be a whole number{floor}, but is {value!r}. {advice}")
    return number


def prefix_number(prefix_length: object) -> int:
    """Return `prefix_length` as an int of at least 0."""
    advice = "Give the number of positions that every query sees, or 0."
    return whole_number("prefix_length", prefix_length, minimum=0, advice=advice)


def finite_positive(name: str, value: object, *, advice: str) -> float:
    """Return `value` if it is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ArgumentError(f"{name} must be a finite number above 0, but is {value!r}. {advice}")
    return value


def tensor_of(
    content: Literal["integers", "floats", "truth values"],
    name: str,
    values: object,
    *,
    ranks: tuple[int, ...] = (1,),
    advice: str,
) -> Tensor:
    """Return `values` as a tensor that holds `content` and has one of the `ranks`.

    A tensor is returned as it is, without a copy; a list or an array becomes a new tensor.
    """
    tensor = values if isinstance(values, Tensor) else _to_tensor(name, values, content, advice)
    if _content(tensor) != content:
        raise DtypeError(f"{name} must hold {content}, but is {dtype_name(tensor.dtype)}. {advice}")
    if tensor.ndim not in ranks:
        wanted = " or ".join(f"{rank}-D" for rank in ranks)
        raise ShapeError(f"{name} must be {wanted}, but has shape {list(tensor.shape)}. {advice}")
    return tensor


def lengths_tensor(
    lengths: Tensor | Sequence[int], advice: str, *, name: str = "lengths"
) -> Tensor:
    """Return `lengths` [N] as a tensor of integers of at least 0."""
    tensor = tensor_of("integers", name, lengths, advice=advice)
    if bool((tensor < 0).any()):
        raise ArgumentError(f"{name} must be at least 0, but one is {int(tensor.min())}. {advice}")
    return tensor


def offsets_tensor(offsets: Tensor | Sequence[int], advice: str) -> Tensor:
    """Return `offsets` [N + 1] as a tensor of integers that starts at 0 and never falls."""
    tensor = tensor_of("integers", "offsets", offsets, advice=advice)
    if len(tensor) == 0 or int(tensor[0]) != 0:
        raise ArgumentError(f"offsets must start at 0, but are {tensor.tolist()[:4]}. {advice}")
    check_never_falls("offsets", tensor, advice)
    return tensor


def check_never_falls(name: str, numbers: Any, advice: str) -> None:
    """Raise if an entry of `numbers` [N], a tensor or an array, is below the entry before it."""
    falls = numbers[1:] < numbers[:-1]
    if falls.any():
        place = falls.tolist().index(True) + 1
        raise ArgumentError(
            f"{name} must not fall, but {int(numbers[place - 1])} is followed by "
            f"{int(numbers[place])} at position {place}. {advice}"
        )


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype without the module: "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def _content(tensor: Tensor) -> str:
    if tensor.is_complex():
        return "complex numbers"
    if tensor.dtype == torch.bool:
        return "truth values"
    return "floats" if tensor.is_floating_point() else "integers"


def _to_tensor(name: str, values: object, content: str, advice: str) -> Tensor:
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            f"{name} must be a tensor or a sequence of {content}, but is {values!r}. {advice}"
        ) from error
    # PyTorch makes a float tensor of an empty list.
    return tensor.int() if content == "integers" and tensor.numel() == 0 else tensor


def _as_index(value: object) -> int | None:
    try:
        return operator.index(value)  # type: ignore[arg-type]  # it raises for other types
    except TypeError:
        return None
