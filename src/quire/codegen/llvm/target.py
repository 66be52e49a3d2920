"""The processor that code is generated for, and the tile shapes that suit it.

    >>> Target.named("x86-64-v3").vector_bits
    256
    >>> Target.named("x86-64-v3:512").vector_bits  # LLVM splits vectors that are too wide
    512

A `Target` is a value: equal targets give the same code. `Target.host()` is what this process
generates code for: this machine, or what QUIRE_TARGET names. A named target gives the same text and
assembly on every machine. A target with another width has the tiles of processors with such
vectors, so tests can run the tiles of every processor on any machine.

The micro kernel multiplies `rows` broadcast numbers with a row of `vectors` vectors:

            panel: `vectors` vectors of queries
           |-------|-------|
    row 0  |  acc  |  acc  |      rows x vectors accumulators, the row of vectors and one
    row 1  |  acc  |  acc  |      broadcast number must fit the register file together
     ...   |       |       |

`python benchmarks/tiles.py` measures shapes; docs/processors.md has what it printed. 16 registers
hold 6 x 2. With 32 registers 6 x 4 is within a percent or two of the best on every processor that
was measured, for forward and backward passes and rows of 64 and 128 numbers.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

import llvmlite.binding as llvm

from quire.codegen.llvm.types import Type
from quire.config import config
from quire.errors import ArgumentError, BackendError

WIDTHS = (128, 256, 512)
"""The widths of vectors, in bits, that kernels can be written for."""

_NEEDED_ON_X86 = ("avx2", "fma", "f16c")
_NEEDED_FOR_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")
_LEVEL_3 = (*_NEEDED_ON_X86, "bmi", "bmi2", "lzcnt", "movbe")
_FEATURES_OF_LEVEL = {
    "x86-64-v3": _LEVEL_3,
    "x86-64-v4": (*_LEVEL_3, *_NEEDED_FOR_AVX512, "avx512cd"),
    "aarch64": (),
}


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

    def __str__(self) -> str:
        shape = f"tiles of {self.rows} rows x {self.vectors} vectors"
        return f"{self.cpu}, vectors of {self.vector_bits} bits, {shape}"

    def lanes(self, element: Type) -> int:
        """How many elements one vector register holds."""
        return self.vector_bits // element.bits

    def vector(self, element: Type) -> Type:
        """The type of a full vector register."""
        return element.vector(self.lanes(element))

    def panel(self, element: Type) -> int:
        """How many queries a panel holds, side by side."""
        return self.vectors * self.lanes(element)

    def widened(self, vector_bits: int) -> Target:
        """This processor with the tiles of one whose vectors have `vector_bits` bits."""
        if vector_bits == self.vector_bits:
            return self
        # Only AVX2, with 256 bits, has 16 registers; processors of other widths have 32.
        registers = 32 if vector_bits != 256 else self.registers
        return _shaped(self.triple, self.cpu, self.features, vector_bits, registers)

    @staticmethod
    def named(name: str) -> Target:
        """A target that is the same on every machine, as in "x86-64-v4" or "x86-64-v3:512"."""
        processor, colon, width = name.partition(":")
        known = [str(bits) for bits in WIDTHS]
        if processor not in _NAMED or (colon and width not in known):
            raise ArgumentError(
                f"expected a target out of {', '.join(_NAMED)}, perhaps with a width of vectors "
                f"out of {', '.join(known)} as in x86-64-v3:512, got {name!r}. Leave it out for "
                f"this processor."
            )
        target = _NAMED[processor]
        return target.widened(int(width)) if colon else target

    @staticmethod
    def host() -> Target:
        """What this process generates code for: QUIRE_TARGET, or else this machine.

        Raises BackendError, with the reason, if the machine lacks what every kernel needs, and
        ArgumentError if it lacks what QUIRE_TARGET asks for.
        """
        return _host(config().target)


@functools.cache
def _host(name: str | None) -> Target:
    triple, features = code_triple(llvm.get_process_triple()), host_features()
    if name is not None:
        return _runnable(name, triple, features)
    reason = missing_on(triple, features)
    if reason:
        raise BackendError(f"{reason}; use backend='eager'")
    flags = ",".join(f"{'+' if features[name] else '-'}{name}" for name in sorted(features))
    return _describe(triple, llvm.get_host_cpu_name(), features, flags)


def _runnable(name: str, triple: str, features: Mapping[str, bool]) -> Target:
    """A named target, checked: this machine must be able to run its code."""
    try:
        target = Target.named(name)
    except ArgumentError as error:
        raise ArgumentError(f"QUIRE_TARGET: {error}") from None
    level = name.partition(":")[0]
    missing = [feature for feature in _FEATURES_OF_LEVEL[level] if not features.get(feature)]
    if _architecture(target.triple) != _architecture(triple):
        missing = [_architecture(target.triple)]
    if missing:
        raise ArgumentError(
            f"QUIRE_TARGET: expected a target that this processor runs, got {name!r}, and it lacks "
            f"{' '.join(missing)}. Unset it to use what the processor has."
        )
    return replace(target, triple=triple)


def host_features() -> Mapping[str, bool]:
    """The features of this processor by LLVM's names; none if LLVM cannot tell.

    It cannot on some aarch64 systems, where no feature is needed that not every processor has.
    """
    try:
        return dict(llvm.get_host_cpu_features())
    except RuntimeError:
        return {}


def code_triple(process_triple: str) -> str:
    """The triple that code for a process is compiled for: on Windows with objects in ELF format.

    Objects in Windows' own format refer to a symbol of the C library, `_fltused`, and to constants
    that a linker would merge. ELF objects need nothing else; the calling convention stays Windows'.
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
        return _shaped(triple, cpu, flags, vector_bits=128, registers=32)
    if all(features.get(name) for name in _NEEDED_FOR_AVX512):
        return _shaped(triple, cpu, flags, vector_bits=512, registers=32)
    return _shaped(triple, cpu, flags, vector_bits=256, registers=16)


def _shaped(triple: str, cpu: str, flags: str, vector_bits: int, registers: int) -> Target:
    vectors = 4 if registers == 32 else 2
    return Target(triple, cpu, flags, vector_bits, registers, rows=6, vectors=vectors)


_LINUX = "unknown-linux-gnu"
_NAMED = {
    "x86-64-v3": _describe(f"x86_64-{_LINUX}", "x86-64-v3", {}, ""),
    "x86-64-v4": _describe(
        f"x86_64-{_LINUX}", "x86-64-v4", dict.fromkeys(_NEEDED_FOR_AVX512, True), ""
    ),
    "aarch64": _describe(f"aarch64-{_LINUX}", "generic", {}, ""),
}
