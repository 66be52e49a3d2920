"""Dropout as a mask of its own: a hash of (seed, b, h, q_idx, kv_idx).

An element is kept or dropped by its position alone, so the mask does not depend on tiles, threads,
layout or batch, and the backward pass finds it again from the seed. It is written as a mask_mod, in
32-bit arithmetic that wraps, so whatever evaluates mods evaluates dropout. `random` is the same
hash as a number, for mods.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.checks.arguments import whole_number
from quire.errors import ArgumentError
from quire.ir.trace import Traced, trace


@dataclass(frozen=True, eq=False)
class Dropout:
    """Dropout with probability `p` from 0 to 1, exclusive of 0, and the seed of one call."""

    p: float
    seed: tuple[int, int] = (0, 0)

    def seeded(self, generator: torch.Generator | None) -> Dropout:
        """The same with a seed drawn from `generator`, or from torch's default one."""
        return Dropout(self.p, drawn_seed(generator))

    @functools.cached_property
    def keep(self) -> Traced:
        """The mask of what is kept."""
        return keep_mask(self.p, *self.seed)

    @property
    def factor(self) -> float:
        """What a kept weight is multiplied by, so that the expected sum stays."""
        return 0.0 if self.p == 1.0 else 1.0 / (1.0 - self.p)


def drawn_seed(generator: torch.Generator | None = None) -> tuple[int, int]:
    """Draw a seed from `generator`, or from torch's default one."""
    device = torch.device("cpu") if generator is None else generator.device
    numbers = torch.randint(-(2**31), 2**31, (2,), generator=generator, device=device)
    low, high = numbers.tolist()
    return low, high


def check_dropout(p: object) -> Dropout | None:
    """Dropout with probability `p`, not yet seeded; None where p is 0."""
    if not isinstance(p, int | float) or not 0.0 <= p <= 1.0:
        raise ArgumentError(
            f"dropout_p must be a number from 0 to 1, but got {p!r}. Use 0.0 to switch it off."
        )
    return None if p == 0.0 else Dropout(float(p))


def keep_mask(p: float, low: int, high: int) -> Traced:
    """The mask that holds with probability 1 - p, for a seed of two 32-bit integers."""
    last_dropped = round(p * 2**31) - 1

    def keep(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (_hash(low, high, b, h, q_idx, kv_idx) & 0x7FFFFFFF) > last_dropped

    return trace(keep, "mask")


def random(seed: int | Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A random number in a mod: a float32 from 0 up to 1, another one for each element.

        def jitter(score, b, h, q_idx, kv_idx):
            return score + 0.1 * random(seed, b, h, q_idx, kv_idx)

    It follows from the seed and the positions alone, so the backward pass and a repeated call find
    the same. Give the seed as a tensor of one int64, and draw a new one in place for each step: a
    Python number is compiled into the kernel.
    """
    if isinstance(seed, Tensor):
        loaded = seed + b * 0  # so that a plan, which does not trace again, reads it again
        low, high = loaded.int(), (loaded >> 32).int()
    else:
        number = whole_number("seed", seed, advice="Give a whole number, or a tensor of one int64.")
        low, high = (_signed(part & 0xFFFFFFFF) for part in (number, number >> 32))
    bits = _hash(low, high, b, h, q_idx, kv_idx) >> 8 & 0xFFFFFF  # as many as float32 is exact for
    return bits.float() * 2.0**-24


def _hash(low: Any, high: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """32 bits for each element and seed."""
    row = _mix(_mix(_mix(b.int() ^ low) + h.int()) + q_idx.int())
    return _mix(row ^ _mix(kv_idx.int() ^ high))


def _signed(bits: int) -> int:
    """32 bits as the int32 that they are."""
    return bits - (bits >> 31 << 32)


def _mix(x: Any) -> Any:
    """A bijection of 32-bit integers whose every output bit depends on every input bit."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7B935975
    return x ^ ((x >> 16) & 0xFFFF)
