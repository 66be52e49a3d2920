"""Numbers along an axis: their positions and their text.

    scale(1 << 20)     # (0, "0"), (262144, "256k"), ..., (1048576, "1M")
    scale(1_000_000)   # (0, "0"), (200000, "200k"), ..., (1000000, "1M")

A length that is a sum of few powers of two is divided into powers of two, with a k of 1,024. Other
lengths are divided into 1, 2 or 5 times a power of ten, with a k of 1,000.
"""

from __future__ import annotations

from collections.abc import Iterator

MOST = 5  # steps along an axis


def scale(length: int, most: int = MOST) -> list[tuple[int, str]]:
    """Return positions from 0 up to `length` tokens with their texts, in at most `most` steps."""
    binary = _is_binary(length)
    step = next(step for step in _steps(binary) if length <= most * step)
    kilo = 1024 if binary else 1000
    unit = next((size, sign) for size, sign in _units(kilo) if step % size == 0)
    return [(at, _written(at, kilo, *unit)) for at in range(0, length + 1, step)]


def _is_binary(length: int) -> bool:
    """Return whether only the four highest bits may be set: 640, 4096, 1 << 20."""
    below = max(0, length.bit_length() - 4)
    return length >> below << below == length


def _steps(binary: bool) -> Iterator[int]:
    size = 1
    while True:
        yield from ((size,) if binary else (size, 2 * size, 5 * size))
        size *= 2 if binary else 10


def _units(kilo: int) -> tuple[tuple[int, str], ...]:
    return (kilo**3, "G"), (kilo**2, "M"), (kilo, "k"), (1, "")


def _written(at: int, kilo: int, size: int, sign: str) -> str:
    """Return a number in the unit of the step, or in the largest unit that divides it."""
    if at == 0:
        return "0"
    if size > 1:
        size, sign = next((size, sign) for size, sign in _units(kilo) if at % size == 0)
    return f"{at // size}{sign}"
