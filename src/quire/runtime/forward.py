"""One launch of the forward kernel: pack what it is told, give it memory, run it."""

from __future__ import annotations

import ctypes
import math
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from quire.codegen.convention import FORWARD, FULL, PARTIAL
from quire.codegen.mods import LOG2_E, CaptureShape
from quire.problem import Problem
from quire.runtime.addressing import Addressing, strides
from quire.runtime.kernels import kernel, mod_code
from quire.runtime.launch import launch, num_threads
from quire.runtime.roots import mod_roots
from quire.runtime.tile_lists import tile_lists

SMALLEST_BLOCK = 64
SMALL_WORK = 2**19
"""Multiplications below which starting threads costs more than it saves."""


class Rows(NamedTuple):
    """What the kernel gives for each query: out [.., Dv], lse and max_scores."""

    out: Tensor
    lse: Tensor
    max_scores: Tensor


def forward(
    problem: Problem, memory: Addressing, sink: Tensor | None, out: Tensor
) -> tuple[Rows, bool]:
    """Attention into `out`, and whether some index into a captured tensor was out of range."""
    query, value = memory.query, memory.value
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    made = kernel(query.dtype, memory.key.dtype, value.dtype, out.dtype)
    head_dim, value_dim = query.shape[3], value.shape[3]
    threads = num_threads() if memory.work > SMALL_WORK else 1
    block_q = made.block_q(head_dim, value_dim, memory.num_rows, threads)
    rows = lists = None
    if problem.block_mask is not None:
        block_q = _within_blocks(block_q, problem.block_mask.BLOCK_SIZE[0])
        rows = problem.block_mask.rows(memory.q_len, memory.kv_len)
        lists = tile_lists(rows, block_q, made.spec.target.block_kv)
    mixed = rows if lists is not None and lists.mixed else None
    roots, captures = mod_roots(problem, wide, memory.longest, mixed)
    code = mod_code(made.tile, roots, tuple(map(CaptureShape.of, captures)))
    lse = torch.empty(query.shape[:3], dtype=wide)
    max_scores = torch.empty_like(lse)
    results = Rows(out, lse, max_scores)
    items = memory.num_items(block_q)
    if items == 0:
        return results, False

    threads = min(threads, items)
    flag = ctypes.c_int64(0)
    packed = code.arguments.pack(captures, ctypes.addressof(flag))
    arguments = ctypes.create_string_buffer(packed)
    if sink is not None:
        sink = sink.to(wide).contiguous()
    scratch_size = made.scratch_bytes(head_dim, value_dim, block_q)
    with Scratch(scratch_size * threads + 64) as scratch:
        counters = (ctypes.c_int64 * 16)()
        values: dict[str, int | float] = {
            **memory.fields(block_q),
            **strides("out", out, "batch", "head", "row", "column"),
            **strides("lse", lse, "batch", "head", "row"),
            "max_scores": max_scores.data_ptr(),
            "sink": 0 if sink is None else sink.data_ptr(),
            "scale": problem.scale * (LOG2_E if roots.score is None else 1.0),
            "block_q": block_q,
            "num_items": items,
            "tile_offsets": 0 if lists is None else lists.offsets.ctypes.data,
            "tile_entries": 0 if lists is None else lists.entries.ctypes.data,
            "tile_batch_stride": 0 if lists is None else lists.batch_stride,
            "tile_per_head": 0 if lists is None else lists.per_head,
            "tile_kind": FULL if roots.always is None else PARTIAL,
            "plain_mod": code.addresses["plain"],
            "full_mod": code.addresses["full"],
            "partial_mod": code.addresses["partial"],
            "weights_mod": code.addresses["drop"],
            "extent": code.addresses["extent"],
            "arguments": ctypes.addressof(arguments),
            "scratch": scratch.address,
            "scratch_bytes": scratch_size,
            "counters": ctypes.addressof(counters),
        }
        record = ctypes.create_string_buffer(FORWARD.pack(values))
        launch(made.address, ctypes.addressof(record), threads)
    return results, bool(flag.value)


def _within_blocks(block_q: int, size: int) -> int:
    """Blocks of queries that do not straddle the blocks of a mask, unless they became tiny."""
    divisor = math.gcd(block_q, size)
    return divisor if divisor >= SMALLEST_BLOCK else block_q


_free: deque[Tensor] = deque(maxlen=8)


class Scratch:
    """Working memory for one call. What a call gives back, the next one may have."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __enter__(self) -> Scratch:
        try:
            self._memory = _free.pop()
        except IndexError:
            self._memory = torch.empty(0, dtype=torch.uint8)
        if self._memory.numel() < self._size:
            self._memory = torch.empty(self._size, dtype=torch.uint8)
        self.address = (self._memory.data_ptr() + 63) // 64 * 64
        return self

    def __exit__(self, *exception: object) -> None:
        _free.append(self._memory)
