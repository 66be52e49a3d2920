"""From LLVM text to an object file, and from an object file to code that can be called.

    code = load(compile_object(module.text, Target.host()), ["axpy"])
    ctypes.CFUNCTYPE(None, ...)(code.address("axpy"))

LLVM's own optimisation passes do not run: the text is written as we want it, and they would double
the compile time. Objects need no symbols from outside, so an object from the disk loads like one
just compiled. Code lives as long as its `Code` object: keep that together with its addresses.

Code refers to its constants by 32-bit distances, on aarch64 whatever the code model. So all
sections of an object have to lie close together. LLVM's newer linker, JITLink, allocates them
together. The older one allocates each by itself, and ends the process if they are too far apart.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable
from typing import Any

import llvmlite.binding as llvm

from quire.codegen.llvm.target import Target, is_windows
from quire.errors import CodegenError
from quire.support.locks import lock

_lock = lock()  # LLVM has globals that are not thread-safe
_serial = itertools.count()


class Code:
    """Machine code in memory; it is unloaded when this object is deleted."""

    def __init__(self, addresses: dict[str, int], tracker: Any) -> None:
        self._addresses = addresses
        self._tracker = tracker

    def __del__(self) -> None:
        with _lock:
            self._tracker.close()  # frees the memory

    def address(self, name: str) -> int:
        """The address of an exported function."""
        if name not in self._addresses:
            raise CodegenError(f"expected one of {sorted(self._addresses)}, got {name!r}")
        return self._addresses[name]


def compile_object(text: str, target: Target) -> bytes:
    """The object file of a module, for any target."""
    with _lock:
        return bytes(_machine(target).emit_object(_module(text, target)))


def assembly(text: str, target: Target) -> str:
    """The assembly of a module, for any target."""
    with _lock:
        return str(_machine(target).emit_assembly(_module(text, target)))


def load(image: bytes, exports: Iterable[str]) -> Code:
    """The code of an object file, ready to be called on this machine."""
    names = list(exports)
    builder = llvm.JITLibraryBuilder().add_object_img(image)
    for name in names:
        builder.export_symbol(name)
    with _lock:
        try:
            tracker = builder.link(_linker(), f"quire{next(_serial)}")
        except RuntimeError as error:
            raise CodegenError(f"expected an object with {names}, got {error}") from error
    return Code({name: tracker[name] for name in names}, tracker)


def llvm_version() -> str:
    """The version of LLVM that compiles, as in "20.1.8"."""
    return ".".join(map(str, llvm.llvm_version_info))


_STACK_PROBE = r"""
module asm ".local __chkstk"
module asm "__chkstk:"
module asm "  movq %rsp, %r10"
module asm "  movq %rax, %r11"
module asm "1: subq $4096, %r10"
module asm "  testb $0, (%r10)"
module asm "  subq $4096, %r11"
module asm "  ja 1b"
module asm "  retq"
"""
"""On Windows a function calls this if its frame, of rax bytes, is larger than a page: a page of the
stack exists only once the page above it was touched. The code may overwrite r10 and r11."""


def _module(text: str, target: Target) -> Any:
    """A verified module. Here LLVM reports a mistake; later it would end the process."""
    if is_windows(target.triple):
        text += _STACK_PROBE
    try:
        module = llvm.parse_assembly(text, context=llvm.create_context())
        module.verify()
    except RuntimeError as error:
        raise CodegenError(f"expected well-formed code, got {error}") from error
    _refuse_unknown_functions(module)
    return module


def _refuse_unknown_functions(module: Any) -> None:
    for function in module.functions:
        if function.is_declaration and not function.name.startswith("llvm."):
            raise CodegenError(f"expected a module on its own, got a call to {function.name}")


@functools.cache
def _machine(target: Target) -> Any:
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.initialize_native_asmparser()  # for _STACK_PROBE
    description = llvm.Target.from_triple(target.triple)
    # Windows may put code and its constants too far apart for an offset of 32 bits.
    reloc, codemodel = ("static", "large") if is_windows(target.triple) else ("pic", "default")
    return description.create_target_machine(
        cpu=target.cpu, features=target.features, opt=3, reloc=reloc, codemodel=codemodel
    )


@functools.cache
def _linker() -> Any:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.create_lljit_compiler(use_jit_link=True, suppress_errors=True)  # see above
