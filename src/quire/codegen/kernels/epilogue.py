"""The end of a linear layer: sums become results, by a graph of our ops, and are stored.

    finish(record, arguments, sums, panel, count, row, rows, sums_pitch)

The graph has the inputs `value`, `row` and `column`. Lanes run over the columns of a panel.
Captured tensors and constants are in `arguments`, as those of mods are
(`codegen/mods/arguments.py`). Without a graph the result is the value.

Columns may come in blocks of pairs: columns i and i + half of a block are partners. Then panels
alternate, one of first halves and one of second halves, and the graph has the inputs `other`, the
value of the partner, and `block`; `column` counts from the start of the block. Each pair has two
results, or one if `merges`, of the first half.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from quire.codegen.kernels.linear import FINISH, LINEAR
from quire.codegen.llvm.builder import Function, Module, Value
from quire.codegen.llvm.types import F32, I8, I64, Layout, typed
from quire.codegen.mods.arguments import ModArguments
from quire.codegen.mods.loads import Lanes
from quire.codegen.mods.lower import ELEMENT, KEY, RATES, Scope
from quire.codegen.phases.storage import storage
from quire.codegen.phases.weights import PANEL
from quire.ir.graph import Node

COLUMNS = Layout("columns", typed("i64 first count block column"))
"""An entry of the table of columns, for one panel: where its results go, how many there are, its
block of pairs, and the first column in that block; for plain columns, block 0 and `first`."""


class EpilogueSpec(NamedTuple):
    """What an epilogue is compiled for: its graph, and the dtype of y by name."""

    graph: Node | None
    arguments: ModArguments
    y: str
    pairs: bool = False
    merges: bool = False


def write_epilogue(spec: EpilogueSpec) -> Module:
    """Return a module with the function `finish`."""
    module = Module()
    with module.function(FINISH.name, FINISH.parameters) as f:
        _Epilogue(f, spec).write()
    return module


class _Epilogue:
    """Writes the loops over rows and panels."""

    def __init__(self, f: Function, spec: EpilogueSpec) -> None:
        self.f, self.spec = f, spec
        self.vector = F32.vector(PANEL)
        record = f.given["record"]
        names = ("y", "y_row", "columns", "first_row")
        self.y, self.y_row, self.columns, self.first_row = (
            f.field(LINEAR, record, name) for name in names
        )
        parameters, captured, self.flag = spec.arguments.read(f, f.given["arguments"])
        self.scope = Scope(f, PANEL, {}, parameters.get, captured)

    def write(self) -> None:
        f, given = self.f, self.f.given
        step = 2 if self.spec.pairs else 1
        with f.range(0, given["rows"]) as place:
            line = f.offset(given["sums"], place * given["sums_pitch"], F32)
            row = given["row"] + place
            uniform = self.scope.inside({"row": Lanes(row + self.first_row)}, *RATES)
            with f.range(0, given["count"], step) as panel:
                values = [f.load(self.vector, line, (panel + i) * PANEL) for i in range(step)]
                for i in range(1 if self.spec.merges else step):
                    spare = f.offset(line, (panel + i) * PANEL, F32)
                    self._store(uniform, row, given["panel"] + panel + i, values, spare)
                    values.reverse()

    def _store(
        self, uniform: Scope, row: Value, panel: Value, values: Sequence[Value], spare: Value
    ) -> None:
        """Compute the results of a panel of one row, and store those that exist."""
        f, stored = self.f, storage(self.spec.y)
        entry = f.offset(self.columns, panel * COLUMNS.size, I8)
        first, count = (f.field(COLUMNS, entry, name) for name in ("first", "count"))
        result = self._computed(uniform, entry, count, *values)
        out = f.offset(self.y, row * self.y_row + first, stored.memory)
        raw = stored.write(f, result)

        def part() -> None:
            f.store(raw, spare)
            with f.range(0, count) as i:
                f.store(f.load(stored.memory, spare, i), out, i)

        f.choose(count.equals(PANEL), lambda: f.store(raw, out), part)

    def _computed(
        self, uniform: Scope, entry: Value, count: Value, value: Value, *other: Value
    ) -> Value:
        graph = self.spec.graph
        if graph is None:
            return value
        f = self.f
        column, block = (f.field(COLUMNS, entry, name) for name in ("column", "block"))
        inputs = {"column": Lanes(column, 1), "value": Lanes(vector=value)}
        if other:
            inputs |= {"other": Lanes(vector=other[0]), "block": Lanes(block)}
        scope = uniform.inside(inputs, KEY, ELEMENT)
        result = scope.as_vector(scope.lower(graph))
        lanes = I64.vector(PANEL)
        exists = f.iota(lanes) < f.splat(count, lanes)
        for mistake in (wrong for rate in RATES for wrong in scope.mistakes[rate]):
            seen = (mistake if mistake.type.lanes else f.splat(mistake, exists.type)) & exists
            with f.when(f.any_lane(seen)):
                f.store(f.value(1, I8), self.flag)
        return result
