"""The function that the tangent kernel calls for a user's mods.

    push(scores, tangents, maxima, arguments, b, h, q_idx, queries, kv_idx, keys)

    scores, maxima          as in `functions.py`
    tangents[key, query]    in: the tangent of the product of keys and queries; out: that of the
                            score after the mods, times log4(e) like the score; 0 if the query does
                            not read the key

Both come from the same scope, so what a mod and its derivative have in common is computed once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from quire.codegen.convention import PUSH
from quire.codegen.llvm.builder import Module, Value
from quire.codegen.mods.arguments import ModArguments
from quire.codegen.mods.functions import (
    Panel,
    existing,
    queries_of_panel,
    report,
    scopes_of_rows,
)
from quire.codegen.mods.loads import Lanes
from quire.codegen.phases.softmax import LOG4_E
from quire.codegen.phases.tiles import TileShape
from quire.ir.graph import Node


def write_push(
    module: Module,
    name: str,
    tile: TileShape,
    arguments: ModArguments,
    score: Node | None,
    masks: Sequence[Node],
    *,
    tangent: Node | None,
) -> None:
    """Write the function for one kind of tile. Without a `tangent`, tangents stay as they are."""
    with module.function(name, PUSH.parameters) as f:
        given, keys = f.given, f.given["keys"]
        rows, flag = scopes_of_rows(f, tile, arguments, queries_of_panel(f, tile))
        panel = Panel(f, tile, rows, tuple(masks), score=score, unit=LOG4_E, tangent=tangent)
        exists, wrong_at_once = existing(f, tile), panel.compute_rows()

        def push_key(j: Value, carried: list[Value]) -> list[Value]:
            best, wrong = carried[: len(rows)], carried[len(rows) :]
            before, moved = (tile.load_row(f, given[x], j) for x in ("scores", "tangents"))
            scopes = list(panel.at_key(Lanes(given["kv_idx"] + j), before, tangent=moved))
            after, wrong = panel.rewritten(scopes, before, exists, wrong)
            tile.store_row(f, after, given["scores"], j)
            if tangent is not None:
                pushed = [panel.pushed(scope) for scope in scopes]
                read = [x.differs(-math.inf) for x in after]
                kept = [f.select(x, t, 0.0) for x, t in zip(read, pushed, strict=True)]
                tile.store_row(f, kept, given["tangents"], j)
            return [*(f.maximum(b, s) for b, s in zip(best, after, strict=True)), *wrong]

        carry = [*tile.row(f, -math.inf), *panel.nothing_wrong()]
        ends = Lanes(given["kv_idx"]), Lanes(given["kv_idx"] + (keys - 1))
        carried = panel.choose(ends, lambda: f.loop(0, keys, push_key, carry=carry))
        tile.store_row(f, carried[: len(rows)], given["maxima"])
        report(f, flag, wrong_at_once, carried[len(rows) :])
