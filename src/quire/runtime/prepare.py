"""What launches a kernel, made for operands and results that lie in a certain way.

A kernel is compiled once per form, dtypes and processor; for few queries there is also one for each
width of heads that many models have. It is looked up in this process, then on disk, and only then
compiled.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from collections.abc import Sequence as Several

import torch
from torch import Tensor

from quire.block_mask import BlockMask
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
    """What launches a kernel for operands and results that lie like these."""
    query, key, value = placed.operands
    heads, value_dim = query.shape[1], value.shape[3]
    dtypes = (query.dtype, key.dtype, value.dtype, results.out.dtype)
    made = kernel(form, dtypes, head_dim=query.shape[3], value_dim=value_dim)
    built = graphs.pyramids
    code = compiled(form, made.tile, graphs, capture_shapes(captures, built))
    group = max(1, heads // key.shape[1])  # also of no heads at all
    row_group = item_heads
    if form == "row":  # the queries of an item's heads share each block of keys
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
        **_functions(code, form, made.tile, results),
    }
    partial_bytes = partial_stride(made.tile, value_dim) * made.tile.element.size
    return Launcher(
        kernel=made,
        code=code,
        heads=heads // row_group,
        block_q=block_q,
        partial_bytes=partial_bytes * block_q * row_group,
        record=PLAN_PART.pack(record),
        pyramids=built,
        terms=Terms.of(form, made.spec, record),
    )


def _result_layout(results: Result) -> dict[str, int]:
    """From row to row of the output, and of what has one number for each query."""
    numbers = next((x for name, x in results.by_query.items() if name != "out"), None)
    steps = (0, 0, 0) if numbers is None else strides(numbers)
    return {
        **dict(
            zip(
                ("out_batch", "out_head", "out_row", "out_column"),
                strides(results.out),
                strict=True,
            )
        ),
        **dict(zip(("lse_batch", "lse_head", "lse_row"), steps, strict=True)),
    }


def _functions(code: ModCode, form: Form, tile: TileShape, results: Result) -> dict[str, int]:
    """The addresses of what the kernel calls."""
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
    """How many queries are computed together."""
    if form == "row":
        return max(1, rows.q_len if isinstance(rows, One) else longest(rows.q_len))
    query, value = placed.query, placed.value
    tile = TileShape(Target.host(), F64 if query.dtype == torch.float64 else F32)
    count = num_rows(placed, rows)
    block_q = choose_block_q(tile, query.shape[3], value.shape[3], count, num_threads())
    if mask is None:
        return block_q
    # Blocks of queries that do not straddle the blocks of a mask, unless they became tiny.
    divisor = math.gcd(block_q, mask.BLOCK_SIZE[0])
    return divisor if divisor >= SMALLEST_BLOCK else block_q


def heads_of_item(form: Form, placed: Placed, rows: One | Sequences, block_q: int) -> int:
    """How many heads are computed one after the other."""
    if form == "row":
        return 1
    sequences = rows if isinstance(rows, Sequences) else Sequences.one(*rows)
    products = sequences.q_len * sequences.kv_len
    alike = int(products.sum()) // max(1, longest(products)) * placed.batches
    heads = placed.query.shape[1]
    return choose_heads(heads, longest(sequences.q_len), alike, block_q, num_threads())


def num_rows(placed: Placed, rows: One | Sequences) -> int:
    """How many query rows some sequences have in all heads."""
    count = rows.q_len if isinstance(rows, One) else int(rows.q_len.sum())
    return count * placed.query.shape[1] * placed.batches


def row_layout(placed: Placed) -> dict[str, int]:
    """The part of a plan that says where rows live."""
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
    }.items()
}


def strides(tensor: Tensor) -> tuple[int, ...]:
    """From row to row. A first dimension of 1 is shared by all batches, and by all sequences."""
    steps = tensor.stride()
    return steps if tensor.shape[0] > 1 else (0, *steps[1:])


# --- kernels --------------------------------------------------------------------------------------


_WRITERS: dict[Form, Callable[[KernelSpec], Module]] = {
    "panel": write_forward,
    "row": write_decode,
    "backward": write_backward,
}


COMMON_WIDTHS = {64, 96, 128}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def kernel(
    form: Form, dtypes: tuple[torch.dtype, ...], *, head_dim: int = 0, value_dim: int = 0
) -> Kernel:
    """The kernel of a form for the dtypes of query, key, value and out.

    One for few queries is written for the width of its rows, if many models have that.
    """
    known = form == "row" and {head_dim, value_dim} <= COMMON_WIDTHS
    query, key, value, out = map(_name, dtypes)
    widths = (head_dim, value_dim) if known else (0, 0)
    return kernel_of(form, KernelSpec(Target.host(), query, key, value, out, *widths))


@functools.cache
def kernel_of(form: Form, spec: KernelSpec) -> Kernel:
    """The kernel of a form, which is made once."""
    key = cache_key(form, repr(spec))
    code = code_of(key, spec.target, lambda: _WRITERS[form](spec), [ENTRY])
    return Kernel(form, spec, spec.tile, code, code.address(ENTRY))


@functools.cache
def observer(form: Form, tile: TileShape) -> jit.Code:
    """The function that a kernel calls where an argmax or an entropy is wanted."""
    key = cache_key("observe", form, repr(tile))
    return code_of(key, tile.target, lambda: write_observe(form, tile), [OBSERVE.name])
