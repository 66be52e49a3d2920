"""What jagged_scaled_dot_product_attention refuses: PyTorch's kinds of errors, our words."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from api.nested.jagged import nested
from torch import Tensor

from quire import jagged_scaled_dot_product_attention as attend
from quire.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    OptionError,
    QuireError,
    RankError,
    ShapeError,
)

LENGTHS = [3, 5]
LAYOUT = "They are [B, H, j, D], or [B, j, D] for one head."


@dataclass(frozen=True)
class Bad:
    """A call that differs from a good one, what is said to it, and what PyTorch would raise."""

    error: type[QuireError]
    message: str
    theirs: type[Exception] = ValueError
    query: Any = None
    key: Any = None
    value: Any = None
    options: dict[str, Any] = field(default_factory=dict)


def five_dimensions() -> Tensor:
    parts = [torch.randn(n, 2, 3, 8) for n in LENGTHS]
    made: Tensor = torch.nested.nested_tensor(parts, layout=torch.jagged)
    return made.transpose(1, 2).transpose(2, 3)


BAD = {
    "dense": Bad(
        ArgumentError,
        "query, key and value must be nested tensors in the layout torch.jagged, but are nested "
        "in the layout torch.jagged, dense and nested in the layout torch.jagged. Use "
        "F.scaled_dot_product_attention for dense ones, or torch.nested.as_nested_tensor(..., "
        "layout=torch.jagged).",
        key=torch.randn(2, 2, 5, 8),
    ),
    "dtypes": Bad(
        DtypeError,
        "query, key and value must have the same dtype, but have torch.float32, torch.float64 and "
        "torch.float32. Convert them with .to(dtype).",
        key=nested(LENGTHS).double(),
    ),
    "devices": Bad(
        DeviceError,
        "query, key and value must be on one device, but are on cpu, cpu and meta. Move them with "
        ".to(device).",
        value=nested(LENGTHS).to("meta"),
    ),
    "two dimensions": Bad(
        RankError,
        f"query, key and value must have the same number of dimensions, at least 3, but have 2, 4 "
        f"and 4. {LAYOUT}",
        query=torch.nested.nested_tensor([torch.randn(n) for n in LENGTHS], layout=torch.jagged),
    ),
    "other dimensions": Bad(
        RankError,
        f"query, key and value must have the same number of dimensions, at least 3, but have 4, 3 "
        f"and 4. {LAYOUT}",
        key=nested(LENGTHS, heads=None),
    ),
    "ragged elsewhere": Bad(
        ShapeError,
        "query, key and value must be ragged on the same dimension, but are on 2, 1 and 2. "
        "Transpose them alike, with .transpose(1, 2).",
        key=nested(LENGTHS).transpose(1, 2),
    ),
    "a ragged head dim": Bad(
        ShapeError,
        f"the last dimension of query, key and value must be the head dim, but it is the ragged "
        f"one, 3. {LAYOUT}",
        RuntimeError,
        *[nested(LENGTHS).transpose(2, 3)] * 3,
    ),
    "five dimensions": Bad(
        RankError,
        "query, key and value must have at most 4 dimensions if sequences are ragged, but have "
        "5. Flatten the heads into one dimension.",
        ValueError,
        *[five_dimensions()] * 3,
    ),
    "head dims": Bad(
        ShapeError,
        "query and key must have the same embedding dimension, but have 8 and 7. Project one of "
        "them.",
        RuntimeError,
        key=nested(LENGTHS, dim=7),
    ),
    "batches": Bad(
        ShapeError,
        "query, key and value must have the same batch size, or 1, but have 2, 3 and 2. Give as "
        "many sequences of each.",
        RuntimeError,
        key=nested([1, 2, 3]),
    ),
    "heads": Bad(
        ShapeError,
        "query, key and value must have the same number of heads, or 1, but have 4, 2 and 2. Set "
        "enable_gqa=True if a key head serves several query heads.",
        RuntimeError,
        query=nested(LENGTHS, heads=4),
    ),
    "groups of heads": Bad(
        ShapeError,
        "query, key and value must have the same number of heads, or 1, but have 3, 2 and 2. "
        "Repeat the heads of one.",
        RuntimeError,
        query=nested(LENGTHS, heads=3),
        options={"enable_gqa": True},
    ),
    "keys and values": Bad(
        ShapeError,
        "key and value must have sequences of the same lengths, but sequence 1 has 5 keys and 6 "
        "values. Give them the same offsets.",
        RuntimeError,
        value=nested([3, 6]),
    ),
    "two masks": Bad(
        OptionError,
        "only one of attn_mask and is_causal=True must be given, but both are. Put the causal mask "
        "into attn_mask, or leave one of them out.",
        RuntimeError,
        options={"attn_mask": torch.ones(5, 5, dtype=torch.bool), "is_causal": True},
    ),
    "a mask that is none": Bad(
        ArgumentError,
        "attn_mask must be a tensor, but is a list. Convert it with torch.as_tensor.",
        options={"attn_mask": [[True]]},
    ),
    "the dtype of a mask": Bad(
        DtypeError,
        "attn_mask must be of torch.bool or of the query's dtype torch.float32, but is of "
        "torch.float64. Convert it with .to(dtype).",
        options={"attn_mask": torch.ones(5, 5).double()},
    ),
    "the device of a mask": Bad(
        DeviceError,
        "attn_mask must be on the query's device cpu, but is on meta. Move it with .to(device).",
        options={"attn_mask": torch.ones(5, 5, device="meta")},
    ),
    "dropout": Bad(
        ArgumentError,
        "dropout_p must be a number from 0 to 1, but is 1.5. Use 0.0 to switch it off.",
        options={"dropout_p": 1.5},
    ),
    "scale": Bad(
        ArgumentError,
        "scale must be a finite number, but is 'x'. Leave it out for 1/sqrt(head_dim).",
        options={"scale": "x"},
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_refusals(name: str) -> None:
    bad = BAD[name]
    operands = [nested(LENGTHS) if x is None else x for x in (bad.query, bad.key, bad.value)]
    with pytest.raises(bad.error) as caught:
        attend(*operands, **bad.options)
    assert str(caught.value) == bad.message
    assert isinstance(caught.value, bad.theirs)


def test_dense_buffers_of_other_offsets() -> None:
    query, key = (
        torch.nested.nested_tensor([torch.randn(n, 16, 8) for n in ns], layout=torch.jagged)
        for ns in ((2, 5), (3, 4))
    )
    with pytest.raises(ShapeError) as caught:
        attend(query, key, key)
    assert str(caught.value) == (
        "query and key must have the same offsets if the ragged dimension is not the sequence, "
        "but have [0, 2, 7] and [0, 3, 7]. Give them as many rows of each."
    )


def test_offsets_that_are_none() -> None:
    def wrong(offsets: list[int], lengths: list[int] | None = None) -> Tensor:
        made: Tensor = torch.nested.nested_tensor_from_jagged(
            torch.randn(7, 2, 8),
            torch.tensor(offsets),
            None if lengths is None else torch.tensor(lengths),
        )
        return made.transpose(1, 2)

    for query, message in {
        wrong([0, 3, 9]): "query.offsets must be from 0 to 7, the number of rows, but go from 0 to "
        "9. query.offsets are the first row of each sequence and the end of the last one.",
        wrong([0, 3, 7], [3, 5]): "query.lengths[1] must be from 0 to 4, but is 5. query.lengths "
        "are how many rows each sequence has, at most up to the next of query.offsets.",
    }.items():
        with pytest.raises(ArgumentError) as caught:
            attend(query, query, query)
        assert str(caught.value) == message
