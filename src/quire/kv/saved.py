"""From a sequence in a cache to the content of a file, and back. `files` writes and reads files."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from torch import Tensor

from quire.checks.arguments import dtype_name
from quire.errors import SequenceFileError
from quire.kv.files import Header
from quire.kv.groups import LayerGroup
from quire.kv.pages import PageShape
from quire.kv.table import PageTable, Plan


def header(
    shape: PageShape, groups: Sequence[LayerGroup], row: int | None = None, length: int = 0
) -> Header:
    """Return the header for the sequence in `row` with `length` tokens, by default an empty one."""
    tables = [group.table for group in groups]
    return Header(
        length=length,
        starts=[0 if row is None else table.start(row) for table in tables],
        layers=[list(group.layers) for group in groups],
        windows=[table.window for table in tables],
        heads=shape.heads,
        head_dim=shape.head_dim,
        value_dim=shape.value_dim,
        dtype=dtype_name(shape.dtype),
    )


def rows_of(groups: Sequence[LayerGroup], row: int, length: int) -> dict[str, Tensor]:
    """Return the rows of a sequence in every layer, in the dtype of pages: key.0, value.0, ..."""
    tensors: dict[str, Tensor] = {}
    for group in groups:
        slots = group.held_slots(row, length)
        for layer, pages in group.layers.items():
            tensors |= {f"{part}.{layer}": each for part, each in pages.read(slots).items()}
    return tensors


def plans(path: str | os.PathLike[str], read: Header, groups: Sequence[LayerGroup]) -> list[Plan]:
    """Return the pages that a sequence takes in each group. Raise if a group cannot hold it."""
    for group, start in zip(groups, read.starts, strict=True):
        _expect_start(path, group.table, start, read.length)
    return [
        group.table.plan_new(start, read.length)
        for group, start in zip(groups, read.starts, strict=True)
    ]


def place(
    groups: Sequence[LayerGroup], row: int, length: int, tensors: Mapping[str, Tensor]
) -> None:
    """Write the tensors that `rows_of` has returned to the pages of another sequence."""
    for group in groups:
        slots = group.held_slots(row, length)
        for layer, pages in group.layers.items():
            pages.place(slots, {part: tensors[f"{part}.{layer}"] for part in pages.shape.parts})


def _expect_start(path: str | os.PathLike[str], table: PageTable, start: int, length: int) -> None:
    size = table.page_size
    if start % size or start > table.reach(length) * size:
        raise SequenceFileError(
            f"the rows of a file must begin with a page of {size} and reach back as far as the "
            f"window of {table.window}, but those of {os.fspath(path)!r} begin at {start}. Load it "
            f"into a cache with the page size that it was saved from."
        )
