"""The functions that the decode kernel calls (`row_nest.py`, `decode.py`)."""

from __future__ import annotations

from quire.codegen.convention import KernelSpec
from quire.codegen.llvm.builder import Module
from quire.codegen.phases.merge import write_merge
from quire.codegen.phases.row_keys import (
    NEAR,
    STREAM,
    set_sizes,
    write_multiply_kept,
    write_multiply_keys,
)
from quire.codegen.phases.row_softmax import write_exponentiate, write_scale_weights
from quire.codegen.phases.row_stream import (
    MOST_AHEAD,
    write_copy,
    write_gather_scales,
    write_point,
)
from quire.codegen.phases.row_values import (
    write_add_read_values,
    write_multiply_columns,
    write_multiply_values,
)
from quire.codegen.phases.staging import write_gather, write_scatter
from quire.codegen.phases.storage import storage


def asked_width(spec: KernelSpec) -> int:
    """The width of values for which the softmax of a set asks ahead; 0 if it asks for none.

    It asks for a line with each vector of scores. So many rows must be in the table of addresses
    behind those of a block, which has too few for the narrowest vectors.
    """
    lines = set_sizes(spec.tile)[0] * spec.target.block_kv // spec.tile.lanes
    return spec.value_dim if lines <= MOST_AHEAD else 0


class RowPhases:
    """The functions that the kernel calls, some by dtype or by the number of rows of a set."""

    def __init__(self, module: Module, spec: KernelSpec) -> None:
        tile, sizes = spec.tile, set_sizes(spec.tile)
        key, value = storage(spec.key), storage(spec.value)
        read = {stored.name: stored for stored in (key, value)}

        careful = write_add_read_values(module, tile, value)
        self.gather = write_gather(module, tile, storage(spec.query))
        self.points = {name: write_point(module, tile, stored) for name, stored in read.items()}
        self.copies = {name: write_copy(module, tile, stored) for name, stored in read.items()}
        self.scatter = write_scatter(module, tile, storage(spec.out))
        self.multiply_keys = {
            (rows, turns): write_multiply_keys(module, tile, key, rows, spec.head_dim, turns=turns)
            for rows in sizes
            for turns in (NEAR, STREAM)
        }
        self.keep_keys = write_multiply_keys(
            module, tile, key, sizes[0], spec.head_dim, turns=NEAR, keep=True
        )
        self.multiply_kept = {rows: write_multiply_kept(module, tile, key, rows) for rows in sizes}
        self.multiply_values = {
            rows: write_multiply_values(module, tile, value, rows, careful, width=spec.value_dim)
            for rows in sizes
        }
        self.multiply_columns = write_multiply_columns(module, tile, value, sizes[0], careful)
        self.gather_scales = {
            name: write_gather_scales(module, tile, stored) for name, stored in read.items()
        }
        self.scale_weights = write_scale_weights(module, tile)
        self.exponentiate = {
            rows: write_exponentiate(
                module, tile, value, rows, asked_width(spec), weighted=spec.weighted
            )
            for rows in sizes
        }
        self.merge = write_merge(module, tile, tile.lanes, weighted=spec.weighted)
