"""One launch of a kernel: pack what it is told, give it memory, run it."""

from __future__ import annotations

import ctypes
import math
from collections import deque
from collections.abc import Sequence as Several
from typing import NamedTuple

import torch
from torch import Tensor

from quire.codegen.convention import FORWARD, FULL, PARTIAL, SEQUENCE, Form
from quire.codegen.mods import LOG2_E, CaptureShape
from quire.problem import Problem
from quire.runtime.addressing import Addressing, Sequence, strides
from quire.runtime.kernels import kernel, mod_code
from quire.runtime.launch import launch, num_threads
from quire.runtime.roots import mod_roots
from quire.runtime.tile_lists import NO_LISTS, read_lists

SMALLEST_BLOCK = 64
SMALL_WORK = 2**19
"""Multiplications below which starting threads costs more than it saves."""

NOTHING = torch.empty(0)


class Rows(NamedTuple):
    """What the kernel gives for each query: out [.., Dv], lse and max_scores."""

    out: Tensor
    lse: Tensor = NOTHING
    max_scores: Tensor = NOTHING


def forward(
    problem: Problem, memory: Addressing, sink: Tensor | None, out: Tensor, *, numbers: bool = True
) -> tuple[Rows, bool]:
    """Attention into `out`, and whether some index into a captured tensor was out of range.

    Without `numbers` neither lse nor max_scores is computed.
    """
    results = Rows(out)
    if numbers:
        shape, wide = memory.query.shape[:3], _wide(memory.query)
        results = Rows(out, torch.empty(shape, dtype=wide), torch.empty(shape, dtype=wide))
    wrong = False
    for form, sequences in memory.by_form():
        wrong |= _run(problem, memory, form, sequences, sink, results)
    return results, wrong


def _wide(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


class _Block:
    """The memory that one launch works with: records, counters and arguments in one piece.

    [ FORWARD | counters: 16 x i64 | mistake flag: i64 | sequences | arguments of the mods ]
    """

    COUNTERS = FORWARD.size
    FLAG = COUNTERS + 16 * 8
    SEQUENCES = FLAG + 8

    def __init__(self, sequences: bytes, arguments_size: int) -> None:
        arguments = self.SEQUENCES + len(sequences)
        self._bytes = ctypes.create_string_buffer(arguments + arguments_size)
        self.address = ctypes.addressof(self._bytes)
        self.arguments = self.address + arguments
        ctypes.memmove(self.address + self.SEQUENCES, sequences, len(sequences))

    def write(self, address: int, content: bytes) -> None:
        """Put `content` where the kernel finds it."""
        ctypes.memmove(address, content, len(content))

    @property
    def flag(self) -> int:
        """What the mistake flag says."""
        return ctypes.c_int64.from_buffer(self._bytes, self.FLAG).value


def _run(
    problem: Problem,
    memory: Addressing,
    form: Form,
    sequences: Several[Sequence],
    sink: Tensor | None,
    results: Rows,
) -> bool:
    """Launch the kernel of one form."""
    query, value, out = memory.query, memory.value, results.out
    heads, head_dim, value_dim = query.shape[1], query.shape[3], value.shape[3]
    made = kernel(form, query.dtype, memory.key.dtype, value.dtype, out.dtype)
    threads = num_threads() if memory.work(sequences) > SMALL_WORK else 1
    if form == "row":
        block_q = max(1, *(s.q_len for s in sequences)) if len(sequences) > 1 else (
            sequences[0].q_len or 1
        )
    else:
        block_q = made.block_q(head_dim, value_dim, memory.num_rows(sequences), threads)
    lists = NO_LISTS
    if problem.block_mask is not None:
        if form == "panel":
            block_q = _within_blocks(block_q, problem.block_mask.BLOCK_SIZE[0])
        lengths = memory.lengths
        lists = read_lists(problem.block_mask, lengths, block_q, made.spec.target.block_kv)
    wide = _wide(query)
    roots, captures = mod_roots(problem, wide, memory.longest, lists.mixed)
    code = mod_code(form, made.tile, roots, tuple(map(CaptureShape.of, captures)))

    group = heads // memory.key.shape[1]
    row_group = group if form == "row" and not lists.per_head else 1
    records, items = memory.records(sequences, heads // row_group, block_q)
    if items == 0:
        return False
    threads = min(threads, items)
    if sink is not None:
        sink = sink.to(wide).contiguous()
    lse, addresses = results.lse, code.addresses
    lse_batch, lse_head, lse_row = strides(lse) if lse is not NOTHING else (0, 0, 0)
    out_batch, out_head, out_row, out_column = strides(out)
    block = _Block(records, code.arguments.size)
    address = block.address
    scratch_size = made.scratch_bytes(head_dim, value_dim, block_q * row_group)
    with Scratch(scratch_size * threads + 64) as scratch:
        values: dict[str, int | float] = {
            **memory.fields(),
            "out": out.data_ptr(),
            "out_batch": out_batch,
            "out_head": out_head,
            "out_row": out_row,
            "out_column": out_column,
            "lse": lse.data_ptr(),
            "max_scores": results.max_scores.data_ptr(),
            "lse_batch": lse_batch,
            "lse_head": lse_head,
            "lse_row": lse_row,
            "sink": 0 if sink is None else sink.data_ptr(),
            "scale": problem.scale * (LOG2_E if roots.score is None else 1.0),
            "heads": heads // row_group,
            "group": group // row_group,
            "row_group": row_group,
            "block_q": block_q,
            "sequences": address + block.SEQUENCES,
            "num_sequences": len(sequences),
            "num_items": items,
            "tile_offsets": lists.offsets_address,
            "tile_entries": lists.entries_address,
            "tile_batch_stride": lists.batch_stride,
            "tile_per_head": lists.per_head,
            "tile_kind": FULL if roots.always is None else PARTIAL,
            "plain_mod": addresses["plain"],
            "full_mod": addresses["full"],
            "partial_mod": addresses["partial"],
            "weights_mod": addresses["drop"],
            "extent": addresses["extent"],
            "arguments": block.arguments,
            "scratch": scratch.address,
            "scratch_bytes": scratch_size,
            "counters": address + block.COUNTERS,
        }
        block.write(address, FORWARD.pack(values))
        block.write(block.arguments, code.arguments.pack(captures, address + block.FLAG))
        launch(made.address, address, threads)
    return bool(block.flag)


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
