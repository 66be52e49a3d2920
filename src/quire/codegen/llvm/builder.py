"""Generated code, written as if it were Python.

    module = Module()
    with module.function("axpy", {"n": I64, "a": F32, "x": PTR, "y": PTR}) as f:
        n, a, x, y = f.parameters
        with f.range(0, n) as i:
            f.store(a * f.load(F32, x, i) + f.load(F32, y, i), y, i)
    module.text

What goes in are Python numbers and `Value`s, which carry a type and know their function. What comes
out is the text of an LLVM module. Only `jit.py` and `target.py` import llvmlite.

LLVM ends the process when it meets malformed code. So everything is checked while it is written:
operands have one type, a value is used only in its own function and only inside the loop or branch
that made it, every block ends once. A violation raises a `CodegenError`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from quire.codegen.llvm.blocks import Blocks
from quire.codegen.llvm.types import F64, I1, I32, I64, PTR, VOID, Layout, Type, literal
from quire.codegen.llvm.values import Operand, Signature, Value
from quire.errors import CodegenError

__all__ = ["Function", "Module", "Operand", "Signature", "Value"]


class Function(Blocks):
    """A function while it is written: instructions here, loops and branches in `Blocks`."""

    def __init__(self, module: Module, signature: Signature) -> None:
        super().__init__(signature)
        self._module = module

    # --- numbers

    def null(self) -> Value:
        """The null pointer."""
        return Value(self, PTR, "null", 0)

    def convert(self, value: Value, to: Type) -> Value:
        """The same number in the scalar type of `to`; i1 is 0 or 1, and floats are truncated."""
        source, target = value.type, to.like(value.type)
        if source == target:
            return value
        wider = target.bits > source.bits
        if source.is_float and target.is_float:
            name = "fpext" if wider else "fptrunc"
        elif source.is_float and target.is_int:
            name = "fptosi"
        elif source.is_int and target.is_float:
            name = "uitofp" if source.kind == "i1" else "sitofp"
        elif source.is_int and target.is_int:
            name = ("zext" if source.kind == "i1" else "sext") if wider else "trunc"
        else:
            raise CodegenError(f"expected two number types, got {value!r} and {to}")
        return self.emit(f"{name} {value!r} to {target}", target, value)

    def zero_extend(self, value: Value, to: Type) -> Value:
        """An unsigned integer in a wider type."""
        target = to.like(value.type)
        if not (value.type.is_int and target.is_int and target.bits > value.type.bits):
            raise CodegenError(f"expected an integer wider than {value!r}, got {target}")
        return self.emit(f"zext {value!r} to {target}", target, value)

    def join_lanes(self, value: Value, to: Type) -> Value:
        """Pairs of lanes as wider integers; the first lane of a pair is the low half."""
        target = to.vector(value.type.lanes // 2)
        if target.scalar.bits != 2 * value.type.scalar.bits or value.type.lanes % 2:
            raise CodegenError(f"expected a type twice as wide as a lane of {value!r}, got {to}")
        return self.emit(f"bitcast {value!r} to {target}", target, value)

    def bitcast(self, value: Value, to: Type) -> Value:
        """The same bits read as another scalar type of the same width."""
        target = to.like(value.type)
        if target.bits != value.type.bits or PTR.kind in (target.kind, value.type.kind):
            raise CodegenError(f"expected a type as wide as {value!r}, got {target}")
        return self.emit(f"bitcast {value!r} to {target}", target, value)

    def reinterpret(self, value: Value, to: Type) -> Value:
        """All bits of a vector read as a vector of other lanes; the first lane is the lowest."""
        if to.bits * max(1, to.lanes) != value.type.bits * max(1, value.type.lanes):
            raise CodegenError(f"expected a type with as many bits as {value!r}, got {to}")
        return self.emit(f"bitcast {value!r} to {to}", to, value)

    def select(self, condition: Value, yes: Operand, no: Operand) -> Value:
        """`yes if condition else no`, lane by lane where the condition is a vector."""
        type = next((x.type for x in (yes, no) if isinstance(x, Value)), F64)
        first, second = self.value(yes, type), self.value(no, type)
        if condition.type.kind != "i1" or condition.type.lanes not in (0, type.lanes):
            raise CodegenError(f"expected a condition that fits {type}, got {condition!r}")
        text = f"select {condition!r}, {first!r}, {second!r}"
        return self.emit(text, type, condition, first, second)

    def minimum(self, a: Value, b: Operand) -> Value:
        """The smaller one; for floats, `b` where either is NaN."""
        return self.select(a < b, a, b)

    def maximum(self, a: Value, b: Operand) -> Value:
        """The larger one; for floats, `b` where either is NaN."""
        return self.select(a > b, a, b)

    def is_nan(self, x: Value) -> Value:
        """True where x is NaN."""
        return x.differs(x)

    def intrinsic(self, name: str, *operands: Value) -> Value:
        """An LLVM intrinsic whose result has the type of its operands: fma, sqrt, fabs, ..."""
        type = operands[0].type
        return self._library(f"{name}.{type.suffix}", (type,) * len(operands), type, operands)

    def instruction(self, name: str, returns: Type, *operands: Value) -> Value:
        """An instruction that only some processors have, by LLVM's name: x86.avx2.pmadd.wd, ..."""
        return self._library(name, [x.type for x in operands], returns, operands)

    def leading_zeros(self, x: Value) -> Value:
        """How many zero bits an integer has before its first one bit."""
        operands = (x, self.value(False, I1))
        return self._library(f"ctlz.{x.type.suffix}", (x.type, I1), x.type, operands)

    def trailing_zeros(self, x: Value) -> Value:
        """How many zero bits an integer has after its last one bit."""
        operands = (x, self.value(False, I1))
        return self._library(f"cttz.{x.type.suffix}", (x.type, I1), x.type, operands)

    def fma(self, a: Value, b: Operand, c: Operand) -> Value:
        """`a * b + c`, rounded once."""
        return self.intrinsic("fma", a, self.value(b, a.type), self.value(c, a.type))

    # --- vectors

    def splat(self, scalar: Operand, type: Type) -> Value:
        """A scalar in every lane of the vector `type`; the scalar itself if `type` is one."""
        x = self.value(scalar, type.scalar)
        if not type.lanes or not isinstance(scalar, Value):
            return self.value(scalar, type)
        start = self.emit(f"insertelement {type} poison, {x!r}, i64 0", type, x)
        lanes = f"<{type.lanes} x i32> zeroinitializer"
        return self.emit(f"shufflevector {start!r}, {type} poison, {lanes}", type, start)

    def lanes(self, type: Type, numbers: Sequence[float]) -> Value:
        """A constant vector, lane by lane."""
        each = ", ".join(f"{type.kind} {literal(type.scalar, number)}" for number in numbers)
        return Value(self, type.scalar.vector(len(numbers)), f"<{each}>", 0)

    def iota(self, type: Type) -> Value:
        """0, 1, 2, ... in the lanes of a vector type."""
        return self.lanes(type, range(type.lanes))

    def shuffle(self, a: Value, b: Value, picks: Sequence[int]) -> Value:
        """A vector of lanes picked from `a`, and from `b` by numbers from len(a) on."""
        self.value(b, a.type)
        if not picks or not all(0 <= lane < 2 * a.type.lanes for lane in picks):
            raise CodegenError(f"expected lanes below {2 * a.type.lanes}, got {list(picks)}")
        mask = f"<{len(picks)} x i32> <{', '.join(f'i32 {lane}' for lane in picks)}>"
        result = a.type.vector(len(picks))
        return self.emit(f"shufflevector {a!r}, {b!r}, {mask}", result, a, b)

    def extract(self, vector: Value, lane: int) -> Value:
        """One lane of a vector."""
        self._check_lane(vector, lane)
        return self.emit(f"extractelement {vector!r}, i64 {lane}", vector.type.scalar, vector)

    def insert(self, vector: Value, scalar: Operand, lane: int) -> Value:
        """The vector with one lane replaced."""
        self._check_lane(vector, lane)
        x = self.value(scalar, vector.type.scalar)
        return self.emit(f"insertelement {vector!r}, {x!r}, i64 {lane}", vector.type, vector, x)

    def any_lane(self, condition: Value) -> Value:
        """True if the condition holds in some lane."""
        return self.reduce("or", condition) if condition.type.lanes else self.value(condition, I1)

    def reduce(self, op: str, vector: Value) -> Value:
        """All lanes of a vector of integers combined by "or", "smax" and the like."""
        type = vector.type
        return self._library(f"vector.reduce.{op}.{type.suffix}", (type,), type.scalar, (vector,))

    def _check_lane(self, vector: Value, lane: int) -> None:
        if not 0 <= lane < vector.type.lanes:
            raise CodegenError(f"expected a lane of {vector!r}, got {lane}")

    # --- memory

    def offset(self, pointer: Value, index: Operand, element: Type) -> Value:
        """The address of `pointer[index]`; the index counts elements of the scalar type."""
        self.value(pointer, PTR)
        if not isinstance(index, Value) and index == 0:
            return pointer
        i = self.value(index, I64)
        text = f"getelementptr {element.kind}, ptr {pointer.text}, {i!r}"
        return self.emit(text, PTR, pointer, i)

    def address(self, pointer: Value) -> Value:
        """A pointer as a number."""
        return self.emit(f"ptrtoint {self.value(pointer, PTR)!r} to i64", I64, pointer)

    def load(self, type: Type, pointer: Value, index: Operand = 0, *, align: int = 0) -> Value:
        """Read `type` at `pointer[index]`; the index counts lanes, not vectors."""
        address = self.offset(pointer, index, type)
        text = f"load {type}, ptr {address.text}, align {align or type.size}"
        return self.emit(text, type, address)

    def store(self, value: Value, pointer: Value, index: Operand = 0, *, align: int = 0) -> None:
        """Write a value at `pointer[index]`; the index counts lanes, not vectors."""
        address = self.offset(pointer, index, value.type)
        text = f"store {value!r}, ptr {address.text}, align {align or value.type.size}"
        self.emit_void(text, value, address)

    def prefetch(self, pointer: Value, near: int = 3) -> None:
        """Prefetch a cache line, to be read at once (3), soon (2), or once (0)."""
        reading, locality, data = (self.value(number, I32) for number in (0, near, 1))
        operands = (self.value(pointer, PTR), reading, locality, data)
        self._library("prefetch.p0", (PTR, I32, I32, I32), VOID, operands)

    def atomic_add(self, pointer: Value, amount: int, *, publish: bool = False) -> Value:
        """Add to an i64 that threads share; returns the value before.

        With `publish`, a thread that adds later sees what this one wrote to memory before.
        """
        order = "acq_rel" if publish else "monotonic"
        text = f"atomicrmw add ptr {pointer.text}, i64 {amount} {order}"
        return self.emit(text, I64, self.value(pointer, PTR))

    def atomic_load(self, pointer: Value) -> Value:
        """Read an i64 that threads share."""
        text = f"load atomic i64, ptr {pointer.text} monotonic, align 8"
        return self.emit(text, I64, self.value(pointer, PTR))

    def field(self, layout: Layout, pointer: Value, name: str) -> Value:
        """Read one field of a record."""
        index = layout.index(name)
        return self.load(layout.fields[name], pointer, index)

    def set_field(self, layout: Layout, pointer: Value, name: str, value: Operand) -> None:
        """Write one field of a record."""
        index = layout.index(name)
        self.store(self.value(value, layout.fields[name]), pointer, index)

    # --- calls

    def call(self, callee: Signature | Function, /, *arguments: Value, **named: Value) -> Value:
        """Call a function of this module; arguments come in order, by name, or both."""
        signature = callee.signature if isinstance(callee, Function) else callee
        if not self._module.knows(signature):
            raise CodegenError(f"expected a function of this module, got {signature.name}")
        return self._call(f"@{signature.name}", signature, signature.in_order(arguments, named))

    def helper(
        self,
        name: str,
        parameters: Mapping[str, Type],
        returns: Type,
        write: Callable[[Function], None],
    ) -> Signature:
        """A function of this module that many places call; written when it is first wanted."""
        signature = Signature(name, parameters, returns)
        if not self._module.knows(signature):
            with self._module.function(name, parameters, returns, internal=True) as helper:
                write(helper)
        return signature

    def call_pointer(
        self, pointer: Value, signature: Signature, /, *arguments: Value, **named: Value
    ) -> Value:
        """Call the function at an address."""
        self._check([self.value(pointer, PTR)])
        return self._call(pointer.text, signature, signature.in_order(arguments, named))

    def _library(
        self, name: str, types: Sequence[Type], returns: Type, operands: Sequence[Value]
    ) -> Value:
        """Call an intrinsic of LLVM."""
        return self.call(self._module.declare(_intrinsic(name, tuple(types), returns)), *operands)

    def _call(self, target: str, signature: Signature, arguments: Sequence[Value]) -> Value:
        types = tuple(argument.type for argument in arguments)
        if types != tuple(signature.parameters.values()):
            raise CodegenError(f"expected {signature}, got {types}; convert the arguments")
        text = f"call {signature.returns} {target}({', '.join(map(repr, arguments))})"
        if signature.returns != VOID:
            return self.emit(text, signature.returns, *arguments)
        self.emit_void(text, *arguments)
        return Value(self, VOID, "", 0)


@functools.cache
def _intrinsic(name: str, types: tuple[Type, ...], returns: Type) -> Signature:
    parameters = {f"operand{place}": type for place, type in enumerate(types)}
    return Signature(f"llvm.{name}", parameters, returns)


class Module:
    """Functions that are compiled together."""

    def __init__(self) -> None:
        self._written: dict[str, str] = {}
        self._signatures: dict[str, Signature] = {}

    @contextmanager
    def function(
        self,
        name: str,
        parameters: Mapping[str, Type],
        returns: Type = VOID,
        *,
        internal: bool = False,
    ) -> Iterator[Function]:
        """Write a function; an `internal` one is called from this module only."""
        signature = Signature(name, parameters, returns)
        if name in self._signatures:
            raise CodegenError(f"expected a new name, got a second function {name}")
        self._signatures[name] = signature
        function = Function(self, signature)
        yield function
        linkage = "internal " if internal else ""
        arguments = ", ".join(map(repr, function.parameters))
        head = f"define {linkage}{returns} @{name}({arguments}) nounwind {{"
        self._written[name] = f"{head}\n{function.finish()}\n}}\n"

    def declare(self, signature: Signature) -> Signature:
        """Declare an intrinsic in the module, and return it."""
        known = self._signatures.setdefault(signature.name, signature)
        if known is not signature and known != signature:
            raise CodegenError(f"expected {known}, got {signature}; the name is taken")
        return signature

    def knows(self, signature: Signature) -> bool:
        """True if a function with this signature can be called here."""
        known = self._signatures.get(signature.name)
        return known is signature or known == signature

    @property
    def text(self) -> str:
        """The module as LLVM reads it: declarations, then functions in the order written."""
        declared = sorted(self._signatures.keys() - self._written.keys())
        lines = [
            f"declare {x.returns} @{x.name}({', '.join(map(repr, x.parameters.values()))})"
            for x in map(self._signatures.__getitem__, declared)
        ]
        return "\n".join([*lines, "", *self._written.values()])
