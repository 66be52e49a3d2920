"""The calling convention between runtime and generated code, and the words of this folder.

One score matrix: queries go down, keys to the right, a cell is the score of one query and one key.

                  keys -->
                  |<------ piece: 8 blocks, 1024 keys ------ ...    span: 64 blocks ------ ...
                  |<--- block: 128 keys --->|<--- block: 128 keys --->|
    queries   +---+------+------------------+-------------------------+ .
       |      |   |strip:|                  |                         |  |
       v    panel |6 keys|      tile        |          tile           |  |
              |   |      |                  |                         |  | block
              +---+------+------------------+-------------------------+  | of
              |   |                         |                         |  | queries
            panel |          tile           |          tile           |  |
              |   |. . . row: all scores of one query . . . . . . . . |  |
              +---+-------------------------+-------------------------+ '

    row        one query of one head, or its numbers in memory: the scores, the result, ...
    column     one number of a row of query, key, value or out; in a panel, one query
    lane       one number of a vector; lanes run over the queries of a panel, but over columns and
               keys in the decode kernel
    panel      as many queries as `TileShape.width`: a few vectors side by side
    block      `block_kv` keys from a multiple of that on; or `block_q` queries of one head
    tile       what one panel does with one block of keys; its kind is EMPTY, PARTIAL, FULL or PLAIN
    strip      the keys, queries or columns that the micro kernel multiplies in one go
    range      first and end of the keys that a panel reads, or of the queries that read some keys
    span       64 blocks of keys, which are skipped together if the mask is false in all of them
    placement  where the rows of one tensor are, for one sequence and head
    group      query heads that read the same key head
    item       what a thread takes off the counter: in the forward kernel a block of queries of
               `row_group` heads, in the decode kernel a piece or all pieces of a sequence, in
               the backward kernel a share
    tangent    the derivative of a number in the direction in which the operands move

Keys are cut into pieces, see `phases/order.py`. For few queries (`kernels/decode.py`):

    piece      `KEYS_OF_PIECE` keys of a sequence, from a multiple of that on
    chain      the weights of every `CHAINS`-th key of a block, which are added in turn
    square     as many keys as a vector has lanes, transposed so that lanes run over keys
    member     one of the sequences that a piece is computed for: they begin with the same pages
    slot       where a piece of one sequence and head leaves its partial result
    set        up to four rows that share each load of a key and value

The backward kernel (`kernels/backward.py`) adds up gradients of keys and values:

    slice      `slice_blocks` blocks of queries in all heads of a group, from a multiple of that on;
               its sums begin at zero, and the sums of slices are added in ascending order
    share      one slice, or all slices, of the queries of one sequence that read one key head
    part       the sums of the slice that a thread computes, if its share is all slices

A kernel is one function, `ENTRY`. Every thread of a launch calls it with the address of the same
record: `KERNEL`, `BACKWARD` for gradients, or `TANGENT` for tangents. A kernel is compiled for
dtypes and a target; sizes, strides, lengths, masks and mods are fields of the record. Items of a
sequence are numbered by head, then by block.

The tiles of a block of queries are a row of the tile list:

    offsets  i64 [rows + 1]       row r has the entries [offsets[r], offsets[r + 1])
    entries  i32                  tile_entry(block of keys, kind), ascending within a row

    row = b * tile_batch_stride + h * tile_head_stride + block * tile_block_stride

where h counts as items do. If only some keys of a block are listed, its entry of `tile_runs` says
which: two bits for each `KEYS_OF_RUN` keys, the kind of that run, or EMPTY. The listed keys are
then computed side by side. All sums stay as they are, because the keys of a block keep their order
and their chain (`phases/order.py`).

    keys of a block     0      16     32     48     64     80     96     112
    runs                .      FULL   .      .      FULL   FULL   .      PART
    computed                   0             16            32            48

Without a list, every tile has the kind `tile_kind`, unless there is a `verdict`. It is asked about
spans first, then about blocks, then about panels; with a list, about PARTIAL blocks. A FULL tile
gets `full_mod`, a PARTIAL one `partial_mod`, a PLAIN one `plain_mod`; a null pointer means that
scores stay as they are. For a PARTIAL tile the kernel first calls `extent`, if there is one, to
learn which keys the panel reads; if every query reads every key, the tile is PLAIN. `contract.py`
checks records before a launch.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.codegen.llvm.builder import Function
from quire.codegen.llvm.target import Target
from quire.codegen.llvm.types import F32, F64, I64, PTR, Layout, Type, typed
from quire.codegen.llvm.values import Signature, Value
from quire.codegen.phases.order import CHAINS
from quire.codegen.phases.staging import Number, padded, scratch_stride
from quire.codegen.phases.tiles import TileShape
from quire.errors import CodegenError

ENTRY = "forward"  # the name of every kernel's function
Form = Literal["panel", "row", "backward", "tangent"]
"""The kernels of forward.py, decode.py, backward.py and tangent.py."""
BLOCK_Q = 128  # queries of a block in the backward kernel
# `benchmarks/paged.py --only border` measures where the border between the kernels is.
FEW_ROWS = 8  # a sequence with at most as many queries is computed by the decode kernel,
MOST_ROWS = 16  # and one with at most as many if it has `MANY_KEYS`, of less than 32 bits
MANY_KEYS = 512
KEYS_OF_PIECE = 1024
KEYS_OF_RUN = CHAINS  # so that keys which are computed side by side keep their chain
EMPTY, PARTIAL, FULL, PLAIN = range(4)  # skip the tile; apply all masks, some, none

# --- functions that a kernel calls through pointers

REWRITE = Signature(
    "rewrite", typed("ptr scores maxima arguments, i64 b h q_idx queries kv_idx keys")
)
"""Applies mods to a panel of scores, see `mods/functions.py`."""

PUSH = Signature(
    "push", typed("ptr scores tangents maxima arguments, i64 b h q_idx queries kv_idx keys")
)
"""Applies mods to a panel of scores and to their tangents, see `mods/push.py`."""

ROW_REWRITE = Signature(
    "rewrite_row", typed("ptr scores arguments, i64 b h q_idx kv_idx keys skipped")
)
"""Applies mods to the scores of one query, see `mods/functions.py`."""

EXTENT = Signature("extent", typed("ptr arguments, i64 b h q_idx queries kv_idx keys"), I64)
"""Tells which keys a panel reads, see `mods/functions.py`."""

VERDICT = Signature("verdict", typed("ptr arguments, i64 b h q_low q_high kv_low kv_high"), I64)
"""Tells the kind of a tile, see `mods/functions.py`."""

OBSERVE = Signature(
    "observe", typed("ptr chains scores running_sum best place surprise, i64 first keys lead")
)
"""Keeps track of the argmax and the entropy of rows, see `phases/observe.py`."""

DERIVE = Signature(
    "derive",
    typed("ptr scores slopes shift delta arguments captured, i64 b h key_head slice")
    | typed("i64 q_idx queries kv_idx keys"),
)
"""Turns scores into weights and gradients of scores, see `mods/derive.py`."""

# --- the records


def _strides(name: str, axes: str) -> dict[str, Type]:
    return {f"{name}_{axis}": I64 for axis in axes.split()}


CALL = {
    # What differs from call to call: addresses and counts. An address may be null where noted.
    "query": PTR,
    "key": PTR,
    "value": PTR,
    "out": PTR,
    "lse": PTR,  # or null
    "max_scores": PTR,  # or null, like argmax and entropy; all have the strides of lse
    "argmax": PTR,  # i64; argmax and entropy need `observe`
    "entropy": PTR,
    "sink": PTR,  # one number for each query head, or null
    "sequences": PTR,  # SEQUENCE records
    "num_sequences": I64,
    "num_items": I64,
    "page_table": PTR,  # i32 [sequence, page], or null
    "key_scale": PTR,  # float32, a scale for each row of 8 bits
    "value_scale": PTR,
    "tile_offsets": PTR,  # the tile list, see above, or null
    "tile_entries": PTR,
    "tile_runs": PTR,  # i16 for each entry, or null: all keys of each block are listed
    "arguments": PTR,  # what the mods read: constants and captured tensors
    "scratch": PTR,  # 64-byte aligned, `scratch_bytes` for each thread
    "scratch_bytes": I64,
    "members": I64,  # the most members that a piece has
    "partials": PTR,  # by slot and row: PARTIAL_STATES and the row's part of out
    "arrivals": PTR,  # i64 for each slot, zero before the launch
    "counters": PTR,  # 16 x i64, zero before the launch
}

STOPPED = 2**62
"""Written to the first counter to end a launch early: threads that see it compute nothing more."""

PLAN = {
    # What all calls of a plan share. Strides are in elements.
    **_strides("query", "batch head row column"),
    **_strides("key", "batch head page row column"),
    **_strides("value", "batch head page row column"),
    **_strides("key_scale", "head page row"),
    **_strides("value_scale", "head page row"),
    **_strides("out", "batch head row column"),
    **_strides("lse", "batch head row"),
    "scale": F64,  # times log4(e), unless the mods multiply by that
    "heads": I64,  # the heads that items are counted by: query heads / row_group
    "group": I64,  # heads for each key head: query heads, in the decode kernel those of items
    "row_group": I64,  # query heads of one item
    "head_dim": I64,
    "value_dim": I64,
    "block_q": I64,  # queries of a block: a multiple of the panel's width
    "sequence_stride": I64,  # 0: one SEQUENCE record serves the whole batch; 1: each has its own
    "page_table_stride": I64,
    "page_size": I64,  # staging.ENDLESS without pages
    "tile_batch_stride": I64,
    "tile_head_stride": I64,
    "tile_block_stride": I64,
    "tile_kind": I64,
    "stays_open": I64,  # 1: out is not divided; lse has the sums and max_scores the maxima for that
    # Addresses of functions: a REWRITE or null; in other kernels a ROW_REWRITE, DERIVE or PUSH.
    "partial_mod": PTR,
    "full_mod": PTR,
    "plain_mod": PTR,
    "weights_mod": PTR,  # is applied to weights, after the softmax
    "extent": PTR,  # an EXTENT or null
    "verdict": PTR,  # a VERDICT or null
    "observe": PTR,  # an OBSERVE or null
}

KERNEL = Layout("forward", CALL | PLAN)
CALL_PART, PLAN_PART = Layout("call", CALL), Layout("plan", PLAN)

GRADIENTS = {
    # What the backward kernel needs besides; it reads out and lse. Null: not wanted.
    "grad_out": PTR,
    **_strides("grad_out", "batch head row column"),
    "grad_lse": PTR,  # grad_lse and delta have the strides of lse
    "delta": PTR,
    "grad_query": PTR,
    **_strides("grad_query", "batch head row column"),
    "grad_key": PTR,  # the sums of each share, float32 or float64 like scratch
    **_strides("grad_key", "slice batch head row"),
    "grad_value": PTR,
    **_strides("grad_value", "slice batch head row"),
    "whole": I64,  # 1 or 0: whether a share is all slices of its sequence
    "part_key": PTR,  # of each thread, by position from kv_begin on; zeros before and after
    "part_key_thread": I64,
    "part_value": PTR,
    "part_value_thread": I64,
    "touched": PTR,  # two i64 for each item: the rows of keys that it added to; or null
    "masses": PTR,  # the sum of each key's weights, by query head and slice
    **_strides("masses", "slice batch head"),
    "captured": PTR,  # a CAPTURED_GRADIENT record for each load that has a gradient
    "wants_slopes": I64,  # 1 or 0: whether any gradient of scores is used
    "slope_scale": F64,  # what gradients of queries and keys are multiplied by at the end
    "odd": PTR,  # two i64: 1 if some gradient is not finite; 1 if some lse that is used is far
}
BACKWARD = Layout("backward", CALL | PLAN | GRADIENTS)
GRADIENTS_PART = Layout("gradients", GRADIENTS)

TANGENTS = {
    # What the tangent kernel needs besides. Null: the operand does not move.
    "query_tangent": PTR,
    **_strides("query_tangent", "batch head row column"),
    "key_tangent": PTR,
    **_strides("key_tangent", "batch head page row column"),
    "value_tangent": PTR,
    **_strides("value_tangent", "batch head page row column"),
    "sink_tangent": PTR,
    "out_tangent": PTR,
    **_strides("out_tangent", "batch head row column"),
    "lse_tangent": PTR,  # with the strides of lse
    "moves": I64,  # 1 or 0: whether scores have a tangent
    "odd": PTR,  # i64: 1 if some tangent is not finite
}
TANGENT = Layout("tangent", CALL | PLAN | TANGENTS)
TANGENTS_PART = Layout("tangents", TANGENTS)

CAPTURED_GRADIENT = Layout("captured", typed("ptr base, i64 batch head slice"))
"""Where shares add up the gradient of a captured tensor: an address, and strides in elements."""

SEQUENCE = Layout(
    "sequence",
    {
        "b": I64,  # its index in the batch; not read if one record serves the whole batch
        "first_item": I64,  # the number of items of all sequences before
        "q_row": I64,  # the row of its first query in query, out, lse and the like
        "q_len": I64,
        "q_start": I64,  # the position of its first query
        "kv_row": I64,  # the row of position 0 in key and value, even if there is none
        "kv_begin": I64,  # keys exist at positions [kv_begin, kv_end)
        "kv_end": I64,
        "slices": I64,  # items for each head: slices in the backward kernel, or 1 if a share is
        # all slices; decode: its own pieces, or 1 if one item is all pieces and none is shared
        "pieces": I64,  # decode: the pieces of its keys
        "shared": I64,  # decode: how many of them, from the first on, have several members
        "members": I64,  # decode: of those pieces, this sequence being the first; 0: it is not
        "first_slot": I64,  # decode: the number of pieces of all sequences before, in all heads
        "first_slice": I64,  # backward: the slice that its first sums are of
        "slice_blocks": I64,  # backward: the blocks of queries of a slice
    },
)

PARTIAL_STATES = ("running_max", "running_sum", "best", "place", "surprise")
"""What a piece leaves for each row, one vector each; the row's part of out follows."""


def belongs_to(name: str) -> str:
    """The operand or result that a gradient or a tangent belongs to."""
    return name.removeprefix("grad_").removesuffix("_tangent")


class Record:
    """A record in generated code. Every use loads its field again, which keeps registers free."""

    def __init__(self, f: Function, layout: Layout, args: Value) -> None:
        self._f, self._layout, self._args = f, layout, args

    def __getitem__(self, name: str) -> Value:
        return self._f.field(self._layout, self._args, name)


@dataclass(frozen=True)
class KernelSpec:
    """What a kernel is compiled for: a target, and dtypes by torch's names.

    The decode kernel may also be compiled for a width of keys and values; 0 means any width.
    """

    target: Target
    query: str = "float32"
    key: str = "float32"
    value: str = "float32"
    out: str = "float32"
    head_dim: int = 0
    value_dim: int = 0
    weighted: bool = False  # the mods return weights, so there is no softmax

    def dtype_of(self, name: str) -> str:
        """The dtype of an operand or a result, which is that of its gradient and tangent, too."""
        return str(getattr(self, belongs_to(name)))

    def __post_init__(self) -> None:
        if "float64" in (self.key, self.value) and self.query != "float64":
            raise CodegenError(f"expected float64 queries with float64 keys, got {self}")

    @property
    def tile(self) -> TileShape:
        """Scratch, lse, max_scores and entropy are float64 if queries are, else float32."""
        return TileShape(self.target, F64 if self.query == "float64" else F32)


# --- how work is divided


def tile_entry(block: int, kind: int) -> int:
    """An entry of the tile list: the number of a block of keys, and PARTIAL or FULL."""
    return block * 4 + kind


@functools.lru_cache(maxsize=1024)
def choose_block_q(tile: TileShape, head_dim: int, value_dim: int, rows: int, threads: int) -> int:
    """How many queries make a block, given the number of query rows of all heads.

    Large blocks copy keys to scratch less often. But the panels of a block must fit a cache, and
    every thread needs a few items. Results do not depend on the choice.
    """
    depth = padded(tile, head_dim) + padded(tile, value_dim)
    size = 512
    while size > 64 and (size * depth * tile.element.size > 1 << 20 or rows < 4 * threads * size):
        size //= 2
    return size


@functools.lru_cache(maxsize=1024)
def choose_heads(heads: int, longest: int, sequences: int, block_q: int, threads: int) -> int:
    """How many heads of a sequence make an item, given the length of the longest query.

    Rows of neighbouring heads lie side by side in memory, so one thread computes several heads of
    a short sequence. But every thread needs a few items; `sequences` is how many sequences like
    the largest one there are. Results do not depend on the choice.
    """
    for size in range(min(heads, block_q // max(1, longest)), 1, -1):
        if heads % size == 0 and sequences * (heads // size) >= 4 * threads:
            return size
    return 1


Lengths = TypeVar("Lengths", int, NDArray[np.int64])


def num_items(q_len: Lengths, heads: int, block_q: int) -> Lengths:
    """How many items a sequence of `q_len` queries has."""
    return heads * -(-q_len // block_q)


def num_pieces(kv_begin: Lengths, kv_end: Lengths) -> Lengths:
    """How many pieces the keys at [kv_begin, kv_end) have."""
    return (kv_end - 1) // KEYS_OF_PIECE - kv_begin // KEYS_OF_PIECE + 1


# --- the layout of sums that the runtime allocates


def partial_stride(tile: TileShape, value_dim: Number) -> Number:
    """The distance between rows of `partials`, in elements."""
    return scratch_stride(tile, value_dim) + len(PARTIAL_STATES) * tile.lanes


def gradient_columns(tile: TileShape, width: Number) -> Number:
    """The width of the rows in which gradients are summed: whole pairs of vectors."""
    pair = 2 * tile.lanes
    return (width + (pair - 1)) & -pair
