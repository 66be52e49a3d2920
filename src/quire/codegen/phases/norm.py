"""RMSNorm and LayerNorm of one row, in one order of sums, whatever the processor.

    rms      x / sqrt(mean(x^2) + epsilon) * gain
    layer    (x - mean(x)) / sqrt(mean((x - mean(x))^2) + epsilon) * gain + bias

A row lies in working memory, with zeros up to whole blocks. Sums are of 2 x 16 lanes, which are
then added as a tree. So a row's result does not depend on the rows beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from quire.codegen.llvm.builder import Function, Value
from quire.codegen.llvm.types import F32, I64
from quire.codegen.phases.tiles import across

Norm = Literal["none", "rms", "layer"]
LANES = 16
_CHAINS = 2


def write_norm(
    f: Function,
    norm: Norm,
    line: Value,
    depth: Value,
    *,
    gain: Value,
    bias: Value,
    epsilon: Value,
) -> None:
    """Write the norm of a row in place. `bias` may be null; so may `gain`."""
    type = F32.vector(LANES)
    count = f.convert(depth, F32)
    padded = (depth + (LANES * _CHAINS - 1)) & -(LANES * _CHAINS)

    def total(term: Callable[[Value, Value, Value], Value]) -> Value:
        def add(k: Value, sums: list[Value]) -> list[Value]:
            places = [k + LANES * chain for chain in range(_CHAINS)]
            return [
                term(f.load(type, line, at), total, at)
                for at, total in zip(places, sums, strict=True)
            ]

        zeros = [f.value(0.0, type)] * _CHAINS
        first, second = f.loop(0, padded, add, carry=zeros, step=LANES * _CHAINS)
        return f.extract(across(f, first + second, lambda a, b: a + b), 0)

    mean = f.value(0.0, F32)
    if norm == "layer":
        mean = total(lambda x, sum, _: sum + x) / count
    wide_mean = f.splat(mean, type)

    def square(x: Value, sum: Value, at: Value) -> Value:
        if norm == "rms":
            return f.fma(x, x, sum)
        lanes = f.splat(at, I64.vector(LANES)) + f.iota(I64.vector(LANES))
        inside = lanes < f.splat(depth, I64.vector(LANES))
        apart = f.select(inside, x - wide_mean, 0.0)
        return f.fma(apart, apart, sum)

    variance = total(square) / count + epsilon
    factor = 1.0 / f.intrinsic("sqrt", variance)

    def finish(k: Value, lanes: int) -> None:
        form = F32.vector(lanes) if lanes else F32

        def wide(scalar: Value) -> Value:
            return f.splat(scalar, form) if lanes else scalar

        def with_(pointer: Value, x: Value, combine: Callable[[Value, Value], Value]) -> Value:
            """Combine x with the numbers at a pointer, unless that is null."""
            there = f.address(pointer).differs(0)
            return f.choose(there, lambda: [combine(x, f.load(form, pointer, k))], lambda: [x])[0]

        x = f.load(form, line, k)
        x = (x - wide(mean) if norm == "layer" else x) * wide(factor)
        x = with_(gain, x, lambda a, b: a * b)
        f.store(with_(bias, x, lambda a, b: a + b), line, k)

    whole = depth & -LANES
    with f.range(0, whole, LANES) as k:
        finish(k, LANES)
    with f.range(whole, depth) as k:
        finish(k, 0)
