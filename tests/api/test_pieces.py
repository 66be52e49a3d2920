"""Pieces of one sequence, computed apart and merged: the bits of one call."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import (
    AttentionPiece,
    AuxRequest,
    Dense,
    Ragged,
    attention,
    attention_piece,
    merge_pieces,
    reference,
)
from quire.codegen.convention import KEYS_OF_PIECE
from quire.errors import ArgumentError, CapturedIndexError, DtypeError, ShapeError
from quire.kv import PagedKVCache
from quire.mods import alibi, causal, sliding_window
from quire.runtime import pieces as runtime

LSE = AuxRequest(lse=True)
KEYS = 3 * KEYS_OF_PIECE + 100


def operands(length: int, width: int = 20, value_width: int = 33) -> tuple[Tensor, Tensor, Tensor]:
    shapes = (2, 4, length, width), (2, 2, KEYS, width), (2, 2, KEYS, value_width)
    return tuple(map(torch.randn, shapes))  # type: ignore[return-value]


def in_pieces(
    query: Tensor, key: Tensor, value: Tensor, cuts: tuple[int, ...], **options: Any
) -> list[AttentionPiece]:
    """One piece from each cut to the next."""
    ends = (*cuts[1:], key.shape[2])
    return [
        attention_piece(
            query,
            Dense(key[:, :, begin:end], value[:, :, begin:end], start=begin),
            **options,
        )
        for begin, end in zip(cuts, ends, strict=True)
    ]


BORDERS = tuple(range(0, KEYS, KEYS_OF_PIECE))


@pytest.mark.every_width
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("length", [1, 40])
@pytest.mark.parametrize("cuts", [BORDERS, (0, *BORDERS[2:]), (0,)])
def test_pieces_give_the_bits_of_one_call(
    cuts: tuple[int, ...], length: int, dtype: torch.dtype
) -> None:
    query, key, value = (x.to(dtype) for x in operands(length))
    options = {"mask": causal, "score_mod": alibi(4), "q_start": KEYS - length}
    sink = torch.tensor([0.5, -1.0, 30.0, 0.0]).to(dtype)
    whole, aux = attention(
        query, Dense(key, value), sink=sink, return_aux=LSE, backend="jit", **options
    )
    pieces = in_pieces(query, key, value, cuts, **options)
    out, lse = merge_pieces(pieces, sink=sink, dtype=dtype)
    assert torch.equal(out, whole)
    assert torch.equal(lse, aux.lse)


@pytest.mark.parametrize("length", [3, 50])
def test_a_query_may_read_nothing_in_a_piece(length: int) -> None:
    query, key, value = operands(length)
    options = {"mask": sliding_window(200), "q_start": 2000}
    whole = attention(query, Dense(key, value), backend="jit", **options)
    pieces = in_pieces(query, key, value, BORDERS, **options)
    assert (pieces[0].sums == 0).all() and (pieces[3].maxima == -torch.inf).all()
    assert torch.equal(merge_pieces(pieces)[0], whole)


def test_pages_and_packed_queries() -> None:
    query, key, value = operands(7, 64, 64)
    packed = query.transpose(1, 2).flatten(0, 1)
    options = {"mask": causal, "q_start": torch.tensor([KEYS - 7] * 2)}
    offsets = torch.tensor([0, 7, 14], dtype=torch.int32)
    lengths = [KEYS_OF_PIECE, KEYS - KEYS_OF_PIECE]

    def ragged(begin: int, end: int) -> Ragged:
        rows = (x[:, :, begin:end].transpose(1, 2).flatten(0, 1) for x in (key, value))
        ends = torch.arange(3, dtype=torch.int32) * (end - begin)
        return Ragged(*rows, offsets=ends)

    whole = attention(packed, ragged(0, KEYS), q_offsets=offsets, backend="jit", **options)
    first = attention_piece(packed, ragged(0, lengths[0]), q_offsets=offsets, **options)
    assert first.out.shape == (14, 4, 64) and first.sums.shape == (14, 4)
    assert torch.equal(whole, attention(packed, ragged(0, KEYS), q_offsets=offsets, **options))
    cache = PagedKVCache(layers=1, heads=2, head_dim=64, page_size=128, n_pages=60)
    sequences = [cache.sequence() for _ in range(2)]
    cache.append(sequences, *(x.transpose(1, 2).flatten(0, 1)[None] for x in (key, value)))
    memory = cache.memory(0, sequences)
    expected = attention(query, memory, mask=causal, backend="jit")
    pages = KEYS_OF_PIECE // 128
    start = {"q_start": torch.tensor([KEYS - 7] * 2)}
    before = dataclasses.replace(memory, lengths=torch.full((2,), KEYS_OF_PIECE))
    pieces = [attention_piece(query, before, mask=causal, **start)]
    for piece in range(1, 4):
        end = min((piece + 1) * KEYS_OF_PIECE, KEYS)
        gone = torch.full((2,), piece * pages)
        part = dataclasses.replace(memory, lengths=torch.full((2,), end), first_page=gone)
        pieces.append(attention_piece(query, part, mask=causal, **start))
    assert torch.equal(merge_pieces(pieces)[0], expected)


@pytest.mark.parametrize("kernels", [True, False])
def test_other_cuts_are_the_same_up_to_rounding(
    kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    query, key, value = operands(5)
    if not kernels:
        monkeypatch.setattr(runtime, "processor_obstacle", lambda: "no kernels here")
        monkeypatch.setattr("quire.backends.jit.processor_obstacle", lambda: "no kernels here")
    sink = torch.randn(4)
    out, lse = merge_pieces(in_pieces(query, key, value, (0, 5, 1500)), sink=sink)
    truth = reference.attention(*(x.double() for x in (query, key, value)), sink=sink.double())
    torch.testing.assert_close(out.double(), truth.out, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), truth.lse, rtol=1e-5, atol=1e-5)


def test_scores_far_from_zero_weigh_as_one_call_does() -> None:
    query, key, value = operands(2)
    options = {"score_mod": lambda score, b, h, q, k: score * 0 - 1e9}
    out, _ = merge_pieces(in_pieces(query, key, value, BORDERS, **options))
    mean = value.double().mean(2).repeat_interleave(2, 1)[:, :, None].expand(-1, -1, 2, -1)
    torch.testing.assert_close(out.double(), mean, rtol=1e-4, atol=1e-5)


def test_an_index_out_of_range_is_an_error() -> None:
    query, key, value = operands(2)
    table = torch.randn(10)
    with pytest.raises(CapturedIndexError):
        attention_piece(
            query, Dense(key, value), score_mod=lambda score, b, h, q, k: score + table[k]
        )


def test_errors() -> None:
    piece = AttentionPiece(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3), torch.zeros(1, 2, 3))
    with pytest.raises(ArgumentError, match="pieces must have one piece or more, but is empty"):
        merge_pieces([])
    with pytest.raises(ShapeError, match=r"sums of a piece must have shape \[1, 2, 3\] as in the"):
        merge_pieces([piece, piece._replace(sums=torch.zeros(1, 2, 4))])
    with pytest.raises(DtypeError, match="pieces must be float32, or all float64, but out is"):
        merge_pieces([piece._replace(out=piece.out.bfloat16())])
