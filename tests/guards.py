"""Memory whose ends are watched, so that one byte too many fails at the test that made it.

Two kinds of guards:

    pages     `guarded` tensors end (or begin) exactly at a page that nobody may touch. To read or
              write one byte further is a segmentation fault, and pytest names the test.
    canaries  bytes beside a piece of memory that nobody may change. They are compared when it is
              given back, and a test fails.

The working memory of every call of every test has canaries (`WatchedScratch`, by a fixture of
`conftest.py`). `everything_guarded` gives all memory that torch allocates guards of both kinds.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from quire.runtime import launch as launcher

Edge = Literal["start", "end"]
EDGES: tuple[Edge, ...] = ("end", "start")
CANARY = 0xA5
GAP = 1024  # bytes between parts of working memory: more than any one store writes
ALIGNED = 64


# --- pages that nobody may touch

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_NO_ACCESS = 0
_PAGE = mmap.PAGESIZE

_alive: weakref.WeakSet[Region] = weakref.WeakSet()
_overwritten: list[str] = []


class Region(mmap.mmap):
    """Some bytes between two pages that nobody may touch; they fill up to one of them exactly."""

    offset: int
    size: int

    @staticmethod
    def of(size: int, edge: Edge) -> Region:
        """What lies between the bytes and the other page has canaries."""
        inner = -(-max(size, 1) // _PAGE) * _PAGE
        region = Region(-1, inner + 2 * _PAGE)
        region.size = size
        region.offset = _PAGE if edge == "start" else _PAGE + inner - size
        start = ctypes.addressof(ctypes.c_char.from_buffer(region))
        ctypes.memset(start + _PAGE, CANARY, inner)
        for page in (start, start + _PAGE + inner):
            if _libc.mprotect(page, _PAGE, _NO_ACCESS):
                raise OSError(ctypes.get_errno(), "mprotect")
        _alive.add(region)
        return region

    __hash__ = object.__hash__

    @property
    def address(self) -> int:
        """Where the bytes are."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self, self.offset))

    def __del__(self) -> None:
        self.note_changes()

    def note_changes(self) -> None:
        """Remember if a canary was changed."""
        before, after = self[_PAGE : self.offset], self[self.offset + self.size : -_PAGE]
        for side, bytes_ in (("before", before), ("behind", after)):
            changed = len(bytes_) - bytes_.count(CANARY)
            if changed:
                _overwritten.append(f"{changed} bytes {side} a tensor of {self.size} bytes")


def assert_nothing_overwritten() -> None:
    """No canary of a guarded tensor was changed."""
    for region in list(_alive):
        region.note_changes()
    found = _overwritten[:]
    _overwritten.clear()
    assert not found, f"written to: {', '.join(found)}"


def guarded(tensor: Tensor, edge: Edge = "end") -> Tensor:
    """A copy with the same strides, whose memory has a guard at that edge."""
    if tensor.numel() == 0:
        return tensor
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    count = 1 + sum((size - 1) * stride for size, stride in steps)
    region = Region.of(count * tensor.element_size(), edge)
    flat = torch.frombuffer(region, dtype=tensor.dtype, count=count, offset=region.offset)
    with torch.no_grad():
        flat.copy_(tensor.detach().as_strided((count,), (1,)))
    copy = flat.as_strided(tensor.shape, tensor.stride())
    return copy.requires_grad_(tensor.requires_grad)


class _GuardedTensors(TorchDispatchMode):
    """Every new tensor is a guarded one."""

    def __init__(self, edge: Edge) -> None:
        super().__init__()
        self._edge = edge

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if any(each.alias_info is not None for each in func._schema.returns):
            return result  # a view, or one of the operands

        def moved(each: Any) -> Any:
            ordinary = type(each) is Tensor and each.is_cpu and each.layout is torch.strided
            return guarded(each, self._edge) if ordinary else each

        return tree_map(moved, result)


@contextlib.contextmanager
def everything_guarded(edge: Edge) -> Iterator[None]:
    """Guards for all that is allocated here: tensors, records, and working memory."""
    assert_nothing_overwritten()

    def record(size: int | bytes) -> Any:
        content = bytes(size) if isinstance(size, int) else size + b"\0"
        region = Region.of(len(content), edge)
        region[region.offset : region.offset + region.size] = content
        return (ctypes.c_char * region.size).from_buffer(region, region.offset)

    with pytest.MonkeyPatch.context() as patch, _GuardedTensors(edge):
        patch.setattr(launcher.ctypes, "create_string_buffer", record)
        patch.setattr(launcher, "Scratch", PagedScratch)
        yield
    assert_nothing_overwritten()


# --- working memory

_free: deque[Tensor] = deque(maxlen=8)


class WatchedScratch:
    """`launcher.Scratch` with canaries around the part of every thread, and around the others."""

    _behind = GAP  # bytes after the last part

    def __init__(self, threads: int, each: int, partial_bytes: int, arrival_bytes: int) -> None:
        self._sizes = [partial_bytes, arrival_bytes, *[each] * threads]
        self.each = _rounded(each) + GAP
        self._size = sum(GAP + _rounded(size) for size in self._sizes) + self._behind

    def __enter__(self) -> WatchedScratch:
        at = self._take()
        self.parts, self._gaps = [], []
        for size in self._sizes:
            self._gaps.append((at, GAP))
            self.parts.append((at + GAP, size))
            at += GAP + _rounded(size)
            self._gaps.append((at - _rounded(size) + size, _rounded(size) - size))
        self._gaps.append((at, self._behind))
        (self.partials, _), (self.arrivals, _), (self.address, _), *_ = self.parts
        for address, size in self._gaps:
            ctypes.memset(address, CANARY, size)
        return self

    def _take(self) -> int:
        """Return an aligned address with enough memory."""
        try:
            self._memory = _free.pop()
        except IndexError:
            self._memory = torch.empty(0, device="cpu")
        if self._memory.nbytes < self._size + ALIGNED:
            self._memory = torch.empty(self._size + ALIGNED, dtype=torch.uint8, device="cpu")
        return -(-self._memory.data_ptr() // ALIGNED) * ALIGNED

    def check(self) -> None:
        """Check that nobody wrote outside of a part."""
        for address, size in self._gaps:
            changed = size - ctypes.string_at(address, size).count(CANARY)
            distance = min(
                (address - begin for begin, _ in self.parts if begin <= address), default=0
            )
            assert not changed, f"{changed} bytes outside of scratch, {distance} after its start"

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:
            self.check()
        _free.append(self._memory)

    def fill(self, number: float, dtype: torch.dtype) -> None:
        """Set all of the memory to one number."""
        for address, size in self.parts:
            if size:
                content = torch.full((size // dtype.itemsize,), number, dtype=dtype, device="cpu")
                ctypes.memmove(address, content.data_ptr(), content.nbytes)


class PagedScratch(WatchedScratch):
    """The same, and the part of the last thread ends at a page that nobody may touch."""

    _behind = 0

    def _take(self) -> int:
        self._region = Region.of(self._size, "end")
        self._memory = torch.empty(0, device="cpu")
        return self._region.address


def _rounded(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
