"""Epilogues that models need, as values: they can be compared, pickled and written to files.

silu, gelu          by themselves; so are gelu_tanh, quick_gelu and sigmoid
silu_and_mul        silu(gate) * up, of a pair of columns
gelu_and_mul        the same with GELU; gelu_tanh_and_mul with its approximation by tanh
add                 value + residual, which the call gives
Rotary(heads, half) rotary embedding of the first heads, by cos and sin that the call gives
ClampedSwiglu(...)  the gate of gpt-oss
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple, dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F

from quire.errors import ArgumentError

EpilogueMod: TypeAlias = Callable[..., Any]


def silu(value: Any, row: Any, column: Any) -> Any:
    """Return value * sigmoid(value)."""
    return F.silu(value)


def gelu(value: Any, row: Any, column: Any) -> Any:
    """Return gelu(value)."""
    return F.gelu(value)


def gelu_tanh(value: Any, row: Any, column: Any) -> Any:
    """Return gelu(value), approximated by tanh."""
    return F.gelu(value, approximate="tanh")


def quick_gelu(value: Any, row: Any, column: Any) -> Any:
    """Return value * sigmoid(1.702 * value)."""
    return value * torch.sigmoid(1.702 * value)


def sigmoid(value: Any, row: Any, column: Any) -> Any:
    """Return sigmoid(value)."""
    return torch.sigmoid(value)


ELEMENTWISE = {each.__name__: each for each in (silu, gelu, gelu_tanh, quick_gelu, sigmoid)}
"""Functions of one number, by name."""


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


@dataclass(frozen=True)
class ClampedSwiglu:
    """The gate of gpt-oss: (up + 1) * gate * sigmoid(alpha * gate), both held within a limit."""

    alpha: float
    limit: float

    def __call__(self, value: Any, other: Any, row: Any, block: Any, column: Any) -> Any:
        """Return the gated number."""
        gate = torch.clamp(value, max=self.limit)
        up = torch.clamp(other, min=-self.limit, max=self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


GATED: dict[str, EpilogueMod] = {
    "SiLU": silu_and_mul,
    "SiLUActivation": silu_and_mul,
    "GELUActivation": gelu_and_mul,
    "GELUTanh": gelu_tanh_and_mul,
    "PytorchGELUTanh": gelu_tanh_and_mul,
}
"""activation(gate) * up, by the name of the activation's class."""

_PLAIN: dict[str, EpilogueMod] = {
    **{each.__name__: each for each in (silu_and_mul, gelu_and_mul, gelu_tanh_and_mul, add)},
    **ELEMENTWISE,
}


def epilogue_name(epilogue: EpilogueMod | None) -> str:
    """Return an epilogue as text. Raise if it is not one of this module."""
    if epilogue is None:
        return ""
    if isinstance(epilogue, Rotary):
        return " ".join(map(str, ("rotary", *astuple(epilogue))))
    if isinstance(epilogue, ClampedSwiglu):
        return " ".join(map(str, ("clamped_swiglu", *astuple(epilogue))))
    for name, known in _PLAIN.items():
        if epilogue is known:
            return name
    raise ArgumentError(
        f"an epilogue must be one of {', '.join(_PLAIN)}, Rotary or ClampedSwiglu to be saved, "
        f"but is {epilogue!r}. Save the layer without it, and give it to the loaded one."
    )


def epilogue_of_name(text: str) -> EpilogueMod | None:
    """Return the epilogue that `epilogue_name` has written."""
    name, *numbers = text.split() or [""]
    if name == "rotary":
        heads, half = map(int, numbers)
        return Rotary(heads, half)
    if name == "clamped_swiglu":
        alpha, limit = map(float, numbers)
        return ClampedSwiglu(alpha, limit)
    return _PLAIN[name] if name else None
