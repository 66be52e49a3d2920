"""What generated code computes with: a `Value` has a type, a function and operators.

Every operator appends one instruction to the value's function. A Python number on either side
becomes a constant of the value's type; two values must have the same type.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.codegen.llvm.types import I1, VOID, Type
from quire.errors import CodegenError

if TYPE_CHECKING:
    from quire.codegen.llvm.blocks import Blocks


@dataclass(frozen=True)
class Signature:
    """What a call needs to know of a function: its name, its parameters and what it returns."""

    name: str
    parameters: Mapping[str, Type]
    returns: Type = VOID

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", dict(self.parameters))

    def in_order(self, arguments: Sequence[Value], named: Mapping[str, Value]) -> Sequence[Value]:
        """One value for each parameter: the first ones by position, all others by name."""
        if not named and len(arguments) == len(self.parameters):
            return arguments
        expected = list(self.parameters)
        given = {**dict(zip(expected, arguments, strict=False)), **named}
        if len(arguments) + len(named) != len(expected) or given.keys() != set(expected):
            raise CodegenError(
                f"expected the arguments {expected} of {self.name}, got {len(arguments)} without a "
                f"name and {sorted(named)}"
            )
        return [given[name] for name in expected]


class Value:
    """A number, vector or pointer of generated code.

    Integers are signed when compared. They are divided by methods whose names say how they round.
    `==` is Python's identity, so values can be keys of a dict; generated code uses `equals`.
    """

    __slots__ = ("function", "scope", "text", "type")

    def __init__(self, function: Blocks, type: Type, text: str, scope: int) -> None:
        self.function, self.type, self.text, self.scope = function, type, text, scope

    def __repr__(self) -> str:
        return f"{self.type} {self.text}"

    def __bool__(self) -> bool:
        raise CodegenError(f"expected a Python truth value, got {self!r}; use select or when")

    def _binary(self, other: Operand, on_int: str, on_float: str, swap: bool = False) -> Value:
        name = on_float if self.type.is_float else on_int if self.type.is_int else ""
        if not name:
            raise CodegenError(f"expected a type that has {on_int or on_float}, got {self!r}")
        right = self.function.value(other, self.type)
        first, second = (right, self) if swap else (self, right)
        return self.function.emit(f"{name} {first!r}, {second.text}", self.type, first, second)

    def _compare(self, other: Operand, predicate: str) -> Value:
        right = self.function.value(other, self.type)
        if self.type.is_float:
            name = "fcmp une" if predicate == "ne" else f"fcmp o{predicate}"
        else:
            name = f"icmp {predicate}" if predicate in ("eq", "ne") else f"icmp s{predicate}"
        return self.function.emit(f"{name} {self!r}, {right.text}", I1.like(self.type), self, right)

    def __add__(self, other: Operand) -> Value:
        return self._binary(other, "add", "fadd")

    def __radd__(self, other: Operand) -> Value:
        return self._binary(other, "add", "fadd", swap=True)

    def __sub__(self, other: Operand) -> Value:
        return self._binary(other, "sub", "fsub")

    def __rsub__(self, other: Operand) -> Value:
        return self._binary(other, "sub", "fsub", swap=True)

    def __mul__(self, other: Operand) -> Value:
        return self._binary(other, "mul", "fmul")

    def __rmul__(self, other: Operand) -> Value:
        return self._binary(other, "mul", "fmul", swap=True)

    def __truediv__(self, other: Operand) -> Value:
        return self._binary(other, "", "fdiv")

    def __rtruediv__(self, other: Operand) -> Value:
        return self._binary(other, "", "fdiv", swap=True)

    def __neg__(self) -> Value:
        if self.type.is_float:
            return self.function.emit(f"fneg {self!r}", self.type, self)
        return 0 - self

    def __and__(self, other: Operand) -> Value:
        return self._binary(other, "and", "")

    def __or__(self, other: Operand) -> Value:
        return self._binary(other, "or", "")

    def __xor__(self, other: Operand) -> Value:
        return self._binary(other, "xor", "")

    def __invert__(self) -> Value:
        return self ^ (1 if self.type.kind == "i1" else -1)

    def __lshift__(self, other: Operand) -> Value:
        return self._binary(other, "shl", "")

    def __rshift__(self, other: Operand) -> Value:
        return self._binary(other, "ashr", "")

    def logical_shift(self, bits: Operand) -> Value:
        """Shift right, filling with zeros."""
        return self._binary(bits, "lshr", "")

    def udiv(self, other: Operand) -> Value:
        """The quotient of two numbers that are not negative."""
        return self._binary(other, "udiv", "")

    def urem(self, other: Operand) -> Value:
        """The remainder of two numbers that are not negative."""
        return self._binary(other, "urem", "")

    def sdiv(self, other: Operand) -> Value:
        """The quotient rounded towards zero."""
        return self._binary(other, "sdiv", "")

    def srem(self, other: Operand) -> Value:
        """The remainder of `sdiv`: it has the sign of the dividend."""
        return self._binary(other, "srem", "")

    def __lt__(self, other: Operand) -> Value:
        return self._compare(other, "lt")

    def __le__(self, other: Operand) -> Value:
        return self._compare(other, "le")

    def __gt__(self, other: Operand) -> Value:
        return self._compare(other, "gt")

    def __ge__(self, other: Operand) -> Value:
        return self._compare(other, "ge")

    def equals(self, other: Operand) -> Value:
        """`==`; false for NaN."""
        return self._compare(other, "eq")

    def differs(self, other: Operand) -> Value:
        """`!=`; true for NaN."""
        return self._compare(other, "ne")


Operand = Value | int | float
