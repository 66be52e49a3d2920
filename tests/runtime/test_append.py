"""Rows that a kernel writes into pages are those that torch writes."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from quire.codegen import jit
from quire.codegen.append import BLOCK, write_append
from quire.codegen.target import Target
from quire.errors import BackendError
from quire.runtime import append as module
from quire.runtime.append import PagePair, append, append_in_torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def empty(dtype: torch.dtype, heads: int, widths: tuple[int, int], page_size: int) -> PagePair:
    return PagePair(*(torch.full((9, heads, page_size, w), 7.0, dtype=dtype) for w in widths))


def numbers(tokens: int, heads: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Random ones, and those that are rounded or are none."""
    rows = torch.randn(tokens, heads, width, dtype=torch.float64)
    special = [math.inf, -math.inf, 0.0, -0.0, 1e-40, 1e-7, 70_000.0, 1 + 2**-8, 1 + 3 * 2**-8]
    flat = rows.view(-1)
    flat[: len(special)] = torch.tensor(special, dtype=torch.float64)[: flat.numel()]
    return rows.to(dtype)


@pytest.mark.parametrize(("source", "pages"), [*itertools.product(DTYPES, DTYPES)])
def test_it_writes_what_torch_writes(source: torch.dtype, pages: torch.dtype) -> None:
    for tokens, heads, widths, page_size in (
        (1, 1, (1, 1), 1),
        (5, 2, (3, 17), 4),
        (2 * BLOCK + 3, 3, (40, 8), 16),
    ):
        ours, theirs = (empty(pages, heads, widths, page_size) for _ in range(2))
        slots = torch.randperm(9 * page_size)[:tokens]
        key, value = (numbers(len(slots), heads, width, source) for width in widths)
        append(ours, slots, key, value)
        append_in_torch(theirs, slots, key, value)
        for mine, expected in zip(ours, theirs, strict=True):
            assert torch.equal(mine.view(torch.uint8), expected.view(torch.uint8))


def test_not_a_number_stays_the_very_one() -> None:
    bits = torch.tensor([0x7FC00123, 0x7F800001, -1], dtype=torch.int32)
    rows = bits.view(torch.float32).view(3, 1, 1)
    pages = empty(torch.float32, 1, (1, 1), 4)
    append(pages, torch.arange(3), rows, rows)
    assert torch.equal(pages.key.view(-1)[:3].view(torch.int32), bits)
    narrow = empty(torch.bfloat16, 1, (1, 1), 4)
    append(narrow, torch.arange(3), rows, rows)
    assert narrow.value.view(-1)[:3].isnan().all()


@pytest.mark.parametrize("layout", ["transposed", "sliced", "strided", "recorded"])
def test_any_strides_will_do(layout: str) -> None:
    rows = torch.randn(2, 6, 8)
    key = {
        "transposed": rows.transpose(0, 1),  # [B, H, L, D] of a model
        "sliced": torch.randn(6, 2, 24)[..., 8:16],
        "strided": torch.randn(6, 2, 16)[..., ::2],
        "recorded": torch.randn(6, 2, 8, requires_grad=True),
    }[layout]
    ours, theirs = (empty(torch.float32, 2, (8, 8), 4) for _ in range(2))
    slots = torch.tensor([3, 2, 1, 0, 30, 31])
    append(ours, slots, key, key)
    append_in_torch(theirs, slots, key, key)
    assert torch.equal(ours.key, theirs.key) and not torch.equal(ours.key, torch.full((), 7.0))
    assert not ours.key.requires_grad


def test_threads_share_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WORTH_THREADS", 0)
    torch.set_num_threads(2)
    key, value = torch.randn(2, 100, 2, 8)
    ours, theirs = (empty(torch.float32, 2, (8, 8), 16) for _ in range(2))
    slots = torch.randperm(9 * 16)[:100]
    append(ours, slots, key, value)
    append_in_torch(theirs, slots, key, value)
    assert torch.equal(ours.key, theirs.key) and torch.equal(ours.value, theirs.value)


def test_without_a_kernel_torch_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> Target:
        raise BackendError("an old processor")

    monkeypatch.setattr(Target, "host", staticmethod(nothing))
    assert module._code.__wrapped__(torch.float32, torch.float32) is None
    monkeypatch.setattr(module, "_code", lambda *_: None)
    pages = empty(torch.float32, 1, (2, 2), 4)
    append(pages, torch.tensor([5]), torch.ones(1, 1, 2), torch.ones(1, 1, 2))
    assert pages.key[1, 0, 1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v4", "aarch64"])
@pytest.mark.parametrize(("source", "pages"), [("float32", "bfloat16"), ("float16", "float16")])
def test_it_compiles_for_other_machines(target: str, source: str, pages: str) -> None:
    there = Target.named(target)
    assert "append:" in jit.assembly(write_append(there, source, pages).text, there)
