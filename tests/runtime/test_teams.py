"""The threads that OpenMP keeps for a thread of Python can be ended, and come back."""

from __future__ import annotations

import os
import sys

import pytest
import torch

from quire.runtime.launch import GnuOpenMP, openmp_library, torch_threads
from quire.runtime.teams import end_team


def compute() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(512, 512) @ torch.randn(512, 512)


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_the_next_region_starts_threads_again() -> None:
    gnu = isinstance(torch_threads(), GnuOpenMP) and "libgomp" in str(openmp_library())
    before = compute()
    with_team = len(os.listdir("/proc/self/task"))
    end_team()
    if gnu:
        assert len(os.listdir("/proc/self/task")) < with_team
    assert torch.equal(compute(), before)
    assert len(os.listdir("/proc/self/task")) == with_team
