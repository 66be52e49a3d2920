"""Nested tensors, and what attention of them should be: one sequence after the other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quire import reference


def nested(
    lengths: list[int], heads: int | None = 2, dim: int = 8, seed: int = 0, **options: Any
) -> Tensor:
    """[B, H, j, D], or [B, j, D] without heads, of random numbers."""
    generator = torch.Generator().manual_seed(seed)
    middle = [] if heads is None else [heads]
    rows = [torch.randn(n, *middle, dim, generator=generator) for n in lengths]
    made: Tensor = torch.nested.nested_tensor(rows, layout=torch.jagged, **options)
    return made if heads is None else made.transpose(1, 2)


def with_a_head(tensor: Tensor) -> Tensor:
    """[B, j, D] as [B, 1, j, D]."""
    parts = [part.unsqueeze(1) for part in tensor.unbind()]
    made: Tensor = torch.nested.nested_tensor(parts, layout=torch.jagged)
    return made.transpose(1, 2)


def with_holes(lengths: list[int], heads: int = 2, dim: int = 8, seed: int = 0) -> Tensor:
    """The same with rows between the sequences that belong to none and hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    room = max(lengths) + 2
    padded = torch.full((len(lengths), room, heads, dim), torch.nan)
    starts = [b % 3 for b in range(len(lengths))]
    for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        length = min(length, room - start)
        own = torch.randn(length, heads, dim, generator=generator)
        padded[b, start : start + length] = own
    narrowed: Tensor = torch.nested.narrow(
        padded, 1, torch.tensor(starts), torch.tensor(lengths), layout=torch.jagged
    )
    return narrowed.transpose(1, 2)


def one_by_one(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mods: Callable[[int], dict[str, Any]] = lambda b: {},
    **options: Any,
) -> list[Tensor]:
    """The reference for each sequence, whose mods are `mods(b)`."""
    return [
        reference.attention(q[None], k[None], v[None], **mods(b), **options).out[0]
        for b, (q, k, v) in enumerate(
            zip(query.unbind(), key.unbind(), value.unbind(), strict=True)
        )
    ]


def assert_same(found: Tensor, expected: list[Tensor]) -> None:
    parts = found.unbind()
    assert len(parts) == len(expected)
    for part, wanted in zip(parts, expected, strict=True):
        torch.testing.assert_close(part, wanted)
