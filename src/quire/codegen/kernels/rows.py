"""Norms and activations row by row: what surrounds a product (`linear.py`), without the product.

    record      LINEAR; `tiles` is 0, and there is one item for each row

A thread takes a row, reads it as floats with its norm, and calls the epilogue for all its columns.
So a row has the bits of a norm that is fused with a product, whatever the rows beside it are, and
wherever in memory it lies.
"""

from __future__ import annotations

from quire.codegen.kernels.linear import FINISH, LINEAR, RowSpec, read_row
from quire.codegen.llvm.builder import Module, Value
from quire.codegen.llvm.types import I8, I64, PTR

NAME = "rows"


def write_rows(spec: RowSpec) -> Module:
    """Return a module with the kernel NAME: void(LINEAR record)."""
    module = Module()
    with module.function(NAME, {"record": PTR}) as f:
        record = f.parameters[0]

        def get(name: str) -> Value:
            return f.field(LINEAR, record, name)

        def take(counter: str) -> Value:
            return f.atomic_add(f.offset(record, LINEAR.index(counter), I64), 1)

        line = f.offset(get("scratch"), take("slots") * get("scratch_bytes"), I8)

        def one(carried: list[Value]) -> list[Value]:
            (row,) = carried
            read_row(f, spec, record, row, line)
            f.call_pointer(
                get("finish"),
                FINISH,
                record=record,
                arguments=get("arguments"),
                sums=line,
                panel=f.value(0, I64),
                count=get("panels"),
                row=row,
                rows=f.value(1, I64),
                sums_pitch=f.value(0, I64),
            )
            return [take("next")]

        f.repeat(lambda carried: carried[0] < get("items"), one, [take("next")])
    return module
