"""A program: a list of kernels with their records, which one launch runs in order.

    program = Program(entries)          # an array [n, 4] of ENTRY records (`codegen/llvm/walk.py`)
    program.run(threads)

Between two kernels all threads meet, but nothing returns to Python, and no thread goes to sleep.
The kernels and their records are those that single launches would have, so bits are the same.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from quire.codegen.contract import ALIGNED
from quire.codegen.convention import CALL_PART, PLAN_PART, SEQUENCE
from quire.codegen.kernels.append import APPEND, LAYER
from quire.codegen.llvm import jit, walk
from quire.codegen.llvm.target import Target
from quire.memory.tables import Numbers
from quire.runtime import launch as launcher
from quire.runtime.linear import LinearLaunch, WorkingMemory
from quire.runtime.recording import PreparedLaunch

_SINGLE = walk.PROGRAM.index("count")
_SEQUENCE = np.dtype([(name, np.int64) for name in SEQUENCE.fields])
_STRIDE = len(CALL_PART) + PLAN_PART.index("page_table_stride")  # PLAN_PART follows CALL_PART


class Program:
    """Entries that are run in order."""

    def __init__(self, entries: Numbers) -> None:
        self._entries = np.ascontiguousarray(entries, np.int64)
        team_size, rest = _functions()
        self._record = aligned(len(walk.PROGRAM))
        self._record[_SINGLE:] = len(self._entries), self._entries.ctypes.data, team_size, rest

    def run(self, threads: int) -> None:
        """Run all kernels with so many threads."""
        self._record[:_SINGLE] = 0
        launcher.launch(_code().address(walk.WALK), self._record.ctypes.data, threads)


def can_run() -> bool:
    """Return whether threads are those of OpenMP, which all run at the same time."""
    return isinstance(launcher.torch_threads(), launcher.GnuOpenMP) and _functions() != (0, 0)


class SteadyCall(NamedTuple):
    """A linear layer, and rows that stay in their place from call to call."""

    launch: LinearLaunch
    captures: Sequence[Tensor]
    x: Tensor
    y: Tensor


class SteadyCalls:
    """The records of linear layers, written once. `entries` has a list for each call."""

    def __init__(self, calls: Sequence[SteadyCall], threads: int) -> None:
        self._calls = calls  # keeps their tensors
        needs = [call.launch.working_bytes(len(call.x), threads) for call in calls]
        each, staged = (max(sizes) for sizes in zip(*needs, strict=True))
        self._memory = aligned((threads * each + staged + ALIGNED) // 8)
        address = self._memory.ctypes.data
        scratch = WorkingMemory(address, each, address + threads * each)
        self._records = [
            call.launch.records(call.x, call.y, call.captures, threads, scratch) for call in calls
        ]
        self.entries = [
            [(call.launch.address, record.start, record.start, call.launch.num_counters)
             for record in records]
            for call, records in zip(calls, self._records, strict=True)
        ]  # fmt: skip


def field_of(taken: PreparedLaunch, name: str) -> int:
    """Return an address that a launch of attention was given."""
    return ctypes.c_int64.from_buffer(taken.block, 8 * CALL_PART.index(name)).value


class LayerLaunches:
    """The records of a launch of attention for many layers, which share all but their pages."""

    def __init__(self, taken: PreparedLaunch, key: Numbers, value: Numbers, out: int) -> None:
        size = -(-taken.table_at // ALIGNED) * ALIGNED // 8
        self.records = aligned(len(key) * size).reshape(len(key), size)
        own = bytes(taken.block)[: taken.table_at]
        self.records[:, : taken.table_at // 8] = np.frombuffer(own, np.int64)
        self._arrivals = np.zeros((len(key), max(1, taken.slots)), np.int64)
        starts = self.records.ctypes.data + 8 * size * np.arange(len(key))
        self._place("key", key)
        self._place("value", value)
        self._place("out", out)
        self._place("counters", starts + taken.counters_at)
        self._place("arrivals", self._arrivals.ctypes.data + 8 * taken.slots * np.arange(len(key)))
        self.needs = taken.scratch_bytes, taken.slots * taken.partial_bytes
        self.taken = taken
        count = field_of(taken, "num_sequences")
        self._table = np.frombuffer(memoryview(taken.block), _SEQUENCE, count, taken.table_at)
        self._order = self._table["b"].copy()
        self._counters = slice(taken.counters_at // 8, taken.flag_at // 8)
        self.entries = np.zeros((len(key), len(walk.ENTRY)), np.int64)
        self.entries[:, 0], self.entries[:, 1] = taken.kernel, starts

    def _place(self, field: str, numbers: Numbers | int) -> None:
        self.records[:, CALL_PART.index(field)] = numbers

    def give(self, working: int, partials: int) -> None:
        """Give the kernels their working memory."""
        self._place("scratch", working)
        self._place("partials", partials)

    def decode_again(self, page_table: Tensor, lengths: Numbers) -> None:
        """Prepare to run once more, for as many sequences of a token each with `lengths` [B] keys.

        Each sequence must be one item for each head, as those of one piece are. The longest come
        first, so that no thread ends late.
        """
        table, ends = self._table, lengths[self._order]
        if np.count_nonzero(ends[1:] > ends[:-1]):
            self._order = np.argsort(-lengths, kind="stable")
            table["b"] = table["q_row"] = self._order
            ends = lengths[self._order]
        table["kv_end"] = ends
        table["q_start"] = ends - 1
        self._page_table = page_table
        self._place("page_table", page_table.data_ptr())
        self.records[:, _STRIDE] = page_table.stride(0)
        self.records[:, self._counters] = 0

    @property
    def wrong(self) -> bool:
        """Whether a mod used an index out of range."""
        return self.taken.block[self.taken.flag_at] != b"\0"


class Appends:
    """The records that write keys and values to the pages of each layer."""

    def __init__(self, kernel: int, record: bytes, pages: Tensor) -> None:
        self._records = aligned(len(pages) * len(APPEND)).reshape(len(pages), -1)
        self._records[:] = np.frombuffer(record, np.int64)
        places = pages.data_ptr() + LAYER.size * np.arange(len(pages))
        self._records[:, APPEND.index("pages")] = places
        self.entries = np.zeros((len(pages), len(walk.ENTRY)), np.int64)
        starts = self._records.ctypes.data + APPEND.size * np.arange(len(pages))
        self.entries[:, 0], self.entries[:, 1] = kernel, starts

    def write_again(self, slots: int) -> None:
        """Prepare to write as many rows once more, to the slots at an address."""
        self._records[:, APPEND.index("next")] = 0
        self._records[:, APPEND.index("slots")] = slots


def aligned(count: int) -> Numbers:
    """Return so many zeros at an address that is a multiple of ALIGNED."""
    memory = np.zeros(count + ALIGNED // 8, np.int64)
    first = -memory.ctypes.data % ALIGNED // 8
    return memory[first : first + count]


@functools.cache
def _code() -> jit.Code:
    return jit.load(jit.compile_object(walk.TEXT, Target.host()), [walk.WALK])


@functools.cache
def _functions() -> tuple[int, int]:
    """Return the addresses of omp_get_num_threads and sched_yield, or zeros."""
    library = launcher.openmp_library()
    if library is None:
        return 0, 0
    try:
        team_size = ctypes.CDLL(library).omp_get_num_threads
        rest = ctypes.CDLL(None).sched_yield
    except (AttributeError, OSError, TypeError):
        return 0, 0
    addresses = [ctypes.cast(each, ctypes.c_void_p).value or 0 for each in (team_size, rest)]
    return addresses[0], addresses[1]
