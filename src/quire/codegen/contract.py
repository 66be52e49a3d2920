"""Checks a record against `convention.py` before a kernel runs.

A kernel trusts its record, and a wrong one would make it write to memory that is not its own. So a
record that breaks the convention raises a CodegenError: it is a bug of quire, not of the user.

The PLAN fields are checked once, when `Terms` are made; the CALL fields before every launch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from quire.codegen.convention import (
    BLOCK_Q,
    CALL,
    EMPTY,
    PLAIN,
    Form,
    KernelSpec,
    gradient_columns,
)
from quire.codegen.phases.staging import ENDLESS
from quire.codegen.phases.storage import storage
from quire.codegen.scratch import scratch_bytes
from quire.errors import CodegenError

ALIGNED = 64  # bytes, of scratch and of each thread's part of it

Fields = Mapping[str, int | float]

_LSE_IS_FOR: dict[Form, str] = {
    "backward": "which the backward pass reads",
    "tangent": "which has a tangent",
}


@dataclass(frozen=True, eq=False)
class Terms:
    """What the CALL fields are checked against: it follows from the PLAN fields."""

    form: Form
    spec: KernelSpec
    head_dim: int
    value_dim: int
    rows: int  # queries that a thread computes at a time, for each member
    observes: bool
    has_pages: bool
    has_scales: bool
    scratch_of_one: int  # bytes that a thread needs for pieces of one member
    lanes: int  # of a vector
    columns: tuple[int, int]  # in which gradients of keys and of values are summed

    @staticmethod
    def of(form: Form, spec: KernelSpec, plan: Fields) -> Terms:
        """Check the PLAN fields, and return what calls are checked against."""
        _check_blocks(form, spec, plan)
        _check_heads(form, plan)
        _check_code(form, plan)
        for name in ("head_dim", "value_dim"):
            known = getattr(spec, name)
            _expect(plan[name] >= 0, f"a {name} of at least 0", plan[name])
            _expect(known in (0, plan[name]), f"a {name} of {known}, as compiled", plan[name])
        _expect(plan["page_size"] >= 1, "a page_size of at least 1", plan["page_size"])
        stride = plan["sequence_stride"]
        _expect(stride in (0, 1), "a sequence_stride of 0 or 1", stride)
        kind = plan["tile_kind"]
        _expect(EMPTY <= kind <= PLAIN, f"a tile_kind from {EMPTY} to {PLAIN}", kind)
        head_dim, value_dim = int(plan["head_dim"]), int(plan["value_dim"])
        rows = int(plan["block_q"] * (plan["row_group"] if form == "row" else 1))
        return Terms(
            form=form,
            spec=spec,
            head_dim=head_dim,
            value_dim=value_dim,
            rows=rows,
            observes=plan["observe"] != 0,
            has_pages=plan["page_size"] != ENDLESS,
            has_scales=storage(spec.key).has_scales or storage(spec.value).has_scales,
            scratch_of_one=scratch_bytes(form, spec.tile, head_dim, value_dim, rows),
            lanes=spec.tile.lanes,
            columns=(
                gradient_columns(spec.tile, head_dim),
                gradient_columns(spec.tile, value_dim),
            ),
        )

    def scratch_bytes(self, members: int) -> int:
        """The bytes of scratch that a thread needs for pieces of `members` sequences."""
        return self.scratch_of_one if members == 1 else self._scratch_bytes(members)

    @functools.lru_cache(maxsize=1024)  # noqa: B019  Terms are small
    def _scratch_bytes(self, members: int) -> int:
        rows = self.rows * members
        return scratch_bytes(self.form, self.spec.tile, self.head_dim, self.value_dim, rows)

    def check_call(self, call: tuple[int, ...]) -> None:
        """Check the CALL fields, given in their order.

        This runs before every launch, so it does few comparisons. A tensor without elements has no
        address, so the address of a tensor that is not read may be null.
        """
        # fmt: off
        (
            query, key, value, out, lse, _, argmax, entropy, _, sequences, num_sequences,
            num_items, page_table, key_scale, value_scale, _, _, runs, _,
            scratch, scratch_size, members, partials, arrivals, counters,
        ) = call
        # fmt: on
        if not query and self.head_dim:
            raise _broken("an address of query", query)
        if not out and self.value_dim:
            raise _broken("an address of out", out)
        if not lse and self.form in _LSE_IS_FOR:
            raise _broken(f"an address of lse, {_LSE_IS_FOR[self.form]}", lse)
        if (argmax or entropy) and not self.observes:
            raise _broken("a function that observes, for argmax and entropy", "none")
        if not sequences or num_sequences < 1 or num_items < 1:
            got = f"{num_sequences} and {num_items} at {sequences}"
            raise _broken("at least one sequence and one item", got)
        if page_table and not self.has_pages:
            raise _broken("no page_table where pages have no size", page_table)
        if runs and (self.observes or self.form not in ("panel", "row")):
            raise _broken("no tile_runs for kernels that observe or derive", runs)
        if self.has_scales:
            self._check_scales((key, key_scale), (value, value_scale))
        if not scratch or (scratch | scratch_size) % ALIGNED:
            got = f"{scratch_size} at {scratch}"
            raise _broken(f"scratch and scratch_bytes in multiples of {ALIGNED}", got)
        if members != 1:
            self._check_members(members, partials, arrivals)
        if scratch_size < self.scratch_bytes(members):
            needed = f"scratch_bytes of at least {self.scratch_bytes(members)}"
            raise _broken(needed, scratch_size)
        if partials % ALIGNED or arrivals % 8:
            got = f"{partials} and {arrivals}"
            raise _broken(f"partials in multiples of {ALIGNED}, arrivals of 8", got)
        if not counters:
            raise _broken("an address of counters", counters)

    def _check_scales(self, *sides: tuple[int, int]) -> None:
        """Keys and values of 8 bits need scales."""
        for name, (rows, scales) in zip(("key", "value"), sides, strict=True):
            if rows and not scales and storage(self.spec.dtype_of(name)).has_scales:
                raise _broken(f"an address of {name}_scale for rows of 8 bits", scales)

    def _check_members(self, members: int, partials: int, arrivals: int) -> None:
        """Pieces of several members need slots."""
        if members < 1 or self.form != "row":
            raise _broken("members of at least 1, and of 1 where items are not rows", members)
        if not (partials and arrivals):
            got = f"{partials} and {arrivals}"
            raise _broken(f"partials and arrivals for {members} members", got)

    def check_tangents(self, fields: Fields) -> None:
        """Check the TANGENTS fields of a tangent kernel."""
        moves = fields["moves"]
        _expect(moves in (0, 1), "moves of 0 or 1", moves)
        for name in ("query_tangent", "key_tangent"):
            _expect(moves == 1 or not fields[name], f"moves for {name}", moves)
        for name in ("lse_tangent", "odd", *(["out_tangent"] if self.value_dim else [])):
            _expect(fields[name] != 0, f"an address of {name}", fields[name])

    def check_gradients(self, fields: Fields) -> None:
        """Check the GRADIENTS fields of a backward pass."""
        slopes = fields["wants_slopes"]
        _expect(slopes in (0, 1), "wants_slopes of 0 or 1", slopes)
        for name in ("delta", "wants_slopes"):
            given = fields["grad_out"] or not fields[name] or not self.value_dim
            _expect(bool(given), f"an address of grad_out for {name}", 0)
        for name in ("grad_query", "grad_key"):
            _expect(slopes == 1 or not fields[name], f"wants_slopes for {name}", slopes)
        for name in ("grad_query", "grad_key", "grad_value"):
            noted = fields["odd"] or not fields[name]
            _expect(bool(noted), f"an address of odd for {name}", 0)
        whole = fields["whole"]
        _expect(whole in (0, 1), "whole of 0 or 1", whole)
        vector, lanes = self.spec.target.vector_bits // 8, self.lanes
        for name in ("part_key", "part_value"):
            _expect(fields[name] % vector == 0, f"{name} in multiples of {vector}", fields[name])
            step = fields[f"{name}_thread"]
            _expect(step % lanes == 0, f"{name}_thread in multiples of {lanes}", step)
        for name, whole in zip(("grad_key", "grad_value"), self.columns, strict=True):
            if not fields[name]:
                continue
            # Sums are read and written in aligned vectors.
            _expect(fields[name] % vector == 0, f"{name} in multiples of {vector}", fields[name])
            row = fields[f"{name}_row"]
            _expect(row >= whole, f"{name}_row of at least {whole}", row)
            for axis in ("slice", "batch", "head", "row"):
                step = fields[f"{name}_{axis}"]
                _expect(step % lanes == 0, f"{name}_{axis} in multiples of {lanes}", step)


def check(form: Form, spec: KernelSpec, record: Fields) -> None:
    """Check a whole record: KERNEL, BACKWARD or TANGENT."""
    terms = Terms.of(form, spec, record)
    terms.check_call(tuple(int(record[name]) for name in CALL))
    if form == "backward":
        terms.check_gradients(record)
    if form == "tangent":
        terms.check_tangents(record)


def _check_blocks(form: Form, spec: KernelSpec, plan: Fields) -> None:
    """Blocks of queries may end within a panel, blocks of keys are whole panels."""
    block_q, panel = plan["block_q"], spec.tile.width
    _expect(block_q >= 1, "a block_q of at least 1", block_q)
    block_kv = spec.target.block_kv
    if form != "row":
        _expect(block_kv % panel == 0, f"a block_kv that is a multiple of {panel}", block_kv)
    if form == "backward":
        _expect(block_q == BLOCK_Q, f"a block_q of {BLOCK_Q}", block_q)


def _check_heads(form: Form, plan: Fields) -> None:
    """The number of heads is a multiple of the groups."""
    heads, group, row_group = plan["heads"], plan["group"], plan["row_group"]
    _expect(
        group >= 1 and row_group >= 1, "a group and a row_group of at least 1", (group, row_group)
    )
    # In the decode kernel both are counted in items.
    all_heads = heads if form == "row" else heads * row_group
    _expect(heads >= 0 and all_heads % group == 0, f"heads in groups of {group}", all_heads)
    if form == "backward":
        _expect(row_group == 1, "a row_group of 1 in the backward pass", row_group)


def _check_code(form: Form, plan: Fields) -> None:
    """Functions that a form always calls have an address, those that it never calls have none."""
    if form == "backward":
        for name in ("partial_mod", "full_mod", "plain_mod"):
            _expect(plan[name] != 0, f"an address of {name}, which derives", plan[name])
        _expect(
            plan["weights_mod"] == 0, "no weights_mod in the backward pass", plan["weights_mod"]
        )
    if form == "row":
        _expect(plan["extent"] == 0, "no extent for rows", plan["extent"])


def _expect(holds: bool, expected: str, got: object) -> None:
    if not holds:
        raise _broken(expected, got)


def _broken(expected: str, got: object) -> CodegenError:
    return CodegenError(f"expected {expected}, got {got}; the kernel was not run")
