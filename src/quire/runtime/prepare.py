"""Makes launchers, each for one layout of operands and results.

A kernel is compiled once per form, dtypes and processor. For few queries, there is also one for
each common head dim. A kernel is looked up in this process, then on disk, and compiled last.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from collections.abc import Sequence as Several

import torch
from torch import Tensor

from quire.block_mask import BlockMask
from quire.checks.arguments import dtype_name
from quire.codegen.contract import Terms
from quire.codegen.convention import (
    ENTRY,
    FULL,
    OBSERVE,
    PARTIAL,
    PLAN_PART,
    Form,
    KernelSpec,
    choose_block_q,
    choose_heads,
    partial_stride,
)
from quire.codegen.kernels.backward import write_backward
from quire.codegen.kernels.decode import write_decode
from quire.codegen.kernels.forward import write_forward
from quire.codegen.llvm import jit
from quire.codegen.llvm.builder import Module
from quire.codegen.llvm.target import Target
from quire.codegen.llvm.types import F32, F64
from quire.codegen.phases.observe import write_observe
from quire.codegen.phases.softmax import LOG4_E
from quire.codegen.phases.staging import ENDLESS
from quire.codegen.phases.tiles import TileShape
from quire.memory import One, Placed, longest
from quire.memory.tables import Sequences
from quire.results import Result
from quire.runtime.cache import cache_key, code_of
from quire.runtime.launch import num_threads
from quire.runtime.launcher import Kernel, Launcher
from quire.runtime.mods import ModCode, ModGraphs, capture_shapes, compiled
from quire.runtime.tile_lists import NO_LISTS, TileLists

SMALLEST_BLOCK = 64


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
) -> Launcher:
    """Return a launcher for operands and results with the layout of these."""
    query, key, value = placed.operands
    heads, value_dim = query.shape[1], value.shape[3]
    dtypes = (query.dtype, key.dtype, value.dtype, results.out.dtype)
    found = kernel(form, dtypes, head_dim=query.shape[3], value_dim=value_dim)
    code = compiled(form, found.tile, graphs, capture_shapes(captures, graphs.pyramids))
    group = max(1, heads // key.shape[1])  # 1 if there are no heads
    row_group = item_heads
    if form == "row":  # the heads of an item share each block of keys
        row_group = 1 if lists.per_head or graphs.judges_heads else group
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
        "tile_per_head": lists.per_head,
        "tile_kind": FULL if graphs.always is None else PARTIAL,
        **_functions(code, form, found.tile, results),
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
    numbers = next((x for name, x in results.by_query.items() if name != "out"), None)
    steps = (0, 0, 0) if numbers is None else strides(numbers)
    layout = dict(zip(_NAMES["out"], strides(results.out), strict=True))
    return layout | dict(zip(_NAMES["lse"], steps, strict=True))


def _functions(code: ModCode, form: Form, tile: TileShape, results: Result) -> dict[str, int]:
    """Return the addresses of the functions that the kernel calls."""
    observes = results.argmax is not None or results.entropy is not None
    return {
        "plain_mod": code.addresses["plain"],
        "full_mod": code.addresses["full"],
        "partial_mod": code.addresses["partial"],
        "weights_mod": code.addresses["drop"],
        "extent": code.addresses["extent"],
        "verdict": code.addresses["verdict"],
        "observe": observer(form, tile).address(OBSERVE.name) if observes else 0,
    }


def queries_of_item(
    form: Form, placed: Placed, rows: One | Sequences, mask: BlockMask | None
) -> int:
    """Return how many queries of a head a thread computes at once."""
    if form == "row":
        return max(1, rows.q_len if isinstance(rows, One) else longest(rows.q_len))
    query, value = placed.query, placed.value
    tile = TileShape(Target.host(), F64 if query.dtype == torch.float64 else F32)
    count = num_rows(placed, rows)
    block_q = choose_block_q(tile, query.shape[3], value.shape[3], count, num_threads())
    if mask is None:
        return block_q
    # A block of queries should be within one block of the mask, unless it becomes tiny.
    divisor = math.gcd(block_q, mask.BLOCK_SIZE[0])
    return divisor if divisor >= SMALLEST_BLOCK else block_q


def heads_of_item(form: Form, placed: Placed, rows: One | Sequences, block_q: int) -> int:
    """Return how many heads a thread computes one after the other."""
    if form == "row":
        return 1
    sequences = rows if isinstance(rows, Sequences) else Sequences.one(*rows)
    products = sequences.q_len * sequences.kv_len
    alike = int(products.sum()) // max(1, longest(products)) * placed.batches
    heads = placed.query.shape[1]
    return choose_heads(heads, longest(sequences.q_len), alike, block_q, num_threads())


def num_rows(placed: Placed, rows: One | Sequences) -> int:
    """Return the number of query rows of some sequences, in all heads."""
    count = rows.q_len if isinstance(rows, One) else int(rows.q_len.sum())
    return count * placed.query.shape[1] * placed.batches


def row_layout(placed: Placed) -> dict[str, int]:
    """Return the fields of a record that say where rows of query, key and value are."""
    query, key, value, table = placed.query, placed.key, placed.value, placed.page_table
    result = dict(zip(_NAMES["query"], strides(query), strict=True))
    for name, tensor in (("key", key), ("value", value)):
        batch, head, row, column = strides(tensor)
        page = tensor.stride(0) if table is not None else 0
        steps = (batch if table is None else 0, head, page, row, column)
        result.update(zip(_NAMES[name], steps, strict=True))
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


_NAMES = {
    name: [f"{name}_{axis}" for axis in axes]
    for name, axes in {
        "query": ("batch", "head", "row", "column"),
        "key": ("batch", "head", "page", "row", "column"),
        "value": ("batch", "head", "page", "row", "column"),
        "out": ("batch", "head", "row", "column"),
        "lse": ("batch", "head", "row"),
    }.items()
}


def strides(tensor: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor, 0 for a batch of 1, which all batches or sequences share."""
    steps = tensor.stride()
    return steps if tensor.shape[0] > 1 else (0, *steps[1:])


# --- kernels --------------------------------------------------------------------------------------


_WRITERS: dict[Form, Callable[[KernelSpec], Module]] = {
    "panel": write_forward,
    "row": write_decode,
    "backward": write_backward,
}


COMMON_WIDTHS = {64, 96, 128}


def kernel(
    form: Form, dtypes: tuple[torch.dtype, ...], *, head_dim: int = 0, value_dim: int = 0
) -> Kernel:
    """Return the kernel of a form for the dtypes of query, key, value and out.

    For few queries and common head dims, it is compiled for these head dims.
    """
    if form != "row" or not {head_dim, value_dim} <= COMMON_WIDTHS:
        head_dim = value_dim = 0  # any
    query, key, value, out = map(dtype_name, dtypes)
    widths = {"head_dim": head_dim, "value_dim": value_dim}
    spec = KernelSpec(Target.host(), query=query, key=key, value=value, out=out, **widths)
    return kernel_of(form, spec)


@functools.cache
def kernel_of(form: Form, spec: KernelSpec) -> Kernel:
    """Return the kernel of a form, which is compiled or loaded once."""
    key = cache_key(form, repr(spec))
    code = code_of(key, spec.target, lambda: _WRITERS[form](spec), [ENTRY])
    return Kernel(form, spec, spec.tile, code, code.address(ENTRY))


@functools.cache
def observer(form: Form, tile: TileShape) -> jit.Code:
    """Return the function that a kernel calls if an argmax or an entropy is wanted."""
    key = cache_key("observe", form, repr(tile))
    return code_of(key, tile.target, lambda: write_observe(form, tile), [OBSERVE.name])
