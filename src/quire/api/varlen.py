"""Attention of sequences that are packed into one tensor, with the signatures of other libraries.

    varlen_attention(q, k, v, cu_seqlens_q, cu_seqlens_k, causal=True)    # as flash-attention's
    varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k)                # as torch.nn.attention's

Both also take mods. In both, causal masks, windows and distances count from the end: the last query
is at the position of the last key of its sequence, even if there are more queries than keys.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from quire.api.attention import attention
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
from quire.support.dynamo import entered_by_callers, traced_as
from quire.support.torch_private import is_in_a_graph

EVERYTHING = (-1, -1)
"""The window in which a query reads all keys."""


@entered_by_callers
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
    """Compute attention of q [total_q, Hq, D] over k [total_k, Hkv, D] and v [total_k, Hkv, Dv].

        varlen_attention(q, k, v, cu_seqlens, cu_seqlens, causal=True, window_size=(128, 0))

    The parameters up to `block_table` are those of flash_attn_varlen_func. Leave `cu_seqlens_k` out
    if it equals `cu_seqlens_q` [B + 1]. `max_seqlen_q` and `max_seqlen_k` are optional: no sequence
    may be longer. `seqused_k` [B] says how many keys of each sequence are used. Scores are scaled,
    soft-capped, lowered by distance times `alibi_slopes` [Hq] or [B, Hq], and then given to
    `score_mod`. A query reads a key if the window, the causal mask and `mask` allow it. `sink` [Hq]
    is a logit per head that joins the softmax. In mods `b` is the sequence, and positions count
    from its start. `block_table` is unused and must be None; `deterministic` has no effect.

    Returns [total_q, Hq, Dv]. With `return_aux` it returns a pair of that and an `AuxOutput`.
    """
    _check_supported(return_attn_probs, block_table)
    packed = (q, k, v)
    longest = ("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)
    layout = _layout_of(packed, (cu_seqlens_q, cu_seqlens_k, seqused_k), _NAMES, longest)
    place = layout.place()
    slopes = None if alibi_slopes is None else _lowered(alibi_slopes, layout, q.shape[1], place)
    found: Tensor | tuple[Tensor, AuxOutput] = layout.attend(
        packed,
        mask=all_of(mask, _window(window_size, causal, place)),
        score_mod=chain(capped(softcap) if softcap != 0.0 else None, slopes, score_mod),
        scale=softmax_scale,
        dropout_p=dropout_p,
        generator=generator,
        sink=sink,
        return_aux=return_aux,
        backend=backend,
    )
    return found


@entered_by_callers
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
    """Compute `varlen_attention` with the parameters of `torch.nn.attention.varlen.varlen_attn`.

        varlen_attn(query, key, value, offsets, offsets, longest, longest, window_size=(-1, 0))

    query [T_q, Hq, D], key [T_k, Hkv, D], value [T_k, Hkv, Dv]; `cu_seq_q` and `cu_seq_k` [B + 1],
    `seqused_k` [B]. `num_splits` has no effect, since results never depend on the batch.
    `block_table` is unused and must be None. Returns [T_q, Hq, Dv], or a pair of that and the
    log-sum-exp [T_q, Hq] if `return_aux.lse` is True.
    """
    packed = (query, key, value)
    longest = ("max_q", max_q), ("max_k", max_k)
    _layout_of(packed, (cu_seq_q, cu_seq_k, seqused_k), _TORCH_NAMES, longest)
    if not enable_gqa and query.shape[1] != key.shape[1]:
        raise HeadsError(
            f"query and key must have the same number of heads, but Hq={query.shape[1]} and "
            f"Hkv={key.shape[1]}. Set enable_gqa=True for grouped-query attention."
        )
    wants_lse = return_aux is not None and bool(return_aux.lse)
    found = varlen_attention(
        *packed,
        cu_seq_q,
        cu_seq_k,
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
    """The offsets [B + 1] and lengths [B] of queries and keys, int64."""

    q_offsets: Tensor
    q_lengths: Tensor
    kv_offsets: Tensor
    kv_lengths: Tensor
    exceeds: bool  # whether a sequence may have more queries than keys

    def place(self) -> Mod:
        """Return place(b, q_idx), the position of a query if the last one is at the last key.

        `q_idx` is that position, unless there are more queries than keys: then `q_idx` begins at
        0, and the positions of the first queries are negative.
        """
        if not self.exceeds:
            return lambda b, q_idx: q_idx
        excess = (self.q_lengths - self.kv_lengths).clamp(min=0)
        return lambda b, q_idx: q_idx - excess[b]

    def attend(self, packed: tuple[Tensor, Tensor, Tensor], **options: Any) -> Any:
        """Compute attention of packed queries, keys and values."""
        q, k, v = packed
        memory = Ragged(k, v, self.kv_offsets, self.kv_lengths)
        return attention(q, memory, q_offsets=self.q_offsets, q_lengths=self.q_lengths, **options)


_Spans: TypeAlias = tuple[Integers, Integers | None, Integers | None]
"""The offsets of queries, the offsets of keys, and how many keys are used."""


def _layout_in_graph(
    packed: tuple[Tensor, Tensor, Tensor],
    spans: _Spans,
    names: tuple[str, str, str],
    longest: tuple[tuple[str, int | None], tuple[str, int | None]],
) -> _Layout:
    """Return the layout where a graph is made: the values are not known, so none is checked."""
    q_offsets = torch.as_tensor(spans[0]).long()
    kv_offsets = q_offsets if spans[1] is None else torch.as_tensor(spans[1]).long()
    used = kv_offsets.diff() if spans[2] is None else torch.as_tensor(spans[2]).long()
    return _Layout(q_offsets, q_offsets.diff(), kv_offsets, used, exceeds=True)


@traced_as(_layout_in_graph)
def _layout_of(
    packed: tuple[Tensor, Tensor, Tensor],
    spans: _Spans,
    names: tuple[str, str, str],
    longest: tuple[tuple[str, int | None], tuple[str, int | None]],
) -> _Layout:
    """Check and return where sequences are. Rows after the last sequence belong to none.

    `names` are the user's names of `spans`; `longest` has the names and values of the user's
    longest lengths, for queries and keys.
    """
    if any(map(is_in_a_graph, packed)):
        return _layout_in_graph(packed, spans, names, longest)
    check_packed(*packed)
    q_ends, k_ends, used = spans
    q_offsets = checked_offsets(names[0], q_ends, len(packed[0]))
    k_ends = q_ends if k_ends is None else k_ends
    kv_offsets = checked_offsets(names[1], k_ends, len(packed[1]))
    if len(q_offsets) != len(kv_offsets):
        raise ArgumentError(
            f"{names[0]} and {names[1]} must be for as many sequences, but hold "
            f"{len(q_offsets)} and {len(kv_offsets)} numbers. Give both one more number than "
            f"there are sequences."
        )
    q_lengths, kv_lengths = np.diff(q_offsets), np.diff(kv_offsets)
    if used is not None:
        kv_lengths = checked_lengths(names[1:], used, kv_lengths)
    for (name, most), lengths in zip(longest, (q_lengths, kv_lengths), strict=True):
        _check_longest(name, most, lengths)
    exceeds = bool((q_lengths > kv_lengths).any())
    columns = [torch.from_numpy(x) for x in (q_offsets, q_lengths, kv_offsets, kv_lengths)]
    return _Layout(columns[0], columns[1], columns[2], columns[3], exceeds)


def _check_longest(name: str, value: int | None, lengths: Numbers) -> None:
    """Raise if a sequence is longer than the user's longest length."""
    if value is None:
        return
    advice = "Give the length of the longest sequence, or None."
    most, longest = whole_number(name, value, advice=advice), int(lengths.max(initial=0))
    if most < longest:
        raise ArgumentError(
            f"{name} must be at least {longest}, the length of the longest sequence, but is "
            f"{most}. {advice}"
        )


# --- options -------------------------------------------------------------------------------------


def _check_supported(return_attn_probs: bool, block_table: object) -> None:
    if return_attn_probs:
        raise OptionError(
            "return_attn_probs must be False, since probabilities are never all in memory, but is "
            "True. Use return_aux=AuxRequest(lse=True): a probability is exp(score - lse)."
        )
    if block_table is not None:
        raise OptionError(
            "block_table must be None, since keys and values are packed, but names pages. Gather "
            "the pages of each sequence, or call quire.attention with Paged memory."
        )


def _window(window_size: Any, causal: bool, place: Mod) -> MaskMod | None:
    """Return the mask of a window (left, right) and of `causal`, or None if all keys are read."""
    advice = "Give how many keys before and after it a query reads, -1 for all of them."
    if not isinstance(window_size, tuple | list) or len(window_size) != 2:
        raise ArgumentError(f"window_size must be two numbers, but is {window_size!r}. {advice}")
    left, right = (
        whole_number(f"window_size[{axis}]", number, minimum=-1, advice=advice)
        for axis, number in enumerate(window_size)
    )
    if causal:
        right = 0
    if left == right == -1:
        return None

    @named(f"window_{left}_{right}")
    def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        here = place(b, q_idx)
        if left < 0:
            shown: Tensor = kv_idx <= here + right
            return shown
        shown = kv_idx >= here - left
        return shown if right < 0 else shown & (kv_idx <= here + right)

    return mask


def _lowered(slopes: Tensor, layout: _Layout, num_heads: int, place: Mod) -> ScoreMod:
    """Return a score_mod that subtracts slope times distance, before and after the query."""
    advice = "Give one slope for each head [H], or for each sequence and head [B, H]."
    slope = tensor_of("floats", "alibi_slopes", slopes, ranks=(1, 2), advice=advice)
    wanted = (num_heads,) if slope.ndim == 1 else (layout.q_lengths.shape[0], num_heads)
    if slope.shape != wanted:
        raise ShapeError(
            f"alibi_slopes must have shape {list(wanted)}, but has {list(slope.shape)}. {advice}"
        )

    @named("alibi")
    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        distance = torch.abs(place(b, q_idx) - kv_idx)
        return score - (slope[h] if slope.ndim == 1 else slope[b, h]) * distance

    return mod
