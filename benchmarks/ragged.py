"""Sequences of unequal lengths, against PyTorch: python benchmarks/ragged.py.

A padded batch has more scores than the sequences need: `padding` says how many times as many. The
figure is divided by this number. So 1 means that quire and SDPA compute as many scores a second.
"""

from __future__ import annotations

import functools
import importlib
import math
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from _race import Table, race, run_parts
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

import quire
from quire import Ragged
from quire.mods import causal

HEADS, HEAD_DIM = 8, 64
MANY, SHORTEST, LONGEST = 64, 16, 2048
EQUAL = ((16, 512, ">= 10"), (128, 64, ">= 10"), (1024, 8, ">= 20"))
LONG, SHORT, SHORT_ONES = 8192, 16, 1000
TEXTS = 500
EXAMPLES = Path(__file__).parent.parent / "examples"


def unequal_lengths() -> list[int]:
    """Return lengths in random order. They grow by a constant factor from shortest to longest."""
    steps = torch.linspace(math.log(SHORTEST), math.log(LONGEST), MANY)
    lengths = steps.exp().round().long()
    return lengths[torch.randperm(MANY, generator=torch.Generator().manual_seed(0))].tolist()


class Batch:
    """Random queries, keys and values [total, heads, head_dim] of sequences in one tensor."""

    def __init__(self, lengths: list[int]) -> None:
        torch.manual_seed(0)
        self.lengths = lengths
        self.offsets = torch.tensor([0, *lengths]).cumsum(0)
        self.packed = [torch.randn(sum(lengths), HEADS, HEAD_DIM) for _ in range(3)]

    def requires_grad(self) -> Batch:
        """Make query, key and value require gradients."""
        self.packed = [x.detach().requires_grad_() for x in self.packed]
        return self

    def attend(self, mask=causal) -> Tensor:
        """Return the output of quire [total, heads, head_dim]."""
        query, key, value = self.packed
        return quire.attention(query, Ragged(key, value, self.offsets), mask=mask)

    def alone(self) -> list[list[Tensor]]:
        """Return query, key and value [1, H, L, D] of each sequence alone."""
        parts = [x.detach().split(self.lengths) for x in self.packed]
        return [[x.transpose(0, 1)[None] for x in own] for own in zip(*parts, strict=True)]

    def padded(self) -> list[Tensor]:
        """Return query, key and value [B, H, longest, D], padded with zeros."""
        return [
            pad_sequence(x.detach().split(self.lengths), batch_first=True)
            .transpose(1, 2)
            .contiguous()
            for x in self.packed
        ]

    def nested(self) -> list[Tensor]:
        """Return query, key and value [B, H, j, D] as nested tensors in the layout torch.jagged."""
        return [
            torch.nested.nested_tensor_from_jagged(x, self.offsets).transpose(1, 2)
            for x in self.packed
        ]

    @property
    def padding(self) -> float:
        """The number of scores of the padded batch divided by that of the sequences."""
        real = sum(n * n for n in self.lengths)
        return len(self.lengths) * max(self.lengths) ** 2 / real


def forward(table: Table, seconds: float, threads: int) -> None:
    """Causal forward passes, against a padded batch and against a loop over sequences."""
    batch = Batch(unequal_lengths())
    query, key, value = batch.padded()
    alone = batch.alone()

    def loop() -> None:
        for q, k, v in alone:
            F.scaled_dot_product_attention(q, k, v, is_causal=True)

    times = race(
        {
            "ours": batch.attend,
            "padded": lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True),
            "loop": loop,
        },
        seconds,
    )
    case = f"{MANY} sequences of {SHORTEST} to {LONGEST}, causal, forward"
    figure = times["padded"] / times["ours"] / batch.padding
    table.add(
        f"{case}, padded", figure, "x as fast as SDPA", ">= 1.2", padding=round(batch.padding, 2)
    )
    table.add(f"{case}, loop", times["loop"] / times["ours"], "x as fast as SDPA", ">= 1.3")


def training(table: Table, seconds: float, threads: int) -> None:
    """Causal forward and backward passes, against a padded batch."""
    batch = Batch(unequal_lengths()).requires_grad()
    padded = [x.requires_grad_() for x in batch.padded()]
    above, above_padded = torch.randn_like(batch.packed[0]), torch.randn_like(padded[0])

    def step(attend, leaves: list[Tensor], above: Tensor) -> None:
        torch.autograd.grad(attend(), leaves, above)

    sdpa = functools.partial(F.scaled_dot_product_attention, *padded, is_causal=True)
    times = race(
        {
            "ours": functools.partial(step, batch.attend, batch.packed, above),
            "padded": functools.partial(step, sdpa, padded, above_padded),
        },
        seconds,
    )
    figure = times["padded"] / times["ours"] / batch.padding
    case = f"{MANY} sequences of {SHORTEST} to {LONGEST}, causal, training, padded"
    table.add(case, figure, "x as fast as SDPA", ">= 1.1", padding=round(batch.padding, 2))


def nested(table: Table, seconds: float, threads: int) -> None:
    """Nested tensors without a mask, against PyTorch's own attention, which takes no mask."""
    for count, length, wanted in EQUAL:
        operands = Batch([length] * count).nested()
        times = race(
            {
                "ours": functools.partial(quire.jagged_scaled_dot_product_attention, *operands),
                "peer": functools.partial(F.scaled_dot_product_attention, *operands),
            },
            seconds,
        )
        table.add(
            f"{count} x {length}, dense, nested tensors",
            times["peer"] / times["ours"],
            "x as fast as PyTorch's",
            wanted,
            ours_ms=round(times["ours"] * 1e3, 2),
        )


def balance(table: Table, seconds: float, threads: int) -> None:
    """One long sequence among many short ones. Ideally two threads take half the time of one."""
    batch = Batch([*[SHORT] * (SHORT_ONES // 2), LONG, *[SHORT] * (SHORT_ONES // 2)])
    before = torch.get_num_threads()

    def with_threads(count: int) -> None:
        torch.set_num_threads(count)
        batch.attend()

    times = race({str(n): functools.partial(with_threads, n) for n in (1, 2)}, seconds)
    torch.set_num_threads(before)
    share = 100 * times["1"] / 2 / times["2"]
    case = f"1 of {LONG} + {SHORT_ONES} of {SHORT}, 2 threads"
    table.add(
        case, share, "% of the ideal speed", ">= 85", one_thread_ms=round(times["1"] * 1e3, 1)
    )


def minilm(table: Table, seconds: float, threads: int) -> None:
    """A whole encoder, as in examples/embed_docstrings.py, against batches sorted by length."""
    sys.path.insert(0, str(EXAMPLES))
    example = importlib.import_module("embed_docstrings")
    case = f"MiniLM embedding of {TEXTS} texts, whole model"
    if absent := example.missing():
        print(f"  {case}: needs {' and '.join(absent)}: {example.HOW_TO_INSTALL}")
        return
    texts = example.tokenize(example.docstrings(TEXTS))
    _, by_length, ragged = example.ways(texts)
    times = race({"ours": ragged.run, "sorted": by_length.run}, seconds)
    figure = times["sorted"] / times["ours"]
    table.add(case, figure, "x as fast as sorted", ">= 1.3", ours_s=round(times["ours"], 2))


PARTS = (forward, training, nested, balance, minilm)


if __name__ == "__main__":
    run_parts("ragged", __doc__, PARTS)
