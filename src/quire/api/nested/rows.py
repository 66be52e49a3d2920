"""Query, key and value of nested attention as packed rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.api.nested.checks import listed
from quire.errors import ShapeError
from quire.memory.tables import Numbers, Spans, checked_lengths, checked_offsets
from quire.support.torch_private import is_transformed, nested_values


class Packed(NamedTuple):
    """The rows of a nested tensor [total, H, D], and where its sequences lie in them."""

    rows: Tensor
    first: Numbers
    lengths: Numbers

    @property
    def spans(self) -> tuple[Tensor, Tensor]:
        """Offsets [B + 1] and lengths [B]."""
        ends = np.append(self.first, len(self.rows))
        return torch.from_numpy(ends), torch.from_numpy(self.lengths)

    def moved(self, first: Numbers, lengths: Numbers) -> Packed:
        """Copy the sequences that begin at `first`, without gaps between them."""
        ends = np.cumsum(lengths)
        at = np.arange(ends[-1] if len(ends) else 0) + np.repeat(first - ends + lengths, lengths)
        rows = self.rows.index_select(0, torch.from_numpy(at).to(self.rows.device))
        return Packed(rows, ends - lengths, lengths)

    def repeated(self, batch: int) -> Packed:
        """Repeat the only sequence `batch` times."""
        if len(self.lengths) == batch:
            return self
        return self.moved(np.repeat(self.first, batch), np.repeat(self.lengths, batch))

    def lie_like(self, other: Packed) -> bool:
        """Return whether sequences have the places of those of `other`, by identity of arrays.

        `rows_of` uses the same arrays for tensors that have the same offsets and lengths.
        """
        return self.first is other.first and self.lengths is other.lengths


def is_watched(tensor: Tensor) -> bool:
    """Return whether autograd, forward-mode AD or torch.func may track a tensor.

    Operations that nested tensors track are slow, so others are used if nothing is tracked.
    """
    return tensor.requires_grad or is_transformed()


def rows_of(query: Any, key: Any, value: Any) -> list[Packed]:
    """Return the rows of nested tensors [B, H, j, D] or [B, j, D].

    Offsets and lengths that several tensors share are checked once.
    """
    seen: dict[tuple[int, int, int], Spans] = {}
    found = []
    for name, nested in (("query", query), ("key", key), ("value", value)):
        values = nested.values() if is_watched(nested) else nested_values(nested).detach()
        offsets, lengths = nested.offsets(), nested.lengths()
        rows = values.unsqueeze(1) if values.dim() == 2 else values.transpose(0, 1)
        known = (id(offsets), id(lengths), len(rows))
        if known not in seen:
            names = (f"{name}.offsets", f"{name}.lengths")
            ends = checked_offsets(names[0], offsets, len(rows))
            room = np.diff(ends)
            own = room if lengths is None else checked_lengths(names, lengths, room)
            seen[known] = Spans(ends[:-1], own)
        found.append(Packed(rows, *seen[known]))
    return found


def aligned(operands: list[Packed], enable_gqa: bool) -> tuple[Packed, Packed, Packed]:
    """Repeat batches of 1 and heads of 1, and give values the places of keys. Raise on mismatch."""
    batches = [len(each.lengths) for each in operands]
    batch = max(batches)
    if set(batches) - {1, batch}:
        raise ShapeError(
            f"query, key and value must have the same batch size, or 1, but have "
            f"{listed(batches)}. Give as many sequences of each."
        )
    query, key, value = (each.repeated(batch) for each in operands)
    if not key.lie_like(value):
        key, value = _at_one_place(key, value)
    q, k, v = with_heads([query.rows, key.rows, value.rows], enable_gqa)
    return query._replace(rows=q), key._replace(rows=k), value._replace(rows=v)


def _at_one_place(key: Packed, value: Packed) -> tuple[Packed, Packed]:
    """Return keys and values with their sequences at the same rows. Raise if lengths differ."""
    if not np.array_equal(key.lengths, value.lengths):
        at = int(np.flatnonzero(key.lengths != value.lengths)[0])
        raise ShapeError(
            f"key and value must have sequences of the same lengths, but sequence {at} has "
            f"{key.lengths[at]} keys and {value.lengths[at]} values. Give them the same offsets."
        )
    if not np.array_equal(key.first, value.first) or len(key.rows) != len(value.rows):
        key, value = (each.moved(each.first, each.lengths) for each in (key, value))
    return key, value


def with_heads(rows: Sequence[Tensor], enable_gqa: bool) -> list[Tensor]:
    """Repeat heads of 1 in the rows [total, H, D] of query, key and value. Raise on mismatch."""
    heads = [each.shape[1] for each in rows]
    q_heads, kv_heads = heads[0], max(heads[1:])
    advice = "Repeat the heads of one."
    if enable_gqa:
        grouped = q_heads % max(1, kv_heads) == 0
    else:
        q_heads = kv_heads = max(heads)
        grouped = heads[0] in (1, q_heads)
        advice = "Set enable_gqa=True if a key head serves several query heads."
    if not grouped or set(heads[1:]) - {1, kv_heads}:
        raise ShapeError(
            f"query, key and value must have the same number of heads, or 1, but have "
            f"{listed(heads)}. {advice}"
        )
    wanted = (q_heads, kv_heads, kv_heads)
    return [
        each if each.shape[1] == count else each.expand(-1, count, -1)
        for each, count in zip(rows, wanted, strict=True)
    ]
