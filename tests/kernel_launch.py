"""Runs the forward kernel on tensors, without the runtime: what tests and benchmarks need of it."""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from quire.codegen import jit
from quire.codegen.convention import (
    ENTRY,
    FORWARD,
    FULL,
    SEQUENCE,
    ForwardSpec,
    num_items,
    scratch_bytes,
    tile_entry,
)
from quire.codegen.forward import write_forward
from quire.codegen.staging import ENDLESS
from quire.codegen.target import Target

LOG2_E = math.log2(math.e)


@functools.cache
def compiled(spec: ForwardSpec) -> jit.Code:
    return jit.load(jit.compile_object(write_forward(spec).text, spec.target), [ENTRY])


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass
class Tiles:
    """Per row (b, h, block of queries): entries, and ranges per entry and panel if any."""

    rows: Sequence[Sequence[tuple[int, int]]]
    ranges: Tensor | None = None
    batch_stride: int = 0
    per_head: int = 0

    def tensors(self) -> tuple[Tensor, Tensor]:
        counts = torch.tensor([0, *(len(row) for row in self.rows)])
        entries = [tile_entry(block, kind) for row in self.rows for block, kind in row]
        return counts.cumsum(0), torch.tensor(entries or [0], dtype=torch.int32)


@dataclass
class Call:
    """One launch. Queries [B, H, L, D], keys and values [B, Hkv, S, D]; ragged ones have B 1."""

    query: Tensor
    key: Tensor
    value: Tensor
    out_dtype: torch.dtype | None = None
    out: Tensor | None = None
    scale: float | None = None
    scores_in_log2: bool = True
    sink: Tensor | None = None
    q_start: int = 0
    kv_begin: int = 0
    kv_end: int | None = None
    sequences: Sequence[dict[str, int]] | None = None
    page_table: Tensor | None = None
    page_size: int = ENDLESS
    tiles: Tiles | None = None
    tile_kind: int = FULL
    partial_mod: int = 0
    full_mod: int = 0
    weights_mod: int = 0
    arguments: int = 0
    threads: int = 1
    block_q: int = 128
    target: Target = field(default_factory=Target.host)

    def prepare(self) -> None:
        query, key, value = self.query, self.key, self.value
        paged = self.page_table is not None
        dtypes = (query, key, value)
        out_dtype = self.out_dtype or query.dtype
        self.spec = ForwardSpec(
            self.target, *(dtype_name(t.dtype) for t in dtypes), dtype_name(out_dtype)
        )
        heads, group = query.shape[1], query.shape[1] // key.shape[1]
        shape = (*query.shape[:3], value.shape[3])
        wide = torch.float64 if query.dtype == torch.float64 else torch.float32
        if self.out is None:
            self.out = torch.full(shape, 7.0, dtype=out_dtype)
        self.lse = torch.full(shape[:3], 7.0, dtype=wide)
        self.max_scores = torch.full(shape[:3], 7.0, dtype=wide)
        records = self.sequences or [
            {
                "q_len": query.shape[2],
                "q_start": self.q_start,
                "kv_begin": self.kv_begin,
                "kv_end": key.shape[2] if self.kv_end is None else self.kv_end,
            }
        ]
        items, packed = 0, b""
        for record in records:
            full = dict.fromkeys(SEQUENCE.fields, 0) | {"first_item": items} | record
            packed += SEQUENCE.pack(full)
            items += num_items(full["q_len"], heads, self.block_q)
        if self.sequences is None:
            items *= query.shape[0]
        self._sequences = ctypes.create_string_buffer(packed)
        size = scratch_bytes(self.spec, query.shape[3], value.shape[3], self.block_q)
        self._scratch = torch.full((size * self.threads + 64,), 255, dtype=torch.uint8)
        self._counters = torch.zeros(16, dtype=torch.int64)
        offsets, entries = self.tiles.tensors() if self.tiles else (None, None)
        ranges = self.tiles.ranges if self.tiles else None
        self._keep = (offsets, entries, ranges)
        scale = 1 / math.sqrt(query.shape[3]) if self.scale is None else self.scale

        def pointer(tensor: Tensor | None) -> int:
            return 0 if tensor is None else tensor.data_ptr()

        values: dict[str, int | float] = {
            "scale": scale * (LOG2_E if self.scores_in_log2 else 1.0),
            "heads": heads,
            "group": group,
            "head_dim": query.shape[3],
            "value_dim": value.shape[3],
            "block_q": self.block_q,
            "lse": pointer(self.lse),
            "max_scores": pointer(self.max_scores),
            "lse_batch": self.lse.stride(0),
            "lse_head": self.lse.stride(1),
            "lse_row": self.lse.stride(2),
            "sink": pointer(self.sink),
            "sequences": ctypes.addressof(self._sequences),
            "sequence_stride": int(self.sequences is not None),
            "num_sequences": len(records),
            "num_items": items,
            "page_table": pointer(self.page_table),
            "page_table_stride": self.page_table.stride(0) if paged else 0,
            "page_size": self.page_size,
            "tile_offsets": pointer(offsets),
            "tile_entries": pointer(entries),
            "plain_mod": self.full_mod,
            "extent": 0,
            "tile_batch_stride": self.tiles.batch_stride if self.tiles else 0,
            "tile_per_head": self.tiles.per_head if self.tiles else 0,
            "tile_kind": self.tile_kind,
            "partial_mod": self.partial_mod,
            "full_mod": self.full_mod,
            "weights_mod": self.weights_mod,
            "arguments": self.arguments,
            "scratch": (self._scratch.data_ptr() + 63) & ~63,
            "scratch_bytes": size,
            "counters": self._counters.data_ptr(),
        }
        for name, tensor in (("query", query), ("key", key), ("value", value), ("out", self.out)):
            first, head, row, column = tensor.stride()
            values[name] = tensor.data_ptr()
            values[f"{name}_head"], values[f"{name}_row"] = head, row
            values[f"{name}_column"] = column
            values[f"{name}_batch"] = 0 if paged and name in ("key", "value") else first
            if self.sequences is not None:
                values[f"{name}_batch"] = 0
            if name in ("key", "value"):
                values[f"{name}_page"] = first if paged else 0
        if self.sequences is not None:
            values["lse_batch"] = 0
        self._args = ctypes.create_string_buffer(FORWARD.pack(values))
        self._code = compiled(self.spec)
        self._function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._code.address(ENTRY))

    def launch(self) -> None:
        self._counters.zero_()
        address = ctypes.addressof(self._args)
        if self.threads == 1:
            self._function(address)
            return
        workers = [
            threading.Thread(target=self._function, args=(address,)) for _ in range(self.threads)
        ]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        self.prepare()
        self.launch()
        assert self.out is not None
        return self.out, self.lse, self.max_scores
