"""Sequences packed into one tensor, called as other libraries call it.

    varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=True)    # as flash-attention's
    varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k)                # as torch.nn.attention's

Both take mods as well. In both, causal masks, windows and distances count from the end: the last
query sits at the last key of its sequence, also where there are more queries than keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.attention import attention
from quire.aux_outputs import AuxOutput, AuxRequest
from quire.checks import check_packed
from quire.checks.arguments import tensor_of, whole_number
from quire.config import Backend as BackendName
from quire.errors import ArgumentError, HeadsError, OptionError, ShapeError
from quire.ir.trace import Mod
from quire.memory import Integers, Ragged
from quire.memory.tables import Numbers, checked_lengths, checked_offsets
from quire.mods import softcap as capped
from quire.mods.compose import MaskMod, ScoreMod, all_of, chain, named
from quire.support.dynamo import never_traced

EVERYTHING = (-1, -1)
"""The window that hides nothing."""


@never_traced
def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Integers,
    cu_seqlens_k: Integers | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = EVERYTHING,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
    *,
    seqused_k: Integers | None = None,
    score_mod: Mod | None = None,
    mask: Mod | None = None,
    sink: Tensor | None = None,
    generator: torch.Generator | None = None,
    return_aux: AuxRequest | None = None,
    backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, AuxOutput]:
    """Attention of q [total_q, Hq, D] over k and v [total_k, Hkv, D], sequence by sequence.

        varlen_attention(q, k, v, cu_seqlens, cu_seqlens, causal=True, window_size=(128, 0))

    The parameters up to `block_table` are those of flash_attn_varlen_func. `cu_seqlens_k` may be
    left out where keys lie as the queries do, and so may the longest lengths, which are only
    compared with the lengths. `seqused_k` says how many keys of each sequence are used. Scores are
    scaled, soft-capped, lowered by distance times slope, and then given to `score_mod`; a key is
    read where window, causal mask and `mask` hold. In the mods `b` is the sequence, and positions
    are within it.

    Returns [total_q, Hq, Dv], and an `AuxOutput` [total_q, Hq] as well where `return_aux` asks.
    """
    if return_attn_probs:
        raise OptionError(
            "return_attn_probs=True asks for probabilities, which are never all made. Use "
            "return_aux=AuxRequest(lse=True): a probability is exp(score - lse)."
        )
    layout = _Layout.of(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, _NAMES)
    layout.check_longest(("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k))
    _check_no_pages(block_table)
    reach = _window(window_size)
    place = layout.place()
    masks: list[Any] = [] if mask is None else [mask]
    if causal or reach != EVERYTHING:
        masks.append(_within(reach[0], 0 if causal else reach[1], place))
    scores: list[Any] = []
    if softcap != 0.0:
        scores.append(capped(softcap))
    if alibi_slopes is not None:
        scores.append(_lowered(alibi_slopes, layout.num, q.shape[1], place))
    if score_mod is not None:
        scores.append(score_mod)
    found: Tensor | tuple[Tensor, AuxOutput] = layout.attend(
        *(q, k, v),
        mask=all_of(*masks),
        score_mod=chain(*scores),
        scale=softmax_scale,
        dropout_p=dropout_p,
        generator=generator,
        sink=sink,
        return_aux=return_aux,
        backend=backend,
    )
    return found


@never_traced
def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Integers,
    cu_seq_k: Integers | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = EVERYTHING,
    enable_gqa: bool = False,
    seqused_k: Integers | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
    score_mod: Mod | None = None,
    mask: Mod | None = None,
    backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, Tensor]:
    """The same with the names of `torch.nn.attention.varlen.varlen_attn`, and mods.

        varlen_attn(query, key, value, offsets, offsets, longest, longest, window_size=(-1, 0))

    Bits never depend on the batch, so `num_splits` changes nothing. Returns [T_q, Hq, Dv], and the
    log-sum-exp [T_q, Hq] as well where `return_aux.lse` holds.
    """
    layout = _Layout.of(query, key, value, cu_seq_q, cu_seq_k, seqused_k, _TORCH_NAMES)
    layout.check_longest(("max_q", max_q), ("max_k", max_k))
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise HeadsError(
            f"query and key must have the same number of heads, but Hq={query.shape[1]} and "
            f"Hkv={key.shape[1]}. Set enable_gqa=True for grouped-query attention."
        )
    wants_lse = return_aux is not None and bool(return_aux.lse)
    found = varlen_attention(
        *(query, key, value, cu_seq_q, cu_seq_k),
        softmax_scale=scale,
        window_size=window_size,
        block_table=block_table,
        seqused_k=seqused_k,
        score_mod=score_mod,
        mask=mask,
        return_aux=AuxRequest(lse=True) if wants_lse else None,
        backend=backend,
    )
    if isinstance(found, Tensor):
        return found
    out, aux = found
    assert aux.lse is not None
    return out, aux.lse


# --- where sequences are -------------------------------------------------------------------------

_NAMES = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")
_TORCH_NAMES = ("cu_seq_q", "cu_seq_k", "seqused_k")


class _Layout(NamedTuple):
    """Offsets and lengths of queries and keys."""

    q_offsets: Numbers
    q_lengths: Numbers
    kv_offsets: Numbers
    kv_lengths: Numbers

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_ends: Integers,
        k_ends: Integers | None,
        used: Integers | None,
        names: tuple[str, str, str],
    ) -> _Layout:
        """As the user gave it, checked. Rows past the last sequence belong to none."""
        check_packed(q, k, v)
        q_offsets = checked_offsets(names[0], q_ends, len(q))
        kv_offsets = checked_offsets(names[1], q_ends if k_ends is None else k_ends, len(k))
        if len(q_offsets) != len(kv_offsets):
            raise ArgumentError(
                f"{names[0]} and {names[1]} must be for as many sequences, but hold "
                f"{len(q_offsets)} and {len(kv_offsets)} numbers. Both hold one more than there "
                f"are sequences."
            )
        kv_lengths = np.diff(kv_offsets)
        if used is not None:
            kv_lengths = checked_lengths(names[1:], used, kv_lengths)
        return _Layout(q_offsets, np.diff(q_offsets), kv_offsets, kv_lengths)

    @property
    def num(self) -> int:
        """How many sequences there are."""
        return len(self.q_lengths)

    def check_longest(self, *given: tuple[str, int | None]) -> None:
        """No sequence is longer than is said of queries and of keys."""
        for (name, value), lengths in zip(given, (self.q_lengths, self.kv_lengths), strict=True):
            if value is None:
                continue
            advice = "Give the length of the longest sequence, or None."
            most, longest = whole_number(name, value, advice=advice), int(lengths.max(initial=0))
            if most < longest:
                raise ArgumentError(
                    f"{name} must be at least {longest}, the length of the longest sequence, but "
                    f"is {most}. {advice}"
                )

    def place(self) -> Mod:
        """place(b, q_idx): where a query is, so that the last one is at the last key.

        With more queries than keys `q_idx` begins at 0, but the first queries are before that.
        """
        excess = torch.from_numpy(np.maximum(self.q_lengths - self.kv_lengths, 0))
        if not bool(excess.any()):
            return lambda b, q_idx: q_idx
        return lambda b, q_idx: q_idx - excess[b]

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        memory = Ragged(k, v, *map(torch.from_numpy, (self.kv_offsets, self.kv_lengths)))
        offsets, lengths = map(torch.from_numpy, (self.q_offsets, self.q_lengths))
        return attention(q, memory, q_offsets=offsets, q_lengths=lengths, **options)


# --- what is asked for by number -----------------------------------------------------------------


def _check_no_pages(block_table: object) -> None:
    if block_table is not None:
        raise OptionError(
            "block_table names pages, and this function takes keys and values that are packed. "
            "Gather the pages of each sequence, and leave block_table out."
        )


def _window(window_size: Any) -> tuple[int, int]:
    advice = "Give how many keys before and after it a query reads, -1 for all of them."
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise ArgumentError(f"window_size must be two numbers, but got {window_size!r}. {advice}")
    left, right = (
        whole_number(f"window_size[{place}]", number, minimum=-1, advice=advice)
        for place, number in enumerate(window_size)
    )
    return left, right


def _within(left: int, right: int, place: Mod) -> MaskMod:
    """From `left` keys before a query to `right` after it; -1 is without end."""

    @named(f"window_{left}_{right}")
    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        here = place(b, q_idx)
        if left < 0:
            shown: Tensor = kv_idx <= here + right
            return shown
        shown = kv_idx >= here - left
        return shown if right < 0 else shown & (kv_idx <= here + right)

    return mask


def _lowered(slopes: Tensor, num_sequences: int, num_heads: int, place: Mod) -> ScoreMod:
    """Scores lowered by distance times slope, on both sides."""
    advice = "Give one slope for each head [H], or for each sequence and head [B, H]."
    slope = tensor_of("floats", "alibi_slopes", slopes, ranks=(1, 2), advice=advice)
    wanted = (num_heads,) if slope.ndim == 1 else (num_sequences, num_heads)
    if slope.shape != wanted:
        raise ShapeError(
            f"alibi_slopes must have shape {list(wanted)}, but has {list(slope.shape)}. {advice}"
        )

    @named("alibi")
    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = torch.abs(place(b, q_idx) - kv_idx)
        return score - (slope[h] if slope.ndim == 1 else slope[b, h]) * distance

    return mod
