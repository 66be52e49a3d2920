"""Peak memory of quire's eager backend, beside PyTorch's eager flex_attention.

    python benchmarks/eager_memory.py

4 heads, D 64, float32, causal with ALiBi. Each row is measured in a new process, and inputs do not
count. The script fails if the eager backend needs more than `LIMITS` at 16,384 tokens. PyTorch
computes whole score matrices, and has no backward pass on a CPU. A length is left out if PyTorch
would need more than a third of the free memory.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from quire import flex_attention, mods
from quire.tools.measure import Reading, race

HEADS, HEAD_DIM = 4, 64
LENGTHS = (4096, 16384)
TORCH_LENGTHS = (4096, 8192, 16384)
LIMITS = {"forward": 200, "forward and backward": 400}
"""The most megabytes at the longest length."""

TORCH_MATRICES = 6
"""About how many score matrices PyTorch's eager path holds at once."""


class Row(NamedTuple):
    """One line of the table."""

    who: str
    what: str
    length: int
    reading: Reading

    @property
    def megabytes(self) -> float:
        return (self.reading.peak_bytes or 0) / 1e6

    def __str__(self) -> str:
        if self.reading.refusal is not None:
            return f"{self.who:8}{self.what:22}{self.length:8,}   {self.reading.refusal}"
        seconds = self.reading.seconds
        return (
            f"{self.who:8}{self.what:22}{self.length:8,}{self.megabytes:12,.0f} MB{seconds:9.1f} s"
        )


def main() -> int:
    """Print the table. Return 1 if a limit is exceeded, else 0."""
    print(
        f"{HEADS} heads, D {HEAD_DIM}, float32, causal and ALiBi, {torch.get_num_threads()} threads"
    )
    failed = False
    for length in LENGTHS:
        for what in LIMITS:
            row = measure("quire", what, length)
            print(row, flush=True)
            failed |= length == max(LENGTHS) and row.megabytes > LIMITS[what]
    for length in TORCH_LENGTHS:
        if TORCH_MATRICES * HEADS * length**2 * 4 < free_memory() / 3:
            print(measure("torch", "forward", length), flush=True)
    print(f"limits at {max(LENGTHS):,} tokens, in MB: {LIMITS}: {'EXCEEDED' if failed else 'kept'}")
    return int(failed)


def measure(who: str, what: str, length: int) -> Row:
    (reading,) = race(functools.partial(CONTESTANTS[who, what], length), seconds=0.1)
    return Row(who, what, length, reading)


def inputs(length: int, *, requires_grad: bool = False) -> list[Tensor]:
    shape = (1, HEADS, length, HEAD_DIM)
    return [torch.randn(shape, requires_grad=requires_grad) for _ in range(3)]


def forward(length: int) -> Callable[[], object]:
    tensors = inputs(length)
    score_mod = mods.alibi(HEADS)
    return lambda: flex_attention(*tensors, score_mod, mask_mod=mods.causal, backend="eager")


def forward_and_backward(length: int) -> Callable[[], object]:
    tensors = inputs(length, requires_grad=True)
    score_mod, grad = mods.alibi(HEADS), torch.ones(1, HEADS, length, HEAD_DIM)

    def run() -> None:
        out = flex_attention(*tensors, score_mod, mask_mod=mods.causal, backend="eager")
        out.backward(grad)

    return run


def torch_forward(length: int) -> Callable[[], object]:
    torch_flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True  # run without torch.compile
    tensors = inputs(length)
    score_mod = mods.alibi(HEADS)
    mask = torch_flex.BlockMask.from_kv_blocks(
        torch.ones(1, 1, 1, dtype=torch.int32),
        torch.zeros(1, 1, 1, 1, dtype=torch.int32),
        BLOCK_SIZE=length,
        mask_mod=mods.causal,
        seq_lengths=(length, length),
    )
    return lambda: torch_flex.flex_attention(*tensors, score_mod, block_mask=mask)


CONTESTANTS: dict[tuple[str, str], Callable[[int], Callable[[], object]]] = {
    ("quire", "forward"): forward,
    ("quire", "forward and backward"): forward_and_backward,
    ("torch", "forward"): torch_forward,
}


def free_memory() -> int:
    """Return the free memory in bytes, or 0 if the system does not report it."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return 0


if __name__ == "__main__":
    sys.exit(main())
