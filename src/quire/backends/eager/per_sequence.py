"""Ragged and paged memory: dense attention, one sequence after the other."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from quire.aux_outputs import AuxRequest
from quire.backends.eager import backward as dense_backward
from quire.backends.eager import forward as dense_forward
from quire.backends.eager import tangent as dense_tangent
from quire.block_mask.blocks import BlockRows
from quire.memory import One, Placed, longest
from quire.memory.tables import Sequences
from quire.request import Problem
from quire.results import Above, Gradients, Result, Tangents, Wanted, nowhere


def in_rows(placed: Placed) -> Placed:
    """Return paged memory as ragged memory: keys and values are copied out of their pages."""
    if placed.page_table is None:
        return placed
    pages, rows = _key_places(placed)

    def copied(x: Tensor, scale: Tensor | None) -> Tensor:
        found = x[pages, :, rows]
        if scale is not None:
            scales = scale[pages, :, rows].to(placed.dtype)
            found = found.to(placed.dtype) * scales.unsqueeze(-1)
        return found.transpose(0, 1).unsqueeze(0)

    sequences = placed.sequences
    counts = sequences.kv_len
    first = np.cumsum(counts) - counts - sequences.kv_begin
    return Placed(
        query=placed.query,
        key=copied(placed.key, placed.key_scale),
        value=copied(placed.value, placed.value_scale),
        rows=sequences._replace(kv_row=first),
    )


def _key_places(placed: Placed) -> tuple[Tensor, Tensor]:
    """Return the page of every key and its row in the page, sequence after sequence."""
    assert placed.page_table is not None, "keys must be in pages"
    sequences, page = placed.sequences, placed.key.shape[2]
    counts = sequences.kv_len
    first = np.repeat(sequences.kv_begin - np.cumsum(counts) + counts, counts)
    position = np.arange(len(first)) + first
    table = placed.page_table.numpy()
    pages = table[np.repeat(sequences.b, counts), position // page].astype(np.int64)
    return torch.from_numpy(pages), torch.from_numpy(position % page)


# --- forward -------------------------------------------------------------------------------------


def forward(problem: Problem, placed: Placed, sink: Tensor | None, wanted: AuxRequest) -> Result:
    """Return the results of all sequences. Rows that belong to no sequence read no key."""
    if placed.is_dense:
        return dense_forward.forward(problem, placed, sink, wanted)
    is_paged, placed = placed.page_table is not None, in_rows(placed)
    query, key, value = placed.operands
    empty = Placed(query[:, :, :0], key[:, :, :0], value[:, :, :0], One(0, 0, 0, 0))
    sample = dense_forward.forward(problem, empty, sink, wanted)  # which results, which dtypes
    nothing = nowhere(problem.weighting)
    whole = {
        name: rows.new_full((*rows.shape[:2], query.shape[2], *rows.shape[3:]), nothing[name])
        for name, rows in sample.by_query.items()
    }
    mass = None
    if wanted.key_mass:
        mass = query.new_zeros((*query.shape[:2], key.shape[2]), dtype=placed.dtype)
    for dense, rows, keys in placed.each():
        found = dense_forward.forward(problem, dense, sink, wanted)
        for name, part in found.by_query.items():
            whole[name][:, :, rows] = part
        if mass is not None and found.key_mass is not None:
            mass[:, :, keys] = found.key_mass
    if mass is not None and is_paged:
        mass = _by_position(mass, placed.sequences)
    return Result(**whole, key_mass=mass)


def _by_position(mass: Tensor, sequences: Sequences) -> Tensor:
    """Return mass [1, Hq, total] as [B, Hq, positions]."""
    padded = mass.new_zeros((sequences.num, mass.shape[1], longest(sequences.kv_end)))
    columns = sequences.b, sequences.kv_begin, sequences.kv_end, sequences.kv_row
    for b, begin, end, row in zip(*(column.tolist() for column in columns), strict=True):
        padded[b, :, begin:end] = mass[0, :, row + begin : row + end]
    return padded


# --- backward ------------------------------------------------------------------------------------


def backward(
    problem: Problem, placed: Placed, blocks: BlockRows | None, wanted: Wanted, above: Above
) -> Gradients:
    """Return the gradients: those of query, key and value joined, those of captures summed."""
    if placed.is_dense:
        return dense_backward.backward(problem, placed, blocks, wanted, above)
    given, placed = placed, in_rows(placed)
    parts: list[tuple[slice, slice, Gradients]] = []
    captures: list[Tensor | None] = [None] * len(wanted.captures)
    for dense, rows, keys in placed.each():
        found = dense_backward.backward(problem, dense, blocks, wanted, above.at(rows))
        parts.append((rows, keys, found))
        for index, grad in enumerate(found.captures):
            if grad is not None:
                total = captures[index]
                captures[index] = grad if total is None else total + grad

    def joined(name: str, like: Tensor, fill: float = 0.0) -> Tensor:
        by_key = name in ("key", "value")
        found = [(keys if by_key else rows, getattr(part, name)) for rows, keys, part in parts]
        return _joined(found, like, placed.dtype, fill)

    query, key, value = placed.operands
    return Gradients(
        query=joined("query", query) if wanted.query else None,
        key=_to_pages(joined("key", key), given.key, given) if wanted.key else None,
        value=_to_pages(joined("value", value), given.value, given) if wanted.value else None,
        captures=tuple(captures),
        delta=joined("delta", above.lse),
        lse=joined("lse", above.lse, fill=-math.inf),
    )


# --- in a direction ------------------------------------------------------------------------------


def tangent(
    problem: Problem, placed: Placed, blocks: BlockRows | None, above: Above, along: Tangents
) -> Result:
    """Return the tangents of out and lse of all sequences; 0 in rows that belong to none."""
    if placed.is_dense:
        return dense_tangent.tangent(problem, placed, blocks, above, along)
    query = placed.query if along.query is None else along.query
    key = placed.key if along.key is None else along.key
    value = placed.value if along.value is None else along.value
    placed, moved = in_rows(placed), in_rows(placed.on(query, key, value))
    outs: list[tuple[slice, Tensor]] = []
    lses: list[tuple[slice, Tensor]] = []
    for (dense, rows, _), (part, *_) in zip(placed.each(), moved.each(), strict=True):
        here = along._replace(
            query=None if along.query is None else part.query,
            key=None if along.key is None else part.key,
            value=None if along.value is None else part.value,
        )
        found = dense_tangent.tangent(problem, dense, blocks, above.at(rows), here)
        assert found.lse is not None, "tangents come in pairs"
        outs.append((rows, found.out))
        lses.append((rows, found.lse))
    return Result(
        _joined(outs, above.out, placed.dtype, 0.0), _joined(lses, above.lse, placed.dtype, 0.0)
    )


def _to_pages(grad: Tensor, like: Tensor, placed: Placed) -> Tensor:
    """Add the gradient of rows that `in_rows` copied to their pages, which may be shared."""
    if placed.page_table is None:
        return grad
    pages, heads, size, width = like.shape
    rows = grad.new_zeros(pages, size, heads, width)
    places = _key_places(placed)
    return rows.index_put(places, grad[0].transpose(0, 1), accumulate=True).transpose(1, 2)


def _joined(
    parts: list[tuple[slice, Tensor]], like: Tensor, dtype: torch.dtype, fill: float
) -> Tensor:
    """Return a tensor of the shape of `like` from parts of its rows, with `fill` between them."""

    def gap(num_rows: int) -> Tensor:
        return like.new_full((*like.shape[:2], num_rows, *like.shape[3:]), fill, dtype=dtype)

    end, joined = 0, []
    for at, part in parts:
        joined += [gap(at.start - end), part]
        end = at.stop
    return torch.cat([*joined, gap(like.shape[2] - end)], 2)
