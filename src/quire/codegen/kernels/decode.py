"""The decode kernel, for few queries: lanes run over keys and over columns of values.

    for every piece of keys of every key head and sequence (items; `row_group` query heads each):
        for every few blocks of keys that the rows attend to, in ascending order:
            scores  = keys . queries              for a set of rows at a time
            scores  = mod(scores)                 row by row, then block by block
            weights = exp4(scores - maximum)
            out     = out alpha + weights . values
        leave the partial result in a slot; after the last piece of a sequence:
            merge its pieces, and write out / sum to the user's tensor

The forward kernel computes whole panels, whether or not there are as many queries as a panel has
lanes. Here the time is that of reading keys and values once, for all rows of a group. What happens
with one block of keys is in `row_nest.py`.
"""

from __future__ import annotations

import math

from quire.codegen.convention import PARTIAL_STATES, KernelSpec, partial_stride
from quire.codegen.kernels.items import Member, Piece, QueryBlock
from quire.codegen.kernels.nest import entry
from quire.codegen.kernels.pieces import MERGED, Pieces
from quire.codegen.kernels.row_nest import Row, RowNest
from quire.codegen.kernels.row_phases import RowPhases
from quire.codegen.llvm.builder import Module, Value
from quire.codegen.llvm.types import I64
from quire.codegen.phases import observe
from quire.codegen.phases.merge import STATES
from quire.codegen.phases.row_stream import unfold_row
from quire.codegen.phases.softmax import Closed, close, sink_of
from quire.codegen.phases.storage import storage
from quire.codegen.phases.tiles import apply_share


def write_decode(spec: KernelSpec) -> Module:
    """The kernel as a module that exports `ENTRY`: void(KERNEL record), called by every thread."""
    module = Module()
    phases = RowPhases(module, spec)
    with entry(module) as f:
        nest = _DecodeNest(spec, f, phases)
        with nest.numbers() as number:
            nest.attend(nest.items.piece(number))
    return module


class _DecodeNest(RowNest):
    """The loop nest: from the queries of a piece to its partial result, or to the result."""

    def attend(self, piece: Piece) -> None:
        """Compute one piece, and write the results of members whose last piece it is."""
        f = self.f
        for name in ("key", "value"):
            self.place(piece.whole, name)
        self.ask_for_first(piece.queries)
        with self.items.members_of(piece) as member:
            self._start(member)
        pieces = Pieces(
            f,
            self.scratch["pieces"],
            clear=lambda which: self._clear_all(piece, which),
            merge=lambda: self._merge_all(piece),
        )
        pieces.start()
        with f.range(0, self.depth["key"], self.tile.lanes) as d:
            nothing = f.value(0.0, self.tile.vector)
            self.tile.store(f, nothing, self.at("queries", self.count(piece)), d)
        self._clear(self.count(piece))

        def judge(first: Value, end: Value) -> Value:
            return self.visits.common_verdict(piece, first, end)

        with self.sections.key_blocks(piece.queries, judge) as blocks:
            self.attend_blocks(piece, blocks, pieces)

        def leave() -> None:
            with self.items.members_of(piece) as member:
                self._leave(member, piece.place)
            with self.items.members_of(piece) as member:
                self._arrive(member)

        def finish() -> None:
            pieces.merge_last(lambda: self._take_merged(piece))
            self._finish(piece.whole)

        f.choose(piece.every, finish, leave)

    def _start(self, member: Member) -> None:
        """Copy the queries to scratch, and multiply them by the scale."""
        f, tile, queries = self.f, self.tile, member.queries
        scale = f.splat(f.convert(self.arg["scale"], tile.element), tile.vector)

        def gather(head: Value, first: Value) -> None:
            self.place(queries._replace(h=head), "query")
            begin, end = queries.q_first, queries.q_first + queries.q_count
            into = self.at("queries", member.first_row + first)
            placement, stride = self.placements["query"], self.stride["key"]
            f.call(self.phases.gather, placement, begin, end, into=into, stride=stride)

        def prepare(row: Row) -> None:
            place = member.first_row + row.place
            with f.range(0, self.depth["key"], tile.lanes) as d:
                at = f.offset(self.at("queries", place), d, tile.element)
                tile.store(f, tile.load(f, at) * scale, at)

        self.each_head(queries, gather)
        self.each_row(queries, prepare)

    def _clear(self, row: Value, which: str = "") -> None:
        """Reset a row: no key has been read."""
        f, tile = self.f, self.tile
        with f.range(0, self.depth["value"], tile.lanes) as d:
            tile.store(f, f.value(0.0, tile.vector), self.at(f"{which}out", row), d)
        tile.store(f, f.value(-math.inf, tile.vector), self.at(f"{which}running_max", row))
        tile.store(f, f.value(0.0, tile.vector), self.at(f"{which}running_sum", row))
        with f.when(self.wanted("observe")):
            observe.forget(f, tile, self.observed(row, which))

    # --- pieces

    def _clear_all(self, piece: Piece, which: str) -> None:
        with self.f.range(0, self.count(piece)) as row:
            self._clear(row, which)

    def _merge_all(self, piece: Piece) -> None:
        """Add what rows have to what they have of the pieces before."""
        first = self.f.value(0, I64)
        theirs = {f"piece_{name}": self.at(name, first) for name in STATES}
        self._add_pieces(MERGED, first, theirs, self.count(piece))

    def _add_pieces(self, which: str, row: Value, theirs: dict[str, Value], count: Value) -> None:
        """Add results of a piece, at the addresses `theirs`, to those of some rows."""
        mine = {name: self.at(which + name, row) for name in STATES}
        size = {"end": self.depth["value"], "count": count, "stride": self.stride["value"]}
        watched = {"observe": self.arg["observe"]}
        self.f.call(self.phases.merge, **mine, **theirs, **watched, **size)

    def _take_merged(self, piece: Piece) -> None:
        """Have the states of all pieces where those of one are."""
        f, tile = self.f, self.tile

        def copy(name: str, row: Value, d: Value | int) -> None:
            tile.store(f, tile.load(f, self.at(MERGED + name, row), d), self.at(name, row), d)

        with f.range(0, self.count(piece)) as row:
            for name in PARTIAL_STATES:
                copy(name, row, 0)
            with f.range(0, self.depth["value"], tile.lanes) as d:
                copy("out", row, d)

    def _partial(self, slot: Value, row: Value) -> Value:
        """The address of a row's partial result in a slot."""
        rows = self.arg["block_q"] * self.arg["row_group"]
        stride = partial_stride(self.tile, self.arg["value_dim"])
        return self.f.offset(self.arg["partials"], (slot * rows + row) * stride, self.tile.element)

    def _leave(self, member: Member, piece: Value) -> None:
        """Write the partial results of a member's rows to its slot."""
        f, tile = self.f, self.tile

        def put_down(row: Row) -> None:
            into = self._partial(member.first_slot + piece, row.place)
            from_row = member.first_row + row.place
            for place, name in enumerate(PARTIAL_STATES):
                tile.store(f, tile.load(f, self.at(name, from_row)), into, place * tile.lanes)
            out = f.offset(into, len(PARTIAL_STATES) * tile.lanes, tile.element)
            with f.range(0, self.depth["value"], tile.lanes) as d:
                tile.store(f, tile.load(f, self.at("out", from_row), d), out, d)

        self.each_row(member.queries, put_down)

    def _arrive(self, member: Member) -> None:
        """Count the pieces that are done; after the last one, merge all and write the result."""
        f = self.f
        arrivals = f.offset(self.arg["arrivals"], member.first_slot, I64)
        arrived = f.atomic_add(arrivals, 1, publish=True)

        def merge(row: Row) -> None:
            with f.range(0, member.pieces) as piece:  # always in this order
                part = self._partial(member.first_slot + piece, row.place)
                theirs = {
                    f"piece_{name}": f.offset(part, k * self.tile.lanes, self.tile.element)
                    for k, name in enumerate(STATES)
                }
                self._add_pieces("", row.place, theirs, f.value(1, I64))

        with f.when(arrived.equals(member.pieces - 1)):
            self.each_row(member.queries, lambda row: self._clear(row.place))
            self.each_row(member.queries, merge)
            self._finish(member.queries)

    # --- results

    def _finish(self, queries: QueryBlock) -> None:
        """Divide by the sums and write all results of an item."""
        self.each_head(queries, lambda head, first: self._finish_head(queries, head, first))

    def _finish_head(self, queries: QueryBlock, head: Value, first: Value) -> None:
        f, tile, arg = self.f, self.tile, self.arg
        sink = sink_of(f, tile, arg, head)
        numbers = queries.b * arg["lse_batch"] + head * arg["lse_head"]
        with f.range(0, queries.q_count) as q:
            row = first + q
            total = tile.load(f, self.at("running_sum", row))
            best = tile.load(f, self.at("running_max", row))
            closed = close(
                f,
                best,
                total,
                sink,
                stays_open=arg["stays_open"],
                weighted=self.spec.weighted,
            )
            with f.range(0, self.depth["value"], tile.lanes) as d:
                at = f.offset(self.at("out", row), d, tile.element)
                shared = apply_share(f, tile.load(f, at), closed.share, weighted=self.spec.weighted)
                tile.store(f, shared, at)
            out, width = self.at("out", row), self.depth["value"]
            unfold_row(f, tile, storage(self.spec.value), out, width)
            place = numbers + (queries.q_row + queries.q_first + q) * arg["lse_row"]
            self._write_numbers(row, place, total, closed, queries.kv_begin)
        self.place(queries._replace(h=head), "out")
        begin, end = queries.q_first, queries.q_first + queries.q_count
        source = {"source": self.at("out", first), "stride": self.stride["value"]}
        f.call(self.phases.scatter, self.placements["out"], begin, end, **source)

    def _write_numbers(
        self, row: Value, place: Value, total: Value, closed: Closed, kv_begin: Value
    ) -> None:
        """Write lse, max_scores, argmax and entropy of a row, as far as the caller wants them."""
        f, tile, arg = self.f, self.tile, self.arg
        for name, value in (("lse", closed.lse), ("max_scores", closed.peak)):
            with f.when(self.wanted(name)):
                f.store(f.extract(value, 0), arg[name], place)
        observed = self.observed(row)
        with f.when(self.wanted("argmax")):
            key = f.load(tile.element.as_int, observed.place)
            f.store(observe.position(f, key, kv_begin), arg["argmax"], place)
        with f.when(self.wanted("entropy")):
            nats = observe.entropy(f, tile.load(f, observed.surprise), total, closed)
            f.store(f.extract(nats, 0), arg["entropy"], place)
