"""The functions that a kernel calls for mods whose result is the weight of a value.

`weigh` is for a weight function: it takes the place of a score_mod's function (`functions.py`) and
has its parameters. It leaves `maxima` as they are. A key that is not read gets UNREAD, -0.0, see
`phases/tiles.py`, so no other weight may be -0.0.

`reweigh` is for a prob_mod and for dropout, after the softmax. A weight of 0 stays as it is: its
key is not read, and indices need not be in range, or its score is too far below the maximum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from quire.codegen.convention import REWRITE, ROW_REWRITE
from quire.codegen.llvm.builder import Module, Value
from quire.codegen.mods.arguments import ModArguments
from quire.codegen.mods.functions import (
    Panel,
    existing,
    lanes_below,
    queries_of_panel,
    report,
    scopes_of_rows,
)
from quire.codegen.mods.loads import Lanes
from quire.codegen.phases.tiles import UNREAD, TileShape
from quire.ir.graph import Node

POSITIVE = ("sigmoid", "exp", "exp2")  # what these give is not -inf, and not -0.0


def write_weigh(
    module: Module,
    name: str,
    tile: TileShape,
    arguments: ModArguments,
    weight: Node,
    masks: Sequence[Node],
) -> None:
    """Write the function that turns a panel of scores into weights."""
    with module.function(name, REWRITE.parameters) as f:
        scores, kv_idx, keys = (f.given[name] for name in ("scores", "kv_idx", "keys"))
        rows, flag = scopes_of_rows(f, tile, arguments, queries_of_panel(f, tile))
        panel = Panel(f, tile, rows, masks=tuple(masks), score=weight)
        exists, wrong_at_once = existing(f, tile), panel.compute_rows()

        def marked(found: Value) -> Value:
            if weight.op in POSITIVE and not masks:
                return found
            kept = found if weight.op in POSITIVE else found + 0.0
            return f.select(found.equals(-math.inf), UNREAD, kept)

        def weigh_key(j: Value, wrong: list[Value]) -> list[Value]:
            before = tile.load_row(f, scores, j)
            after, wrong = panel.rewrite(Lanes(kv_idx + j), before, exists, wrong)
            tile.store_row(f, [marked(x) for x in after], scores, j)
            return wrong

        ends = Lanes(kv_idx), Lanes(kv_idx + (keys - 1))
        wrong = panel.choose(ends, lambda: f.loop(0, keys, weigh_key, carry=panel.nothing_wrong()))
        report(f, flag, wrong_at_once, wrong)


def write_reweigh(
    module: Module, name: str, tile: TileShape, arguments: ModArguments, mod: Node
) -> None:
    """Write the function for a panel of weights."""
    with module.function(name, REWRITE.parameters) as f:
        weights, kv_idx, keys = (f.given[name] for name in ("scores", "kv_idx", "keys"))
        rows, flag = scopes_of_rows(f, tile, arguments, queries_of_panel(f, tile))
        panel = Panel(f, tile, rows, masks=(), score=mod)
        exists, wrong_at_once = existing(f, tile), panel.compute_rows()

        def reweigh_key(j: Value, wrong: list[Value]) -> list[Value]:
            before = tile.load_row(f, weights, j)
            after, wrong = _reweighed(panel, Lanes(kv_idx + j), before, exists, wrong)
            tile.store_row(f, after, weights, j)
            return wrong

        ends = Lanes(kv_idx), Lanes(kv_idx + (keys - 1))
        loop = panel.choose(ends, lambda: f.loop(0, keys, reweigh_key, carry=panel.nothing_wrong()))
        report(f, flag, wrong_at_once, loop)


def write_row_reweigh(
    module: Module, name: str, tile: TileShape, arguments: ModArguments, mod: Node
) -> None:
    """Write the function for the weights of one query."""
    with module.function(name, ROW_REWRITE.parameters) as f:
        weights, kv_idx, keys = (f.given[name] for name in ("scores", "kv_idx", "keys"))
        skipped, step = f.given["skipped"], tile.lanes
        rows, flag = scopes_of_rows(f, tile, arguments, [Lanes(f.given["q_idx"])])
        panel = Panel(f, tile, rows, masks=(), score=mod)
        wrong_at_once = panel.compute_rows()

        def reweigh_keys(j: Value, wrong: list[Value]) -> list[Value]:
            exists = lanes_below(f, tile, keys - j) & ~lanes_below(f, tile, skipped - j)
            before = [tile.load(f, weights, j)]
            after, wrong = _reweighed(panel, Lanes(kv_idx + j, 1), before, [exists], wrong)
            tile.store(f, after[0], weights, j)
            return wrong

        first, last = skipped & -step, (keys - 1) & -step
        ends = Lanes(kv_idx + first, 1), Lanes(kv_idx + last, 1)
        wrong = panel.choose(
            ends,
            lambda: f.loop(first, keys, reweigh_keys, carry=panel.nothing_wrong(), step=step),
        )
        report(f, flag, wrong_at_once, wrong)


def _reweighed(
    panel: Panel,
    kv_idx: Lanes,
    before: Sequence[Value],
    exists: Sequence[Value],
    wrong: Sequence[Value],
) -> tuple[list[Value], list[Value]]:
    """The weights after the mod, and the lanes with mistakes so far."""
    live = [x & weight.differs(0.0) for x, weight in zip(exists, before, strict=True)]
    after, wrong = panel.rewrite(kv_idx, before, live, wrong)
    both = zip(live, after, before, strict=True)
    return [panel.f.select(x, changed + 0.0, weight) for x, changed, weight in both], wrong
