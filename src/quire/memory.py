"""Where keys and values live. A memory answers one question: where are the rows of sequence b?"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Dense:
    """Keys [B, Hkv, S, D] and values [B, Hkv, S, Dv] in any strides.

    `Dense(key, value, start=4096)` is a shard: its first key sits at position 4096.
    """

    key: Tensor
    value: Tensor
    start: int = 0
