"""The builder: what it writes runs, and what is malformed never reaches LLVM."""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Callable

import numpy as np
import pytest

from quire.codegen.llvm import jit
from quire.codegen.llvm.builder import Function, Module
from quire.codegen.llvm.target import Target
from quire.codegen.llvm.types import (
    F16,
    F32,
    F64,
    I1,
    I8,
    I16,
    I32,
    I64,
    PTR,
    VOID,
    Layout,
    Type,
    literal,
    typed,
)
from quire.codegen.llvm.values import Signature, Value
from quire.errors import CodegenError


def run(write: Callable[[Function], Value], *arguments: int) -> int:
    """Write an i64 function of i64 arguments and call it."""
    module = Module()
    names = {f"a{k}": I64 for k in range(len(arguments))}
    with module.function("f", names, I64) as f:
        f.give_back(write(f))
    code = jit.load(jit.compile_object(module.text, Target.host()), ["f"])
    types = [ctypes.c_int64] * (1 + len(arguments))
    return int(ctypes.CFUNCTYPE(*types)(code.address("f"))(*arguments))


def broken(write: Callable[[Function], object], match: str) -> None:
    """Writing this is an error that says so."""
    module = Module()
    with pytest.raises(CodegenError, match=match), module.function("f", {"x": F32, "n": I64}) as f:
        write(f)


# --- what is written runs


def test_operators_on_integers() -> None:
    def write(f: Function) -> Value:
        a, b = f.parameters
        parts = [a + b, a - b, a * b, a.sdiv(b), a.srem(b), a & b, a | b, a ^ b, ~a, -a, 7 - a]
        shifts = [a << 2, a >> 1, a.logical_shift(60), (a & 255).udiv(b), (a & 255).urem(b)]
        total = f.value(0, I64)
        for part in parts + shifts:
            total = total * 31 + part
        return total

    a, b = -100, 7
    parts = [a + b, a - b, a * b, -14, -2, a & b, a | b, a ^ b, ~a, -a, 7 - a]
    shifts = [a << 2, a >> 1, (a % 2**64) >> 60, (a & 255) // b, (a & 255) % b]
    expected = 0
    for part in parts + shifts:
        expected = expected * 31 + part
    assert run(write, a, b) % 2**64 == expected % 2**64


def test_comparisons_are_signed_and_know_nan() -> None:
    def write(f: Function) -> Value:
        a, b = f.parameters
        nan = f.value(math.nan, F64)
        truths = [a < b, a <= b, a > b, a >= b, a.equals(b), a.differs(b)]
        truths += [nan < 1.0, nan.equals(nan), nan.differs(nan), f.is_nan(nan)]
        bits = f.value(0, I64)
        for truth in truths:
            bits = bits * 2 + f.convert(truth, I64)
        return bits

    assert run(write, -1, 1) == 0b1100010011
    assert run(write, 1, 1) == 0b0101100011


def test_loops_carry_values() -> None:
    def write(f: Function) -> Value:
        (n,) = f.parameters
        one, two = f.value(0, I64), f.value(1, I64)
        return f.loop(0, n, lambda i, c: [c[1], c[0] + c[1]], carry=[one, two])[0]

    assert [run(write, n) for n in (0, 1, 2, 10, 50)] == [0, 1, 1, 55, 12586269025]


def test_repeat_runs_while_its_condition_holds() -> None:
    def write(f: Function) -> Value:
        (n,) = f.parameters

        def collatz(carried: list[Value]) -> list[Value]:
            x, steps = carried
            odd = (x & 1).differs(0)
            return [f.select(odd, x * 3 + 1, x >> 1), steps + 1]

        return f.repeat(lambda c: c[0].differs(1), collatz, [n, f.value(0, I64)])[1]

    assert run(write, 27) == 111


def test_blocks_nest() -> None:
    """Memory written from loops, branches and an endless loop that is left."""
    module = Module()
    with module.function("f", {"n": I64, "out": PTR}) as f:
        n, out = f.parameters
        with f.range(0, n, 2) as i, f.range(0, i) as j, f.when((i + j).urem(3).equals(0)):
            f.store(f.load(I64, out) + i * j, out)
        with f.forever() as leave:
            count = f.atomic_add(f.offset(out, 1, I64), 1)
            leave(count >= n)
            (term,) = f.choose(count > 2, lambda: [count * 10], lambda: [count - 1])
            f.store(f.load(I64, out, 2) + term, out, 2)
    code = jit.load(jit.compile_object(module.text, Target.host()), ["f"])
    out = np.zeros(3, np.int64)
    ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_void_p)(code.address("f"))(9, out.ctypes.data)
    first = sum(i * j for i in range(0, 9, 2) for j in range(i) if (i + j) % 3 == 0)
    third = sum(c * 10 if c > 2 else c - 1 for c in range(9))
    assert out.tolist() == [first, 10, third]


def test_vectors() -> None:
    def write(f: Function) -> Value:
        (n,) = f.parameters
        vector = I64.vector(4)
        x = f.iota(vector) * f.splat(n, vector)
        y = f.shuffle(x, f.lanes(I64, [10, 20, 30, 40]), [7, 0, 4, 3])
        y = f.insert(y, 5, 1)
        y = f.select(y > 8, y, f.minimum(y, 1))
        total = f.value(0, I64)
        for lane in range(4):
            total = total * 100 + f.extract(y, lane)
        return total * 10 + f.convert(f.any_lane(y > 39), I64)

    assert run(write, 3) == 400110091  # [40, 5 -> 1, 10, 9], and one is above 39


def test_conversions() -> None:
    def write(f: Function) -> Value:
        (n,) = f.parameters
        as_float = f.convert(n, F32)
        half = f.convert(as_float, F16)
        byte = f.convert(n, I8)
        parts = [
            f.convert(f.convert(half, F64), I64),
            f.zero_extend(byte, I64),
            f.convert(byte, I64),
            f.zero_extend(f.bitcast(as_float, I32), I64),
            f.convert(n > 0, I64),
            f.convert(f.intrinsic("sqrt", f.fma(as_float, 1.0, -200.0)), I64),
        ]
        total = f.value(0, I64)
        for part in parts:
            total = total * 1000003 + part
        return total

    expected = 0
    for part in (300, 44, 44, np.float32(300).view(np.int32).item(), 1, 10):
        expected = expected * 1000003 + part
    assert run(write, 300) % 2**64 == expected % 2**64


def test_calls_records_and_pointers_to_functions() -> None:
    record = Layout("pair", {"first": I64, "scale": F64, "function": PTR})
    module = Module()
    with module.function("twice", {"x": I64}, I64) as twice:
        twice.give_back(twice.parameters[0] * 2)
    with module.function("main", {"pair": PTR}) as f:
        (pair,) = f.parameters
        pointer = f.field(record, pair, "function")
        with f.when(pointer.differs(f.null())):
            doubled = f.call_pointer(pointer, Signature("any", {"x": I64}, I64), x=f.value(20, I64))
            f.set_field(record, pair, "first", f.call(twice, doubled))
        scale = f.field(record, pair, "scale")
        f.set_field(record, pair, "scale", f.intrinsic("fabs", scale))
    code = jit.load(jit.compile_object(module.text, Target.host()), ["twice", "main"])
    main = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address("main"))
    for address, first in ((0, 1), (code.address("twice"), 80)):
        memory = ctypes.create_string_buffer(
            record.pack({"first": 1, "scale": -0.5, "function": address})
        )
        main(ctypes.addressof(memory))
        values = np.frombuffer(memory, np.int64, 3)
        assert values[0] == first and values.view(np.float64)[1] == 0.5


def test_arguments_come_in_order_and_by_name() -> None:
    module = Module()
    with module.function("minus", {"a": I64, "b": I64}, I64, internal=True) as minus:
        minus.give_back(minus.given["a"] - minus.given["b"])
    with module.function("main", {"x": I64}, I64) as f:
        x = f.given["x"]
        results = [
            f.call(minus, x, f.value(1, I64)),
            f.call(minus, x, b=f.value(1, I64)),
            f.call(minus, b=f.value(1, I64), a=x),
        ]
        f.give_back(results[0] + results[1] * 100 + results[2] * 10000)
    code = jit.load(jit.compile_object(module.text, Target.host()), ["main"])
    assert ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(code.address("main"))(8) == 70707


@pytest.mark.parametrize(
    ("arguments", "named"), [(0, "a"), (1, ""), (1, "a"), (1, "c"), (2, "b"), (3, ""), (0, "abc")]
)
def test_arguments_that_do_not_fit_are_refused(arguments: int, named: str) -> None:
    module = Module()
    with module.function("minus", {"a": I64, "b": I64}, internal=True) as minus:
        pass
    match = rf"expected the arguments \['a', 'b'\] of minus, got {arguments} without a name and"
    one = {"x": I64}
    with pytest.raises(CodegenError, match=match), module.function("main", one) as f:
        f.call(minus, *f.parameters * arguments, **dict.fromkeys(named, f.given["x"]))


def test_types_are_declared_before_names() -> None:
    assert typed("ptr rows, i64 begin end") == {"rows": PTR, "begin": I64, "end": I64}
    with pytest.raises(CodegenError, match="expected types before names, got 'rows ptr'"):
        typed("rows ptr")


def test_the_text_is_stable() -> None:
    def text() -> str:
        module = Module()
        with module.function("f", {"x": PTR, "n": I64}) as f:
            x, n = f.parameters
            f.comment("squares")
            with f.range(0, n, 8) as i:
                vector = f.load(F32.vector(8), x, i)
                f.store(f.fma(vector, vector, 1.0), x, i, align=32)
        return module.text

    assert text() == text()
    assert "; squares" in text() and "align 32" in text()
    assert "declare <8 x float> @llvm.fma.v8f32(<8 x float>, <8 x float>, <8 x float>)" in text()


# --- what is malformed is refused


@pytest.mark.parametrize(
    ("write", "match"),
    [
        (lambda f: f.parameters[0] + f.parameters[1], "expected float, got i64 %n; convert"),
        (lambda f: f.parameters[0] & 1, "expected a type that has and"),
        (lambda f: f.parameters[1] / 2, "expected a type that has fdiv"),
        (lambda f: f.null() + 1, "expected a type that has add, got ptr null"),
        (lambda f: f.parameters[1] + 0.5, "expected an integer that fits i64, got 0.5"),
        (lambda f: f.value(2**70, I64), "expected an integer that fits i64"),
        (lambda f: f.value(1, PTR), "expected a number type"),
        (lambda f: f.load(F32, f.parameters[1]), "expected ptr, got i64 %n"),
        (lambda f: f.select(f.parameters[1], 1.0, f.parameters[0]), "expected a condition"),
        (lambda f: f.bitcast(f.parameters[0], I64), "expected a type as wide"),
        (lambda f: f.zero_extend(f.parameters[1], I32), "expected an integer wider"),
        (lambda f: f.convert(f.null(), I64), "expected two number types"),
        (lambda f: f.extract(f.iota(I64.vector(4)), 4), "expected a lane"),
        (lambda f: f.shuffle(f.iota(I64.vector(2)), f.iota(I64.vector(2)), [4]), "below 4"),
        (lambda f: f.call(Signature("g", ())), "expected a function of this module, got g"),
        (lambda f: f.intrinsic("fma", f.parameters[0], f.parameters[1]), "convert the arguments"),
        (lambda f: f.give_back(f.parameters[0]), "expected void, got float %x"),
        (lambda f: bool(f.parameters[1] < 3), "use select or when"),
        (lambda f: f.loop(0, 3, lambda i, c: [i], carry=[f.parameters[0]]), "to be carried on"),
        (lambda f: f.loop(0, 3, lambda i, c: [], carry=[f.parameters[0]]), "to be carried on"),
        (
            lambda f: f.choose(f.parameters[1] < 1, list, lambda: [f.parameters[0]]),
            "expected one type from both sides",
        ),
        (lambda f: f.range(0, f.parameters[0]).__enter__(), "expected i64, got float"),
        (lambda f: f.when(f.parameters[1]).__enter__(), "expected i1, got i64"),
    ],
)
def test_mistakes_are_refused(write: Callable[[Function], object], match: str) -> None:
    broken(write, match)


def test_a_value_ends_with_its_block() -> None:
    def after_loop(f: Function) -> None:
        with f.range(0, 3) as i:
            inside = i + 1
        f.store(inside, f.null())

    def after_branch(f: Function) -> None:
        with f.when(f.parameters[1] < 3):
            inside = f.parameters[0] * 2.0
        inside + 1.0

    broken(after_loop, "from a loop or branch that has ended; carry it out")
    broken(after_branch, "from a loop or branch that has ended; carry it out")


def test_a_value_belongs_to_one_function() -> None:
    module = Module()
    with module.function("first", {"x": F32}) as first:
        pass
    with (
        pytest.raises(CodegenError, match="got float %x of first; pass it as an argument"),
        module.function("second", {"y": F32}) as second,
    ):
        second.parameters[0] + first.parameters[0]


def test_functions_end_once() -> None:
    module = Module()
    with module.function("f", {"x": I64}, I64) as f:
        f.give_back(f.parameters[0])
        with pytest.raises(CodegenError, match="expected no more code: f is finished"):
            f.parameters[0] + 1
    with (
        pytest.raises(CodegenError, match="expected g to give back a value"),
        module.function("g", {}, I64),
    ):
        pass
    with pytest.raises(CodegenError, match="second function f"), module.function("f", {}):
        pass
    with module.function("h", {"x": I64}, I64) as h:
        with h.range(0, 3), pytest.raises(CodegenError, match="got a nested block"):
            h.give_back(h.parameters[0])
        h.give_back(h.parameters[0])


# --- types


def test_types_spell_themselves() -> None:
    assert repr(F32.vector(8)) == "<8 x float>" and F32.vector(8).suffix == "v8f32"
    assert F64.vector(4).as_int == I64.vector(4) and I1.like(F32.vector(4)) == I1.vector(4)
    assert F32.vector(0) == F32 and I16.size == 2 and I1.size == 1
    assert VOID.bits == 0 and not PTR.is_int and not PTR.is_float


@pytest.mark.parametrize(
    ("type", "number", "text"),
    [
        (F32, 0.1, "0x3FB99999A0000000"),
        (F64, 0.1, "0x3FB999999999999A"),
        (F16, 1.5, "0xH3E00"),
        (F32, -math.inf, "0xFFF0000000000000"),
        (F32.vector(4), 1.0, "splat (float 0x3FF0000000000000)"),
        (I32, -7, "-7"),
        (I32, 0xFFFFFFFF, "4294967295"),
        (I1, 1, "true"),
    ],
)
def test_literals(type: Type, number: float, text: str) -> None:
    assert literal(type, number) == text


def test_a_layout_packs_all_of_its_fields() -> None:
    layout = Layout("pair", {"first": I64, "second": F64})
    assert len(layout.pack({"first": -1, "second": 2.0})) == layout.size == 16
    with pytest.raises(CodegenError, match=r"exactly the fields of pair, check \['second'\]"):
        layout.pack({"first": 1})
    with pytest.raises(CodegenError, match="expected a field of pair, got 'third'"):
        layout.index("third")
    with pytest.raises(CodegenError, match=r"expected a field of 8 bytes, got float pair\.x"):
        Layout("pair", {"x": F32})


def test_a_record_packed_in_order_is_the_record_packed_by_name() -> None:
    layout = Layout("three", {"first": I64, "second": F64, "third": PTR})
    by_name = layout.pack({"third": 7, "first": -1, "second": 0.5})
    assert layout.pack_in_order(-1, 0.5, 7) == by_name
    with pytest.raises(struct.error, match="expected 3 items"):
        layout.pack_in_order(-1, 0.5)
