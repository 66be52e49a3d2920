"""AuxRequest(weights=rows): the probabilities of chosen rows, in every memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire import (
    AuxRequest,
    Dense,
    Paged,
    Ragged,
    attention,
    create_block_mask,
    flex_attention,
    reference,
)
from quire.backends.eager import tiling
from quire.errors import ArgumentError, OptionError
from quire.mods import alibi, causal, sliding_window

ROWS = [0, 17, -1, 3, 4, 17]
SINK = torch.tensor([0.5, -1.0, 3.0, 0.0])


def operands(q_len: int = 37, kv_len: int = 53, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    shapes = ((2, 4, q_len, 16), (2, 2, kv_len, 16), (2, 2, kv_len, 8))
    return [torch.randn(shape).to(dtype) for shape in shapes]


def weights_of(*args: Any, rows: Any = ROWS, **options: Any) -> Tensor:
    found = attention(*args, return_aux=AuxRequest(weights=rows), **options)[1].weights
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mask_mod": causal},
        {"mask_mod": sliding_window(9), "score_mod": alibi(4)},
        {"score_mod": lambda score, b, h, q_idx, kv_idx: torch.asinh(score) + h, "sink": SINK},
        {"mask_mod": lambda b, h, q_idx, kv_idx: kv_idx > 2 * q_idx, "scale": 0.7},
    ],
    ids=["plain", "causal", "alibi", "sink", "empty rows"],
)
@pytest.mark.filterwarnings("ignore::quire.request.EagerModWarning")
def test_dense(options: dict[str, Any], dtype: torch.dtype) -> None:
    tensors = operands(dtype=dtype)
    out, aux = flex_attention(
        *tensors, **options, enable_gqa=True, return_aux=AuxRequest(lse=True, weights=ROWS)
    )
    wanted = reference.attention(*tensors, **options).weights[:, :, ROWS]
    assert aux.weights.shape == (2, 4, len(ROWS), 53)
    assert aux.weights.dtype == wanted.dtype
    torch.testing.assert_close(aux.weights, wanted, rtol=1e-5, atol=1e-6)
    plain = flex_attention(*tensors, **options, enable_gqa=True)
    assert torch.equal(out, plain) and aux.lse is not None and aux.entropy is None


def test_many_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "TILE_SIDE", 5)
    monkeypatch.setattr(tiling, "TILE_ELEMENTS", 60)
    tensors = operands()
    wanted = reference.attention(*tensors, mask_mod=causal).weights
    found = weights_of(tensors[0], Dense(*tensors[1:]), mask=causal, q_start=0, rows=range(37))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
    rows = torch.tensor([2, 3, 4, 5, 6, 20, 36])
    found = weights_of(tensors[0], Dense(*tensors[1:]), mask=causal, q_start=0, rows=rows)
    torch.testing.assert_close(found, wanted[:, :, rows], rtol=1e-5, atol=1e-6)


def test_a_block_mask_counts_from_its_first_row() -> None:
    tensors = operands()
    blocks = create_block_mask(causal, None, None, 37, 53, device="cpu", BLOCK_SIZE=16)
    _, aux = flex_attention(
        *tensors, block_mask=blocks, enable_gqa=True, return_aux=AuxRequest(weights=ROWS)
    )
    wanted = reference.attention(*tensors, mask_mod=causal).weights[:, :, ROWS]
    torch.testing.assert_close(aux.weights, wanted, rtol=1e-5, atol=1e-6)


def test_before_dropout_and_without_gradient() -> None:
    query, key, value = (x.requires_grad_() for x in operands())
    found = weights_of(query, Dense(key, value), dropout_p=0.5)
    torch.testing.assert_close(found, weights_of(query, Dense(key, value)), rtol=0, atol=0)
    assert not found.requires_grad
    torch.testing.assert_close(found.sum(-1), torch.ones(2, 4, len(ROWS)))


def test_ragged_rows_have_the_columns_of_their_own_sequence() -> None:
    offsets, rows = torch.tensor([0, 5, 5, 16]), [0, 4, 9, -1]
    query, key, value = (torch.randn(16, heads, 8) for heads in (4, 2, 2))
    found = weights_of(query, Ragged(key, value, offsets), mask=causal, rows=rows)
    assert found.shape == (4, 4, 11)
    for place, row in enumerate(rows):
        begin, end = (0, 5) if 0 <= row < 5 else (5, 16)
        one = [x[begin:end].transpose(0, 1)[None] for x in (query, key, value)]
        wanted = reference.attention(*one, mask_mod=causal).weights[0, :, row % 16 - begin]
        torch.testing.assert_close(found[place, :, : end - begin], wanted, rtol=1e-5, atol=1e-6)
        assert not found[place, :, end - begin :].any()


def test_paged_rows_are_those_of_every_sequence() -> None:
    key, value = torch.randn(6, 2, 4, 8), torch.randn(6, 2, 4, 8)
    table, lengths = torch.tensor([[5, 0, 2], [3, 1, 1]]), torch.tensor([11, 6])
    query = torch.randn(2, 4, 3, 8)
    found = weights_of(query, Paged(key, value, table, lengths), mask=causal, rows=[-1, 0])
    assert found.shape == (2, 4, 2, 11)
    for b, length in enumerate(lengths.tolist()):
        keys = [x[table[b]].transpose(0, 1).flatten(1, 2)[None, :, :length] for x in (key, value)]
        wanted = reference.attention(query[b : b + 1], *keys, mask_mod=causal, q_start=length - 3)
        torch.testing.assert_close(
            found[b, :, :, :length], wanted.weights[0][:, [-1, 0]], rtol=1e-5, atol=1e-6
        )
        assert not found[b, :, :, length:].any()


@pytest.mark.parametrize("table", [[[0, -1, 1, -1]], [[0, 1, -1, -1]], [[-1, -1, -1, -1]]])
@pytest.mark.parametrize("backend", ["jit", "eager"])
def test_holes_have_columns(table: list[list[int]], backend: Any) -> None:
    """Each position of a sequence has one, also after its last page."""
    query, key = torch.randn(1, 4, 3, 8), torch.randn(2, 2, 4, 8)
    there = torch.tensor(table[0]) >= 0
    memory = Paged(key, key, torch.tensor(table), [15])
    asked = AuxRequest(weights=[0, 2], key_mass=True)
    _, aux = attention(query, memory, mask=causal, return_aux=asked, backend=backend)
    rows = key[torch.tensor(table[0])].transpose(0, 1).flatten(1, 2)[None, :, :15]

    def seen(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & there[kv_idx // 4]

    wanted = reference.attention(query, rows, rows, mask_mod=seen, q_start=12).weights
    torch.testing.assert_close(aux.weights, wanted[:, :, [0, 2]], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(aux.key_mass, wanted.sum(2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_pages_of_eight_bits(dtype: torch.dtype) -> None:
    query, numbers = torch.randn(2, 4, 3, 8), (8 * torch.randn(3, 2, 4, 8)).to(dtype)
    scale, table = torch.rand(3, 2, 4) / 8, torch.tensor([[2, 0], [1, 1]])
    scales = {"key_scale": scale, "value_scale": scale}
    narrow = Paged(numbers, numbers, table, [8, 6], **scales)
    rows = numbers.float() * scale.unsqueeze(-1)
    found = weights_of(query, narrow, mask=causal, rows=[0, 2])
    wanted = weights_of(query, Paged(rows, rows, table, [8, 6]), mask=causal, rows=[0, 2])
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


def test_nothing_to_see() -> None:
    query, key, value = operands(kv_len=0)
    assert weights_of(query, Dense(key, value)).shape == (2, 4, len(ROWS), 0)
    query, key, value = operands()
    assert weights_of(query, Dense(key, value), rows=[]).shape == (2, 4, 0, 53)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            [0.5],
            "AuxRequest.weights must be a list or a tensor of rows of the query, but is [0.5]. "
            "Give numbers such as [0, -1].",
        ),
        (
            True,
            "AuxRequest.weights must be a list or a tensor of rows of the query, but is True. Give "
            "numbers such as [0, -1].",
        ),
        (
            "last",
            "AuxRequest.weights must be a list or a tensor of rows of the query, but is 'last'. "
            "Give numbers such as [0, -1].",
        ),
        (
            [37],
            "AuxRequest.weights must be rows of the query, from -37 to 36, but has 37. A row is "
            "counted in the query, not in the sequence.",
        ),
    ],
)
def test_rows_that_are_none(rows: Any, message: str) -> None:
    query, key, value = operands()
    with pytest.raises(ArgumentError) as caught:
        weights_of(query, Dense(key, value), rows=rows)
    assert str(caught.value) == message


def test_inside_of_torch_func() -> None:
    query, key, value = operands()
    with pytest.raises(OptionError, match=r"AuxRequest.weights must be None inside of torch.func"):
        torch.func.vmap(lambda q: weights_of(q, Dense(key, value)))(query[None])
