"""Makes launchers, each for one layout of operands and results, and their tables of sequences.

A kernel is compiled once per form, dtypes and processor. For few queries, there is also one for
each common head dim. A kernel is looked up in this process, then on disk, and compiled last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence as Several
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.codegen.contract import Terms
from quire.codegen.convention import (
    EMPTY,
    ENTRY,
    FULL,
    KEYS_OF_PIECE,
    OBSERVE,
    PARTIAL,
    PLAN_PART,
    Form,
    KernelSpec,
    num_items,
    num_pieces,
    partial_stride,
)
from quire.codegen.kernels.backward import write_backward
from quire.codegen.kernels.decode import write_decode
from quire.codegen.kernels.forward import write_forward
from quire.codegen.kernels.tangent import write_tangent
from quire.codegen.llvm import jit
from quire.codegen.llvm.builder import Module
from quire.codegen.llvm.target import Target
from quire.codegen.phases.observe import write_observe
from quire.codegen.phases.softmax import LOG4_E
from quire.codegen.phases.staging import ENDLESS
from quire.codegen.phases.tiles import TileShape
from quire.memory import One, Placed, longest
from quire.memory.tables import HOLE, Numbers, Sequences
from quire.results import Result
from quire.runtime.blocks import BY_SEQUENCE, NO_LISTS, TileLists, hole_lists
from quire.runtime.cache import cache_key, code_of
from quire.runtime.launch import (
    Launcher,
    LoadedKernel,
    Records,
    num_products,
    num_threads,
    record,
    table_of,
)
from quire.runtime.mods import ModCode, ModGraphs, capture_shapes, compiled
from quire.runtime.shared_prefix import shared_pieces

ENOUGH = 8  # items for each thread; with as many, no thread waits long for the last one
FEW_PIECES = 4  # of listed keys, which one item computes: all pieces between them would be empty


def make_launcher(
    form: Form,
    placed: Placed,
    results: Result,
    graphs: ModGraphs,
    captures: Several[Tensor],
    *,
    scale: float,
    block_q: int,
    lists: TileLists = NO_LISTS,
    item_heads: int = 1,
    stays_open: bool = False,
) -> Launcher:
    """Return a launcher for operands and results with the layout of these.

    With `stays_open`, results are those of a piece, to be merged with others.
    """
    query, key, value = placed.operands
    if placed.holes is not None and lists is NO_LISTS:
        lists = BY_SEQUENCE
    heads, value_dim = query.shape[1], value.shape[3]
    dtypes = (query.dtype, key.dtype, value.dtype, results.out.dtype)
    found = kernel(
        form, dtypes, head_dim=query.shape[3], value_dim=value_dim, weighted=graphs.weighted
    )
    code = compiled(form, found.tile, graphs, capture_shapes(captures, graphs.pyramids))
    group = max(1, heads // key.shape[1])  # 1 if there are no heads
    row_group = item_heads
    if form == "row":  # the heads of an item share each block of keys
        own_lists = lists.heads not in (1, key.shape[1])
        row_group = 1 if own_lists or graphs.judges_heads else group
        group = group // row_group
    record = {
        **row_layout(placed),
        **_result_layout(results),
        "scale": scale * (LOG4_E if graphs.score is None else 1.0),
        "heads": heads // row_group,
        "group": group,
        "row_group": row_group,
        "block_q": block_q,
        "tile_batch_stride": lists.batch_stride,
        "tile_head_stride": lists.head_stride,
        "tile_block_stride": lists.block_stride,
        "tile_kind": FULL if graphs.always is None else PARTIAL,
        "stays_open": int(stays_open),
        **_functions(code, form, found.spec, results),
    }
    partial_bytes = partial_stride(found.tile, value_dim) * found.tile.element.size
    return Launcher(
        kernel=found,
        code=code,
        heads=heads // row_group,
        block_q=block_q,
        partial_bytes=partial_bytes * block_q * row_group,
        record=PLAN_PART.pack(record),
        pyramids=graphs.pyramids,
        terms=Terms.of(form, found.spec, record),
    )


def _result_layout(results: Result) -> dict[str, int]:
    """Return the strides of the output, and of the results with one number per query."""
    numbers = next((x for x in results[1:5] if x is not None), None)  # they lie alike
    steps = (0, 0, 0) if numbers is None else strides(numbers)
    named = zip(("lse_batch", "lse_head", "lse_row"), steps, strict=True)
    return row_strides("out", results.out) | dict(named)


def _functions(code: ModCode, form: Form, spec: KernelSpec, results: Result) -> dict[str, int]:
    """Return the addresses of the functions that the kernel calls."""
    observe = 0
    if results.argmax is not None or results.entropy is not None:
        observe = observer(form, spec.tile, spec.weighted).address(OBSERVE.name)
    return {
        "plain_mod": code.addresses["plain"],
        "full_mod": code.addresses["full"],
        "partial_mod": code.addresses["partial"],
        "weights_mod": code.addresses["drop"],
        "extent": code.addresses["extent"],
        "verdict": code.addresses["verdict"],
        "observe": observe,
    }


def row_layout(placed: Placed) -> dict[str, int]:
    """Return the fields of a record that say where rows of query, key and value are."""
    query, key, value, table = placed.query, placed.key, placed.value, placed.page_table
    result, paged = row_strides("query", query), table is not None
    result |= memory_strides("key", key, paged=paged) | memory_strides("value", value, paged=paged)
    for name, scale in (("key_scale", placed.key_scale), ("value_scale", placed.value_scale)):
        page, head, row = (0, 0, 0) if scale is None else scale.stride()
        result |= {f"{name}_head": head, f"{name}_page": page, f"{name}_row": row}
    return result | {
        "head_dim": query.shape[3],
        "value_dim": value.shape[3],
        "sequence_stride": 0 if placed.is_dense else 1,
        "page_table_stride": 0 if table is None else table.stride(0),
        "page_size": ENDLESS if table is None else key.shape[2],
    }


def row_strides(name: str, tensor: Tensor) -> dict[str, int]:
    """Return the strides of a tensor with a row for each query, as fields of a record."""
    steps = zip(("batch", "head", "row", "column"), strides(tensor), strict=True)
    return {f"{name}_{axis}": step for axis, step in steps}


def memory_strides(name: str, tensor: Tensor, *, paged: bool) -> dict[str, int]:
    """Return the strides of a tensor with a row for each key, as fields of a record."""
    of_batch = {f"{name}_batch": 0} if paged else {}
    page = {f"{name}_page": tensor.stride(0) if paged else 0}
    return row_strides(name, tensor) | of_batch | page


def strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor, 0 for a batch of 1, which all batches or sequences share."""
    steps = tensor.stride()
    return steps if tensor.shape[0] > 1 else (0, *steps[1:])


# --- kernels --------------------------------------------------------------------------------------


_WRITERS: dict[Form, Callable[[KernelSpec], Module]] = {
    "panel": write_forward,
    "row": write_decode,
    "backward": write_backward,
    "tangent": write_tangent,
}


COMMON_WIDTHS = {64, 96, 128}


def kernel(
    form: Form,
    dtypes: tuple[torch.dtype, ...],
    *,
    head_dim: int = 0,
    value_dim: int = 0,
    weighted: bool = False,
) -> LoadedKernel:
    """Return the kernel of a form for the dtypes of query, key, value and out.

    For few queries and common head dims, it is compiled for these head dims.
    """
    if form != "row" or not {head_dim, value_dim} <= COMMON_WIDTHS:
        head_dim = value_dim = 0  # any
    query, key, value, out = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    spec = KernelSpec(
        Target.host(),
        query=query,
        key=key,
        value=value,
        out=out,
        head_dim=head_dim,
        value_dim=value_dim,
        weighted=weighted,
    )
    return kernel_of(form, spec)


@functools.cache
def kernel_of(form: Form, spec: KernelSpec) -> LoadedKernel:
    """Return the kernel of a form, which is compiled or loaded once."""
    key = cache_key(form, repr(spec))
    code = code_of(key, spec.target, lambda: _WRITERS[form](spec), [ENTRY])
    return LoadedKernel(form, spec, spec.tile, code, code.address(ENTRY))


@functools.cache
def observer(form: Form, tile: TileShape, weighted: bool) -> jit.Code:
    """Return the function that a kernel calls if an argmax or an entropy is wanted."""
    key = cache_key("observe", form, repr(tile), repr(weighted))
    write = functools.partial(write_observe, form, tile, weighted=weighted)
    return code_of(key, tile.target, write, [OBSERVE.name])


# --- sequences ------------------------------------------------------------------------------------


def records_of(
    launcher: Launcher,
    placed: Placed,
    rows: One | Sequences,
    listed_kind: int = EMPTY,
    lists: TileLists = NO_LISTS,
) -> Records:
    """Return the table of some sequences for a kernel, and how many items they are.

    `lists` are those of a block mask. If sequences have holes, tiles of `listed_kind` are listed,
    unless that is EMPTY.
    """
    form, heads, block_q = launcher.kernel.form, launcher.heads, launcher.block_q
    if not isinstance(rows, One):
        if placed.holes is None or listed_kind == EMPTY:
            return _table(placed, rows, launcher, lists, shares=lists.batch_stride == 0)
        page = placed.key.shape[2]
        lists = hole_lists(placed.holes, page, listed_kind, Target.host().block_kv)
        return _table(placed, rows, launcher, lists)._replace(lists=lists)
    pieces = max(1, num_pieces(rows.kv_begin, rows.kv_end)) if form == "row" else 1
    whole = num_items(rows.q_len, heads, block_q) * placed.query.shape[0]
    slices = 1 if whole >= ENOUGH * num_threads() else pieces
    items = whole * slices
    slots = items if slices > 1 else 0
    table = record(rows, pieces, slices)
    return Records(table, 1, num_products(placed, rows), items, slots)


class Cut(NamedTuple):
    """The number of pieces of keys of each sequence [B], and how many of them are shared.

    The first sequence of a group computes the first `shared` pieces for all its `members`.
    """

    pieces: Numbers
    shared: Numbers
    members: Numbers

    def slices(self, heads: int, listed: Numbers | None) -> Numbers:
        """Return how many items each sequence has for each of its `heads`.

        These are the pieces that it computes itself. But a sequence that shares none is one item,
        if that is a small part of all the work, or if it lists few keys: `listed` [B] pieces.
        """
        own = np.where(self.members == 0, self.pieces - self.shared, self.pieces)
        work = own if listed is None else np.minimum(own, listed)
        small = work * (ENOUGH * num_threads()) <= work.sum() * heads
        if listed is not None:
            small |= listed <= FEW_PIECES
        return np.where((self.shared == 0) & small, 1, own)


def _table(
    placed: Placed,
    rows: Sequences,
    launcher: Launcher,
    lists: TileLists = NO_LISTS,
    *,
    shares: bool = True,
) -> Records:
    """Return the table of many sequences. The largest come first, so that no thread ends late.

    `shares` says whether sequences that begin with the same pages read the same of them.
    """
    form, heads = launcher.kernel.form, launcher.heads
    pieces = np.ones_like(rows.q_len)
    if form == "row":
        pieces = np.maximum(1, num_pieces(rows.kv_begin, rows.kv_end))
    order = rows.largest_first()
    shared = members = None
    shares = shares and form == "row" and placed.page_table is not None
    if shares and longest(rows.kv_end) >= KEYS_OF_PIECE:
        page = placed.key.shape[2]
        table = placed.page_table
        assert table is not None, "there are pages"
        if placed.holes is not None:
            table = torch.where(placed.holes.there, table, HOLE)
        order, shared, members = shared_pieces(rows, table, page, order)
    rows, pieces = rows.where(order), pieces[order]
    cut = Cut(pieces, np.zeros_like(pieces), np.ones_like(pieces))
    if shared is not None and members is not None:
        cut = Cut(pieces, shared, members)
    listed = None if lists is NO_LISTS or form != "row" else _most_pieces(lists, rows)
    each = num_items(rows.q_len, heads, launcher.block_q)
    slices, most_members = cut.slices(heads, listed), longest(cut.members)
    items, slots = each * slices, np.where((slices == 1) & (cut.shared == 0), 0, each * pieces)
    work = rows
    if listed is not None:
        most = rows.kv_begin + listed * KEYS_OF_PIECE
        work = rows._replace(kv_end=np.minimum(rows.kv_end, most))
    columns = {**cut._asdict(), "slices": slices, "first_slot": np.cumsum(slots) - slots}
    return Records(
        table=table_of(rows, np.cumsum(items) - items, columns),
        num_sequences=rows.num,
        products=num_products(placed, work),
        items=int(items.sum()),
        slots=int(slots.sum()),
        members=most_members,
    )


def _most_pieces(lists: TileLists, rows: Sequences) -> Numbers:
    """Return how many pieces the listed keys of each sequence would be, by its longest list."""
    before = np.concatenate([[0], np.cumsum(lists.keys)])[lists.offsets]
    keys: Numbers = np.diff(before)
    most = keys.max(initial=0)
    if lists.batch_stride:
        most = keys.reshape(-1, lists.batch_stride).max(axis=1)[rows.b]
    pieces: Numbers = np.zeros_like(rows.b) - -most // KEYS_OF_PIECE
    return pieces
