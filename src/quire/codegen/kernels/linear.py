"""y = x @ W^T with packed weights, at any number of rows with the same bits.

    record      LINEAR, see below
    items       first every tile of rows is staged (`phases/activations.py`), then every few panels
                of weights are multiplied with all rows

Threads take items off a counter. A thread that takes panels waits until all rows are staged; the
threads that stage them never wait. It takes the item after the next one early, so that it can ask
for its memory in time.

    for each cut, a few blocks of k, which stay in the cache:
        for some of the panels of the item:
            decode them to floats, if there are many rows and tiles have no room for that
            for each tile of rows: multiply, and add to sums in working memory
    then the epilogue (`kernels/epilogue.py`) makes results of the sums, and stores them

Every number is a chain of multiply-adds for each cut, and the sum of these chains in order. How k
is cut depends on the layer alone, so bits do not depend on the number of rows or threads. One chain
over all k would be less exact.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

from quire.codegen.llvm.builder import Function, Module, Signature, Value
from quire.codegen.llvm.target import Target
from quire.codegen.llvm.types import F32, F64, I8, I64, PTR, Layout, typed
from quire.codegen.phases.activations import Activations, Stager
from quire.codegen.phases.linear_tiles import (
    DECODED,
    DIRECT,
    FEW,
    LINE,
    LINES_AHEAD,
    TileSize,
    TileSizes,
    bytes_of_turn,
    write_tile,
)
from quire.codegen.phases.norm import Norm, write_norm
from quire.codegen.phases.storage import storage
from quire.codegen.phases.weights import (
    BLOCK,
    FLOAT32,
    FORMATS,
    GROUP_BYTES,
    GROUPS,
    PANEL,
    Loader,
    WeightFormat,
)

NAME = "linear"
LINEAR = Layout(
    "linear",
    {
        # Counters that threads share:
        **typed("i64 next slots staged"),
        # Of the call:
        **typed("ptr x, i64 x_row x_column, ptr y, i64 y_row, i64 rows first_row, ptr arguments"),
        # How it is cut:
        **typed("i64 tiles tile_panels item_panels items way cut ask_bytes"),
        # Working memory: of all threads, and of each
        **typed("ptr staged_rows scratch, i64 scratch_bytes sums_bytes"),
        # Of the layer:
        **typed("ptr weights columns, i64 panels depth blocks"),
        **typed("ptr gain bias finish"),
        "epsilon": F64,
    },
)
"""What a kernel is told. Sizes count numbers, unless they are called bytes.

    tiles, tile_panels      rows are cut into `tiles` as even as possible, panels into these
    item_panels, items      panels that a thread takes at once, and how often it can
    way                     FEW, DIRECT or DECODED: who decodes panels (`phases/linear_tiles.py`)
    cut                     blocks of a cut of k
    ask_bytes               bytes of a panel that one turn of a tile of many rows reads
    columns                 what the epilogue knows of each panel (`kernels/epilogue.py`)
    blocks                  depth in blocks of 64
    gain, bias, epsilon     of a norm of the rows of x
    finish, arguments       the epilogue, and what it is given
"""

FINISH = Signature(
    "finish", typed("ptr record arguments sums, i64 panel count row rows, i64 sums_pitch")
)
"""Makes results of sums [row][panel][16]: `count` panels from `panel`, `rows` rows from `row`."""


class RowSpec(NamedTuple):
    """How a row of x is read: its dtype by name, and its norm."""

    target: Target
    x: str
    norm: Norm = "none"


class LinearSpec(NamedTuple):
    """What a kernel is compiled for: formats by name, and the norm of the rows of x."""

    target: Target
    weights: str
    x: str
    integers: bool = False
    norm: Norm = "none"

    @property
    def format(self) -> WeightFormat:
        """Return the format of the weights."""
        return FORMATS[self.weights]

    @property
    def row(self) -> RowSpec:
        """Return how rows are read."""
        return RowSpec(self.target, self.x, self.norm)

    @property
    def staged(self) -> Activations:
        """Return how rows are staged."""
        return Activations.integers(self.target) if self.integers else Activations()

    @property
    def tiling(self) -> TileSizes:
        """Return the sizes of tiles."""
        return TileSizes.of(self.target, self.format, self.staged)


def write_linear(spec: LinearSpec) -> Module:
    """Return a module with the kernel NAME: void(LINEAR record)."""
    module = Module()
    stage = _write_stage(module, spec)
    tiling = spec.tiling
    decode = None
    if tiling.decodes:
        decode = _write_decode(module, spec)

    def tile(way: int, size: TileSize) -> _TileFunction:
        format, once = FLOAT32 if way == DECODED else spec.format, way == FEW
        lines = -(-bytes_of_turn(spec.format, way) // LINE)
        function = write_tile(
            module, spec.target, format, spec.staged, size, once=once, lines=lines
        )
        return _TileFunction(way, size, function)

    tiles = [tile(FEW, size) for size in tiling.few]
    tiles += [tile(DIRECT, size) for size in tiling.of_many if size.rows <= tiling.direct]
    if decode is not None:
        tiles += [tile(DECODED, size) for size in tiling.of_many]
    with module.function(NAME, {"record": PTR}) as f:
        _Nest(f, spec, stage, decode, tiles).write()
    return module


class _TileFunction(NamedTuple):
    """The function of tiles of a size, for one way to compute rows."""

    way: int
    size: TileSize
    function: Function


class _Nest:
    """Writes the loops of the kernel."""

    def __init__(
        self,
        f: Function,
        spec: LinearSpec,
        stage: Function,
        decode: Function | None,
        tiles: Sequence[_TileFunction],
    ) -> None:
        self.f, self.spec, self.stage, self.decode, self.tiles = f, spec, stage, decode, tiles
        self.record = f.parameters[0]
        slot = f.atomic_add(self._counter("slots"), 1)
        self.scratch = f.offset(self["scratch"], slot * self["scratch_bytes"], I8)
        self.decoded = f.offset(self.scratch, self["sums_bytes"], I8)
        self.pitch = self["item_panels"] * PANEL  # of sums
        self.panel_bytes = self["blocks"] * spec.format.block_bytes
        self.last = self["tiles"] + self["items"]

    def __getitem__(self, name: str) -> Value:
        """A field of the record."""
        return self.f.field(LINEAR, self.record, name)

    def _counter(self, name: str) -> Value:
        return self.f.offset(self.record, LINEAR.index(name), I64)

    def write(self) -> None:
        """Write the loop over items."""
        f = self.f

        def take() -> Value:
            return f.atomic_add(self._counter("next"), 1)

        def one(carried: list[Value]) -> list[Value]:
            (place,) = carried
            following = take()
            f.choose(
                place < self["tiles"],
                lambda: self._stage(place),
                lambda: self._multiply(place - self["tiles"], following - self["tiles"]),
            )
            return [following]

        f.repeat(lambda carried: carried[0] < self.last, one, [take()])

    def _stage(self, tile: Value) -> None:
        f = self.f
        f.call(self.stage, self.record, tile, self.decoded)
        f.atomic_add(self._counter("staged"), 1, publish=True)

    def _multiply(self, item: Value, following: Value) -> None:
        """An item of panels, all rows."""
        f = self.f
        ready = self._counter("staged")
        f.repeat(lambda _: f.atomic_load(ready) < self["tiles"], lambda _: [], [])
        f.atomic_add(ready, 0, publish=True)  # from here on, this thread sees what others staged
        item_panels, blocks = self["item_panels"], self["blocks"]
        panel = item * item_panels
        count = f.minimum(item_panels, self["panels"] - panel)
        next_panel = f.minimum(following * item_panels, self["panels"] - item_panels)
        next_panel = f.maximum(next_panel, 0)
        last_cut = (blocks - 1).udiv(self["cut"]) * self["cut"]
        asks_ahead = self["way"].equals(FEW)

        def some_blocks(carried: list[Value]) -> list[Value]:
            (block,) = carried
            end = f.minimum(block + self["cut"], blocks)
            with f.when(asks_ahead & block.equals(last_cut)):
                self._ask_for_first_lines(next_panel)

            def some_panels(carried: list[Value]) -> list[Value]:
                (sub,) = carried
                after = sub + self["tile_panels"]
                ask_block = f.select(block < last_cut, end, 0)
                elsewhere = f.select(block < last_cut, panel, next_panel)
                ask_panel = f.select(after < count, panel + after, elsewhere)
                ask_block = f.select(after < count, block, ask_block)
                ask = self._weights_at(ask_panel, ask_block)
                self._panels(panel, sub, count - sub, (block, end), ask)
                return [after]

            f.repeat(lambda carried: carried[0] < count, some_panels, [f.value(0, I64)])
            return [end]

        f.repeat(lambda carried: carried[0] < blocks, some_blocks, [f.value(0, I64)])
        self._finish(panel, count)

    def _ask_for_first_lines(self, panel: Value) -> None:
        """Ask for the first lines of an item, which tiles that ask ahead do not ask for."""
        f = self.f
        lines = f.value(LINES_AHEAD, I64).udiv(self["tile_panels"])
        with f.range(panel, f.minimum(panel + self["item_panels"], self["panels"])) as each:
            start = self._weights_at(each, f.value(0, I64))
            with f.range(0, lines) as line:
                f.prefetch(f.offset(start, line * LINE, I8))

    def _weights_at(self, panel: Value, block: Value) -> Value:
        at = panel * self.panel_bytes + block * self.spec.format.block_bytes
        return self.f.offset(self["weights"], at, I8)

    def _panels(
        self, panel: Value, sub: Value, available: Value, cut: tuple[Value, Value], ask: Value
    ) -> None:
        """Some panels of an item, from `sub` on, and a cut of k: all tiles of rows."""
        f = self.f
        block, end = cut
        source = self._weights_at(panel + sub, block)
        count = end - block
        decoded_pitch = self["cut"] * FLOAT32.block_bytes
        w, pitch = source, self.panel_bytes

        def decoded(decode: Function) -> list[Value]:
            f.call(
                decode,
                source=source,
                pitch=self.panel_bytes,
                available=f.minimum(available, self["tile_panels"]),
                blocks=count,
                into=self.decoded,
                into_pitch=decoded_pitch,
            )
            return [self.decoded, decoded_pitch]

        if self.decode is not None:
            run, first = functools.partial(decoded, self.decode), self["way"].equals(DECODED)
            w, pitch = f.choose(first, run, lambda: [source, self.panel_bytes])
        bytes_ = self.spec.format.block_bytes
        share = (count * bytes_).udiv(self["tiles"])
        with f.range(0, self["tiles"]) as tile:
            first, rows = self._rows(tile)
            self._call_tile(
                rows,
                x=self._staged_at(first, rows, block),
                w=w,
                pitch=pitch,
                available=available,
                blocks=count,
                first=f.select(block.equals(0), f.value(1, I64), 0),
                sums=f.offset(self.scratch, first * self.pitch + sub * PANEL, F32),
                sums_pitch=self.pitch,
                ask=f.offset(ask, share * tile, I8),
                ask_pitch=self.panel_bytes,
                ask_step=f.maximum(self["ask_bytes"].udiv(self["tiles"]), 1),
                decoded=self.decoded,
            )

    def _call_tile(self, rows: Value, **given: Value) -> None:
        """Call the function for this number of rows and panels."""
        f = self.f
        for way, size, function in self.tiles:
            with f.when(rows.equals(size.rows) & self["way"].equals(way)):
                f.call(function, **given)

    def _rows(self, tile: Value) -> tuple[Value, Value]:
        """The first row of a tile, and its number of rows."""
        return rows_of_tile(self["rows"], self["tiles"], tile)

    def _staged_at(self, first: Value, rows: Value, block: Value) -> Value:
        words = self.spec.staged.group_words * 2  # of a row in a block
        at = (first * self["blocks"] + rows * block) * words
        return self.f.offset(self["staged_rows"], at, F32)

    def _finish(self, panel: Value, count: Value) -> None:
        f = self.f
        f.call_pointer(
            self["finish"],
            FINISH,
            record=self.record,
            arguments=self["arguments"],
            sums=self.scratch,
            panel=panel,
            count=count,
            row=f.value(0, I64),
            rows=self["rows"],
            sums_pitch=self.pitch,
        )


def rows_of_tile(rows: Value, tiles: Value, tile: Value) -> tuple[Value, Value]:
    """The first row of a tile, and its number of rows: as even as possible."""
    first = (rows * tile).udiv(tiles)
    return first, (rows * (tile + 1)).udiv(tiles) - first


def _write_stage(module: Module, spec: LinearSpec) -> Function:
    """Write the function that stages one tile of rows; `line` has room for a row of floats."""
    with module.function("stage", typed("ptr record, i64 tile, ptr line"), internal=True) as f:
        record, tile, line = f.parameters

        def get(name: str) -> Value:
            return f.field(LINEAR, record, name)

        first, rows = rows_of_tile(get("rows"), get("tiles"), tile)
        blocks = get("blocks")
        words = spec.staged.group_words * 2
        out = f.offset(get("staged_rows"), first * blocks * words, F32)
        stager = Stager(f, spec.staged)
        with f.range(0, rows) as row:
            read_row(f, spec.row, record, first + row, line)
            stager.scatter(line, blocks * BLOCK, f.offset(out, row, F32), rows)
    return f


def read_row(f: Function, spec: RowSpec, record: Value, row: Value, line: Value) -> None:
    """Write a row of x to `line`: floats after the norm, and zeros up to whole blocks."""

    def get(name: str) -> Value:
        return f.field(LINEAR, record, name)

    depth = get("depth")
    source = f.offset(get("x"), row * get("x_row"), storage(spec.x).memory)
    _copy_row(f, spec, source, step=get("x_column"), depth=depth, line=line)
    with f.range(depth, get("blocks") * BLOCK) as k:
        f.store(f.value(0.0, F32), line, k)
    if spec.norm != "none":
        epsilon = f.convert(get("epsilon"), F32)
        write_norm(f, spec.norm, line, depth, gain=get("gain"), bias=get("bias"), epsilon=epsilon)


def _copy_row(
    f: Function, spec: RowSpec, source: Value, *, step: Value, depth: Value, line: Value
) -> None:
    """Copy a row of x as floats: vectors if its numbers are neighbours."""
    stored, lanes = storage(spec.x), spec.target.lanes(F32)

    def copy(k: Value, at: Value, count: int) -> None:
        number = f.load(stored.memory.vector(count), source, at)
        f.store(stored.read(f, number, F32), line, k)

    def neighbours() -> None:
        whole = depth & -lanes
        with f.range(0, whole, lanes) as k:
            copy(k, k, lanes)
        with f.range(whole, depth) as k:
            copy(k, k, 0)

    def apart() -> None:
        with f.range(0, depth) as k:
            copy(k, k * step, 0)

    f.choose(step.equals(1), neighbours, apart)


def _write_decode(module: Module, spec: LinearSpec) -> Function:
    """Write the function that turns panels into panels of floats."""
    parameters = typed("ptr source, i64 pitch available blocks, ptr into, i64 into_pitch")
    with module.function("decode", parameters, internal=True) as f:
        given, format = f.given, spec.format
        loader = Loader(f, spec.target, format)
        with f.range(0, given["available"]) as panel:
            start = f.offset(given["source"], panel * given["pitch"], I8)
            target = f.offset(given["into"], panel * given["into_pitch"], I8)
            with f.range(0, given["blocks"]) as block:
                place = loader.place(start, block)
                out = f.offset(target, block * FLOAT32.block_bytes, I8)
                with f.range(0, GROUPS) as group:
                    loader.decode_group(place, group, f.offset(out, group * GROUP_BYTES, I8))
    return f
