"""The processor that code is generated for, and the tile shapes that suit it.

    >>> Target.named("x86-64-v3").vector_bits
    256

A `Target` is a value: two of them are equal if they give the same code. `Target.host()` describes
this machine; named targets give the same text and assembly everywhere.

The micro kernel multiplies `rows` broadcast numbers with a row of `vectors` vectors:

            panel: `vectors` vectors of queries
           |-------|-------|
    row 0  |  acc  |  acc  |      rows x vectors accumulators, the row of vectors and one
    row 1  |  acc  |  acc  |      broadcast number must fit the register file together
     ...   |       |       |
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

import llvmlite.binding as llvm

from quire.codegen.types import Type
from quire.errors import ArgumentError, BackendError

_NEEDED_ON_X86 = ("avx2", "fma", "f16c")
_NEEDED_FOR_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")


@dataclass(frozen=True)
class Target:
    """A processor: what LLVM calls it, and the shape of tiles on it."""

    triple: str
    cpu: str
    features: str
    vector_bits: int
    registers: int
    rows: int
    vectors: int
    block_kv: int = 128

    def __post_init__(self) -> None:
        used = self.rows * self.vectors + self.vectors + 1
        assert used <= self.registers, f"a micro kernel of {used} registers on {self.registers}"

    def lanes(self, element: Type) -> int:
        """How many elements one vector register holds."""
        return self.vector_bits // element.bits

    def vector(self, element: Type) -> Type:
        """The type of a full vector register."""
        return element.vector(self.lanes(element))

    def panel(self, element: Type) -> int:
        """How many queries a panel holds, side by side."""
        return self.vectors * self.lanes(element)

    @staticmethod
    def named(name: str) -> Target:
        """A target that is the same on every machine: x86-64-v3, x86-64-v4 or aarch64."""
        if name not in _NAMED:
            raise ArgumentError(
                f"expected a target out of {', '.join(_NAMED)}, got {name!r}. Leave it out for "
                f"this processor."
            )
        return _NAMED[name]

    @staticmethod
    @functools.cache
    def host() -> Target:
        """This machine. Raises BackendError, with the reason, where it lacks what we need."""
        features = host_features()
        reason = missing_on(llvm.get_process_triple(), features)
        if reason:
            raise BackendError(f"{reason}; use backend='eager'")
        flags = ",".join(f"{'+' if features[name] else '-'}{name}" for name in sorted(features))
        triple = code_triple(llvm.get_process_triple())
        return _describe(triple, llvm.get_host_cpu_name(), features, flags)


def host_features() -> Mapping[str, bool]:
    """What this processor can do, by LLVM's names; nothing where LLVM does not know.

    It does not on every system of aarch64. That is no loss, since nothing is needed there besides
    what every such processor has.
    """
    try:
        return dict(llvm.get_host_cpu_features())
    except RuntimeError:
        return {}


def code_triple(process_triple: str) -> str:
    """What code for a process is compiled for: the same, and on Windows with objects in ELF.

    Objects in Windows' own format refer to a symbol of the C library, `_fltused`, and to constants
    that a linker would merge. Those in ELF stand alone, and the calling convention is Windows'.
    """
    return f"{process_triple}-elf" if is_windows(process_triple) else process_triple


def is_windows(triple: str) -> bool:
    """Whether code for a triple runs on Windows."""
    return "windows" in triple


def missing_on(triple: str, features: Mapping[str, bool]) -> str:
    """Why a machine cannot run generated code; empty if it can."""
    architecture = _architecture(triple)
    if architecture == "aarch64" and not is_windows(triple):
        return ""
    if architecture != "x86_64":
        return f"expected a processor of x86_64, or of aarch64 without Windows, got {triple}"
    missing = [name for name in _NEEDED_ON_X86 if not features.get(name)]
    needed = " ".join(_NEEDED_ON_X86)
    return f"expected a processor with {needed}, this one lacks {' '.join(missing)}" * bool(missing)


def _architecture(triple: str) -> str:
    name = triple.split("-")[0].lower()
    return {"arm64": "aarch64", "amd64": "x86_64"}.get(name, name)


def _describe(triple: str, cpu: str, features: Mapping[str, bool], flags: str) -> Target:
    if _architecture(triple) == "aarch64":
        # 128-bit vectors are short: four of them make a panel of 16 floats.
        return Target(triple, cpu, flags, vector_bits=128, registers=32, rows=6, vectors=4)
    if all(features.get(name) for name in _NEEDED_FOR_AVX512):
        return Target(triple, cpu, flags, vector_bits=512, registers=32, rows=8, vectors=2)
    return Target(triple, cpu, flags, vector_bits=256, registers=16, rows=6, vectors=2)


_LINUX = "unknown-linux-gnu"
_NAMED = {
    "x86-64-v3": _describe(f"x86_64-{_LINUX}", "x86-64-v3", {}, ""),
    "x86-64-v4": _describe(
        f"x86_64-{_LINUX}", "x86-64-v4", dict.fromkeys(_NEEDED_FOR_AVX512, True), ""
    ),
    "aarch64": _describe(f"aarch64-{_LINUX}", "generic", {}, ""),
}
