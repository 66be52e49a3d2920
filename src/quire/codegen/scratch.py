"""How each kernel divides the scratch memory of a thread.

A kernel's form has a function that names the regions of its scratch, in order, and gives the offset
of each in elements; the last one is "end". Python calls it with numbers to learn how many bytes a
thread needs, and generated code calls it with `Value`s to compute addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from quire.codegen.convention import BLOCK_Q, Form, gradient_columns
from quire.codegen.llvm.types import I64, PTR
from quire.codegen.phases.order import CHAINS
from quire.codegen.phases.row_stream import MOST_AHEAD
from quire.codegen.phases.staging import PLACEMENT, Number, padded, scratch_stride
from quire.codegen.phases.tiles import SMALL_ROWS, TileShape

BLOCKS_TOGETHER = 4  # blocks of keys that the decode kernel computes at once
MOST_SECTIONS = 32  # entries of a tile list among these: each has at least 16 keys
SECTION_SIZE = 6 * I64.size  # bytes of the record of one
MOST_SQUARES = 4  # squares of keys whose scores it writes at once, perhaps past the last key

Regions: TypeAlias = Iterator[tuple[str, Number]]
"""Names of regions, and where each begins in elements."""


def scratch_bytes(form: Form, tile: TileShape, head_dim: int, value_dim: int, rows: int) -> int:
    """How many bytes of scratch a thread needs to compute `rows` queries at a time."""
    regions = dict(_REGIONS[form](tile, head_dim, value_dim, rows))
    return regions["end"] * tile.element.size


def panel_regions(
    tile: TileShape, head_dim: Number, value_dim: Number, block_q: Number
) -> Regions[Number]:
    """The scratch of the forward kernel: one block of queries, one block of keys, one panel."""
    block_kv = tile.target.block_kv
    block_q = (block_q + (tile.width - 1)) & -tile.width  # whole panels
    sizes = (
        ("records", _placements(tile, 8)),  # of query, key, value and out, and their tangents
        ("maxima", tile.width),  # of one tile, for each query
        ("maxima_of_parts", tile.width),  # of the parts of a tile so far
        ("alpha", tile.width),  # the factor by which earlier sums shrink
        ("chains", CHAINS * tile.lanes),  # of the sums of weights, see `phases/order.py`
        ("scores", (block_kv + SMALL_ROWS) * tile.width),
        ("lse", block_q),
        ("key_scales", block_kv + SMALL_ROWS),  # of rows of 8 bits
        ("value_scales", block_kv),
        ("keys", scratch_stride(tile, head_dim) * block_kv),
        ("values", scratch_stride(tile, value_dim) * block_kv),
        ("queries", padded(tile, head_dim) * block_q),
        ("pieces", 2 * I64.size // tile.element.size),  # which one it is; how many came before
        ("running_max", block_q),  # of the piece that is computed, as far as "out"
        ("running_sum", block_q),
        ("best", block_q),  # best, place and surprise are for `observe`
        ("place", block_q),
        ("surprise", block_q),
        ("out", padded(tile, value_dim) * block_q),
        ("merged_running_max", block_q),  # the same of all pieces before it
        ("merged_running_sum", block_q),
        ("merged_best", block_q),
        ("merged_place", block_q),
        ("merged_surprise", block_q),
        ("merged_out", padded(tile, value_dim) * block_q),
    )
    yield from _placed(tile, sizes, block_q * 0)


def tangent_regions(
    tile: TileShape, head_dim: Number, value_dim: Number, block_q: Number
) -> Regions[Number]:
    """The scratch of the tangent kernel: that of the forward kernel, and tangents beside it."""
    widths = 2 * padded(tile, head_dim), results_with_tangents(tile, value_dim)
    end: Number = block_q * 0
    for name, end in panel_regions(tile, *widths, block_q):
        if name != "end":
            yield name, end
    sizes = (
        ("tangents", (tile.target.block_kv + SMALL_ROWS) * tile.width),  # of scores
        ("spare", tile.width),  # maxima that nobody reads, then ones
        ("lse_tangent", block_q),
    )
    yield from _placed(tile, sizes, end)


def row_regions(
    tile: TileShape, head_dim: Number, value_dim: Number, rows: Number
) -> Regions[Number]:
    """The scratch of the decode kernel: some rows, and a few blocks of keys."""
    keys = BLOCKS_TOGETHER * tile.target.block_kv
    more = keys + MOST_AHEAD  # the last keys may be computed twice, and the next are prefetched
    addresses = more * (PTR.size // tile.element.size)
    rows = rows + 1  # a row of zeros completes a set of three rows
    sizes = (
        ("records", _placements(tile, 4)),
        ("rows", 2 * addresses),  # the addresses of keys, then those of values
        ("keys", scratch_stride(tile, head_dim) * keys),
        ("values", scratch_stride(tile, value_dim) * keys),
        ("kept", padded(tile, head_dim) * MOST_SQUARES * tile.lanes),  # transposed keys
        ("key_scales", more),  # of rows of 8 bits
        ("value_scales", more),
        ("alpha", rows * BLOCKS_TOGETHER * tile.lanes),
        ("scores", rows * row_stride(tile)),
        ("running_max", rows * tile.lanes),
        ("running_sum", rows * tile.lanes),
        ("best", rows * tile.lanes),
        ("place", rows * tile.lanes),
        ("surprise", rows * tile.lanes),
        ("queries", rows * scratch_stride(tile, head_dim)),
        ("out", rows * scratch_stride(tile, value_dim)),
        ("sections", (MOST_SECTIONS + 1) * SECTION_SIZE // tile.element.size),  # of keys
        ("pieces", 2 * I64.size // tile.element.size),  # as in the forward kernel, to the end
        ("merged_running_max", rows * tile.lanes),
        ("merged_running_sum", rows * tile.lanes),
        ("merged_best", rows * tile.lanes),
        ("merged_place", rows * tile.lanes),
        ("merged_surprise", rows * tile.lanes),
        ("merged_out", rows * scratch_stride(tile, value_dim)),
        ("sums", 4 * scratch_stride(tile, value_dim)),  # of one set
    )
    yield from _placed(tile, sizes, rows * 0)


def backward_regions(
    tile: TileShape, head_dim: Number, value_dim: Number, block_q: Number
) -> Regions[Number]:
    """The scratch of the backward kernel: one block of queries and one block of keys."""
    keys, values = gradient_stride(tile, head_dim), gradient_stride(tile, value_dim)
    block_kv, pair = tile.target.block_kv, 2 * I64.size // tile.element.size
    panels = block_q // tile.width if isinstance(block_q, int) else block_q.udiv(tile.width)
    sizes = (
        ("records", _placements(tile, 6)),  # as for the forward kernel, grad_out and grad_query
        ("key_ranges", panels * pair),  # for each panel, the keys that it reads
        ("query_ranges", block_kv * pair),  # for each strip of keys, the queries that read it
        ("touched", pair),  # the first and the end of the keys that a slice has added to
        ("shift", block_q),  # lse, and +inf past the last query
        ("delta", block_q),
        ("keys", keys * block_kv),
        ("values", values * block_kv),
        ("query_rows", keys * block_q),
        ("grad_rows", values * block_q),
        ("grad_query", keys * block_q),
        ("queries", padded(tile, head_dim) * block_q),
        ("grads", padded(tile, value_dim) * block_q),
        ("weights", weights_stride(tile) * (block_kv + SMALL_ROWS)),
        ("slopes", weights_stride(tile) * (block_kv + SMALL_ROWS)),
    )
    yield from _placed(tile, sizes, block_q * 0)


_REGIONS: dict[Form, Callable[[TileShape, int, int, int], Regions[int]]] = {
    "panel": panel_regions,
    "row": row_regions,
    "backward": backward_regions,
    "tangent": tangent_regions,
}


def row_stride(tile: TileShape) -> int:
    """The distance between the scores of two rows in the decode kernel."""
    return BLOCKS_TOGETHER * tile.target.block_kv + MOST_SQUARES * tile.lanes


def tangent_stride(tile: TileShape, width: Number) -> Number:
    """The distance between rows of keys, or of values, each with its tangent behind it."""
    return scratch_stride(tile, 2 * padded(tile, width))


def results_with_tangents(tile: TileShape, value_dim: Number) -> Number:
    """The rows of a panel of results: those of out, of its tangent, and one for the sum of P S'."""
    return padded(tile, 2 * padded(tile, value_dim) + 1)


def gradient_stride(tile: TileShape, width: Number) -> Number:
    """The distance between rows of gradients: a pair of vectors more than they are wide.

    Rows at a distance of a power of two would compete for the same lines of the cache.
    """
    return gradient_columns(tile, width) + 2 * tile.lanes


def weights_stride(tile: TileShape) -> int:
    """The distance between the weights of two keys, which are those of all queries of a block."""
    return BLOCK_Q + tile.width


def _placements(tile: TileShape, count: int) -> int:
    return count * PLACEMENT.size // tile.element.size


def _placed(
    tile: TileShape, sizes: Sequence[tuple[str, int | Number]], start: Number
) -> Regions[Number]:
    """Regions one after the other, each beginning at a cache line."""
    align = 64 // tile.element.size
    for name, size in sizes:
        yield name, start
        start = start + ((size + (align - 1)) & -align)
    yield "end", start
