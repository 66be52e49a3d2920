"""32-bit integers: only where they fit, and never another value."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire.ir.graph import Node, text, walk
from quire.ir.interpret import interpret
from quire.ir.narrow import narrow, ranges
from quire.ir.trace import trace

SHORT = {name: (0, 2**20 - 1) for name in ("b", "h", "q_idx", "kv_idx")}
LONG = {name: (0, 2**31 - 1) for name in ("b", "h", "q_idx", "kv_idx")}


def test_a_difference_of_positions_fits() -> None:
    slopes = torch.ones(4)
    mod = trace(lambda s, b, h, q_idx, kv_idx: s + slopes[h] * (q_idx - kv_idx), "score")
    assert text(narrow(mod.output, SHORT)) == (
        "%0 = input score : float32\n"
        "%1 = input h : int32\n"
        "%2 = load captured0[%1] : float32\n"
        "%3 = input q_idx : int32\n"
        "%4 = input kv_idx : int32\n"
        "%5 = sub %3, %4 : int32\n"
        "%6 = cast %5 : float32\n"
        "%7 = mul %2, %6 : float32\n"
        "%8 = add %0, %7 : float32"
    )


def test_a_product_of_positions_does_not() -> None:
    mask = trace(lambda b, h, q_idx, kv_idx: (q_idx * 4096 + kv_idx) % 7 == 0, "mask")
    wide = {node.op for node in walk(narrow(mask.output, SHORT)) if node.dtype == torch.int64}
    assert {"mul", "add"} <= wide


def test_long_positions_are_not_added_in_32_bits() -> None:
    mask = trace(lambda b, h, q_idx, kv_idx: q_idx + kv_idx > 5, "mask")
    assert "add %1, %2 : int32" in text(narrow(mask.output, SHORT))
    assert ": int64" in text(narrow(mask.output, LONG))


def test_the_result_keeps_its_dtype() -> None:
    position = Node("input", (), torch.int64, "q_idx")
    assert narrow(position, SHORT).dtype == torch.int64


EXPRESSIONS = [
    "q + k", "q - k", "q * k", "q * 3000 - k", "-q", "(q - k).abs()", "(k - q) // 7", "(k - q) % 7",
    "(q - k) // -3", "(q - k) % -3", "torch.minimum(q, k - 5)", "torch.maximum(-q, k)",
    "torch.where(q > k, q, -k)", "torch.sign(q - k)", "q * q * q", "(q << 3) ^ k", "q.float().long()",
]  # fmt: skip


@pytest.mark.parametrize("expression", EXPRESSIONS)
@given(st.lists(st.integers(0, 2**20 - 1), min_size=4, max_size=4))
def test_values_and_ranges_hold(expression: str, numbers: list[int]) -> None:
    function = eval(f"lambda b, h, q, k: {expression} >= 1000", {"torch": torch})  # noqa: S307
    mask = trace(function, "mask")
    env = {
        "b": torch.tensor(0),
        "h": torch.tensor(0),
        "q_idx": torch.tensor(numbers[:2]),
        "kv_idx": torch.tensor(numbers[2:]),
    }
    before = interpret(mask.output, env)
    assert torch.equal(interpret(narrow(mask.output, SHORT), env), before)
    for node, (low, high) in ranges(mask.output, SHORT).items():
        value = interpret(node, env)
        assert low <= int(value.min()) and int(value.max()) <= high
