"""The guards themselves: one byte too many is found."""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from guards import (
    EDGES,
    Edge,
    PagedScratch,
    WatchedScratch,
    assert_nothing_overwritten,
    everything_guarded,
    guarded,
)

from quire.runtime import launch as launcher


def write_byte(address: int) -> None:
    ctypes.memset(address, 0, 1)


@pytest.mark.parametrize("kind", [WatchedScratch, PagedScratch])
@pytest.mark.parametrize("sizes", [(1, 64, 0, 0), (3, 128, 0, 0), (2, 64, 100, 24)])
def test_a_byte_beside_scratch_is_found(
    kind: type[WatchedScratch], sizes: tuple[int, int, int, int]
) -> None:
    with kind(*sizes) as scratch:
        parts = [*scratch.parts]
        for address, size in parts:
            ctypes.memset(address, 0, size)  # all of it is theirs
    for place, (_, size) in enumerate(parts):
        for offset in (-1, size):
            if kind is PagedScratch and place == len(parts) - 1 and offset == size:
                continue  # that byte is of the page
            with pytest.raises(AssertionError, match="1 bytes outside of"), kind(*sizes) as scratch:
                write_byte(scratch.parts[place][0] + offset)


def test_every_test_has_watched_scratch() -> None:
    assert launcher.Scratch is WatchedScratch


@pytest.mark.parametrize(("edge", "offset"), [("end", -1), ("start", 12)])
def test_a_byte_beside_a_tensor_is_found(edge: Edge, offset: int) -> None:
    tensor = guarded(torch.ones(3), edge)
    assert_nothing_overwritten()
    write_byte(tensor.data_ptr() + offset)
    del tensor
    with pytest.raises(AssertionError, match=r"1 bytes (before|behind) a tensor of 12 bytes"):
        assert_nothing_overwritten()


@pytest.mark.parametrize("edge", EDGES)
def test_guarded_tensors_are_the_same_tensors(edge: Edge) -> None:
    for tensor in (torch.randn(2, 3, 5)[:, ::2, 1:4], torch.randn(7).bool(), torch.randn(0, 3)):
        mine = guarded(tensor, edge)
        assert torch.equal(mine, tensor) and mine.stride() == tensor.stride()
    with everything_guarded(edge):
        made = torch.empty(5) if edge == "end" else torch.zeros(5)
    at = made.data_ptr() + (made.nbytes if edge == "end" else 0)
    assert at % 4096 == 0


FAULT = """
import ctypes, sys, torch
from guards import guarded
tensor = guarded(torch.ones(3), sys.argv[1])
ctypes.string_at(tensor.data_ptr(), 12)
print("inside", flush=True)
ctypes.string_at(tensor.data_ptr() + int(sys.argv[2]), 1)
print("outside", flush=True)
"""


@pytest.mark.parametrize(("edge", "offset"), [("end", 12), ("start", -1)])
def test_a_byte_past_a_guard_is_a_fault(edge: Edge, offset: int) -> None:
    command = [sys.executable, "-c", FAULT, edge, str(offset)]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False
    )
    assert done.stdout == "inside\n", done.stderr
    assert done.returncode == -signal.SIGSEGV
