"""A record that breaks the convention is refused, and says how."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from guards import WatchedScratch
from kernel_launch import Call

from quire import Dense, attention
from quire.codegen import contract
from quire.codegen.convention import BLOCK_Q, GRADIENTS, TANGENTS, Form, KernelSpec
from quire.codegen.llvm.target import Target
from quire.codegen.scratch import scratch_bytes
from quire.errors import CodegenError
from quire.runtime import forward as division
from quire.runtime import launch as launcher

TARGET = Target.named("x86-64-v4")  # 64 queries to a panel
SPEC = KernelSpec(TARGET)
INT8 = KernelSpec(TARGET, key="int8", value="int8")
WIDE = KernelSpec(TARGET, head_dim=64, value_dim=64)


def record(form: Form, spec: KernelSpec = SPEC) -> dict[str, int | float]:
    """One that keeps to the convention; addresses are multiples of 64 that nobody follows."""
    call = Call(*(torch.zeros(1, 4, 8, 20) for _ in range(3)))
    call.prepare()
    fields = call.record | {"query": 64, "key": 64, "value": 64, "out": 64, "scratch": 640}
    fields |= {"scratch_bytes": scratch_bytes(form, spec.tile, 20, 20, BLOCK_Q)}
    if form == "backward":
        fields |= dict.fromkeys(GRADIENTS, 0)
        fields |= dict.fromkeys(("partial_mod", "full_mod", "plain_mod"), 64)
    if form == "tangent":
        fields |= dict.fromkeys(TANGENTS, 0)
        fields |= dict.fromkeys(("out_tangent", "lse_tangent", "odd"), 64)
    return fields


BROKEN: list[tuple[Form, dict[str, Any], str]] = [
    ("panel", {"block_q": 0}, "a block_q of at least 1, got 0"),
    ("backward", {"block_q": 64}, "a block_q of 128, got 64"),
    ("row", {"block_q": 0}, "a block_q of at least 1, got 0"),
    ("panel", {"group": 0}, "a group and a row_group of at least 1, got (0, 1)"),
    ("panel", {"row_group": 0}, "a group and a row_group of at least 1, got (1, 0)"),
    ("panel", {"group": 3}, "heads in groups of 3, got 4"),
    ("row", {"group": 3}, "heads in groups of 3, got 4"),
    ("backward", {"row_group": 2}, "a row_group of 1 in the backward pass, got 2"),
    ("backward", {"full_mod": 0}, "an address of full_mod, which derives, got 0"),
    ("backward", {"weights_mod": 64}, "no weights_mod in the backward pass, got 64"),
    ("row", {"extent": 64}, "no extent for rows, got 64"),
    ("panel", {"head_dim": -1}, "a head_dim of at least 0, got -1"),
    ("panel", {"page_size": 0}, "a page_size of at least 1, got 0"),
    ("panel", {"sequence_stride": 2}, "a sequence_stride of 0 or 1, got 2"),
    ("panel", {"tile_kind": 4}, "a tile_kind from 0 to 3, got 4"),
    ("panel", {"query": 0}, "an address of query, got 0"),
    ("panel", {"out": 0}, "an address of out, got 0"),
    ("backward", {"lse": 0}, "an address of lse, which the backward pass reads, got 0"),
    ("panel", {"argmax": 64}, "a function that observes, for argmax and entropy, got none"),
    ("row", {"entropy": 64}, "a function that observes, for argmax and entropy, got none"),
    (
        "panel",
        {"num_sequences": 0, "sequences": 64},
        "at least one sequence and one item, got 0 and 4 at 64",
    ),
    ("panel", {"page_table": 64}, "no page_table where pages have no size, got 64"),
    ("backward", {"tile_runs": 64}, "no tile_runs for kernels that observe or derive, got 64"),
    ("row", {"tile_runs": 64, "observe": 64}, "no tile_runs for kernels that observe or derive"),
    ("panel", {"members": 2}, "members of at least 1, and of 1 where items are not rows, got 2"),
    ("row", {"members": 0}, "members of at least 1, and of 1 where items are not rows, got 0"),
    ("row", {"scratch": 96}, "scratch and scratch_bytes in multiples of 64, got"),
    ("row", {"scratch": 0}, "scratch and scratch_bytes in multiples of 64, got"),
    ("row", {"scratch_bytes": 96}, "scratch and scratch_bytes in multiples of 64, got 96 at 640"),
    ("row", {"scratch_bytes": 64}, "scratch_bytes of at least"),
    ("row", {"members": 99, "partials": 64, "arrivals": 64}, "scratch_bytes of at least"),
    ("row", {"partials": 32}, "partials in multiples of 64, arrivals of 8, got 32 and 0"),
    (
        "row",
        {"members": 2, "block_q": 1},
        "partials and arrivals for 2 members, got 0 and 0",
    ),
    ("panel", {"counters": 0}, "an address of counters, got 0"),
    ("backward", {"wants_slopes": 2}, "wants_slopes of 0 or 1, got 2"),
    ("backward", {"delta": 64}, "an address of grad_out for delta, got 0"),
    ("backward", {"grad_query": 64, "odd": 64}, "wants_slopes for grad_query, got 0"),
    ("backward", {"grad_value": 64}, "an address of odd for grad_value, got 0"),
    ("backward", {"grad_value": 96, "odd": 64}, "grad_value in multiples of 64, got 96"),
    (
        "backward",
        {"grad_value": 64, "odd": 64, "grad_value_row": 20},
        "grad_value_row of at least 32, got 20",
    ),
    (
        "backward",
        {"grad_value": 64, "odd": 64, "grad_value_row": 32, "grad_value_head": 40},
        "grad_value_head in multiples of 16, got 40",
    ),
    ("tangent", {"lse": 0}, "an address of lse, which has a tangent, got 0"),
    ("tangent", {"moves": 2}, "moves of 0 or 1, got 2"),
    ("tangent", {"query_tangent": 64}, "moves for query_tangent, got 0"),
    ("tangent", {"key_tangent": 64}, "moves for key_tangent, got 0"),
    ("tangent", {"out_tangent": 0}, "an address of out_tangent, got 0"),
    ("tangent", {"lse_tangent": 0}, "an address of lse_tangent, got 0"),
    ("tangent", {"odd": 0}, "an address of odd, got 0"),
]


@pytest.mark.parametrize(("form", "change", "message"), BROKEN)
def test_what_is_broken(form: Form, change: dict[str, Any], message: str) -> None:
    fields = record(form)
    contract.check(form, SPEC, fields)
    expected = rf"^expected {re.escape(message)}.*; the kernel was not run$"
    with pytest.raises(CodegenError, match=expected):
        contract.check(form, SPEC, fields | change)


@pytest.mark.parametrize("form", ["panel", "row", "backward", "tangent"])
def test_scratch_may_not_be_a_line_too_small(form: Form) -> None:
    fields = record(form)
    fields["scratch_bytes"] -= 64
    with pytest.raises(CodegenError, match="expected scratch_bytes of at least"):
        contract.check(form, SPEC, fields)


def test_what_a_kernel_was_compiled_for() -> None:
    with pytest.raises(CodegenError, match="expected a head_dim of 64, as compiled, got 20"):
        contract.check("row", WIDE, record("row", WIDE))
    fields = record("row", INT8)
    with pytest.raises(CodegenError, match="expected an address of key_scale for rows of 8 bits"):
        contract.check("row", INT8, fields)
    with pytest.raises(CodegenError, match="expected an address of value_scale for rows of 8 bits"):
        contract.check("row", INT8, fields | {"key_scale": 64})
    contract.check("row", INT8, fields | {"key_scale": 64, "value_scale": 64})


# --- who asks


def test_a_launch_without_the_runtime_is_refused() -> None:
    operands = [torch.randn(1, 2, 40, 16) for _ in range(3)]
    with pytest.raises(CodegenError, match="a block_q of at least 1, got -1"):
        Call(*operands, block_q=-1).run()


def test_a_plan_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(division, "choose_block_q", lambda *sizes: -1)
    operands = [torch.randn(1, 2, 40, 18) for _ in range(3)]
    with pytest.raises(CodegenError, match="expected a block_q of at least 1"):
        attention(operands[0], Dense(*operands[1:]), backend="jit")


@pytest.mark.parametrize("q_len", [1, 40])
def test_a_call_is_refused(q_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(WatchedScratch):
        def __enter__(self) -> WatchedScratch:
            super().__enter__()
            self.address += 8
            return self

    monkeypatch.setattr(launcher, "Scratch", Odd)
    operands = [torch.randn(1, 2, 40, 18) for _ in range(3)]
    with pytest.raises(CodegenError, match="expected scratch and scratch_bytes in multiples"):
        attention(operands[0][:, :, :q_len], Dense(*operands[1:]), backend="jit")
