"""How work is cut into items."""

from __future__ import annotations

import numpy as np
import torch

from quire.memory import One, Placed
from quire.memory.tables import Sequences
from quire.runtime.forward import heads_of_item


def heads(q_len: list[int], kv_len: list[int], copies: int | None = None) -> int:
    """How many of 8 heads an item of such sequences has, a block being 512 queries."""
    lengths = [np.array(column) for column in (q_len, kv_len)]
    zeros = np.zeros_like(lengths[0])
    sequences = Sequences(np.arange(len(q_len)), lengths[0], zeros, zeros, lengths[1], zeros, zeros)
    operands = [torch.empty(copies or 1, 8, 1, 16)] * 3
    rows = sequences if copies is None else One(q_len[0], 0, 0, kv_len[0])
    return heads_of_item("panel", Placed(*operands, rows), rows, 512)


def test_short_sequences_are_taken_whole() -> None:
    torch.set_num_threads(2)
    assert heads([8] * 1000, [8] * 1000) == 8
    assert heads([8], [8], copies=1000) == 8
    assert heads([8] * 1000 + [512], [8] * 1000 + [512]) == 1
    assert heads([8], [8], copies=2) == 2
    assert heads([], []) == heads([8], [0]) == 1


def test_one_that_is_most_of_the_work_is_shared_by_threads() -> None:
    torch.set_num_threads(2)
    assert heads([8] * 100, [10] * 99 + [9000]) == 1
    assert heads([8] * 100, [10] * 99 + [100]) == 8
