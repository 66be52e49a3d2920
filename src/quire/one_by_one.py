"""Ragged attention as dense attention of one sequence after the other.

It is what ragged attention means, and how it is computed where no kernel takes all at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from quire import eager
from quire.eager import Above, Gradients, Operands, Result, Wanted
from quire.problem import Problem
from quire.sequences import Sequences

NOWHERE = Result(*map(torch.tensor, (0.0, -math.inf, -math.inf, -1, 0.0)))
"""What a row holds that may attend nowhere."""

Attend: TypeAlias = Callable[[Problem, Operands], Result]


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
    problem: Problem, operands: Operands, sequences: Sequences | None, attend: Attend
) -> Result:
    """The result for packed operands, `attend` being asked about each sequence alone."""
    if sequences is None:
        return attend(problem, operands)
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
    return Result(*columns)._replace(key_mass=mass)


def _placed(sample: Tensor, masses: list[tuple[slice, Tensor]], num_keys: int) -> Tensor:
    """What is known of keys, where they are; nobody attends to the others."""
    if sample.dim() <= 1:  # nobody wants it
        return sample
    placed = sample.new_zeros((*sample.shape[:2], num_keys))
    for keys, mass in masses:
        placed[:, :, keys] = mass
    return placed


def gradients_one_by_one(
    problem: Problem, operands: Operands, sequences: Sequences, wanted: Wanted, above: Above
) -> Gradients:
    """The gradients for packed operands, the backward pass being that of each sequence alone."""
    rows: list[tuple[slice, Gradients]] = []
    keys: list[tuple[slice, Gradients]] = []
    captures: list[Tensor | None] = [None] * len(wanted.captures)
    for alone in each(problem, operands, sequences):
        mine = Above(*(None if x is None else x[:, :, alone.rows] for x in above))  # type: ignore[arg-type]
        found = eager.backward(alone.problem, alone.operands, None, wanted, mine)
        rows.append((alone.rows, found))
        keys.append((alone.keys, found))
        for place, grad in enumerate(found.captures):
            if grad is not None:
                known = captures[place]
                captures[place] = grad if known is None else known + grad
    query, key, _ = operands
    dtype = operands.dtype
    return Gradients(
        _joined([(at, each.query) for at, each in rows], query, dtype) if wanted.query else None,
        _joined([(at, each.key) for at, each in keys], key, dtype) if wanted.key else None,
        _joined([(at, each.value) for at, each in keys], operands.value, dtype)
        if wanted.value
        else None,
        tuple(captures),
        _joined([(at, each.delta) for at, each in rows], above.lse, dtype),
    )


def _joined(parts: list[tuple[slice, Tensor | None]], like: Tensor, dtype: torch.dtype) -> Tensor:
    """Parts of the rows of `like` in ascending order, and zeros between them."""
    end, joined = 0, []
    for at, part in parts:
        assert part is not None, "what is wanted of one sequence is wanted of all"
        joined += [_zeros(like, at.start - end, dtype), part]
        end = at.stop
    joined.append(_zeros(like, like.shape[2] - end, dtype))
    return torch.cat(joined, 2)


def _zeros(like: Tensor, num_rows: int, dtype: torch.dtype) -> Tensor:
    return like.new_zeros((*like.shape[:2], num_rows, *like.shape[3:]), dtype=dtype)


def _hole(sample: Result, num_rows: int) -> Result:
    """Rows of no sequence."""

    def rows(result: Tensor, content: Tensor) -> Tensor:
        shape = (*result.shape[:2], num_rows, *result.shape[3:])
        return result if result.dim() <= 1 else content.to(result.dtype).expand(shape)

    return Result(*map(rows, sample[:-1], NOWHERE))


def fill_holes(result: Result, sequences: Sequences | None) -> None:
    """Say of the rows of no sequence that they attend nowhere."""
    holes = None if sequences is None else sequences.unowned(result.out.shape[2])
    if holes is None:
        return
    where = torch.from_numpy(holes)
    for rows, content in zip(result[:-1], NOWHERE, strict=False):
        if rows.dim() > 1:
            rows[:, :, where] = content.to(rows.dtype)
