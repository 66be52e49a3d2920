"""Tiles of a linear layer: some rows of x times some panels of weights.

            w: panel | panel, k = 0, 1, 2, ...
            |-------|-------|
    x row 0 |  sum  |  sum  |      x is staged (`activations.py`): one pointer for all rows
    x row 1 |  sum  |  sum  |

Every number that a tile gives is one chain of fused multiply-adds in ascending k. So its bits
depend neither on the number of rows nor on the shape of the tile. If x is quantised, a chain has
one multiply-add for each group of k, whose sum of integers is exact.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import NamedTuple

from quire.codegen.llvm.builder import Function, Module, Value
from quire.codegen.llvm.target import Target
from quire.codegen.llvm.types import F32, I8, I32, I64, typed
from quire.codegen.phases.activations import HEAD, Activations
from quire.codegen.phases.weights import (
    BLOCK,
    FLOAT32,
    GROUP,
    GROUPS,
    PANEL,
    Loader,
    Scale,
    WeightFormat,
)

TILE_PARAMETERS = {
    **typed("ptr x w, i64 pitch available blocks first, ptr sums, i64 sums_pitch"),
    **typed("ptr ask, i64 ask_pitch ask_step, ptr decoded"),
}
"""What a tile is given:

    x           the staged rows
    w, pitch    its first panel, and the bytes from panel to panel
    available   how many panels exist; further ones repeat the last, and nobody reads their sums
    blocks      blocks of k
    first       1 if these are the first blocks, 0 if what they give is added to `sums`
    sums        [row][panel][16], with `sums_pitch` numbers from row to row
    ask         memory that is read next: lines of each panel per turn, `ask_step` bytes further on
                (tiles of few rows ask for what is ahead of what they read, and then for this)
    decoded     room for a group of floats
"""
LINE = 64  # bytes of the cache
LINES_FURTHER, LINES_FURTHER_OF_INTEGERS = 32, 16
"""How many lines of each panel a tile of few rows asks for before it uses them: rows of floats, and
rows of integers (Zen 5)."""
LINES_AHEAD = 24
"""How many lines of all its panels together it asks for as well if weights have scales. Twice as
many read less (Zen 4); floats are read faster without (Zen 5)."""
UNROLLED = 2  # steps of k in a turn of the loop over floats


FEW, DIRECT, DECODED = 0, 1, 2
"""How rows are computed: by one tile that reads weights once, by tiles that decode weights
themselves, or by tiles of weights that were decoded to memory before."""


class TileSize(NamedTuple):
    """The rows and panels of a tile."""

    rows: int
    panels: int


class TileSizes(NamedTuple):
    """The tiles of a processor: one size for each small number of rows, and `many` for more.

    Few rows are limited by memory, so they read several panels at once: each is a stream of memory.
    How many is by measurement (`benchmarks/linear.py --only reading`).
    """

    few: tuple[TileSize, ...]
    many: TileSize
    direct: int  # the most rows whose tiles decode weights themselves

    def way(self, rows: int) -> int:
        """Return how so many rows are computed: FEW, DIRECT or DECODED."""
        if rows <= len(self.few):
            return FEW
        return DIRECT if rows <= self.direct else DECODED

    @staticmethod
    def of(target: Target, format: WeightFormat, staged: Activations) -> TileSizes:
        """Return the tiles that fit the registers."""
        vectors = PANEL // min(PANEL, target.lanes(F32))  # of a panel
        plenty = target.registers == 32
        sums = (24 if plenty else 12) // vectors  # rows x panels
        # Beside its sums, a vector of a panel keeps its words, and scales with their offsets. Where
        # registers are few, offsets stay in memory. Decoding has constants of its own.
        decoded = format.scaled and not staged.words
        kept = 0 if staged.words or format.step == 1 else 1
        kept += (2 if plenty else 1) if decoded else 0
        # A sum of integers, and one of floats, which rests in memory where registers are few.
        each = 2 if staged.words and plenty else 1
        panels = 3 if vectors == 1 else 1
        most = 6 if vectors == 1 and format.scaled else 4
        few = []
        for rows in range(1, 5):
            room = target.registers - (6 if plenty and decoded else 4) - (rows if plenty else 0)
            wide = min(most, room // (vectors * (rows * each + kept)))
            if wide > panels:
                few.append(TileSize(rows, wide))
        many = TileSize(sums // each // panels, panels)
        own = (2 if format.step > 1 else 1) + (2 if decoded else 0)
        fixed = 4 if decoded else 1
        direct = (target.registers - fixed) // (vectors * panels) - own
        if decoded and not plenty:
            direct = many.rows  # one tile, which decodes a group at a time to memory
        elif format.name == "float32" or staged.words or direct >= many.rows:
            direct = sys.maxsize
        return TileSizes(tuple(few), many, direct)

    @property
    def decodes(self) -> bool:
        """Whether there are rows whose weights are decoded before."""
        return self.direct < sys.maxsize

    @property
    def of_many(self) -> list[TileSize]:
        """The tiles of many rows, which are cut evenly, so a tile may be half as high as `many`."""
        least = min((self.many.rows + 1) // 2, len(self.few) + 1)
        return [TileSize(rows, self.many.panels) for rows in range(least, self.many.rows + 1)]


def bytes_of_turn(format: WeightFormat, way: int) -> int:
    """Return the bytes of a panel that one turn of a tile reads, or has others read (DECODED)."""
    turn = UNROLLED if way == DECODED else max(UNROLLED, format.step)
    return format.block_bytes * turn // BLOCK


def write_tile(
    module: Module,
    target: Target,
    format: WeightFormat,
    staged: Activations,
    size: TileSize,
    *,
    once: bool = False,
    lines: int = 1,
) -> Function:
    """Write the function that computes a tile; `once` if no other tile reads its weights.

    Else each of its turns reads so many `lines` of a panel in memory, and asks for as many.
    """
    name = f"tile_{size.rows}x{size.panels}_{format.name}" + "_once" * once
    with module.function(name, TILE_PARAMETERS, internal=True) as f:
        tile = _Tile(f, Loader(f, target, format), staged, size)
        tile.once, tile.lines = once, lines
        tile.write()
    return f


class _Tile:
    """Writes a tile. Vectors are numbered panel by panel."""

    once = False  # if weights are read once, they need not stay in the cache
    lines = 1
    further: Value | None = None  # how many bytes further a tile of few rows asks

    def __init__(self, f: Function, load: Loader, staged: Activations, size: TileSize) -> None:
        self.f, self.load, self.staged = f, load, staged
        self.rows, self.panels = size
        self.ahead = LINES_AHEAD // self.panels * LINE if load.format.scaled else None
        self.per_panel = len(load.parts)
        self.vectors = self.panels * self.per_panel
        self.float = F32.vector(load.lanes)
        last = f.given["available"] - 1
        self.places = [f.minimum(f.value(p, I64), last) for p in range(self.panels)]
        self.starts = [f.offset(f.given["w"], at * f.given["pitch"], I8) for at in self.places]

    def write(self) -> None:
        f = self.f
        before = [f.value(0.0, self.float)] * (self.rows * self.vectors)
        step, body = 1, self._integer_block
        if not self.staged.words and self.load.format.scaled:
            plenty = self.once or self.load.target.registers == 32
            body = self._scaled_block if plenty else self._decoded_block
        elif not self.staged.words:
            body, step = self._turn, max(UNROLLED, self.load.format.step)
        stop = f.given["blocks"] * (BLOCK if step > 1 else 1)
        _, *after = f.loop(0, stop, body, carry=[f.given["ask"], *before], step=step)

        def add() -> list[Value]:
            places = range(len(after))
            return [f.load(self.float, *self._sum_at(place)) + after[place] for place in places]

        for place, value in enumerate(f.choose(f.given["first"].equals(1), lambda: after, add)):
            f.store(value, *self._sum_at(place))

    def _ask(self, ask: Value, places: Sequence[Value]) -> Value:
        """Ask for lines of each panel that is read next; return where the next lines are."""
        f = self.f
        if self.once:
            for place in places:
                self._ask_for(place)
            return ask
        for p, line in itertools.product(range(self.panels), range(self.lines)):
            part = f.given["ask_step"].udiv(self.lines) * line if line else 0
            f.prefetch(f.offset(ask, f.given["ask_pitch"] * p + part, I8), 3)
        return f.offset(ask, f.given["ask_step"], I8)

    def _ask_for(self, place: Value) -> None:
        """Ask for the line that is a little ahead of a place, and for one that is further."""
        for bytes_ in (self.ahead, self.further):
            if bytes_ is not None:
                self.f.prefetch(self.f.offset(place, bytes_, I8))

    def _sum_at(self, place: int) -> tuple[Value, int]:
        row, vector = divmod(place, self.vectors)
        pitch = self.f.given["sums_pitch"]
        return self.f.offset(self.f.given["sums"], pitch * row, F32), vector * self.load.lanes

    # --- floats

    def _turn(self, block: Value, carried: list[Value]) -> list[Value]:
        """Some steps of k, from weights that need no scale."""
        f, step = self.f, self.load.format.step
        ask, *sums = carried
        for u in range(0, max(UNROLLED, step), step):
            k = block + u
            x = f.offset(f.given["x"], k * self.rows, F32)
            at = k.udiv(step) * self.load.format.step_bytes
            places = [f.offset(start, at, I8) for start in self.starts]
            if self.once and u == 0:
                ahead = LINES_FURTHER * LINE * BLOCK // self.load.format.block_bytes
                stop = f.given["blocks"] * BLOCK
                self.further = self._further(k + ahead < stop, LINES_FURTHER * LINE)
            if u == 0 or (self.once and u // step * self.load.format.step_bytes % LINE == 0):
                ask = self._ask(ask, places)
            sums = self._multiply(x, places, [], sums)
        return [ask, *sums]

    def _scaled_block(self, block: Value, carried: list[Value]) -> list[Value]:
        """A block of integers that become floats."""
        f, format = self.f, self.load.format
        blocks = self._blocks(block)

        def group(g: Value, carried: list[Value]) -> list[Value]:
            scales = [scale for at in blocks for scale in self.load.scales(at, g)]
            first = (block * GROUPS + g) * GROUP

            def word(i: Value, carried: list[Value]) -> list[Value]:
                ask, *sums = carried
                places = self._words_at(blocks, g, i)
                ask = self._ask(ask, places)
                x = f.offset(f.given["x"], (first + i * format.step) * self.rows, F32)
                return [ask, *self._multiply(x, places, scales, sums)]

            return f.loop(0, GROUP // format.step, word, carry=carried)

        return f.loop(0, GROUPS, group, carry=carried)

    def _decoded_block(self, block: Value, carried: list[Value]) -> list[Value]:
        """The same where registers are few: a group is decoded to memory before it is multiplied.

        The processor decodes the next group while it multiplies this one.
        """
        f, step, decoded = self.f, self.load.format.step, self.f.given["decoded"]
        (place,) = self._blocks(block)
        floats = _Tile(f, Loader(f, self.load.target, FLOAT32), self.staged, TileSize(self.rows, 1))

        def group(g: Value, carried: list[Value]) -> list[Value]:
            self.load.decode_group(place, g, decoded)
            first = (block * GROUPS + g) * GROUP

            def turn(k: Value, carried: list[Value]) -> list[Value]:
                ask, *sums = carried
                ask = self._ask(ask, [])
                for u in range(step):
                    x = f.offset(f.given["x"], (first + k + u) * self.rows, F32)
                    row = f.offset(decoded, (k + u) * PANEL, F32)
                    sums = floats._multiply(x, [row], [], sums)
                return [ask, *sums]

            return f.loop(0, GROUP, turn, carry=carried, step=step)

        return f.loop(0, GROUPS, group, carry=carried)

    def _blocks(self, block: Value) -> list[Value]:
        """Where a block of each panel begins; its header is asked for ahead, as words are."""
        f = self.f
        blocks = [self.load.place(start, block) for start in self.starts]
        if self.once:
            size = self.load.format.block_bytes
            lines = LINES_FURTHER_OF_INTEGERS if self.staged.words else LINES_FURTHER
            ahead = max(1, round(lines * LINE / size))
            self.further = self._further(block + ahead < self.f.given["blocks"], ahead * size)
            for place, line in itertools.product(
                blocks, range(0, self.load.format.header_bytes, LINE)
            ):
                self._ask_for(f.offset(place, line, I8))
        return blocks

    def _further(self, inside: Value, size: int) -> Value:
        """How far it is to what is asked for early: `size` bytes, or more if a cut ends before."""
        f = self.f
        end = f.given["blocks"] * self.load.format.block_bytes
        beyond = f.address(f.given["ask"]) - f.address(f.given["w"]) - end
        return f.select(inside, 0, beyond) + size

    def _words_at(self, blocks: Sequence[Value], group: Value, word: Value) -> list[Value]:
        format = self.load.format
        at = (group * (GROUP // format.step) + word) * format.step_bytes + format.header_bytes
        return [self.f.offset(block, at, I8) for block in blocks]

    def _multiply(
        self, x: Value, places: Sequence[Value], scales: Sequence[Scale], sums: list[Value]
    ) -> list[Value]:
        """The steps of k of one load. Loads stand beside their use, since LLVM keeps the order."""
        words = [word for place in places for word in self.load.words(place)]
        for j in range(self.load.format.step):
            sums = self._outer(x, j, words, scales, sums)
        return sums

    def _outer(
        self,
        x: Value,
        j: int,
        words: Sequence[Value],
        scales: Sequence[Scale],
        sums: list[Value],
    ) -> list[Value]:
        """One step of k: whichever of x and w are fewer stay in registers."""
        f, result = self.f, list(sums)

        def number(r: int) -> Value:
            return f.splat(f.load(F32, x, j * self.rows + r), self.float)

        def weight(v: int) -> Value:
            return self.load.decode(words[v], j, scales[v] if scales else None)

        if self.rows <= self.vectors:
            numbers = [number(r) for r in range(self.rows)]
            for v in range(self.vectors):
                w = weight(v)
                for r, each in enumerate(numbers):
                    place = r * self.vectors + v
                    result[place] = f.fma(each, w, sums[place])
        else:
            weights = [weight(v) for v in range(self.vectors)]
            for r in range(self.rows):
                each = number(r)
                for v, w in enumerate(weights):
                    place = r * self.vectors + v
                    result[place] = f.fma(each, w, sums[place])
        return result

    # --- integers

    def _integer_block(self, block: Value, carried: list[Value]) -> list[Value]:
        """A block of integers that are multiplied by integers."""
        f, staged = self.f, self.staged
        blocks = self._blocks(block)

        def group(g: Value, carried: list[Value]) -> list[Value]:
            ask, *sums = carried
            at = (block * GROUPS + g) * (staged.group_words * self.rows)
            x = f.offset(f.given["x"], at, F32)
            start = [
                start for r in range(self.rows) for start in [self._begin(x, r)] * self.vectors
            ]

            def word(i: Value, carried: list[Value]) -> list[Value]:
                ask, *dots = carried
                places = self._words_at(blocks, g, i)
                ask = self._ask(ask, places)
                return [ask, *self._dots(x, i, places, dots)]

            words = GROUP // self.load.format.step
            ask, *dots = f.loop(0, words, word, carry=[ask, *start])
            scales = [scale for at in blocks for scale in self.load.scales(at, g)]
            return [ask, *self._scaled(x, dots, scales, sums)]

        return f.loop(0, GROUPS, group, carry=carried)

    def _begin(self, x: Value, r: int) -> Value:
        """Where a sum of integers begins: what the zero of the weights adds to it is taken off."""
        f, zero, type = self.f, self.load.format.zero, I32.vector(self.load.lanes)
        if not zero:
            return f.value(0, type)
        return f.splat(self.staged.total(f, x, self.rows, r) * -zero, type)

    def _dots(self, x: Value, i: Value, places: Sequence[Value], dots: list[Value]) -> list[Value]:
        f, staged = self.f, self.staged
        fours = self.load.format.step // 4  # in a word
        result = list(dots)
        words = [word for place in places for word in self.load.words(place)]
        for half in range(fours):
            first = (i * fours + half) * staged.words + HEAD
            here = f.offset(x, first * self.rows, I32)

            def broadcast(r: int, at: int, here: Value = here) -> Value:
                return f.splat(f.load(I32, here, at * self.rows + r), I32.vector(self.load.lanes))

            numbers = [self.load.bytes_of(word)[half] for word in words]
            for r in range(self.rows):
                given = [broadcast(r, at) for at in range(staged.words)]
                for v, four in enumerate(numbers):
                    place = r * self.vectors + v
                    result[place] = staged.dot(f, given.__getitem__, four, result[place])
        return result

    def _scaled(
        self, x: Value, dots: Sequence[Value], scales: Sequence[Scale], sums: Sequence[Value]
    ) -> list[Value]:
        """sum + dot * (scale of x * scale of w), and + (total * scale of x) * offset of w."""
        f, result = self.f, []
        for r in range(self.rows):
            factor = self.staged.scale(f, x, r)
            wide = f.splat(factor, self.float)
            total = f.convert(self.staged.total(f, x, self.rows, r), F32) * factor
            for v, (scale, offset) in enumerate(scales):
                place = r * self.vectors + v
                value = f.fma(f.convert(dots[place], F32), wide * scale, sums[place])
                if self.load.format.shifted:
                    value = f.fma(f.splat(total, self.float), offset, value)
                result.append(value)
        return result
