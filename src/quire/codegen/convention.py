"""The calling convention between runtime and generated code, and the words of this folder.

One score matrix: queries go down, keys to the right, a cell is the score of one query and one key.

                       keys -->
                       |<---- block of keys ---->|<------ block of keys ----->|
    queries     +----- +-------------------------+----------------------------+
       |        | panel|   tile: one panel       |            tile            |
       v        |      |   and one block of keys |                            |
      block     +----- +------+------------------+----------------------------+
      of        | panel| strip|      tile        |            tile            |
      queries   |      |      |                  |                            |
                +----- +------+------------------+----------------------------+

    row        one query of one head, or its numbers in memory: the scores, the result, ...
    column     one number of a row of query, key, value or out; in a panel, one query
    lane       one number of a vector; lanes run over the queries of a panel, in decode over columns
    panel      as many queries as `Tile.width`: a few vectors side by side
    block      `block_kv` keys from a multiple of that on; or `block_q` queries of one head
    tile       what one panel does with one block of keys; its kind is EMPTY, PARTIAL, FULL or PLAIN
    strip      the keys, queries or columns that the micro kernel multiplies in one go
    range      first and end of the keys that a panel reads, or of the queries that read some keys
    span       64 blocks of keys, which are skipped together if the mask is false in all of them
    placement  where the rows of one tensor are, for one sequence and head
    group      query heads that read the same key head
    item       what a thread takes off the counter: in the forward kernel a block of queries of
               `row_group` heads, in the decode kernel a piece, in the backward kernel a share

Few queries (`decode.py`) are computed row by row, and their keys are cut into pieces:

    piece      `KEYS_OF_PIECE` keys of a sequence, from a multiple of that on
    member     one of the sequences that a piece is computed for: they begin with the same pages
    slot       where a piece of one sequence and head leaves its partial result
    set        up to four rows that share each load of a key and value

The backward kernel (`backward.py`) adds up gradients of keys and values:

    slice      every n-th block of queries; how many slices there are is fixed by lengths and heads
    share      a slice of the queries of one sequence that read one key head; it has its own sums

A kernel is one function `forward(args)`, run by every thread of a launch with the same `FORWARD`
record. It is compiled for dtypes and a target; sizes, strides, lengths, masks and mods are
arguments. Its form is "panel", "row" or "backward". Items of a sequence are numbered by head, then
by block.

The tiles of a block of queries are a row of the tile list:

    offsets  i64 [rows + 1]       row r has the entries [offsets[r], offsets[r + 1])
    entries  i32                  tile_entry(block of keys, kind), ascending within a row

    row = tile_row of the sequence + b * tile_batch_stride + (h * blocks if tile_per_head) + block

Without a list, every tile has the kind `tile_kind`, unless there is a `verdict`. It is asked about
spans first, then about blocks, then about panels. A FULL tile gets `full_mod`, a PARTIAL one
`partial_mod`, a PLAIN one `plain_mod`; a null pointer means that scores stay as they are. For a
PARTIAL tile the kernel first calls `extent`, if there is one, to learn which keys the panel reads;
if every query reads every key, the tile is PLAIN.

`contract.py` checks every launch against this convention.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.codegen.row_stream import MOST_AHEAD
from quire.codegen.staging import PLACEMENT, Number, padded, scratch_stride
from quire.codegen.target import Target
from quire.codegen.tiles import SMALL_ROWS, Tile
from quire.codegen.types import F32, F64, I64, PTR, Layout, Type, fields
from quire.codegen.values import Signature
from quire.errors import CodegenError

ENTRY = "forward"
Form = Literal["panel", "row", "backward"]
BLOCK_Q = 128  # queries that the backward kernel computes together
MOST_ROWS = 4  # the longest query that is computed row by row
BLOCKS_TOGETHER = 4  # of keys, that are computed at once for such a query
KEYS_OF_PIECE = 1024  # that one item reads for such a query; pieces begin at multiples
EMPTY, PARTIAL, FULL, PLAIN = range(4)  # kinds of tiles: nothing to do, all masks, some, none

_PLACE = fields(I64, "b h q_idx queries kv_idx keys")
_ROW_PLACE = fields(I64, "b h q_idx kv_idx keys")
_ENDS = fields(I64, "b h q_low q_high kv_low kv_high")

REWRITE = Signature("rewrite", fields(PTR, "scores maxima arguments") | _PLACE)
"""A mod: rewrites a panel of scores, see `mods.py`."""

ROW_REWRITE = Signature("rewrite_row", fields(PTR, "scores arguments") | _ROW_PLACE)
"""A mod: rewrites the scores of one query, see `mods.py`."""

EXTENT = Signature("extent", fields(PTR, "arguments") | _PLACE, I64)
"""Which keys a panel reads, see `mods.py`."""

VERDICT = Signature("verdict", fields(PTR, "arguments") | _ENDS, I64)
"""Which kind a tile has, see `mods.py`."""

_OBSERVED = fields(PTR, "scores running_sum best place surprise")
OBSERVE = Signature("observe", _OBSERVED | fields(I64, "first keys"))
"""Keeps track of the argmax and the entropy, see `observe.py`."""

_DERIVED = fields(PTR, "scores slopes shift delta arguments captured")
_OF_SHARE = fields(I64, "b h key_head slice q_idx queries kv_idx keys")
DERIVE = Signature("derive", _DERIVED | _OF_SHARE)
"""From scores to weights and slopes, see `derive.py`."""


def _strides(name: str, axes: str) -> dict[str, Type]:
    return fields(I64, " ".join(f"{name}_{axis}" for axis in axes.split()))


CALL = {
    # What changes from call to call: where things are, and how many.
    "query": PTR,
    "key": PTR,
    "value": PTR,
    "out": PTR,
    "lse": PTR,  # or null
    "max_scores": PTR,  # or null, as the next two; all have the strides of lse
    "argmax": PTR,  # i64; this and entropy need `observe`
    "entropy": PTR,
    "sink": PTR,  # one number per query head, or null
    "sequences": PTR,  # SEQUENCE records
    "num_sequences": I64,
    "num_items": I64,
    "page_table": PTR,  # i32 [sequence, page], or null
    "key_scale": PTR,  # float32, a factor for each row of pages of int8
    "value_scale": PTR,
    "tile_offsets": PTR,  # the tile list, see above; null: no list
    "tile_entries": PTR,
    "arguments": PTR,  # of the mods
    "scratch": PTR,  # 64-byte aligned, `scratch_bytes` for each thread
    "scratch_bytes": I64,
    "members": I64,  # the most sequences that an item computes
    "partials": PTR,  # what each piece of a row leaves, by slot: `PARTIAL_STATES`, then out
    "arrivals": PTR,  # i64 for each slot, zero before the launch
    "counters": PTR,  # 16 x i64, zero before the launch; from STOPPED on nothing more is computed
}

STOPPED = 2**62
"""What somebody writes to the first counter who no longer wants the results."""

PLAN = {
    # What a plan knows. Strides are in elements; paged keys and values have one for pages.
    **_strides("query", "batch head row column"),
    **_strides("key", "batch head page row column"),
    **_strides("value", "batch head page row column"),
    **_strides("key_scale", "head page row"),
    **_strides("value_scale", "head page row"),
    **_strides("out", "batch head row column"),
    **_strides("lse", "batch head row"),
    "scale": F64,  # times log4(e), unless the mods do that
    "heads": I64,  # of items: query heads, or groups of `row_group` of them
    "group": I64,  # heads per key head: query heads, or items' where items are rows
    "row_group": I64,  # query heads that one item computes
    "head_dim": I64,
    "value_dim": I64,
    "block_q": I64,  # queries of an item: a multiple of the panel's width
    "sequence_stride": I64,  # 0: one SEQUENCE stands for all; 1: each has its own
    "page_table_stride": I64,
    "page_size": I64,  # staging.ENDLESS without pages
    "tile_batch_stride": I64,
    "tile_per_head": I64,  # 1 or 0
    "tile_kind": I64,
    # Code to call, each a REWRITE, or a ROW_REWRITE for rows, or null.
    "partial_mod": PTR,
    "full_mod": PTR,
    "plain_mod": PTR,
    "weights_mod": PTR,  # gets weights in place of scores
    "extent": PTR,  # an EXTENT or null
    "verdict": PTR,  # a VERDICT or null; null where there is a tile list
    "observe": PTR,  # an OBSERVE or null
}

FORWARD = Layout("forward", CALL | PLAN)
CALL_PART, PLAN_PART = Layout("call", CALL), Layout("plan", PLAN)

GRADIENTS = {
    # What the backward pass is told besides, reading out and lse. Null: not wanted.
    "grad_out": PTR,
    **_strides("grad_out", "batch head row column"),
    "grad_lse": PTR,  # this and delta have the strides of lse
    "delta": PTR,
    "grad_query": PTR,
    **_strides("grad_query", "batch head row column"),
    "grad_key": PTR,  # sums of each slice, in the type that is accumulated in
    **_strides("grad_key", "slice batch head row"),
    "grad_value": PTR,
    **_strides("grad_value", "slice batch head row"),
    "masses": PTR,  # of query heads
    **_strides("masses", "slice batch head"),
    "captured": PTR,  # a CAPTURED record for each load that has a gradient
    "wants_slopes": I64,  # 1 or 0
    "slope_scale": F64,  # of products with slopes
    "odd": PTR,  # i64, set where a gradient is not finite
}
BACKWARD = Layout("backward", CALL | PLAN | GRADIENTS)
GRADIENTS_PART = Layout("gradients", GRADIENTS)

CAPTURED = Layout("captured", {"base": PTR, "batch": I64, "head": I64, "slice": I64})
"""Where the gradient of a captured tensor is summed: from share to share, in elements."""

SEQUENCE = Layout(
    "sequence",
    {
        "b": I64,  # its number in the batch; not read where one record stands for all
        "first_item": I64,  # items of the sequences before
        "tile_row": I64,
        "q_row": I64,  # its first row in query, out, lse and the like
        "q_len": I64,
        "q_start": I64,  # the position of its first query
        "kv_row": I64,  # the row that position 0 has, or would have, in key and value
        "kv_begin": I64,  # keys exist at positions [kv_begin, kv_end)
        "kv_end": I64,
        "slices": I64,  # that it is shared out by: queries in the backward pass, else keys
        "pieces": I64,  # of its keys, for few queries
        "shared": I64,  # of these, the first ones that it has in common with its neighbours
        "members": I64,  # that these are computed for, this one being the first; 0: by another
        "first_slot": I64,  # pieces of the sequences before, in all heads
    },
)


@dataclass(frozen=True)
class ForwardSpec:
    """What a kernel is compiled for: a target, and dtypes by torch's names.

    A kernel for few queries may also know how wide keys and values are; 0 stands for any width.
    """

    target: Target
    query: str = "float32"
    key: str = "float32"
    value: str = "float32"
    out: str = "float32"
    head_dim: int = 0
    value_dim: int = 0

    def dtype_of(self, name: str) -> str:
        """The dtype of an operand or a result; gradients have that of what they belong to."""
        return str(getattr(self, name.removeprefix("grad_")))

    def __post_init__(self) -> None:
        if "float64" in (self.key, self.value) and self.query != "float64":
            raise CodegenError(f"expected float64 queries with float64 keys, got {self}")

    @property
    def tile(self) -> Tile:
        """Scratch, lse, max_scores and entropy are float32; float64 if the queries are."""
        return Tile(self.target, F64 if self.query == "float64" else F32)


def tile_entry(block: int, kind: int) -> int:
    """How the tile list names a block of keys, PARTIAL or FULL."""
    return block * 4 + kind


@functools.lru_cache(maxsize=1024)
def choose_block_q(tile: Tile, head_dim: int, value_dim: int, rows: int, threads: int) -> int:
    """How many queries make an item, `rows` being all query rows of all heads.

    Larger blocks stage keys less often; their panels must stay in a cache, if not the nearest one,
    and every thread must have a few items to take. Results do not depend on it.
    """
    depth = padded(tile, head_dim) + padded(tile, value_dim)
    size = 512
    while size > 64 and (size * depth * tile.element.size > 1 << 20 or rows < 4 * threads * size):
        size //= 2
    return size


@functools.lru_cache(maxsize=1024)
def choose_heads(heads: int, longest: int, sequences: int, block_q: int, threads: int) -> int:
    """How many heads of a sequence make an item, `longest` being the longest query.

    Rows of neighbouring heads are neighbours in memory, so a thread that has begun with a short
    sequence goes on with it; every thread must have a few items to take, where the work is that of
    so many `sequences` like the largest one. Results do not depend on it.
    """
    for size in range(min(heads, block_q // max(1, longest)), 1, -1):
        if heads % size == 0 and sequences * (heads // size) >= 4 * threads:
            return size
    return 1


Lengths = TypeVar("Lengths", int, NDArray[np.int64])


def num_items(q_len: Lengths, heads: int, block_q: int) -> Lengths:
    """How many items sequences of `q_len` queries have."""
    return heads * -(-q_len // block_q)


def num_pieces(kv_begin: Lengths, kv_end: Lengths) -> Lengths:
    """By how many items the keys at [kv_begin, kv_end) are shared out, for few queries."""
    return (kv_end - 1) // KEYS_OF_PIECE - kv_begin // KEYS_OF_PIECE + 1


def scratch_bytes(spec: ForwardSpec, head_dim: int, value_dim: int, block_q: int) -> int:
    """What each thread needs."""
    regions = dict(scratch_regions(spec.tile, head_dim, value_dim, block_q))
    return regions["end"] * spec.tile.element.size


def decode_scratch_bytes(spec: ForwardSpec, head_dim: int, value_dim: int, rows: int) -> int:
    """What each thread needs for `rows` queries at a time."""
    regions = dict(decode_regions(spec.tile, head_dim, value_dim, rows))
    return regions["end"] * spec.tile.element.size


def scratch_regions(
    tile: Tile, head_dim: Number, value_dim: Number, block_q: Number
) -> Iterator[tuple[str, Number]]:
    """The parts of a thread's scratch and where they start, in elements; the last is the end.

    Python reckons the size with it and generated code the addresses, so it takes both.
    """
    sizes = (
        (
            "records",
            4 * PLACEMENT.size // tile.element.size,
        ),  # a PLACEMENT each for query, key, value and out
        ("maxima", tile.width),  # of one panel and one block of keys
        ("alpha", tile.width),  # what the running sums are scaled by
        ("scores", (tile.target.block_kv + SMALL_ROWS) * tile.width),
        ("running_max", block_q),
        ("running_sum", block_q),
        ("lse", block_q),
        ("best", block_q),  # this and the next two for `observe` alone
        ("place", block_q),
        ("surprise", block_q),
        ("keys", scratch_stride(tile, head_dim) * tile.target.block_kv),
        ("values", scratch_stride(tile, value_dim) * tile.target.block_kv),
        ("queries", padded(tile, head_dim) * block_q),
        ("out", padded(tile, value_dim) * block_q),
    )
    yield from _placed(tile, sizes, block_q * 0)


def decode_regions(
    tile: Tile, head_dim: Number, value_dim: Number, rows: Number
) -> Iterator[tuple[str, Number]]:
    """The same for the kernel of few queries, which has `rows` of them at a time."""
    keys = BLOCKS_TOGETHER * tile.target.block_kv
    more = keys + MOST_AHEAD  # some keys are computed twice, some rows asked for
    addresses = more * (PTR.size // tile.element.size)
    rows = rows + 1  # that nobody has, to complete a set
    sizes = (
        ("records", 4 * PLACEMENT.size // tile.element.size),
        ("rows", 2 * addresses),  # where the keys and the values of a block are
        ("keys", scratch_stride(tile, head_dim) * keys),
        ("values", scratch_stride(tile, value_dim) * keys),
        ("key_scales", more),  # of int8
        ("value_scales", more),
        ("alpha", rows * tile.lanes),
        ("scores", rows * row_stride(tile)),
        ("running_max", rows * tile.lanes),
        ("running_sum", rows * tile.lanes),
        ("best", rows * tile.lanes),
        ("place", rows * tile.lanes),
        ("surprise", rows * tile.lanes),
        ("queries", rows * scratch_stride(tile, head_dim)),
        ("out", rows * scratch_stride(tile, value_dim)),
        ("sums", 4 * scratch_stride(tile, value_dim)),  # of a set and a block
    )
    yield from _placed(tile, sizes, rows * 0)


PARTIAL_STATES = ("running_max", "running_sum", "best", "place", "surprise")
"""What a row of a piece of its keys has, a vector each, besides its part of out."""


def partial_stride(tile: Tile, value_dim: Number) -> Number:
    """From row to row of what pieces leave behind."""
    return scratch_stride(tile, value_dim) + len(PARTIAL_STATES) * tile.lanes


def row_stride(tile: Tile) -> int:
    """From row to row of scores, for keys that are computed at once."""
    return BLOCKS_TOGETHER * tile.target.block_kv + tile.lanes


def backward_regions(
    tile: Tile, head_dim: Number, value_dim: Number, block_q: Number
) -> Iterator[tuple[str, Number]]:
    """The same for the backward kernel."""
    keys, values = gradient_stride(tile, head_dim), gradient_stride(tile, value_dim)
    panels = block_q // tile.width if isinstance(block_q, int) else block_q.udiv(tile.width)
    sizes = (
        ("records", 6 * PLACEMENT.size // tile.element.size),
        ("key_ranges", panels * (2 * I64.size // tile.element.size)),  # the keys of each panel
        (
            "query_ranges",
            tile.target.block_kv * (2 * I64.size // tile.element.size),
        ),  # queries of keys
        ("shift", block_q),  # lse, and +inf where there is no query
        ("delta", block_q),
        ("keys", keys * tile.target.block_kv),
        ("values", values * tile.target.block_kv),
        ("query_rows", keys * block_q),
        ("grad_rows", values * block_q),
        ("grad_query", keys * block_q),
        ("queries", padded(tile, head_dim) * block_q),
        ("grads", padded(tile, value_dim) * block_q),
        ("weights", weights_stride(tile) * (tile.target.block_kv + SMALL_ROWS)),
        ("slopes", weights_stride(tile) * (tile.target.block_kv + SMALL_ROWS)),
    )
    yield from _placed(tile, sizes, block_q * 0)


def gradient_columns(tile: Tile, width: Number) -> Number:
    """The width of rows that gradients are summed in: pairs of vectors."""
    pair = 2 * tile.lanes
    return (width + (pair - 1)) & -pair


def gradient_stride(tile: Tile, width: Number) -> Number:
    """From row to row of these: a pair more, so that rows do not share cache sets."""
    return gradient_columns(tile, width) + 2 * tile.lanes


def weights_stride(tile: Tile) -> int:
    """From key to key of weights and slopes, which have all queries of a block side by side."""
    return BLOCK_Q + tile.width


def backward_scratch_bytes(spec: ForwardSpec, head_dim: int, value_dim: int, rows: int) -> int:
    """What each thread needs for `rows` queries at a time."""
    regions = dict(backward_regions(spec.tile, head_dim, value_dim, rows))
    return regions["end"] * spec.tile.element.size


SCRATCH_BYTES: dict[Form, Callable[[ForwardSpec, int, int, int], int]] = {
    "panel": scratch_bytes,
    "row": decode_scratch_bytes,
    "backward": backward_scratch_bytes,
}
"""What each thread of a kernel needs: (spec, head_dim, value_dim, queries at a time)."""


def _placed(
    tile: Tile, sizes: Sequence[tuple[str, int | Number]], start: Number
) -> Iterator[tuple[str, Number]]:
    """Regions one after the other, each at a cache line of its own."""
    align = 64 // tile.element.size
    for name, size in sizes:
        yield name, start
        start = start + ((size + (align - 1)) & -align)
    yield "end", start
