"""Dropout as a mask of its own: a hash of (seed, b, h, q_idx, kv_idx).

An element is kept or dropped by its position alone, so the mask does not depend on tiles, threads,
layout or batch, and the backward pass finds it again from the seed. It is written as a mask_mod, in
32-bit arithmetic that wraps, so whatever evaluates mods evaluates dropout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from quire.errors import ArgumentError
from quire.ir.trace import Traced, trace


@dataclass(frozen=True, eq=False)
class Dropout:
    """Which elements are kept, and the factor that keeps the expected sum."""

    keep: Traced
    factor: float


def dropout(p: float, generator: torch.Generator | None = None) -> Dropout | None:
    """Dropout with probability `p`, its seed drawn from `generator`; None where p is 0."""
    if not isinstance(p, int | float) or not 0.0 <= p <= 1.0:
        raise ArgumentError(
            f"dropout_p must be a number from 0 to 1, but got {p!r}. Use 0.0 to switch it off."
        )
    if p == 0.0:
        return None
    low, high = torch.randint(-(2**31), 2**31, (2,), generator=generator).tolist()
    return Dropout(keep_mask(p, low, high), 0.0 if p == 1.0 else 1.0 / (1.0 - p))


def keep_mask(p: float, low: int, high: int) -> Traced:
    """The mask that holds with probability 1 - p, for a seed of two 32-bit integers."""
    last_dropped = round(p * 2**31) - 1

    def keep(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        row = _mix(_mix(_mix(b.int() ^ low) + h.int()) + q_idx.int())
        column = _mix(kv_idx.int() ^ high)
        return (_mix(row ^ column) & 0x7FFFFFFF) > last_dropped

    return trace(keep, "mask")


def _mix(x: Any) -> Any:
    """A bijection of 32-bit integers whose every output bit depends on every input bit."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7B935975
    return x ^ ((x >> 16) & 0xFFFF)
