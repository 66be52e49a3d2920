"""What factories accept. Each check gives the argument back, or says what is wrong with it.

Every message has three parts: what the argument must be, what came, and `advice` on what to give.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from quire.errors import ArgumentError, DtypeError, ShapeError


def whole_number(name: str, value: object, *, minimum: int | None = None, advice: str) -> int:
    """`value` as an int that is not below `minimum`."""
    number = None if isinstance(value, bool) else _as_index(value)
    if number is None or (minimum is not None and number < minimum):
        floor = "" if minimum is None else f" of at least {minimum}"
        raise ArgumentError(f"{name} must be a whole number{floor}, got {value!r}. {advice}")
    return number


def prefix_number(prefix_length: object) -> int:
    """`prefix_length` as an int that is not negative."""
    advice = "Give the number of positions that everyone sees, or 0."
    return whole_number("prefix_length", prefix_length, minimum=0, advice=advice)


def finite_positive(name: str, value: object, *, advice: str) -> float:
    """`value` as a number above 0 that is not infinite."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ArgumentError(f"{name} must be a finite number above 0, got {value!r}. {advice}")
    return value


def tensor_of(
    content: Literal["integers", "floats", "truth values"],
    name: str,
    values: object,
    *,
    ranks: tuple[int, ...] = (1,),
    advice: str,
) -> Tensor:
    """`values` as a tensor of that content and rank: a tensor as it is, anything else copied."""
    tensor = values if isinstance(values, Tensor) else _copied(name, values, content, advice)
    if _content(tensor) != content:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise DtypeError(f"{name} must hold {content}, got {dtype}. {advice}")
    if tensor.ndim not in ranks:
        wanted = " or ".join(f"{rank}-D" for rank in ranks)
        raise ShapeError(f"{name} must be {wanted}, got shape {list(tensor.shape)}. {advice}")
    return tensor


def lengths_tensor(
    lengths: Tensor | Sequence[int], advice: str, *, name: str = "lengths"
) -> Tensor:
    """`lengths` as a tensor of integers of which none is negative."""
    tensor = tensor_of("integers", name, lengths, advice=advice)
    if bool((tensor < 0).any()):
        raise ArgumentError(f"{name} must not be negative, got {int(tensor.min())}. {advice}")
    return tensor


def offsets_tensor(offsets: Tensor | Sequence[int], advice: str) -> Tensor:
    """`offsets` as a tensor of integers that starts at 0 and never falls."""
    tensor = tensor_of("integers", "offsets", offsets, advice=advice)
    if len(tensor) == 0 or int(tensor[0]) != 0:
        raise ArgumentError(f"offsets must start at 0, got {tensor.tolist()[:4]}. {advice}")
    falls = (tensor[1:] < tensor[:-1]).nonzero()
    if len(falls):
        place = int(falls[0])
        raise ArgumentError(
            f"offsets must not fall, got {int(tensor[place])} and then {int(tensor[place + 1])} "
            f"at position {place + 1}. {advice}"
        )
    return tensor


def _content(tensor: Tensor) -> str:
    if tensor.is_complex():
        return "complex numbers"
    if tensor.dtype == torch.bool:
        return "truth values"
    return "floats" if tensor.is_floating_point() else "integers"


def _copied(name: str, values: object, content: str, advice: str) -> Tensor:
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ArgumentError(
            f"{name} must be a tensor or a sequence of {content}, got {values!r}. {advice}"
        ) from error
    # PyTorch calls the empty list a list of floats.
    return tensor.int() if content == "integers" and tensor.numel() == 0 else tensor


def _as_index(value: object) -> int | None:
    try:
        return operator.index(value)  # type: ignore[arg-type]  # that is the question
    except TypeError:
        return None
