"""What tests of gradients stand on: one thread, where a test does not ask for more."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Small sums in tiles of torch ops are slower on two, and much slower on a busy machine."""
    torch.set_num_threads(1)
