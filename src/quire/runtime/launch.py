"""The threads that run a kernel: torch's own OpenMP threads, or a thread pool.

A kernel is a function of one pointer. Every thread calls it with the same argument, and takes its
work off an atomic counter there. So results do not depend on the kind or number of threads.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import os
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeAlias

import torch

from quire.codegen.llvm import jit, parallel
from quire.codegen.llvm.target import Target
from quire.config import config

_Entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

Launcher: TypeAlias = Callable[[int, int, int], None]
"""(kernel, argument, threads): run `kernel(argument)` in every thread, return when all are done."""


def run_inline(kernel: int, argument: int, threads: int = 1) -> None:
    """Run a kernel in the calling thread, without the GIL."""
    _entry(kernel)(argument)


class GnuOpenMP:
    """Threads of GNU's OpenMP. LLVM's has the same function, except on Windows."""

    def __init__(self, library: str) -> None:
        self._parallel = ctypes.CDLL(library).GOMP_parallel
        self._parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        self._parallel.restype = None

    def __call__(self, kernel: int, argument: int, threads: int) -> None:
        """Run in a parallel region of `threads` threads; the calling thread is one of them."""
        self._parallel(kernel, argument, threads, 0)

    def ready(self, kernel: int, argument: int, threads: int) -> Callable[[], None]:
        """Return a function without parameters that does the same."""
        pointers = ctypes.c_void_p(kernel), ctypes.c_void_p(argument)
        return functools.partial(self._parallel, *pointers, ctypes.c_uint(threads), ctypes.c_uint())


class LlvmOpenMP:
    """Threads of LLVM's OpenMP, or of Intel's, which is a copy of it."""

    def __init__(self, library: str) -> None:
        functions = ctypes.CDLL(library)
        self._functions = [
            ctypes.cast(getattr(functions, name), ctypes.c_void_p).value
            for name in parallel.LIBRARY_FUNCTIONS
        ]
        image = jit.compile_object(parallel.TEXT, Target.host())
        self._code = jit.load(image, [parallel.RUN])
        pointer, number = ctypes.c_void_p, ctypes.c_int32
        parameters = [*[pointer] * len(self._functions), number, pointer, pointer]
        self._run = ctypes.CFUNCTYPE(None, *parameters)(self._code.address(parallel.RUN))

    def __call__(self, kernel: int, argument: int, threads: int) -> None:
        """Run in a parallel region of `threads` threads; the calling thread is one of them."""
        self._run(*self._functions, threads, kernel, argument)


class Pool:
    """A thread pool, for systems whose torch has no OpenMP that can be called."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._size = 0
        self._executor: ThreadPoolExecutor | None = None

    def __call__(self, kernel: int, argument: int, threads: int) -> None:
        """Run in `threads` threads; the calling thread is one of them."""
        executor = self._at_least(threads - 1)
        others = [executor.submit(run_inline, kernel, argument) for _ in range(threads - 1)]
        try:
            run_inline(kernel, argument)
        finally:  # after an interrupt, too: the others use the argument until they are done
            wait(others)
        for other in others:
            other.result()

    def _at_least(self, size: int) -> ThreadPoolExecutor:
        with self._lock:
            if self._executor is None or self._size < size:
                self._size = size
                self._executor = ThreadPoolExecutor(size, thread_name_prefix="quire")
            return self._executor


def launch(kernel: int, argument: int, threads: int) -> None:
    """Run a kernel in `threads` threads; after a fork, in the calling thread only."""
    if threads <= 1 or _forked:
        run_inline(kernel, argument)
    else:
        launcher()(kernel, argument, threads)


def ready(kernel: int, argument: int, threads: int) -> Callable[[], None]:
    """Return a function that launches a kernel, with all arguments converted for C."""
    alone = functools.partial(_entry(kernel), argument)
    if threads <= 1:
        return alone
    start = launcher()
    if not isinstance(start, GnuOpenMP):
        return functools.partial(launch, kernel, argument, threads)
    together = start.ready(kernel, argument, threads)

    def run() -> None:
        if _forked:
            alone()
        else:
            together()

    return run


def num_threads() -> int:
    """Return how many threads a kernel may use: QUIRE_THREADS, or as many as torch."""
    return 1 if _forked else config().threads or torch.get_num_threads()


@functools.cache
def launcher() -> Launcher:
    """Return the threads that torch computes with, so that no second pool competes for cores.

    Return a thread pool if torch has no OpenMP that can be called.
    """
    library = openmp_library()
    if library is not None:
        for kind in (GnuOpenMP, LlvmOpenMP):
            with contextlib.suppress(OSError, AttributeError):  # not a library of this kind
                return kind(library)
    return Pool()


@functools.cache
def openmp_library() -> str | None:
    """Return the path of torch's OpenMP library: the one beside torch, or the system's."""
    beside = os.path.join(os.path.dirname(torch.__file__), "lib", "*")
    return next(filter(_is_openmp, (*sorted(glob.glob(beside)), *_loaded_files())), None)


def _is_openmp(path: str) -> bool:
    name = r"lib(gomp|omp|iomp5|iomp5md)(-\w+)?\.(so(\.\d+)*|dylib|dll)"
    return re.fullmatch(name, os.path.basename(path)) is not None


def _loaded_files() -> list[str]:
    """Return the files that are mapped into this process; none if the system is not Linux."""
    try:
        with open("/proc/self/maps", errors="replace") as file:
            return [line.rstrip("\n").split(maxsplit=5)[-1] for line in file]
    except OSError:
        return []


@functools.lru_cache(maxsize=1024)
def _entry(kernel: int) -> Callable[[int], None]:
    return _Entry(kernel)


_forked = False


def _after_fork() -> None:
    # The child has none of its parent's threads; OpenMP would wait for them forever.
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
