"""Epilogues that models need, as values: they can be compared, pickled and written to files.

silu_and_mul        silu(gate) * up, of a pair of columns
gelu_and_mul        the same with GELU; gelu_tanh_and_mul with its approximation by tanh
add                 value + residual, which the call gives
Rotary(heads, half) rotary embedding of the first heads, by cos and sin that the call gives
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from quire.errors import ArgumentError

EpilogueMod: TypeAlias = Callable[..., Any]


def silu_and_mul(value: Any, other: Any, row: Any, block: Any, column: Any) -> Any:
    """Return silu(value) * other."""
    return F.silu(value) * other


def gelu_and_mul(value: Any, other: Any, row: Any, block: Any, column: Any) -> Any:
    """Return gelu(value) * other."""
    return F.gelu(value) * other


def gelu_tanh_and_mul(value: Any, other: Any, row: Any, block: Any, column: Any) -> Any:
    """Return gelu(value) * other, where gelu is approximated by tanh."""
    return F.gelu(value, approximate="tanh") * other


def add(value: Any, row: Any, column: Any, *, residual: Any) -> Any:
    """Return value + residual."""
    return value + residual[row, column]


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding as models of the Llama family define it.

    A block is a head of 2 * half columns. The first `heads` are rotated, the others stay. `cos` and
    `sin` have a row for each row of x, and 2 * half columns.
    """

    heads: int
    half: int

    def __call__(
        self, value: Any, other: Any, row: Any, head: Any, column: Any, *, cos: Any, sin: Any
    ) -> Any:
        """Return a number of a head after the rotation."""
        turned = torch.where(column < self.half, -other, other) * sin[row, column]
        return torch.where(head < self.heads, value * cos[row, column] + turned, value)


_PLAIN = {each.__name__: each for each in (silu_and_mul, gelu_and_mul, gelu_tanh_and_mul, add)}


def epilogue_name(epilogue: EpilogueMod | None) -> str:
    """Return an epilogue as text. Raise if it is not one of this module."""
    if epilogue is None:
        return ""
    if isinstance(epilogue, Rotary):
        return " ".join(map(str, ("rotary", *astuple(epilogue))))
    for name, known in _PLAIN.items():
        if epilogue is known:
            return name
    raise ArgumentError(
        f"an epilogue must be one of {', '.join(_PLAIN)} or Rotary to be saved, but is "
        f"{epilogue!r}. Save the layer without it, and give it to the loaded one."
    )


def epilogue_of_name(text: str) -> EpilogueMod | None:
    """Return the epilogue that `epilogue_name` has written."""
    name, *numbers = text.split() or [""]
    if name == "rotary":
        heads, half = map(int, numbers)
        return Rotary(heads, half)
    return _PLAIN[name] if name else None
