"""Random calls of attention: sizes, dtypes, layouts, and mods from a small grammar.

A mod is the text of a Python expression in `score`, `b`, `h`, `q_idx`, `kv_idx` and captured
tensors, so that a failing example can be read and tried by hand. Its float tensors all require
grad; what is generated is smooth, since a kink that rounding crosses has no derivative to compare.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

# How a tensor [B, H, L, D] may lie in memory.
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "heads inside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "head dim outside": lambda x: x.transpose(1, 3).contiguous().transpose(1, 3),
    "with gaps": lambda x: torch.stack([x, torch.full_like(x, math.nan)], -1)[..., 0],
    "backed by one batch": lambda x: x[:1].expand_as(x),
}


@dataclass(frozen=True)
class Case:
    """One call of attention, without its random numbers; `seed` makes those."""

    batch: int = 2
    kv_batch: int = 2
    kv_heads: int = 2
    group: int = 2
    q_len: int = 19
    kv_len: int = 23
    head_dim: int = 8
    value_dim: int = 5
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    score: str | None = None
    mask: str | None = None
    block_size: tuple[int, int] | None = None
    scale: float | None = None
    has_sink: bool = False
    dropout_p: float = 0.0
    tile_side: int = 8
    tile_elements: int = 500
    seed: int = 0

    @property
    def q_heads(self) -> int:
        return self.kv_heads * self.group

    @property
    def num_scores(self) -> int:
        return self.batch * self.q_heads * self.q_len * self.kv_len

    def operands(self) -> dict[str, Tensor]:
        """query, key, value and, if there is one, the sink, in float64."""
        kv = (self.kv_batch, self.kv_heads, self.kv_len)
        shapes: dict[str, tuple[int, ...]] = {
            "query": (self.batch, self.q_heads, self.q_len, self.head_dim),
            "key": (*kv, self.head_dim),
            "value": (*kv, self.value_dim),
        }
        if self.has_sink:
            shapes["sink"] = (self.q_heads,)
        return self._random(shapes)

    def captures(self) -> dict[str, Tensor]:
        """What the mods may capture, in float64."""
        return self._random(
            {
                "scalar": (),
                "heads": (self.q_heads,),
                "rows": (self.q_len,),
                "columns": (self.kv_len,),
                "batches": (self.batch, self.kv_len),
                "table": (self.q_heads, self.q_len + self.kv_len),
                "rows_of": (self.q_len, 3),
                "columns_of": (self.kv_len, 3),
                "many_of": (max(self.q_len, self.kv_len), 64),
                "pairs": (self.batch, self.q_heads, self.q_len, self.kv_len),
            }
        )

    def documents(self) -> Tensor:
        """The document of each position."""
        return torch.arange(max(self.q_len, self.kv_len)) // 7

    def mod(self, text: str | None, captures: dict[str, Tensor]) -> Callable[..., Any] | None:
        """The function whose body is `text`."""
        if text is None:
            return None
        names = "b, h, q_idx, kv_idx" if text is self.mask else "score, b, h, q_idx, kv_idx"
        scope = {**captures, "torch": torch, "doc": self.documents(), "n": self.kv_len}
        mod: Callable[..., Any] = eval(f"lambda {names}: {text}", scope)
        return mod

    def _random(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
        """One stream of numbers per name, so that shapes do not change each other's numbers."""
        return {
            name: torch.randn(
                shape,
                dtype=torch.float64,
                generator=torch.Generator().manual_seed(
                    self.seed * 1000 + zlib.crc32(name.encode())
                ),
            )
            for name, shape in shapes.items()
        }


# --- the grammar ---------------------------------------------------------------------------------

_LOADS = st.sampled_from(
    [
        "scalar",
        "heads[h]",
        "rows[q_idx]",
        "columns[kv_idx]",
        "columns[kv_idx - n]",
        "batches[b, kv_idx]",
        "batches[b][kv_idx]",
        "table[h, q_idx - kv_idx + n]",
        "table[h, -1 - kv_idx]",
        "heads[(q_idx + kv_idx) % heads.shape[0]]",
        "heads[doc[kv_idx] % heads.shape[0]]",
        "table[h, doc[q_idx] - doc[kv_idx]]",
        "pairs[b, h, q_idx, kv_idx]",
        "(rows_of[q_idx] * columns_of[kv_idx]).sum()",
        "(rows_of[q_idx] - columns_of[kv_idx]).norm()",
        "rows_of[q_idx].amax()",
        "torch.linalg.cross(columns_of[kv_idx - n], rows_of[q_idx % 2])[1]",
        "(torch.sigmoid(columns_of[(q_idx + kv_idx) % n]) @ rows_of[q_idx])",
    ]
)
_POSITIONS = st.sampled_from(
    [
        "(q_idx - kv_idx) / n",
        "q_idx % 3",
        "torch.log(kv_idx + 1.5)",
        "1.0 / (1 + kv_idx // 4)",
        "h * 0.25",
    ]
)
_SMOOTH = st.sampled_from(
    ["torch.tanh({})", "torch.sigmoid({})", "({}).sin()", "torch.exp(-({}) ** 2)", "({}) * 0.5"]
)
_OPAQUE = st.sampled_from(
    [
        "torch.asinh({})",
        "{} + (rows_of[q_idx] * columns_of[kv_idx]).view(3).sum()",
        "{} + rows_of[q_idx].flip(0).amax()",
    ]
)
_JOINED = st.sampled_from(
    ["({} + {})", "({} - {} * 1.5)", "torch.tanh({}) * ({})", "(2 - {} + {})"]
)


def _combine(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.builds(str.format, _SMOOTH, inner),
        st.builds(str.format, _JOINED, inner, inner),
        st.builds("torch.where({}, {}, {})".format, mask_texts, inner, inner),
    )


_CONDITIONS = st.sampled_from(
    [
        "q_idx >= kv_idx",
        "(q_idx - kv_idx).abs() <= 5",
        "kv_idx < q_idx + 3",
        "kv_idx % 4 != 1",
        "doc[q_idx] == doc[kv_idx]",
        "h % 2 == 0",
        "b < 1",
        "q_idx != 4",
        "(q_idx // 5) == (kv_idx // 6)",
        "kv_idx < 0",
    ]
)

mask_texts: st.SearchStrategy[str] = st.recursive(
    _CONDITIONS,
    lambda inner: st.one_of(
        st.builds("({}) & ({})".format, inner, inner),
        st.builds("({}) | ({})".format, inner, inner),
        st.builds("~({})".format, inner),
    ),
    max_leaves=3,
)
"""Bodies of a mask_mod."""

score_texts: st.SearchStrategy[str] = st.builds(
    "{} + {}".format,
    st.sampled_from(["score", "score * 0.5", "torch.tanh(score) * 2", "score * heads[h]"]),
    st.recursive(st.one_of(_LOADS, _LOADS, _POSITIONS, st.just("score")), _combine, max_leaves=4),
)
"""Bodies of a score_mod; the score is always in it."""

opaque_score_texts: st.SearchStrategy[str] = st.builds(str.format, _OPAQUE, score_texts)
"""Bodies of a score_mod that use an operation outside of the op table."""


# --- whole calls ---------------------------------------------------------------------------------


_LENGTHS = st.one_of(
    st.integers(0, 5),
    st.integers(6, 40),
    st.sampled_from([63, 65, 127, 129, 145, 161]),
)


@st.composite
def long_cases(draw: st.DrawFn) -> Case:
    """Calls of several tiles and panels with a rest, or of a few queries, or of nothing at all."""
    q_len, kv_len = draw(_LENGTHS), draw(st.one_of(_LENGTHS, st.sampled_from([257, 290])))
    few = q_len * kv_len < 3000
    batch = draw(st.integers(1, 3 if few else 2))
    block = st.sampled_from([16, 40, 128])
    return Case(
        batch=batch,
        kv_batch=draw(st.sampled_from([1, batch])),
        kv_heads=draw(st.integers(1, 2 if few else 1)),
        group=draw(st.sampled_from([1, 2, 3, 5])),
        q_len=q_len,
        kv_len=kv_len,
        head_dim=draw(st.sampled_from([1, 4, 8, 13, 20, 33])),
        value_dim=draw(st.sampled_from([1, 5, 8, 16, 27])),
        dtype=draw(st.sampled_from(DTYPES)),
        layout=draw(st.sampled_from(sorted(LAYOUTS))),
        score=draw(st.one_of(st.none(), score_texts)),
        mask=draw(st.one_of(st.none(), mask_texts)),
        block_size=draw(st.one_of(st.none(), st.tuples(block, block))),
        has_sink=draw(st.booleans()),
        dropout_p=draw(st.sampled_from([0.0, 0.0, 0.3])),
        seed=draw(st.integers(0, 2**16)),
    )


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Any call that is right."""
    batch = draw(st.integers(1, 3))
    q_len, kv_len = draw(st.integers(1, 33)), draw(st.integers(1, 33))
    block = st.integers(1, 40)
    return Case(
        batch=batch,
        kv_batch=draw(st.sampled_from([1, batch])),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.integers(1, 3)),
        q_len=q_len,
        kv_len=kv_len,
        head_dim=draw(st.integers(1, 9)),
        value_dim=draw(st.integers(1, 9)),
        dtype=draw(st.sampled_from(DTYPES)),
        layout=draw(st.sampled_from(sorted(LAYOUTS))),
        score=draw(st.one_of(st.none(), score_texts, opaque_score_texts)),
        mask=draw(st.one_of(st.none(), mask_texts)),
        block_size=draw(st.one_of(st.none(), st.tuples(block, block))),
        scale=draw(st.sampled_from([None, 0.3, 0.0])),
        has_sink=draw(st.booleans()),
        dropout_p=draw(st.sampled_from([0.0, 0.0, 0.3, 1.0])),
        tile_side=draw(st.sampled_from([5, 16, 64])),
        tile_elements=draw(st.sampled_from([200, 2000])),
        seed=draw(st.integers(0, 2**16)),
    )
