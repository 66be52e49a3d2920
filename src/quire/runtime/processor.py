"""Tests whether this processor can run the code that is generated for it.

An emulator may list instructions that it cannot run. So before code is first generated for a
target, a child process runs a small function with instructions of each kind. If that kills the
child, no kernel is used, and `obstacle` returns the reason. A success is stored in the cache of
kernels, so that later processes need no test.
"""

from __future__ import annotations

import ctypes
import functools
import os
import signal
import warnings

from quire.codegen.llvm import jit
from quire.codegen.llvm.builder import Module
from quire.codegen.llvm.target import Target
from quire.codegen.llvm.types import F16, F32, F64, I8, I32, PTR
from quire.errors import BackendError, CodegenError
from quire.runtime.cache import cache_key, object_cache

_TRIAL = "trial"


def obstacle(*, keep: bool = True) -> str | None:
    """Return why no kernel runs on this machine; None if kernels run. `keep` stores a success."""
    try:
        target = Target.host()
    except BackendError as error:
        return str(error)
    return _failure(target, keep)


@functools.cache
def _failure(target: Target, keep: bool) -> str | None:
    key, cache = cache_key(_TRIAL, repr(target)), object_cache()
    if cache.get(key) is not None:
        return None
    try:
        image = jit.compile_object(write_trial(target).text, target)
        ending = _run_in_child(image)
    except CodegenError as error:  # on a system that quire was not tested on
        return f"{error}, as code for {target} was linked; use backend='eager'"
    if ending:
        return (
            f"the processor must run the instructions that it lists, but code for {target} ended "
            f"a trial with {ending}; use backend='eager', or set QUIRE_TARGET to an older processor"
        )
    if keep:
        cache.put(key, image)
    return None


def write_trial(target: Target) -> Module:
    """Return a module with `trial`: void(ptr), which has vector instructions of each kind."""
    module = Module()
    lanes = target.lanes(F32)
    with module.function("trial", {"memory": PTR}) as f:
        (memory,) = f.parameters
        singles = f.convert(f.load(F16.vector(lanes), memory), F32.vector(lanes))
        doubles = f.convert(f.load(F32.vector(lanes // 2), memory), F64.vector(lanes // 2))
        bytes_ = f.convert(f.load(I8.vector(lanes), memory), I32.vector(lanes))
        sums = f.fma(singles, f.convert(bytes_ * bytes_, F32.vector(lanes)), 1.0)
        sums = f.select(sums < 0.0, f.shuffle(sums, sums, list(reversed(range(lanes)))), sums)
        f.store(sums, memory)
        f.store(f.fma(doubles, doubles, 1.0), memory, lanes)
    return module


def _run_in_child(image: bytes) -> str:
    """Run a trial in a child. Return the signal that killed it; "" if none did, or without fork."""
    if not hasattr(os, "fork"):
        return ""
    code = jit.load(image, [_TRIAL])
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address(_TRIAL))
    memory = ctypes.create_string_buffer(4096)
    address = (ctypes.addressof(memory) + 63) & ~63
    with warnings.catch_warnings():
        # Forking is safe here: the child takes no lock and starts no thread.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        run(address)
        os._exit(0)
    try:
        _, status = os.waitpid(child, 0)
    except ChildProcessError:  # the program ignores SIGCHLD, so the status is lost
        return ""
    if not os.WIFSIGNALED(status):
        return ""
    return signal.Signals(os.WTERMSIG(status)).name
