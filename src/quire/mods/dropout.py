"""Dropout as a mask of its own: a hash of (seed, b, h, q_idx, kv_idx).

Whether an element is kept depends on its position alone. So the mask does not depend on tiles,
threads, layout or batch, and the backward pass computes it again from the seed. It is a mask_mod
in 32-bit arithmetic that wraps, so whatever evaluates mods evaluates dropout. `random` gives the
same hash to mods, as a number.
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
from quire.support.torch_private.transforms import innermost


@dataclass(frozen=True, eq=False)
class Dropout:
    """Dropout with probability `p`, above 0 and at most 1, and the seed of one call.

    `drawn` is the seed as a tensor. Inside torch.vmap it may be mapped: then each call drops other
    weights, by its number in the batch. `mask` replaces the mask_mod that the seed gives.
    """

    p: float
    seed: tuple[int, int] = (0, 0)
    drawn: Tensor | None = None
    mask: Traced | None = None

    def seeded(self, generator: torch.Generator | None) -> Dropout:
        """Return the same dropout with a seed from `generator`, by default torch's own."""
        numbers = _drawn(generator)
        return Dropout(self.p, _seed(numbers), numbers)

    @functools.cached_property
    def keep(self) -> Traced:
        """The mask_mod that is True for what is kept."""
        return keep_mask(self.p, *self.seed) if self.mask is None else self.mask

    @property
    def factor(self) -> float:
        """The factor of kept weights. With it, the expected sum of all weights does not change."""
        return 0.0 if self.p == 1.0 else 1.0 / (1.0 - self.p)


def drawn_seed(generator: torch.Generator | None = None) -> tuple[int, int]:
    """Return a seed from `generator`, by default torch's own."""
    return _seed(_drawn(generator))


def _drawn(generator: torch.Generator | None) -> Tensor:
    device = torch.device("cpu") if generator is None else generator.device
    return torch.randint(-(2**31), 2**31, (2,), generator=generator, device=device)


def _seed(numbers: Tensor) -> tuple[int, int]:
    """Return the two numbers of a seed. If torch.vmap drew several seeds, return the first."""
    low, high = innermost(numbers).flatten()[:2].tolist()
    return low, high


def check_dropout(p: object) -> Dropout | None:
    """Return dropout with probability `p`, without a seed yet. None if `p` is 0."""
    if not isinstance(p, int | float) or not 0.0 <= p <= 1.0:
        raise ArgumentError(
            f"dropout_p must be a number from 0 to 1, but is {p!r}. Use 0.0 to switch it off."
        )
    return None if p == 0.0 else Dropout(float(p))


def keep_mask(p: float, low: int, high: int) -> Traced:
    """Return the mask_mod that is True with probability 1 - p. The seed is two int32 numbers."""
    last_dropped = round(p * 2**31) - 1

    def keep(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (_hash((low, high), b, h, q_idx, kv_idx) & 0x7FFFFFFF) > last_dropped

    return trace(keep, "mask")


def random(seed: int | Tensor, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Return a random number in a mod: a float32 from 0 up to 1, another one for each element.

        def jitter(score, b, h, q_idx, kv_idx):
            return score + 0.1 * random(seed, b, h, q_idx, kv_idx)

    The number depends on the seed and the position alone. So the backward pass and a repeated call
    find the same number. Give `seed` as a tensor [] of int64, and draw a new one in place for
    each step: a Python number is compiled into the kernel.
    """
    if isinstance(seed, Tensor):
        loaded = seed + b * 0  # depends on `b`, so that the kernel reads the seed at every call
        low, high = loaded.int(), (loaded >> 32).int()
    else:
        number = whole_number("seed", seed, advice="Give a whole number, or a tensor of one int64.")
        low, high = (_signed(part & 0xFFFFFFFF) for part in (number, number >> 32))
    # A float32 has 24 bits.
    bits = _hash((low, high), b, h, q_idx, kv_idx) >> 8 & 0xFFFFFF
    return bits.float() * 2.0**-24


def _hash(seed: tuple[Any, Any], b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """Return 32 bits for each element and seed."""
    low, high = seed
    row = _mix(_mix(_mix(b.int() ^ low) + h.int()) + q_idx.int())
    return _mix(row ^ _mix(kv_idx.int() ^ high))


def _signed(bits: int) -> int:
    """Return the int32 with these 32 bits."""
    return bits - (bits >> 31 << 32)


def _mix(x: Any) -> Any:
    """Map each 32-bit integer to another one. Every bit of it depends on every bit of `x`."""
    x = (x ^ ((x >> 16) & 0xFFFF)) * 0x7FEB352D
    x = (x ^ ((x >> 15) & 0x1FFFF)) * -0x7B935975
    return x ^ ((x >> 16) & 0xFFFF)
