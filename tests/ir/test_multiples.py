"""Which mods are multiples of their score."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire.ir.multiples import is_multiple
from quire.ir.trace import trace

GATE = torch.rand(4)
ROWS = torch.rand(8, 3)

MULTIPLES: dict[str, Callable[..., Any]] = {
    "itself": lambda p, b, h, q, k: p,
    "gate": lambda p, b, h, q, k: p * GATE[h],
    "from the left": lambda p, b, h, q, k: GATE[h] * p * torch.exp(-GATE[h]),
    "divided": lambda p, b, h, q, k: p / (1 + GATE[h]),
    "negative": lambda p, b, h, q, k: -p,
    "sum": lambda p, b, h, q, k: p * GATE[h] + p / 2 - p,
    "chosen": lambda p, b, h, q, k: torch.where(k < 4, p * 2, p),
    "dropped": lambda p, b, h, q, k: torch.where(q - k < 4, p, 0.0),
    "filled": lambda p, b, h, q, k: p.masked_fill(q < k, 0.0),
    "vectors": lambda p, b, h, q, k: (p * ROWS[q] * ROWS[k]).sum(),
    "double": lambda p, b, h, q, k: p.double() * 0.5,
    "nothing": lambda p, b, h, q, k: p * 0 + 0.0,
}
OTHERS: dict[str, Callable[..., Any]] = {
    "square": lambda p, b, h, q, k: p * p,
    "power": lambda p, b, h, q, k: p**1.5,
    "threshold": lambda p, b, h, q, k: torch.where(p > 0.1, p, 0.0),
    "shifted": lambda p, b, h, q, k: p + GATE[h],
    "other side": lambda p, b, h, q, k: torch.where(k < 4, p, 1.0),
    "reciprocal": lambda p, b, h, q, k: 1 / p,
    "ratio": lambda p, b, h, q, k: p / (p + 1),
    "constant": lambda p, b, h, q, k: GATE[h],
    "largest": lambda p, b, h, q, k: torch.maximum(p, GATE[h]),
    "rounded": lambda p, b, h, q, k: p.half().float(),
    "truth": lambda p, b, h, q, k: (p != 0) * 1.0,
}


@pytest.mark.parametrize("name", [*MULTIPLES, *OTHERS])
def test_multiples(name: str) -> None:
    mod = {**MULTIPLES, **OTHERS}[name]
    assert is_multiple(trace(mod, "score").output) == (name in MULTIPLES)
