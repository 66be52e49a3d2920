"""The types of generated code, and literals of those types.

    >>> F32.vector(8)
    <8 x float>
    >>> literal(F32, 0.1)
    '0x3FB99999A0000000'

A `Layout` names the fields of a record that Python packs and generated code reads. Every field
takes eight bytes, so a record is packed by `struct.pack` from integers, pointers and doubles.
"""

from __future__ import annotations

import operator
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field

from quire.errors import CodegenError

_BITS = {"void": 0, "ptr": 64, "half": 16, "float": 32, "double": 64}
_BITS |= {f"i{bits}": bits for bits in (1, 8, 16, 32, 64)}


@dataclass(frozen=True, slots=True)
class Type:
    """A scalar (`lanes` is 0) or a vector of scalars, as LLVM spells it."""

    kind: str
    lanes: int = 0
    text: str = field(init=False, repr=False, compare=False, default="")
    bits: int = field(init=False, repr=False, compare=False, default=0)  # of one lane

    def __post_init__(self) -> None:
        text = f"<{self.lanes} x {self.kind}>" if self.lanes else self.kind
        object.__setattr__(self, "text", text)
        object.__setattr__(self, "bits", _BITS[self.kind])

    def __repr__(self) -> str:
        return self.text

    def vector(self, lanes: int) -> Type:
        """A vector of this scalar; 0 lanes is the scalar itself."""
        return Type(self.kind, lanes)

    def like(self, other: Type) -> Type:
        """This scalar in the shape of `other`: I32.like(<8 x float>) is <8 x i32>."""
        return Type(self.kind, other.lanes)

    @property
    def scalar(self) -> Type:
        """The type of one lane."""
        return Type(self.kind)

    @property
    def size(self) -> int:
        """The bytes one lane takes in memory."""
        return (self.bits + 7) // 8

    @property
    def is_float(self) -> bool:
        """True for half, float and double."""
        return self.kind in ("half", "float", "double")

    @property
    def is_int(self) -> bool:
        """True for i1 to i64."""
        return self.kind.startswith("i")

    @property
    def as_int(self) -> Type:
        """The integer type with the same bits and lanes."""
        return Type(f"i{self.bits}", self.lanes)

    @property
    def suffix(self) -> str:
        """How the name of an intrinsic spells this type: v8f32, i64."""
        scalar = f"f{self.bits}" if self.is_float else self.kind
        return f"v{self.lanes}{scalar}" if self.lanes else scalar


VOID, PTR = Type("void"), Type("ptr")
F16, F32, F64 = Type("half"), Type("float"), Type("double")
I1, I8, I16, I32, I64 = Type("i1"), Type("i8"), Type("i16"), Type("i32"), Type("i64")


def literal(type: Type, number: float) -> str:
    """The text of a constant; for a vector, the same number in every lane."""
    text = _scalar_literal(type.scalar, number)
    return f"splat ({type.kind} {text})" if type.lanes else text


def _scalar_literal(type: Type, number: float) -> str:
    if type.is_float:
        return _float_literal(type, float(number))
    if type.kind == "i1":
        return "true" if number else "false"
    if not type.is_int:
        raise CodegenError(f"expected a number type, got a literal of {type}; use null()")
    if number != int(number) or not -(2 ** (type.bits - 1)) <= number < 2**type.bits:
        raise CodegenError(f"expected an integer that fits {type}, got {number}")
    return str(int(number))


def _float_literal(type: Type, number: float) -> str:
    if type.kind == "half":
        return f"0xH{struct.unpack('<H', struct.pack('<e', number))[0]:04X}"
    if type.kind == "float" and abs(number) != float("inf"):
        number = struct.unpack("<f", struct.pack("<f", number))[0]
    return f"0x{struct.unpack('<Q', struct.pack('<d', number))[0]:016X}"


def typed(declarations: str) -> dict[str, Type]:
    """Types by name, written as in C: each type stands before its names.

    >>> typed("ptr rows, i64 begin end")
    {'rows': ptr, 'begin': i64, 'end': i64}
    """
    declared = [part.split() for part in declarations.split(",")]
    if any(kind not in _BITS for kind, *_ in declared):
        raise CodegenError(f"expected types before names, got {declarations!r}")
    return {name: Type(kind) for kind, *names in declared for name in names}


class Layout:
    """The fields of a record in memory, eight bytes each, in order."""

    def __init__(self, name: str, fields: Mapping[str, Type]) -> None:
        self.name = name
        self.fields = dict(fields)
        self.size = 8 * len(self.fields)  # bytes of one record
        self._index = {field: index for index, field in enumerate(fields)}
        for field_name, type in self.fields.items():
            if type.bits != 64 or type.lanes:
                raise CodegenError(f"expected a field of 8 bytes, got {type} {name}.{field_name}")
        format = "".join("d" if type == F64 else "q" for type in self.fields.values())
        self._struct = struct.Struct(f"={format}")
        self.pack_in_order = self._struct.pack
        self._in_order = operator.itemgetter(*self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def index(self, field: str) -> int:
        """The number of a field, counting from 0."""
        if field not in self._index:
            raise CodegenError(f"expected a field of {self.name}, got {field!r}")
        return self._index[field]

    def pack(self, values: Mapping[str, int | float]) -> bytes:
        """The bytes of one record; every field must be given, and no other.

        >>> Layout("pair", {"first": I64, "second": F64}).pack({"first": 1, "second": 0.5})
        b'\\x01\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\xe0?'
        """
        try:
            ordered = self._in_order(values)
        except KeyError:
            ordered = ()
        if len(ordered) != len(values):
            wrong = sorted(values.keys() ^ self.fields.keys())
            raise CodegenError(f"expected exactly the fields of {self.name}, check {wrong}")
        return self._struct.pack(*ordered)
