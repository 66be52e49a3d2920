"""Forward-mode AD: the time of torch.func.jvp, as a multiple of the time of a forward pass."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from _race import Table, race, run_parts
from torch import Tensor

from quire import flex_attention
from quire.mods import causal

HEADS, LENGTH = 8, 2048


def query(table: Table, seconds: float, threads: int) -> None:
    """A tangent of the query alone."""
    _row(table, seconds, threads, width=64, moved=1)


def operands(table: Table, seconds: float, threads: int) -> None:
    """Tangents of query, key and value."""
    _row(table, seconds, threads, width=64, moved=3)


def wide(table: Table, seconds: float, threads: int) -> None:
    """Tangents of query, key and value, with a head dim of 128."""
    _row(table, seconds, threads, width=128, moved=3)


def _row(table: Table, seconds: float, threads: int, *, width: int, moved: int) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(1, HEADS, LENGTH, width) for _ in range(3)]
    tangents = [torch.randn_like(x) for x in tensors[:moved]]
    attend: Callable[..., Tensor] = functools.partial(flex_attention, mask_mod=causal)

    def pushed() -> object:
        rest = tensors[moved:]
        return torch.func.jvp(
            lambda *some: attend(*some, *rest), tuple(tensors[:moved]), tuple(tangents)
        )

    times = race({"forward": lambda: attend(*tensors), "jvp": pushed}, seconds)
    names = ", ".join(("query", "key", "value")[:moved])
    table.add(
        f"causal, [1, {HEADS}, {LENGTH}, {width}], tangents of {names}",
        times["jvp"] / times["forward"],
        "x the time of forward",
        "<= 2.5",
        threads=threads,
        forward_ms=round(times["forward"] * 1e3, 2),
    )


if __name__ == "__main__":
    run_parts("jvp", __doc__, (query, operands, wide))
