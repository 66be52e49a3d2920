"""Nothing is read or written outside of operands, results and working memory.

Each test runs a call twice, the second time in memory that ends, or begins, at a page that nobody
may touch: one byte too many is a segmentation fault there. The results must be the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from guards import EDGES, everything_guarded, guarded
from torch import Tensor

from quire import AuxRequest, Dense, Paged, Ragged, attention, create_block_mask
from quire.aux_outputs import OF_KERNELS
from quire.mods import causal
from quire.runtime.append import PageTensors, PageWriter, quantise

EVERYTHING = AuxRequest(*[True] * len(OF_KERNELS))
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DIMS = ((37, 21), (5, 3), (64, 64), (130, 96))


def same_in_guarded_memory(compute: Callable[[Sequence[Tensor]], Any], *inputs: Tensor) -> None:
    """`compute` gives some tensors; wherever its inputs and its own memory are, the same ones."""
    expected = compute(inputs)
    for edge in EDGES:
        mine = [guarded(each, edge) for each in inputs]
        with everything_guarded(edge):
            found = compute(mine)
        for a, b in zip(found, expected, strict=True):
            a, b = (x.float() if x.dtype.itemsize == 1 else x for x in (a, b))
            assert torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0))


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


# --- all forms, over all memories


@pytest.mark.every_width
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dense(dtype: torch.dtype) -> None:
    """Rows, half panels and panels, with all that is known about them."""

    def compute(inputs: Sequence[Tensor]) -> list[Tensor]:
        query, key, value = inputs
        out, aux = attention(query, Dense(key, value), mask=causal, return_aux=EVERYTHING)
        return [out, *aux[:-1], attention(query, Dense(key, value))]

    for head_dim, value_dim in DIMS:
        for q_len, kv_len in ((1, 1), (3, 130), (4, 7), (9, 9), (70, 150)):
            query = random(2, 4, q_len, head_dim, dtype=dtype)
            sizes = ((2, 2, kv_len, head_dim), (2, 2, kv_len, value_dim))
            key, value = (random(*size, dtype=dtype) for size in sizes)
            same_in_guarded_memory(compute, query, key, value)


@pytest.mark.every_width
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients(dtype: torch.dtype) -> None:
    table = torch.randn(150).requires_grad_()

    def compute(inputs: Sequence[Tensor]) -> list[Tensor]:
        *leaves, table = (each.detach().requires_grad_() for each in inputs)
        query, key, value = leaves
        out = attention(
            *(query, Dense(key, value)),
            mask=causal,
            score_mod=lambda score, b, h, q_idx, kv_idx: score + table[kv_idx],
        )
        return list(torch.autograd.grad(out.square().sum(), [*leaves, table]))

    for head_dim, value_dim in ((37, 21), (5, 3), (64, 130)):
        for q_len, kv_len in ((1, 9), (7, 7), (33, 150), (130, 131)):
            query = random(1, 4, q_len, head_dim, dtype=dtype)
            sizes = ((1, 2, kv_len, head_dim), (1, 2, kv_len, value_dim))
            key, value = (random(*size, dtype=dtype) for size in sizes)
            same_in_guarded_memory(compute, query, key, value, table[:kv_len].detach())


@pytest.mark.every_width
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is (deprecated|not supported)")
def test_tangents(dtype: torch.dtype) -> None:
    offsets = [0, 1, 8, 8, 150]

    def compute(inputs: Sequence[Tensor]) -> list[Tensor]:
        def attend(*given: Tensor) -> Tensor:
            query, key, value, table = given
            return attention(
                *(query, Ragged(key, value, offsets)),
                mask=causal,
                score_mod=lambda score, b, h, q_idx, kv_idx: score + table[kv_idx],
            )

        return list(torch.func.jvp(attend, tuple(inputs[:4]), tuple(inputs[4:])))

    for dims in ((37, 21), (64, 64), (5, 3)):
        shapes = ((150, 4, dims[0]), (150, 2, dims[0]), (150, 2, dims[1]), (142,))
        same_in_guarded_memory(compute, *(random(*shape, dtype=dtype) for shape in shapes * 2))


@pytest.mark.every_width
@pytest.mark.parametrize("dtype", [*DTYPES, torch.int8, torch.float8_e4m3fn], ids=str)
def test_pages(dtype: torch.dtype) -> None:
    """Sequences end with the last row of the last page, and within one."""

    def compute(inputs: Sequence[Tensor]) -> list[Tensor]:
        query, key, value, table, lengths, *scales = inputs
        memory = Paged(key, value, table, lengths, None, *scales)
        out = attention(query, memory, mask=causal)
        again = attention(query, memory, mask=causal)  # recalled, where that can be
        return [out, again]

    for dims in DIMS:
        for q_len in (1, 3, 20):
            for page, counts in ((16, (3, 2)), (1, (30, 21))):
                pages = [random(sum(counts), 2, page, width) for width in dims]
                scales: list[Tensor] = []
                if dtype == torch.int8:
                    pages, scales = map(list, zip(*map(quantise, pages), strict=True))
                table = torch.zeros(2, max(counts), dtype=torch.int32)
                table[0, : counts[0]] = torch.arange(counts[0])
                table[1, : counts[1]] = torch.arange(counts[0], sum(counts))
                lengths = torch.tensor([counts[0] * page, counts[1] * page])
                wide = torch.float32 if dtype.itemsize == 1 else dtype
                query = random(2, 4, q_len, dims[0], dtype=wide)
                operands = [each.to(dtype) for each in pages]
                same_in_guarded_memory(compute, query, *operands, table, lengths, *scales)
                same_in_guarded_memory(compute, query, *operands, table, lengths - 1, *scales)


@pytest.mark.every_width
def test_pieces_that_sequences_share() -> None:
    def compute(inputs: Sequence[Tensor]) -> list[Tensor]:
        query, key, value, table, lengths = inputs
        return [attention(query, Paged(key, value, table, lengths), mask=causal)]

    key, value = random(5, 1, 512, 20), random(5, 1, 512, 12)
    table = torch.tensor([[0, 1, 2], [0, 1, 3], [0, 1, 4]], dtype=torch.int32)
    lengths = torch.tensor([1536, 1500, 1100])
    for q_len, heads in ((1, 3), (2, 1)):
        same_in_guarded_memory(compute, random(3, heads, q_len, 20), key, value, table, lengths)


@pytest.mark.every_width
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ragged(dtype: torch.dtype) -> None:
    offsets = [0, 1, 8, 8, 150]

    def compute(inputs: Sequence[Tensor]) -> list[Tensor]:
        leaves = [each.detach().requires_grad_() for each in inputs]
        query, key, value = leaves
        out, aux = attention(
            *(query, Ragged(key, value, offsets)), mask=causal, return_aux=EVERYTHING
        )
        return [out, *aux[:-1], *torch.autograd.grad(out.square().sum(), leaves)]

    for dims in ((37, 21), (64, 64)):
        query, key = random(150, 4, dims[0], dtype=dtype), random(150, 2, dims[0], dtype=dtype)
        same_in_guarded_memory(compute, query, key, random(150, 2, dims[1], dtype=dtype))


@pytest.mark.every_width
@pytest.mark.parametrize("column", [1, 2])
def test_rows_apart(column: int) -> None:
    """Between rows, and between columns, is memory of somebody else."""

    def compute(inputs: Sequence[Tensor]) -> list[Tensor]:
        query, key, value = inputs
        return [attention(query, Dense(key, value))]

    for width in (2, 6, 12, 16, 37, 64):
        for q_len in (1, 5, 40):
            rows = torch.full((3, 1, 2, 40, width * column + 9), torch.nan)
            rows[..., : width * column : column] = torch.randn(3, 1, 2, 40, width)
            query, key, value = rows[..., : width * column : column]
            same_in_guarded_memory(compute, query[:, :, :q_len], key, value)


# --- tables of mods

INDICES: dict[str, Callable[[Any, Any], Any]] = {
    "key": lambda q, k: k,
    "query": lambda q, k: q,
    "query - key": lambda q, k: q - k + 149,
    "key - query": lambda q, k: k - q + 149,
    "irregular": lambda q, k: (k * k + q) % 37,
}
LENGTHS = {"query - key": 299, "irregular": 37}


@pytest.mark.every_width
@pytest.mark.parametrize("index", INDICES)
def test_tables_that_mods_load_from(index: str) -> None:
    at = INDICES[index]

    def biased(inputs: Sequence[Tensor]) -> list[Tensor]:
        query, key, value, table = inputs
        memory = Dense(key, value)

        def bias(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return score + table[at(q_idx, kv_idx)].to(torch.float32) * 0.1

        def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return (q_idx >= kv_idx) & (table[at(q_idx, kv_idx)] != 1)  # bounded by a pyramid

        options = {"mask": mask} if table.dtype == torch.int32 else {}
        return [attention(query, memory, score_mod=bias, **options)]

    key, value = random(1, 1, 150, 8), random(1, 1, 150, 8)
    for dtype in (torch.float32, torch.bfloat16, torch.int32, torch.bool):
        for q_len in (1, 3, 7, 40):
            length = 149 + q_len if index == "key - query" else LENGTHS.get(index, 150)
            table = torch.randint(0, 3, (length,)).to(dtype)
            same_in_guarded_memory(biased, random(1, 2, q_len, 8), key, value, table)


@pytest.mark.every_width
def test_block_masks() -> None:
    mask = create_block_mask(causal, None, None, 150, 150, BLOCK_SIZE=(64, 32), device="cpu")

    def compute(inputs: Sequence[Tensor]) -> list[Tensor]:
        leaves = [each.detach().requires_grad_() for each in inputs]
        query, key, value = leaves
        out = attention(query, Dense(key, value), mask=mask)
        return [out, *torch.autograd.grad(out.sum(), leaves)]

    same_in_guarded_memory(compute, *(random(1, 2, 150, 20) for _ in range(3)))


# --- new rows of pages


@pytest.mark.every_width
@pytest.mark.parametrize("pages", [*DTYPES, torch.int8, torch.float8_e5m2], ids=str)
def test_appending(pages: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last row of the last page, and rows that are streamed."""

    def compute(inputs: Sequence[Tensor]) -> list[Tensor]:
        slots, key, value, *room = inputs
        mine = [each.clone() for each in room]
        writer = PageWriter({0: PageTensors(*mine)}).at(slots)
        writer.expect(key, value)
        writer.write(0, key, value)
        return mine

    monkeypatch.setattr("quire.runtime.append.WORTH_STREAMING", 0)
    for source in DTYPES:
        for widths in ((5, 3), (37, 21), (64, 32), (130, 128)):
            for page, tokens in ((4, 11), (1, 20)):
                shapes = [(-(-tokens // page), 3, page, width) for width in widths]
                room = [torch.zeros(shape, dtype=pages) for shape in shapes]
                if pages == torch.int8:
                    room += [torch.zeros(shape[:3]) for shape in shapes]
                slots = torch.randperm(shapes[0][0] * page)[:tokens]
                rows = [random(tokens, 3, width, dtype=source) for width in widths]
                same_in_guarded_memory(compute, slots, *rows, *room)
