"""Runs the forward kernel on tensors, without the runtime: what tests of the kernel need of it."""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from guards import WatchedScratch, guarded
from torch import Tensor

from quire.codegen import contract
from quire.codegen.convention import (
    ENTRY,
    EXTENT,
    FULL,
    KERNEL,
    REWRITE,
    SEQUENCE,
    KernelSpec,
    num_items,
    tile_entry,
)
from quire.codegen.kernels.forward import write_forward
from quire.codegen.llvm import jit
from quire.codegen.llvm.builder import Function, Module, Value
from quire.codegen.llvm.target import Target
from quire.codegen.llvm.types import I64
from quire.codegen.phases.staging import ENDLESS
from quire.codegen.phases.tiles import TileShape
from quire.codegen.scratch import scratch_bytes

LOG4_E = 1 / math.log(4)


@functools.cache
def compiled(spec: KernelSpec) -> jit.Code:
    return jit.load(jit.compile_object(write_forward(spec).text, spec.target), [ENTRY])


# --- mods written by hand

_codes: dict[int, jit.Code] = {}


def _address(module: Module, name: str, target: Target) -> int:
    code = jit.load(jit.compile_object(module.text, target), [name])
    _codes[code.address(name)] = code  # the address lives as long as the code
    return code.address(name)


@functools.cache
def mod_code(tile: TileShape, rewrite: Callable[[Function, Value, Value, Value], Value]) -> int:
    """The address of a mod that rewrites (q_idx vector, kv_idx, score) to a score in log4."""
    module = Module()
    with module.function("mod", REWRITE.parameters) as f:
        scores, q_idx, kv_idx, keys = (f.given[x] for x in ("scores", "q_idx", "kv_idx", "keys"))
        positions = I64.vector(tile.lanes)
        queries = [
            f.splat(q_idx + v * tile.lanes, positions) + f.iota(positions)
            for v in range(tile.target.vectors)
        ]

        def one_key(j: Value, best: list[Value]) -> list[Value]:
            row = tile.load_row(f, scores, j)
            row = [rewrite(f, q, kv_idx + j, x) for q, x in zip(queries, row, strict=True)]
            tile.store_row(f, row, scores, j)
            return [f.maximum(a, b) for a, b in zip(best, row, strict=True)]

        best = f.loop(0, keys, one_key, carry=tile.row(f, -math.inf))
        tile.store_row(f, best, f.given["maxima"])
    return _address(module, "mod", tile.target)


@functools.cache
def extent_code(
    tile: TileShape,
    bounds: Callable[[Function, Value, Value, Value], tuple[Value, Value, Value]],
) -> int:
    """The address of an extent: (first and last q_idx, kv_idx) to (first, last, every)."""
    module = Module()
    with module.function("extent", EXTENT.parameters, EXTENT.returns) as f:
        q_idx, queries, kv_idx, keys = (
            f.given[name] for name in ("q_idx", "queries", "kv_idx", "keys")
        )
        last_q = q_idx + f.minimum(queries, tile.width) - 1
        first, last, every = bounds(f, q_idx, last_q, kv_idx)
        first = f.maximum(f.minimum(first, keys), 0)
        last = f.maximum(f.minimum(last, keys), 0)
        f.give_back(first | (last << 16) | (f.convert(every, I64) << 32))
    return _address(module, "extent", tile.target)


# --- launches


@dataclass
class Tiles:
    """Per row (b, h, block of queries) the blocks of keys and their kinds."""

    rows: Sequence[Sequence[tuple[int, int]]]
    batch_stride: int = 0
    per_head: int = 0

    def __post_init__(self) -> None:
        self.offsets = torch.tensor([0, *(len(row) for row in self.rows)]).cumsum(0)
        entries = [tile_entry(block, kind) for row in self.rows for block, kind in row]
        self.entries = torch.tensor(entries or [0], dtype=torch.int32)


@dataclass
class Call:
    """One launch. Queries [B, H, L, D], keys and values [B, Hkv, S, D].

    With `sequences`, ragged queries, keys and values have B 1; with a page table keys and values
    are pages [P, Hkv, page, D].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    out_dtype: torch.dtype | None = None
    out: Tensor | None = None
    scale: float | None = None
    scores_in_log4: bool = True
    sink: Tensor | None = None
    q_start: int = 0
    kv_row: int = 0
    kv_begin: int = 0
    kv_end: int | None = None
    sequences: Sequence[dict[str, int]] | None = None
    page_table: Tensor | None = None
    page_size: int = ENDLESS
    tiles: Tiles | None = None
    tile_kind: int = FULL
    partial_mod: int = 0
    full_mod: int = 0
    plain_mod: int = 0
    weights_mod: int = 0
    extent: int = 0
    threads: int = 1
    block_q: int = 128
    heads_of_item: int = 1
    target: Target = field(default_factory=Target.host)

    @property
    def spec(self) -> KernelSpec:
        dtypes = [x.dtype for x in (self.query, self.key, self.value)]
        dtypes.append(self.out_dtype or self.query.dtype)
        return KernelSpec(self.target, *(str(dtype).removeprefix("torch.") for dtype in dtypes))

    def run(self) -> tuple[Tensor, Tensor, Tensor]:
        """out, lse and max_scores."""
        self.prepare()
        self.launch()
        assert self.out is not None
        return self.out, self.lse, self.max_scores

    def launch(self) -> None:
        """Run what `prepare` has packed; can be called again."""
        self._counters.zero_()
        address = ctypes.addressof(self._args)
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._code.address(ENTRY))
        others = [
            threading.Thread(target=function, args=(address,)) for _ in range(self.threads - 1)
        ]
        for thread in others:
            thread.start()
        function(address)
        for thread in others:
            thread.join()
        self._scratch.check()

    def prepare(self) -> None:
        """Make the outputs, scratch full of NaN, and the record of arguments.

        Operands and results end where nobody may read or write.
        """
        self.query, self.key, self.value = map(guarded, (self.query, self.key, self.value))
        shape = (*self.query.shape[:3], self.value.shape[3])
        wide = torch.float64 if self.query.dtype == torch.float64 else torch.float32
        if self.out is None:
            self.out = guarded(torch.full(shape, 7.0, dtype=self.out_dtype or self.query.dtype))
        self.lse = guarded(torch.full(shape[:3], 7.0, dtype=wide))
        self.max_scores = guarded(torch.full(shape[:3], 7.0, dtype=wide))
        widths = self.query.shape[3], self.value.shape[3]
        size = scratch_bytes("panel", self.spec.tile, *widths, self.block_q)
        self._scratch = WatchedScratch(self.threads, size, 0, 0).__enter__()
        self._scratch.fill(255, torch.uint8)
        self._counters = torch.zeros(16, dtype=torch.int64)
        self._code = compiled(self.spec)
        values = self._tensors() | self._sizes() | self._sequences() | self._tiles()
        values |= {
            "scratch": self._scratch.address,
            "scratch_bytes": self._scratch.each,
            "counters": self._counters.data_ptr(),
            "arguments": 0,
            "members": 1,
            "partials": 0,
            "arrivals": 0,
            **{name: 0 for name in KERNEL.fields if name.startswith(("key_scale", "value_scale"))},
        }
        contract.check("panel", self.spec, values)
        self.record = values
        self._args = ctypes.create_string_buffer(KERNEL.pack(values))

    def _tensors(self) -> dict[str, int | float]:
        assert self.out is not None
        paged, ragged = self.page_table is not None, self.sequences is not None
        values: dict[str, int | float] = {}
        tensors = {"query": self.query, "key": self.key, "value": self.value, "out": self.out}
        for name, tensor in tensors.items():
            first, head, row, column = tensor.stride()
            values |= {name: tensor.data_ptr(), f"{name}_batch": 0 if ragged else first}
            values |= {f"{name}_head": head, f"{name}_row": row, f"{name}_column": column}
            if name in ("key", "value"):
                values[f"{name}_page"] = first if paged else 0
        batch, head, row = self.lse.stride()
        return values | {
            "lse": self.lse.data_ptr(),
            "max_scores": self.max_scores.data_ptr(),
            "argmax": 0,
            "entropy": 0,
            "lse_batch": 0 if ragged else batch,
            "lse_head": head,
            "lse_row": row,
            "sink": 0 if self.sink is None else self.sink.data_ptr(),
        }

    def _sizes(self) -> dict[str, int | float]:
        dim = self.query.shape[3]
        scale = 1 / math.sqrt(dim) if self.scale is None else self.scale
        return {
            "scale": scale * (LOG4_E if self.scores_in_log4 else 1.0),
            "heads": self.query.shape[1] // self.heads_of_item,
            "group": self.query.shape[1] // self.key.shape[1],
            "row_group": self.heads_of_item,
            "head_dim": dim,
            "value_dim": self.value.shape[3],
            "block_q": self.block_q,
        }

    def _sequences(self) -> dict[str, int | float]:
        kv_end = self.key.shape[2] if self.kv_end is None else self.kv_end
        one = {"q_len": self.query.shape[2], "q_start": self.q_start, "kv_row": self.kv_row}
        records = self.sequences or [one | {"kv_begin": self.kv_begin, "kv_end": kv_end}]
        items, packed = 0, b""
        for b, record in enumerate(records):
            packed += SEQUENCE.pack(
                dict.fromkeys(SEQUENCE.fields, 0) | record | {"b": b, "first_item": items}
            )
            heads = self.query.shape[1] // self.heads_of_item
            items += num_items(record["q_len"], heads, self.block_q)
        self._records = ctypes.create_string_buffer(packed)
        table = self.page_table
        return {
            "sequences": ctypes.addressof(self._records),
            "sequence_stride": int(self.sequences is not None),
            "num_sequences": len(records),
            "num_items": items if self.sequences is not None else items * self.query.shape[0],
            "page_table": 0 if table is None else table.data_ptr(),
            "page_table_stride": 0 if table is None else table.stride(0),
            "page_size": self.page_size,
        }

    def _tiles(self) -> dict[str, int | float]:
        tiles, blocks = self.tiles, -(-self.query.shape[2] // self.block_q)
        return {
            "tile_offsets": 0 if tiles is None else tiles.offsets.data_ptr(),
            "tile_entries": 0 if tiles is None else tiles.entries.data_ptr(),
            "tile_batch_stride": 0 if tiles is None else tiles.batch_stride,
            "tile_runs": 0,
            "tile_head_stride": 0 if tiles is None else tiles.per_head * blocks,
            "tile_block_stride": 1,
            "tile_kind": self.tile_kind,
            "partial_mod": self.partial_mod,
            "full_mod": self.full_mod,
            "plain_mod": self.plain_mod,
            "weights_mod": self.weights_mod,
            "extent": self.extent,
            "verdict": 0,
            "observe": 0,
            "stays_open": 0,
        }
