"""Rows that a kernel writes into pages are those that torch writes."""

from __future__ import annotations

import math

import pytest
import torch

from quire.codegen.kernels.append import write_append
from quire.codegen.llvm import jit
from quire.codegen.llvm.target import Target
from quire.errors import BackendError
from quire.runtime import append as module
from quire.runtime.append import (
    MOST_OF_BLOCK,
    PageTensors,
    PageWriter,
    block_of,
    dequantise,
    form_of,
    quantise,
    write_in_torch,
)

pytestmark = pytest.mark.every_width

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
PAGES = [
    *((dtype, False) for dtype in (*DTYPES, *FLOAT8)),
    *((dtype, True) for dtype in (torch.int8, *FLOAT8)),
]
"""Dtypes of pages, and whether they have scales."""


def empty(
    dtype: torch.dtype,
    heads: int,
    widths: tuple[int, int],
    page_size: int,
    *,
    scaled: bool | None = None,
) -> PageTensors:
    pages = [torch.full((9, heads, page_size, width), 7.0).to(dtype) for width in widths]
    scaled = dtype == torch.int8 if scaled is None else scaled
    scales = [torch.full((9, heads, page_size), 7.0) for _ in widths if scaled]
    return PageTensors(*pages, *scales)


def append(pages: PageTensors, slots: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    ready = PageWriter({0: pages}).at(slots)
    ready.expect(key, value)
    ready.write(0, key, value)


def same_bits(ours: PageTensors, theirs: PageTensors) -> bool:
    """Scales that are NaN may be any NaN."""
    for mine, other in zip(ours, theirs, strict=True):
        if mine is not None and other is not None:
            a, b = (torch.nan_to_num(x, nan=-1.0) if x.dim() == 3 else x for x in (mine, other))
            if not torch.equal(a.view(torch.uint8), b.view(torch.uint8)):
                return False
    return True


def numbers(tokens: int, heads: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Return random numbers, numbers that have to be rounded, infinities and NaN."""
    rows = torch.randn(tokens, heads, width, dtype=torch.float64)
    special = [math.inf, -math.inf, 0.0, -0.0, 1e-40, 1e-7, 70_000.0, 1 + 2**-8, 1 + 3 * 2**-8]
    flat = rows.view(-1)
    flat[: len(special)] = torch.tensor(special, dtype=torch.float64)[: flat.numel()]
    return rows.to(dtype)


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize(("pages", "scaled"), PAGES)
def test_it_writes_what_torch_writes(source: torch.dtype, pages: torch.dtype, scaled: bool) -> None:
    for tokens, heads, widths, page_size in (
        (1, 1, (1, 1), 1),
        (5, 2, (3, 17), 4),
        (4, 2, (77, 33), 4),
        (2 * MOST_OF_BLOCK + 3, 3, (40, 8), 16),
    ):
        ours, theirs = (empty(pages, heads, widths, page_size, scaled=scaled) for _ in range(2))
        slots = torch.randperm(9 * page_size)[:tokens]
        key, value = (numbers(len(slots), heads, width, source) for width in widths)
        append(ours, slots, key, value)
        write_in_torch(theirs, slots, key, value)
        assert same_bits(ours, theirs)


@pytest.mark.parametrize("source", DTYPES)
@pytest.mark.parametrize(("pages", "scaled"), PAGES)
@pytest.mark.parametrize("widths", [(64, 32), (128, 33), (192, 128)])
def test_it_streams_whole_lines(
    source: torch.dtype,
    pages: torch.dtype,
    scaled: bool,
    widths: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "WORTH_STREAMING", 0)
    ours, theirs = (empty(pages, 3, widths, 4, scaled=scaled) for _ in range(2))
    slots = torch.randperm(36)[:20]
    key, value = (numbers(20, 3, width, source) for width in widths)
    writer = PageWriter({0: ours})
    assert writer._worth_streaming("key")
    assert writer._worth_streaming("value") == (widths[1] * pages.itemsize % 64 == 0)
    ready = writer.at(slots)
    ready.expect(key, value)
    ready.write(0, key, value)
    write_in_torch(theirs, slots, key, value)
    assert same_bits(ours, theirs)


@pytest.mark.parametrize("pages", [torch.float32, torch.int8])
@pytest.mark.parametrize("compiled", [True, False])
def test_all_layers_are_written_at_once(
    pages: torch.dtype, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiled:
        monkeypatch.setattr(module, "_code", lambda *_: None)
    slots = torch.randperm(36)[:20]
    layers = {layer: empty(pages, 2, (8, 8), 4) for layer in (3, 0, 2)}
    key, value = (torch.randn(2, 4, 20, 2, 8).transpose(0, 1)[:, each] for each in (0, 1))
    PageWriter(layers).at(slots).write_all(key, value)
    for layer, ours in layers.items():
        theirs = empty(pages, 2, (8, 8), 4)
        write_in_torch(theirs, slots, key[layer], value[layer])
        assert same_bits(ours, theirs)


def test_a_scale_spans_the_largest_of_a_row() -> None:
    rows = torch.tensor([[1.0, -2.0, 0.5], [0.0, -0.0, 0.0], [0.5, 1.5, 127.0], [1e-45, 0, 0]])
    small, scale = quantise(rows)
    assert scale.tolist() == [torch.tensor(2.0).div(127).item(), 0, 1, 0]
    assert small.tolist() == [[64, -127, 32], [0, 0, 0], [0, 2, 127], [0, 0, 0]]  # to even
    random = torch.randn(100, 64) * torch.logspace(-30, 30, 100)[:, None]
    again = dequantise(*quantise(random))
    assert ((again - random).abs().amax(1) <= random.abs().amax(1) / 127 * 0.5001).all()


@pytest.mark.parametrize("dtype", FLOAT8)
def test_float8_is_rounded_as_torch_rounds_it(dtype: torch.dtype) -> None:
    """Halfway, below, above and far between all numbers, from both sides; and NaN."""
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    ends = codes[codes.isfinite()].unique()
    middles = (ends[1:] + ends[:-1]) / 2
    around = [torch.nextafter(middles, torch.tensor(far)) for far in (-math.inf, math.inf)]
    beyond = torch.tensor([464.0, 479.9, 480.0, 61440.0, 61439.9, 1e30, math.inf, math.nan, 1e-45])
    rows = torch.cat([ends, middles, *around, beyond, -beyond]).view(-1, 1, 1)
    slots = torch.arange(len(rows))
    room = PageTensors(*(torch.zeros(1, 1, len(rows), 1).to(dtype) for _ in range(2)))
    append(room, slots, rows, rows)
    assert torch.equal(
        room.key.view(-1).view(torch.uint8), rows.view(-1).to(dtype).view(torch.uint8)
    )


@pytest.mark.parametrize("dtype", FLOAT8)
def test_a_scale_makes_the_largest_of_a_row_the_largest_there_is(dtype: torch.dtype) -> None:
    rows = torch.randn(100, 64) * torch.logspace(-20, 20, 100)[:, None]
    small, scale = quantise(rows, dtype)
    assert small.float().abs().amax(1).unique().tolist() == [torch.finfo(dtype).max]
    again = dequantise(small, scale)
    step = {torch.float8_e4m3fn: 2**-4, torch.float8_e5m2: 2**-3}[dtype]
    exact = (again - rows).abs() <= rows.abs() * step * 1.001
    assert (exact | ((again - rows).abs() <= scale[:, None])).all()


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan])
def test_a_row_that_is_not_finite_is_read_as_none(wrong: float) -> None:
    rows = torch.randn(3, 1, 20)
    rows[1, 0, 13] = wrong
    pages = empty(torch.int8, 1, (20, 20), 4)
    append(pages, torch.arange(3), rows, rows)
    assert pages.key_scale is not None
    again = dequantise(pages.key, pages.key_scale)[0, 0]
    assert again[1].isnan().all() and again[[0, 2]].isfinite().all()


def test_the_smallest_numbers_stay_in_range() -> None:
    """A scale among them is rounded so much that a ratio can be beyond 127."""
    tiny = torch.tensor([2**-149 * n for n in range(60, 300)], dtype=torch.float32).view(-1, 1, 1)
    ours, theirs = (empty(torch.int8, 1, (1, 1), 32) for _ in range(2))
    slots = torch.arange(len(tiny))
    append(ours, slots, tiny, -tiny)
    write_in_torch(theirs, slots, tiny, -tiny)
    assert same_bits(ours, theirs)
    assert (ours.key.view(-1)[100:240] > 90).all() and (ours.value.view(-1)[100:240] < -90).all()


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
    write_in_torch(theirs, slots, key, key)
    assert torch.equal(ours.key, theirs.key) and not torch.equal(ours.key, torch.full((), 7.0))
    assert not ours.key.requires_grad


def test_threads_share_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WORTH_THREADS", 0)
    torch.set_num_threads(2)
    key, value = torch.randn(2, 100, 2, 8)
    ours, theirs = (empty(torch.float32, 2, (8, 8), 16) for _ in range(2))
    slots = torch.randperm(9 * 16)[:100]
    append(ours, slots, key, value)
    write_in_torch(theirs, slots, key, value)
    assert same_bits(ours, theirs)


def test_a_step_is_as_the_one_before() -> None:
    """What was worked out then is used again, until tokens or threads are others."""
    layers = {layer: empty(torch.float32, 2, (8, 8), 16) for layer in range(2)}
    writer = PageWriter(layers)
    torch.set_num_threads(2)
    key, value = torch.randn(2, 6, 2, 8)
    first = writer.at(torch.arange(6))
    assert first.form is None
    first.expect(key, value)
    second = writer.at(torch.arange(20, 26))
    assert second.form == form_of(key, value)
    for layer in range(2):
        second.write(layer, key + layer, value)
        theirs = empty(torch.float32, 2, (8, 8), 16)
        write_in_torch(theirs, torch.arange(20, 26), key + layer, value)
        assert same_bits(layers[layer], theirs)
    assert writer.at(torch.arange(5)).form is None
    torch.set_num_threads(1)
    try:
        assert writer.at(torch.arange(6)).form is None
    finally:
        torch.set_num_threads(2)


def test_all_at_once_says_nothing_about_the_next_step() -> None:
    """Rows of all layers are of a form that one layer must not have."""
    writer = PageWriter({0: empty(torch.float32, 2, (8, 8), 16)})
    writer.at(torch.arange(6)).write_all(*torch.randn(2, 1, 6, 2, 8))
    assert writer.at(torch.arange(6)).form is None


@pytest.mark.parametrize(
    ("tokens", "threads", "block"), [(0, 2, 1), (1, 2, 1), (64, 2, 32), (65, 2, 33), (2048, 2, 64)]
)
def test_a_block_is_the_share_of_a_thread(tokens: int, threads: int, block: int) -> None:
    assert block_of(tokens, threads) == block


def test_without_a_kernel_torch_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> Target:
        raise BackendError("an old processor")

    monkeypatch.setattr(Target, "host", staticmethod(nothing))
    pages = empty(torch.float32, 1, (2, 2), 4)
    append(pages, torch.tensor([5]), torch.ones(1, 1, 2), torch.ones(1, 1, 2))
    assert pages.key[1, 0, 1].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v4", "aarch64"])
@pytest.mark.parametrize(
    ("source", "pages", "scaled"),
    [
        ("float32", "bfloat16", False),
        ("float16", "float16", False),
        ("bfloat16", "int8", True),
        ("float32", "float8_e4m3fn", False),
        ("bfloat16", "float8_e5m2", True),
    ],
)
def test_it_compiles_for_other_machines(target: str, source: str, pages: str, scaled: bool) -> None:
    there = Target.named(target)
    kernel = write_append(there, source, pages, scaled=scaled)
    assert "append:" in jit.assembly(kernel.text, there)


@pytest.mark.parametrize("pages", ["float32", "bfloat16", "int8"])
def test_lines_are_streamed_before_the_end_is_told(pages: str) -> None:
    there = Target.named("x86-64-v3")
    source = "float32" if pages == "int8" else pages
    kernel = write_append(there, source, pages, scaled=pages == "int8")
    code = jit.assembly(kernel.text, there)
    assert code.count("vmovnt") == 2  # keys and values
    assert code.rindex("lock") > code.rindex("vmovnt")  # a full barrier
