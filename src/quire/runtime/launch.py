"""The launch of a kernel: its record, its scratch memory, and the threads that run it.

A launcher is made once (`prepare.py`) and used many times. It takes the operands (`Placed`), the
results to fill, and the tensors that mods load from. It does not depend on the number of keys, so a
KV cache that grows at every step needs one launcher.

A kernel is a function of one pointer. Every thread calls it with the same argument, and takes its
work off an atomic counter there. So results do not depend on the kind or number of threads, which
are torch's own OpenMP threads, or a thread pool.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Several
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from quire.codegen.contract import ALIGNED, Terms
from quire.codegen.convention import CALL_PART, PLAN_PART, SEQUENCE, Form, KernelSpec
from quire.codegen.llvm import jit, parallel
from quire.codegen.llvm.target import Target
from quire.codegen.phases.tiles import TileShape
from quire.config import config
from quire.ir.pyramid import Pyramid
from quire.memory import One, Placed
from quire.memory.tables import Numbers, Sequences
from quire.results import Result
from quire.runtime import pyramids
from quire.runtime.blocks import NO_LISTS, TileLists
from quire.runtime.interrupt import LONG_WORK, launch_stoppable
from quire.runtime.mods import ModCode
from quire.runtime.recording import PreparedLaunch, recording

SMALL_WORK = 2**19
"""The most multiplications of a call for which starting threads costs more than it saves."""


@dataclass(frozen=True, eq=False)
class LoadedKernel:
    """A compiled kernel in memory, and the tile sizes that it was compiled for."""

    form: Form
    spec: KernelSpec
    tile: TileShape
    code: jit.Code
    address: int


class Records(NamedTuple):
    """The table of sequences for one launch, and the numbers of its sequences and items.

    An item may be for several sequences, its members. If one is, or if keys are in several pieces,
    each piece of a sequence has a slot. `products` estimates the number of multiplications.
    """

    table: bytes
    num_sequences: int
    products: int
    items: int
    slots: int = 0
    members: int = 1
    lists: TileLists | None = None  # of sequences with holes


def num_products(placed: Placed, rows: One | Sequences) -> int:
    """Estimate the number of multiplications for some sequences."""
    batch, heads, _, head_dim = placed.query.shape
    if isinstance(rows, One):
        return batch * heads * head_dim * rows.q_len * (rows.kv_end - rows.kv_begin)
    return int(np.vdot(rows.q_len, rows.kv_len)) * heads * head_dim


def table_of(sequences: Sequences, first_item: Numbers, columns: dict[str, Numbers]) -> bytes:
    """Return the table of sequences, with more `columns`; a field without a column is 0."""
    columns = sequences._asdict() | {"first_item": first_item} | columns
    zeros = np.zeros_like(first_item)
    return np.stack([columns.get(name, zeros) for name in SEQUENCE.fields], axis=1).tobytes()


def record(
    rows: One, pieces: int = 1, slices: int = 1, *, first_slice: int = 0, slice_blocks: int = 0
) -> bytes:
    """Return the table of a dense call, with as many pieces of keys or slices of queries."""
    q_len, q_start, kv_begin, kv_end, b, _ = rows
    positions = (q_len, q_start, -kv_begin, kv_begin, kv_end)
    pieced = (slices, pieces, 0, 1, 0)
    fields = (b, 0, 0, *positions, *pieced, first_slice, slice_blocks)  # as in SEQUENCE
    return SEQUENCE.pack_in_order(*fields)


class Launcher(NamedTuple):
    """A kernel, the code of the mods, and the part of its record that is the same in all calls."""

    kernel: LoadedKernel
    code: ModCode
    heads: int  # heads / heads of an item
    block_q: int
    partial_bytes: int  # of one slot
    record: bytes
    pyramids: tuple[Pyramid, ...]
    terms: Terms

    def launch(
        self,
        placed: Placed,
        records: Records,
        results: Result,
        captures: Several[Tensor],
        *,
        sink: Tensor | None = None,
        lists: TileLists = NO_LISTS,
        more: bytes = b"",
        first: int = 0,
    ) -> bool:
        """Run the kernel from item `first` on. Return whether a mod used an index out of range.

        `more` is the part of the record that only the backward or the tangent kernel reads.
        """
        table, num_sequences, products, items, slots, members, listed = records
        lists = lists if listed is None else listed
        if items == first:
            return False
        query, key, value, _, page_table, key_scale, value_scale, *_ = placed
        out, lse, max_scores, argmax, entropy, _ = results
        threads = min(num_threads(), items - first) if products > SMALL_WORK else 1
        if self.pyramids:
            captures = [*captures, *pyramids.build(captures, self.pyramids, products)]
        arguments = self.code.arguments
        counters = _COUNTERS + len(more)
        flag, sequences = counters + _FLAG, counters + _SEQUENCES
        block = (ctypes.c_char * (sequences + len(table) + arguments.size))()  # zeros
        start = ctypes.addressof(block)
        scratch_bytes = self.terms.scratch_bytes(members)
        with Scratch(threads, scratch_bytes, slots * self.partial_bytes, slots * 8) as scratch:
            if slots:
                ctypes.memset(scratch.arrivals, 0, slots * 8)
            call = (
                query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr(),
                0 if lse is None else lse.data_ptr(),
                0 if max_scores is None else max_scores.data_ptr(),
                0 if argmax is None else argmax.data_ptr(),
                0 if entropy is None else entropy.data_ptr(),
                0 if sink is None else sink.data_ptr(),
                start + sequences, num_sequences, items,
                0 if page_table is None else page_table.data_ptr(),
                _ONE_ADDRESS if key_scale is None else key_scale.data_ptr(),
                _ONE_ADDRESS if value_scale is None else value_scale.data_ptr(),
                lists.offsets_address, lists.entries_address, lists.runs_address,
                start + sequences + len(table),
                scratch.address, scratch.each, members, scratch.partials, scratch.arrivals,
                start + counters,
            )  # fmt: skip
            self.terms.check_call(call)
            packed = arguments.pack(captures, start + flag)
            parts = (CALL_PART.pack_in_order(*call), self.record, more)
            content = b"".join((*parts, first.to_bytes(8, sys.byteorder), _ZEROS, table, packed))
            ctypes.memmove(start, content, len(content))
            taken = recording.get()
            if taken is not None:
                prepared = PreparedLaunch(
                    kernel=self.kernel.address,
                    block=block,
                    counters_at=counters,
                    flag_at=flag,
                    table_at=sequences,
                    scratch_bytes=scratch.each,
                    slots=slots,
                    partial_bytes=self.partial_bytes,
                    keeps=(self, placed, results, captures, lists),
                )
                taken.append(prepared)
                return False
            if products > LONG_WORK:
                counter = ctypes.c_int64.from_buffer(block, counters)
                run = functools.partial(launch, self.kernel.address, start, threads)
                launch_stoppable(run, counter)
            else:
                launch(self.kernel.address, start, threads)
        return block[flag] != b"\0"


# A launch has one block of memory:
# [ call | plan | gradients or tangents, if any | counters, the first is the next item | flag: an
#   index was out of range | table of sequences | arguments of the mods ]
_COUNTERS = CALL_PART.size + PLAN_PART.size  # from the start of the block, without the third part
_FLAG = 16 * 8  # from the first counter
_SEQUENCES = _FLAG + 8
_ONE = ctypes.c_float(1.0)
_ONE_ADDRESS = ctypes.addressof(_ONE)  # the scale of all rows that have none of their own
_ZEROS = bytes(_SEQUENCES - 8)  # all counters but the first, and the flag


_free: deque[Tensor] = deque(maxlen=8)


class Scratch:
    """Working memory for one call. The next call may reuse it.

    Every thread has its own `each` bytes; pieces of rows share `partials` and `arrivals`.
    """

    __slots__ = ("_memory", "_sizes", "address", "arrivals", "each", "partials")

    def __init__(self, threads: int, each: int, partial_bytes: int, arrival_bytes: int) -> None:
        self.each, self._sizes = each, (threads * each, partial_bytes, arrival_bytes)

    def __enter__(self) -> Scratch:
        working, partial_bytes, arrival_bytes = self._sizes
        size = working + partial_bytes + arrival_bytes + ALIGNED
        try:
            memory = _free.pop()
        except IndexError:
            memory = None
        if memory is None or memory.nbytes < size:
            memory = torch.empty(size, dtype=torch.uint8, device="cpu")
        self._memory = memory
        self.address = address = (memory.data_ptr() + ALIGNED - 1) // ALIGNED * ALIGNED
        self.partials = partials = address + working
        self.arrivals = partials + partial_bytes
        return self

    def __exit__(self, *exception: object) -> None:
        _free.append(self._memory)


# --- threads --------------------------------------------------------------------------------------

_Entry = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

Threads: TypeAlias = Callable[[int, int, int], None]
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
        _entry(kernel)(argument)
    else:
        torch_threads()(kernel, argument, threads)


def ready(kernel: int, argument: int, threads: int) -> Callable[[], None]:
    """Return a function that launches a kernel, with all arguments converted for C."""
    alone = functools.partial(_entry(kernel), argument)
    if threads <= 1:
        return alone
    start = torch_threads()
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
def torch_threads() -> Threads:
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
