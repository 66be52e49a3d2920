"""Whether this processor runs what is generated for it.

A processor says which instructions it has, and an emulator may name some that it does not run. So
the first time that code is generated for a target, a child process runs a small function with
instructions of each kind. If it ends the child, no kernel is used and `obstacle` says why. What
passed is kept in the cache of objects, so that later processes need not try again.
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
    """Why no kernel runs on this machine; None where kernels do. Writes only if it is to `keep`."""
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
    except CodegenError as error:  # on a system that nobody has tried
        return f"{error}, as code for {target} was linked; use backend='eager'"
    if ending:
        return (
            f"expected a processor that runs what it says it can, but code for {target} ended a "
            f"trial with {ending}; use backend='eager', or set QUIRE_TARGET to an older processor"
        )
    if keep:
        cache.put(key, image)
    return None


def write_trial(target: Target) -> Module:
    """void(ptr): multiply-adds, conversions, selections and shuffles of whole vectors."""
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
    """How a child process ended that ran a trial; empty if it came to its end, or cannot be had."""
    if not hasattr(os, "fork"):
        return ""
    code = jit.load(image, [_TRIAL])
    run = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address(_TRIAL))
    memory = ctypes.create_string_buffer(4096)
    address = (ctypes.addressof(memory) + 63) & ~63
    with warnings.catch_warnings():
        # The child takes no lock and starts no thread: it runs the function and ends.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        run(address)
        os._exit(0)
    try:
        _, status = os.waitpid(child, 0)
    except ChildProcessError:  # whoever ignores SIGCHLD never learns how a child ended
        return ""
    if not os.WIFSIGNALED(status):
        return ""
    return signal.Signals(os.WTERMSIG(status)).name
