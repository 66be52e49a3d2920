"""Linear layers on packed weights: which code runs, how rows are cut, and the launch.

    layer = LinearLaunch(weights, prologue, epilogue, torch.float32)
    layer.run(x, y)                     # x [M, K], y [M, N], any strides but the last of y

All that does not depend on the number of rows is done when a launch is made, and what depends on it
is kept by number of rows. Rows are computed in chunks, so that what is staged stays in the cache.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from quire.checks.arguments import dtype_name
from quire.codegen.kernels import rows as row_kernel
from quire.codegen.kernels.epilogue import EpilogueSpec, write_epilogue
from quire.codegen.kernels.linear import FINISH, LINEAR, NAME, LinearSpec, RowSpec, write_linear
from quire.codegen.llvm import jit
from quire.codegen.llvm.target import Target
from quire.codegen.mods.arguments import CaptureShape, ModArguments
from quire.codegen.phases.linear_tiles import DECODED, FEW, bytes_of_turn
from quire.codegen.phases.norm import Norm
from quire.codegen.phases.weights import BLOCK, FLOAT32, GROUP_BYTES, PANEL, WeightFormat
from quire.errors import BackendError
from quire.ir.graph import Node, text
from quire.runtime import launch as launcher
from quire.runtime.cache import cache_key, code_of, processor_obstacle
from quire.runtime.interrupt import LONG_WORK, launch_stoppable

BLOCKS_OF_CUT = 4
"""The most blocks of a cut of k. It decides about bits: each cut has a sum of its own."""
SMALL_WORK = 2**17
"""The most multiplications of a call for which starting threads costs more than it saves."""
SMALL_ROWS = 2**15
"""The same for the numbers of a norm or an activation."""


class PackedWeights(NamedTuple):
    """Weights as `codegen/phases/weights.py` draws them."""

    data: Tensor  # uint8, panel after panel
    columns: Tensor  # int64 [panels, 4], an entry of COLUMNS for each panel
    format: WeightFormat
    depth: int  # K
    width: int  # N of the weights
    half: int = 0  # columns i and i + half are pairs, in blocks of 2 * half; 0 if there are none
    integers: bool = False  # whether x is quantised, too


class Prologue(NamedTuple):
    """The norm of a row of x before it is multiplied."""

    norm: Norm = "none"
    gain: Tensor | None = None  # float32 [K], contiguous
    bias: Tensor | None = None
    epsilon: float = 0.0


class Epilogue(NamedTuple):
    """What becomes of a sum (`codegen/kernels/epilogue.py`)."""

    graph: Node | None = None
    captures: tuple[Tensor, ...] = ()
    merges: bool = False


class RowCut(NamedTuple):
    """How a number of rows is computed; see LINEAR."""

    tiles: int
    tile_panels: int
    item_panels: int
    items: int
    way: int
    cut: int
    ask_bytes: int
    staged_bytes: int
    scratch_bytes: int
    sums_bytes: int
    threads: int
    products: int


class WorkingMemory(NamedTuple):
    """Working memory that somebody else keeps: an address, bytes of each thread, and partials."""

    address: int
    each: int
    partials: int


class LinearLaunch:
    """A layer that is ready to run."""

    rows_of_chunk = 128
    num_counters = 3  # at the start of a record

    def __init__(
        self, weights: PackedWeights, prologue: Prologue, epilogue: Epilogue, dtype: torch.dtype
    ) -> None:
        self.weights, self.prologue = weights, prologue
        self._spec = LinearSpec(
            Target.host(),
            weights.format.name,
            dtype_name(dtype),
            integers=weights.integers,
            norm=prologue.norm,
        )
        shapes = tuple(CaptureShape.of(tensor) for tensor in epilogue.captures)
        roots = [] if epilogue.graph is None else [epilogue.graph]
        self._arguments = ModArguments.of(roots, shapes)
        finish = EpilogueSpec(
            epilogue.graph,
            self._arguments,
            dtype_name(dtype),
            pairs=weights.half > 0,
            merges=epilogue.merges,
        )
        self._code, self._kernel = self._load()
        self._finish = epilogue_of(finish, self._spec.target)
        self._blocks = -(-weights.depth // BLOCK)
        pointers = [_address(x) for x in (weights.data, weights.columns)]
        norm = [_address(x) for x in (prologue.gain, prologue.bias)]
        sizes = [len(weights.columns), weights.depth, self._blocks]
        self._of_layer = (*pointers, *sizes, *norm, self._finish.address(FINISH.name))
        self._planned: dict[tuple[int, int], tuple[RowCut, list[_Record]]] = {}

    def _load(self) -> tuple[jit.Code, int]:
        """Return the kernel and its address."""
        code = kernel_of(self._spec)
        return code, code.address(NAME)

    def run(self, x: Tensor, y: Tensor, captures: Sequence[Tensor] = ()) -> bool:
        """Fill y. Return whether the epilogue used an index out of range."""
        rows = x.shape[0]
        if rows <= self.rows_of_chunk:
            return self._chunk(x, y, captures, 0)
        wrong = False
        for first in range(0, rows, self.rows_of_chunk):
            some = slice(first, first + self.rows_of_chunk)
            wrong |= self._chunk(x[some], y[some], captures, first)
        return wrong

    def _chunk(self, x: Tensor, y: Tensor, captures: Sequence[Tensor], first: int) -> bool:
        """Compute some rows; the first of them is row `first` of the call."""
        rows, most = x.shape[0], launcher.num_threads()
        cut, free = self._plan(rows, most)
        try:
            record = free.pop()
        except IndexError:
            record = self._record(cut)
        block, start, threads = record.block, record.start, cut.threads
        with launcher.Scratch(threads, cut.scratch_bytes, cut.staged_bytes, 0) as scratch:
            self._fill(record, x, y, captures, first=first, scratch=scratch)
            if cut.products > LONG_WORK:
                counter = ctypes.c_int64.from_buffer(block)
                run = functools.partial(launcher.launch, self._kernel, start, threads)
                launch_stoppable(run, counter)
            else:
                launcher.launch(self._kernel, start, threads)
        wrong = block[_FLAG_AT] != b"\0"
        if not wrong:  # else the flag stays set, so the record is not used again
            free.append(record)
        return wrong

    def _plan(self, rows: int, most: int) -> tuple[RowCut, list[_Record]]:
        """Return how to compute some rows, and records that are free."""
        planned = self._planned.get((rows, most))
        if planned is None:
            if len(self._planned) > _MOST_PLANNED:
                self._planned.clear()
            planned = self._planned[rows, most] = self._cut(rows, most), []
        return planned

    def _fill(
        self,
        record: _Record,
        x: Tensor,
        y: Tensor,
        captures: Sequence[Tensor],
        *,
        first: int,
        scratch: launcher.Scratch | WorkingMemory,
    ) -> None:
        """Write to a record what a call knows."""
        block, start = record.block, record.start
        places = (x.data_ptr(), *x.stride(), y.data_ptr(), y.stride(0))
        fields = (*_COUNTERS, *places, x.shape[0], first)
        _CALL.pack_into(block, 0, *fields)
        _WORK.pack_into(block, _WORK_AT, scratch.partials, scratch.address, scratch.each)
        if captures is not record.captures:
            packed = self._arguments.pack(captures, start + _FLAG_AT)
            ctypes.memmove(start + _ARGUMENTS_AT, packed, len(packed))
            record.captures = captures if type(captures) is tuple else None

    # --- for programs, which run many launches

    @property
    def address(self) -> int:
        """The address of the kernel."""
        return self._kernel

    def working_bytes(self, rows: int, threads: int) -> tuple[int, int]:
        """Return the working memory of each thread, and of all threads, for so many rows."""
        cuts = [self._plan(count, threads)[0] for count in self._chunks(rows)]
        return max(cut.scratch_bytes for cut in cuts), max(cut.staged_bytes for cut in cuts)

    def records(
        self,
        x: Tensor,
        y: Tensor,
        captures: Sequence[Tensor],
        threads: int,
        scratch: WorkingMemory,
    ) -> list[_Record]:
        """Return the records of a call, which can be launched one after the other."""
        records, first = [], 0
        for count in self._chunks(len(x)):
            record, some = self._record(self._plan(count, threads)[0]), slice(first, first + count)
            self._fill(record, x[some], y[some], captures, first=first, scratch=scratch)
            records.append(record)
            first += count
        return records

    def _chunks(self, rows: int) -> list[int]:
        whole, rest = divmod(rows, self.rows_of_chunk)
        return [self.rows_of_chunk] * whole + [rest] * (rest > 0)

    def _record(self, cut: RowCut) -> _Record:
        """Return a record with all that does not change from call to call."""
        block = (ctypes.c_char * (_ARGUMENTS_AT + self._arguments.size))()
        start = ctypes.addressof(block)
        fields = (
            *(0,) * _NUM_CALL, start + _ARGUMENTS_AT, *cut[:7], 0, 0, 0,
            cut.sums_bytes, *self._of_layer, self.prologue.epsilon,
        )  # fmt: skip
        content = LINEAR.pack_in_order(*fields)
        ctypes.memmove(start, content, len(content))
        return _Record(block, start)

    def _cut(self, rows: int, most: int) -> RowCut:
        """Return how to compute some rows with at most so many threads."""
        tiling, format, blocks = self._spec.tiling, self.weights.format, self._blocks
        panels, depth = len(self.weights.columns), self.weights.depth
        tiles, size, way = 1, tiling.many, tiling.way(rows)
        cut = -(-blocks // max(1, -(-blocks // BLOCKS_OF_CUT)))  # as even as possible
        if way == FEW:
            size = tiling.few[rows - 1]
        else:
            tiles = -(-rows // tiling.many.rows)
        item = size.panels * {0: 1, 1: 2}[size.panels % 2] * (2 if size.panels == 1 else 1)
        items = -(-panels // item)
        sums = rows * item * PANEL * 4
        line = blocks * BLOCK * 4
        decoded = size.panels * cut * FLOAT32.block_bytes if way == DECODED else GROUP_BYTES
        products = rows * depth * panels * PANEL
        return RowCut(
            tiles=tiles,
            tile_panels=size.panels,
            item_panels=item,
            items=items,
            way=way,
            cut=cut,
            ask_bytes=bytes_of_turn(format, way),
            staged_bytes=rows * blocks * 2 * self._spec.staged.group_words * 4,
            scratch_bytes=-(-(sums + max(line, decoded)) // 64) * 64,
            sums_bytes=sums,
            threads=min(most, tiles + items) if products > SMALL_WORK else 1,
            products=products,
        )


class RowLaunch(LinearLaunch):
    """A norm or an activation of rows that is ready to run: a layer without a product."""

    rows_of_chunk = sys.maxsize

    def __init__(
        self,
        columns: Tensor,
        width: int,
        prologue: Prologue,
        epilogue: Epilogue,
        dtype: torch.dtype,
    ) -> None:
        none = torch.empty(0, dtype=torch.uint8, device="cpu")
        weights = PackedWeights(none, columns, FLOAT32, width, width)
        super().__init__(weights, prologue, epilogue, dtype)

    def _load(self) -> tuple[jit.Code, int]:
        code = rows_of(self._spec.row)
        return code, code.address(row_kernel.NAME)

    def _cut(self, rows: int, most: int) -> RowCut:
        numbers = rows * self.weights.depth
        return RowCut(
            tiles=0,
            tile_panels=0,
            item_panels=0,
            items=rows,
            way=0,
            cut=0,
            ask_bytes=0,
            staged_bytes=0,
            scratch_bytes=self._blocks * BLOCK * 4,
            sums_bytes=0,
            threads=min(most, rows) if numbers > SMALL_ROWS else 1,
            products=numbers,
        )


_MOST_PLANNED = 512

# A launch has one block of memory: [ LINEAR | flag: an index was out of range | arguments ]
_FLAG_AT = LINEAR.size
_ARGUMENTS_AT = _FLAG_AT + 8
_NUM_CALL = LINEAR.index("arguments")  # fields that each call writes, from the first on
_CALL = struct.Struct(f"={_NUM_CALL}q")
_COUNTERS = (0, 0, 0)
_WORK = struct.Struct("=3q")  # staged_rows, scratch, scratch_bytes
_WORK_AT = 8 * LINEAR.index("staged_rows")


class _Record:
    """A block of memory for one call at a time, and the captured tensors that it describes.

    Only a tuple of them is remembered, which cannot change.
    """

    __slots__ = ("block", "captures", "start")

    def __init__(self, block: ctypes.Array[ctypes.c_char], start: int) -> None:
        self.block, self.start = block, start
        self.captures: Sequence[Tensor] | None = None


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@functools.cache
def kernel_of(spec: LinearSpec) -> jit.Code:
    """Return the kernel of a kind of layers, which is compiled or loaded once."""
    _check_processor()
    key = cache_key("linear", repr(spec))
    return code_of(key, spec.target, lambda: write_linear(spec), [NAME])


@functools.cache
def rows_of(spec: RowSpec) -> jit.Code:
    """Return the kernel of norms and activations."""
    _check_processor()
    key = cache_key("rows", repr(spec))
    return code_of(key, spec.target, lambda: row_kernel.write_rows(spec), [row_kernel.NAME])


def _check_processor() -> None:
    obstacle = processor_obstacle()
    if obstacle is not None:
        raise BackendError(f"a packed layer must be compiled, but cannot be: {obstacle}")


@functools.cache
def epilogue_of(spec: EpilogueSpec, target: Target) -> jit.Code:
    """Return the code of an epilogue."""
    graph = "" if spec.graph is None else text(spec.graph, values=False)
    key = cache_key("epilogue", graph, repr(spec._replace(graph=None)), repr(target))
    return code_of(key, target, lambda: write_epilogue(spec), [FINISH.name])
