"""The key of a call: all that its checks and its plan depend on.

A key has two parts. The layout says how the operands lie; it is read off the request, before its
mods are called. The rest says which graphs the mods became, what shapes they load from, and what a
block mask holds. The number of keys is left out, so a cache of keys that grows in place has one
key. A request that is out of the ordinary has no key: it is checked and planned at every call.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from quire import autograd
from quire.block_mask import BlockMask
from quire.checks import is_ordinary
from quire.codegen.arguments import CaptureShape
from quire.codegen.convention import MOST_ROWS
from quire.config import config
from quire.ir.trace import Traced
from quire.memory import Dense, Paged
from quire.request import Call, Request
from quire.torch_private import is_transformed, is_zero_tensor

Key: TypeAlias = tuple[object, ...]

MOST_KEYS = 2**19  # farther positions have other graphs, and microseconds do not matter there
MOST_BYTES = 2**16  # of a block mask


def layout_of(request: Request) -> Key | None:
    """How the operands of a request lie; None if it is out of the ordinary."""
    memory, queries, scale = request.memory, request.queries, request.scale
    if (
        request.backend != "auto"
        or request.dropout_p != 0.0
        or request.kernel_options is not None
        or request.generator is not None
        or not (scale is None or type(scale) is float)
        or queries.offsets is not None
        or queries.lengths is not None
        or isinstance(queries.start, Tensor)
        or config().backend != "auto"
    ):
        return None
    if type(memory) is Dense:
        where: Key | None = _dense(request.query, memory)
    elif type(memory) is Paged and queries.start is None:
        where = _paged(request.query, memory)
    else:
        return None
    sink = request.sink
    if where is None or not (sink is None or is_ordinary(sink)):
        return None
    kind = None if sink is None else (sink.shape, sink.dtype)
    return (*where, scale, request.aux, kind)


def _dense(query: Tensor, memory: Dense) -> Key | None:
    if type(memory.start) is not int or memory.start != 0:
        return None
    return operand_layout(query, memory.key, memory.value)


def _paged(query: Tensor, memory: Paged) -> Key | None:
    """A few queries for each sequence, that learn nothing."""
    key, table = memory.key, memory.page_table
    where = operand_layout(query, key, memory.value)
    if (
        where is None
        or query.shape[2] > MOST_ROWS
        or not is_ordinary(table)
        or table.dim() != 2
        or table.shape[1] * key.shape[2] > MOST_KEYS
    ):
        return None
    parts: list[object] = [*where, "pages", key.shape[2], table.shape]
    for factors in (memory.key_scale, memory.value_scale):
        if factors is None:
            parts.append(None)
        elif is_ordinary(factors):
            parts += (factors.shape, factors.stride(), factors.dtype)
        else:
            return None
    return tuple(parts)


def operand_layout(query: Tensor, key: Tensor, value: Tensor) -> Key | None:
    """How ordinary tensors lie; None where one is not ordinary, or something watches."""
    for tensor in (query, key, value):
        if (
            type(tensor) is not Tensor
            or not tensor.is_cpu
            or tensor.is_nested
            or tensor.layout is not torch.strided
            or tensor.is_neg()
            or is_zero_tensor(tensor)
        ):
            return None
    q_shape, k_shape, v_shape = query.shape, key.shape, value.shape
    if (
        not len(q_shape) == len(k_shape) == len(v_shape) == 4
        or k_shape[:3] != v_shape[:3]
        or k_shape[2] > MOST_KEYS
        or q_shape[2] > MOST_KEYS
        or torch.is_autocast_enabled("cpu")
        or is_transformed()
        or config().check
        or not all(tensor.untyped_storage().nbytes() for tensor in (query, key, value))
    ):
        return None
    return (
        q_shape,
        query.stride(),
        query.dtype,
        k_shape[:2],
        k_shape[3],
        key.stride(),
        key.dtype,
        v_shape[3],
        value.stride(),
        value.dtype,
        torch.get_num_threads(),
    )


def key_of(layout: Key, call: Call) -> Key | None:
    """The key of a call whose operands lie like that; None if its mods are out of the ordinary."""
    problem, placed, learns = call.problem, call.placed, autograd.learns(call)
    if placed.is_dense:
        if placed.one.q_start > MOST_KEYS:
            return None
    elif learns or placed.content is None:  # a backward pass is planned for the lengths of queries
        return None
    key: list[object] = [*layout, learns]
    for mod in (problem.score_mod, problem.mask_mod, problem.partial_mod):
        if mod is None:
            key.append(None)
            continue
        if not isinstance(mod, Traced):
            return None
        key.append(mod.output)
        for tensor in mod.captures:
            if not is_ordinary(tensor):
                return None
            key += (CaptureShape.of(tensor), tensor.shape)
    if problem.block_mask is None:
        return tuple(key)
    return _with_blocks(key, call, problem.block_mask)


def _with_blocks(key: list[object], call: Call, mask: BlockMask) -> Key | None:
    """A mask that counts from the first query would have another graph at every step of a cache."""
    placed = call.placed
    if placed.one.q_start != 0 or mask.device != placed.query.device or mask.nbytes > MOST_BYTES:
        return None
    return (*key, mask.content(), placed.key.shape[2])
