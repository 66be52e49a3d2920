"""Ragged and paged attention as dense attention of one sequence after the other.

It is what they mean, and how it is computed where no kernel takes all at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from quire import eager
from quire.eager import Above, Gradients, Operands, Result, Wanted
from quire.problem import Problem
from quire.sequences import Numbers, Packed, Sequences

NOWHERE = Result(*map(torch.tensor, (0.0, -math.inf, -math.inf, -1, 0.0)))
"""What a row holds that may attend nowhere."""

Attend: TypeAlias = Callable[[Problem, Operands], Result]


def in_rows(operands: Operands, packed: Packed | None) -> tuple[Operands, Sequences | None]:
    """The operands with keys and values in rows: those of pages are copied out of them."""
    if packed is None or packed.page_table is None:
        return operands, None if packed is None else packed.sequences
    query, key, value = operands
    pages, rows = packed.key_places(key.shape[2])
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32

    def taken(x: Tensor, scale: Tensor | None) -> Tensor:
        found = x[pages, :, rows]
        if scale is not None:
            found = found.to(dtype) * scale[pages, :, rows].to(dtype).unsqueeze(-1)
        return found.transpose(0, 1).unsqueeze(0)

    key, value = taken(key, packed.key_scale), taken(value, packed.value_scale)
    sequences = packed.sequences
    counts = sequences.kv_len
    first = np.cumsum(counts) - counts - sequences.kv_begin
    return Operands(query, key, value), sequences._replace(kv_row=first)


def _to_pages(grad: Tensor | None, like: Tensor, packed: Packed) -> Tensor | None:
    """The gradient of what `in_rows` copied. Sequences may share pages."""
    if grad is None or packed.page_table is None:
        return grad
    pages, heads, size, width = like.shape
    rows = grad.new_zeros(pages, size, heads, width)
    places = packed.key_places(size)
    return rows.index_put(places, grad[0].transpose(0, 1), accumulate=True).transpose(1, 2)


class Alone(NamedTuple):
    """A sequence as a problem of its own, and where its rows and keys are among all."""

    problem: Problem
    operands: Operands
    rows: slice
    keys: slice


def each(problem: Problem, operands: Operands, sequences: Sequences | None) -> Iterator[Alone]:
    """The sequences that have queries; operands without sequences are one."""
    query, key, value = operands
    if sequences is None:
        yield Alone(problem, operands, slice(0, query.shape[2]), slice(0, key.shape[2]))
        return
    for b, q_len, q_start, kv_begin, kv_end, q_row, kv_row in zip(
        *(column.tolist() for column in sequences), strict=True
    ):
        if q_len == 0:
            continue
        rows, keys = slice(q_row, q_row + q_len), slice(kv_row + kv_begin, kv_row + kv_end)
        alone = replace(problem, q_start=q_start, kv_start=kv_begin, b_start=b)
        part = Operands(query[:, :, rows], key[:, :, keys], value[:, :, keys])
        yield Alone(alone, part, rows, keys)


def one_by_one(
    problem: Problem, operands: Operands, packed: Packed | None, attend: Attend
) -> Result:
    """The result for packed operands, `attend` being asked about each sequence alone."""
    if packed is None:
        return attend(problem, operands)
    operands, sequences = in_rows(operands, packed)
    nothing = Operands(*(tensor[:, :, :0] for tensor in operands))
    nobody = attend(problem, nothing)  # by which autograd knows all operands
    end, parts, masses = 0, [nobody], []
    for alone in each(problem, operands, sequences):
        found = attend(alone.problem, alone.operands)
        parts += [_hole(nobody, alone.rows.start - end), found]
        masses.append((alone.keys, found.key_mass))
        end = alone.rows.stop
    parts.append(_hole(nobody, operands.query.shape[2] - end))
    columns = (
        torch.cat(column, 2) if column[0].dim() > 1 else column[0]
        for column in zip(*(part[:-1] for part in parts), strict=True)
    )
    mass = _placed(nobody.key_mass, masses, operands.key.shape[2])
    if packed.page_table is not None:
        mass = _by_position(mass, packed)
    return Result(*columns)._replace(key_mass=mass)


def _placed(sample: Tensor, masses: list[tuple[slice, Tensor]], num_keys: int) -> Tensor:
    """What is known of keys, where they are; nobody attends to the others."""
    if sample.dim() <= 1:  # nobody wants it
        return sample
    placed = sample.new_zeros((*sample.shape[:2], num_keys))
    for keys, mass in masses:
        placed[:, :, keys] = mass
    return placed


def _by_position(mass: Tensor, packed: Packed) -> Tensor:
    """What is known of keys that lie in pages: [sequences, Hq, positions]."""
    if mass.dim() <= 1:
        return mass
    placed = mass.new_zeros((packed.sequences.num, mass.shape[1], packed.longest))
    for b, begin, end, first in zip(
        *(column.tolist() for column in _ends(packed.sequences)), strict=True
    ):
        placed[b, :, begin:end] = mass[0, :, first : first + end - begin]
    return placed


def _ends(sequences: Sequences) -> tuple[Numbers, ...]:
    """Number, first and last key of each sequence, and how many keys come before."""
    counts = sequences.kv_len
    return sequences.b, sequences.kv_begin, sequences.kv_end, np.cumsum(counts) - counts


def gradients_one_by_one(
    problem: Problem, given: Operands, packed: Packed, wanted: Wanted, above: Above
) -> Gradients:
    """The gradients for packed operands, the backward pass being that of each sequence alone."""
    operands, sequences = in_rows(given, packed)
    rows: list[tuple[slice, Gradients]] = []
    keys: list[tuple[slice, Gradients]] = []
    captures: list[Tensor | None] = [None] * len(wanted.captures)
    for alone in each(problem, operands, sequences):
        mine = above.at(alone.rows)
        found = eager.backward(alone.problem, alone.operands, None, wanted, mine)
        rows.append((alone.rows, found))
        keys.append((alone.keys, found))
        for place, grad in enumerate(found.captures):
            if grad is not None:
                known = captures[place]
                captures[place] = grad if known is None else known + grad
    query, key, value = operands
    dtype = operands.dtype

    def joined(
        parts: list[tuple[slice, Gradients]], name: str, like: Tensor, hole: float = 0.0
    ) -> Tensor:
        return _joined([(at, getattr(each, name)) for at, each in parts], like, dtype, hole)

    grad_key = joined(keys, "key", key) if wanted.key else None
    grad_value = joined(keys, "value", value) if wanted.value else None
    return Gradients(
        joined(rows, "query", query) if wanted.query else None,
        _to_pages(grad_key, given.key, packed),
        _to_pages(grad_value, given.value, packed),
        tuple(captures),
        joined(rows, "delta", above.lse),
        joined(rows, "lse", above.lse, -math.inf),
    )


def _joined(
    parts: list[tuple[slice, Tensor | None]], like: Tensor, dtype: torch.dtype, hole: float
) -> Tensor:
    """Parts of the rows of `like` in ascending order, and `hole` between them."""
    end, joined = 0, []
    for at, part in parts:
        assert part is not None, "what is wanted of one sequence is wanted of all"
        joined += [_filled(like, at.start - end, dtype, hole), part]
        end = at.stop
    joined.append(_filled(like, like.shape[2] - end, dtype, hole))
    return torch.cat(joined, 2)


def _filled(like: Tensor, num_rows: int, dtype: torch.dtype, content: float) -> Tensor:
    return like.new_full((*like.shape[:2], num_rows, *like.shape[3:]), content, dtype=dtype)


def _hole(sample: Result, num_rows: int) -> Result:
    """Rows of no sequence."""

    def rows(result: Tensor, content: Tensor) -> Tensor:
        shape = (*result.shape[:2], num_rows, *result.shape[3:])
        return result if result.dim() <= 1 else content.to(result.dtype).expand(shape)

    return Result(*map(rows, sample[:-1], NOWHERE))


def fill_holes(result: Result, packed: Packed | None) -> None:
    """Say of the rows of no sequence that they attend nowhere."""
    holes = None if packed is None else packed.sequences.unowned(result.out.shape[2])
    if holes is None:
        return
    where = torch.from_numpy(holes)
    for rows, content in zip(result[:-1], NOWHERE, strict=False):
        if rows.dim() > 1:
            rows[:, :, where] = content.to(rows.dtype)
