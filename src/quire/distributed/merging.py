"""Decoding with a cache over ranks: each computes over its own keys, all get the whole result.

merge_over_ranks     results (out, lse) of each rank; agrees with one process up to rounding
attend_over_ranks    computes pieces of 1,024 keys and merges these, with the bits of one process
"""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import flex_attention as torch_flex

from quire import checks
from quire.api.merge import merge_attention
from quire.api.pieces import AttentionPiece, attention_piece, merge_pieces
from quire.block_mask import BlockMask, element_mod
from quire.block_mask.mask_mods import try_trace
from quire.codegen.convention import KEYS_OF_PIECE
from quire.distributed.context_plan import digest_of, digest_of_tensors
from quire.distributed.group import TIMEOUT, RankGroup
from quire.errors import ArgumentError, ShapeError
from quire.ir.trace import Kind, Mod, Traced
from quire.memory import Dense, Integers, Paged
from quire.request import Mask


def merge_over_ranks(
    out: Tensor,
    lse: Tensor,
    *,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    timeout: timedelta = TIMEOUT,
) -> tuple[Tensor, Tensor]:
    """Return out and lse of attention over the keys of all ranks, the same bits on every rank.

        part = Dense(key, value, start=first)  # this rank's part of a cache; or pages of it
        out, aux = attention(query, part, mask=causal, q_start=n, return_aux=AuxRequest(lse=True))
        out, lse = merge_over_ranks(out, aux.lse)

    `out` is [B, Hq, L, Dv], `lse` is [B, Hq, L], or those of packed queries without B. This is for
    decoding with a cache whose parts are on several ranks: every rank has the same queries,
    and one small message per step takes the place of the keys. `merge_attention` merges results,
    rank 0 first, in float32, and they are rounded once. A rank without keys has lse -inf. There is
    no gradient.
    """
    group = RankGroup.of(mesh, timeout)
    facts: dict[str, object] = {"shape of out": [*out.shape]}
    with group.agreeing(facts | {"dtype": [str(out.dtype), str(lse.dtype)]}):
        if out.shape[:-1] != lse.shape:
            raise ShapeError(
                f"lse must have shape {list(out.shape[:-1])}, since out has {list(out.shape)}, but "
                f"has {list(lse.shape)}. Give what attention returned."
            )
    parts = zip(*(group.gather(x.detach().contiguous()) for x in (out, lse)), strict=True)
    total, total_lse = next(parts)
    total = total.to(lse.dtype)
    for other, other_lse in parts:
        total, total_lse = merge_attention(total, total_lse, other.to(lse.dtype), other_lse)
    return total.to(out.dtype), total_lse


def attend_over_ranks(
    query: Tensor,
    memory: Dense | Paged | None,
    *,
    score_mod: Mod | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    sink: Tensor | None = None,
    q_start: int | Integers,
    mesh: DeviceMesh | dist.ProcessGroup | None = None,
    timeout: timedelta = TIMEOUT,
) -> tuple[Tensor, Tensor]:
    """Return out and lse of attention over the keys of all ranks, with the bits of one process.

        part = Dense(key, value, start=2048)   # this rank has the positions from 2048 on
        out, lse = attend_over_ranks(query, part, mask=causal, q_start=n)

    Every rank has the same query [B, Hq, L, D] and its own part of a cache: `Dense` with a start,
    or `Paged` with a `first_page`; None if it has no keys yet. Parts are cut at multiples of 1,024
    positions. A rank computes every 1,024 keys apart, and one message merges the pieces of all
    ranks in the order of their positions. All ranks give the same other arguments; `sink` [Hq]
    counts once. All ranks get the same bits. There is no gradient.
    """
    group = RankGroup.of(mesh, timeout)
    pieces: list[AttentionPiece] = []
    options = {"score_mod": score_mod, "mask": mask, "scale": scale, "q_start": q_start}
    facts: dict[str, object] = {}
    with group.agreeing(facts) as notes:
        parts = _ranges(memory)
        pieces += (attention_piece(query, part, **options) for _, part in parts)  # type: ignore[arg-type]
        checks.check_sink(sink, query)
        width = pieces[0].out.shape[-1] if pieces else 0
        facts |= {
            "shape of the query": [*query.shape],
            "dtype": str(query.dtype),
            "score_mod": _digest(score_mod, "score", query),
            "mask": _digest(mask, "mask", query),
            "scale": scale,
            "sink": None if sink is None else digest_of_tensors([sink]),
            "q_start": q_start if isinstance(q_start, int) else _digest_of_numbers(q_start),
            "note": [width, parts[0][0] if parts else 0, len(parts)],
        }
    places = _places(notes)
    with group.telling():
        size = max(count for *_, count in notes), notes[places[0][0]][0]
        every = [_unpacked(x) for x in group.gather(_packed(pieces, query, size))]
        ordered = [AttentionPiece(*(x[n] for x in every[rank])) for rank, n in places]
        return merge_pieces(ordered, sink=sink, dtype=query.dtype)


def _places(notes: list[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """Return the rank of each piece of all ranks and its number there, in the order of positions.

    Ranks tell the width of their values, the first of their positions and the number of pieces.
    """
    places = sorted(
        (first + n * KEYS_OF_PIECE, rank, n)
        for rank, (_, first, count) in enumerate(notes)
        for n in range(count)
    )
    if len({first for first, *_ in places}) < len(places):
        told = [[first, first + count * KEYS_OF_PIECE] for _, first, count in notes]
        raise ArgumentError(
            f"ranks must have different keys, cut at multiples of {KEYS_OF_PIECE:,}, but several "
            f"have some of the same positions: {told}. Give each rank its own part."
        )
    if not places:
        raise ArgumentError("some rank must have keys, but none has. Give the keys of the cache.")
    widths = {width for width, _, count in notes if count}
    if len(widths) > 1:
        raise ShapeError(
            f"the values of all ranks must have the same width, but have {sorted(widths)}. Give "
            f"each rank its part of one cache."
        )
    return [(rank, n) for _, rank, n in places]


def _digest(mod: Mask | None, kind: Kind, query: Tensor) -> str:
    """Return a number that is the same for mods that say the same; see `digest_of`."""
    if isinstance(mod, torch_flex.BlockMask):
        mod = element_mod(BlockMask.from_torch(mod))
    traced = None if mod is None else try_trace(mod, kind, query.device)
    return digest_of(traced if isinstance(traced, Traced) else mod)


def _digest_of_numbers(numbers: Integers) -> str:
    return digest_of_tensors([torch.as_tensor(numbers).long()])


def _packed(pieces: list[AttentionPiece], query: Tensor, size: tuple[int, int]) -> Tensor:
    """Return pieces in one tensor [most, B, Hq, L, Dv + 2], the rest of which is 0."""
    most, width = size
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    packed = query.new_zeros((most, *query.shape[:-1], width + 2), dtype=dtype)
    for place, (out, sums, maxima) in enumerate(pieces):
        packed[place, ..., :-2] = out
        packed[place, ..., -2], packed[place, ..., -1] = sums, maxima
    return packed


def _unpacked(packed: Tensor) -> AttentionPiece:
    """Return the pieces of a rank, in tensors of all of them."""
    return AttentionPiece(packed[..., :-2], packed[..., -2], packed[..., -1])


def _ranges(memory: Dense | Paged | None) -> list[tuple[int, Dense | Paged]]:
    """Return the keys of each 1,024 positions, and the first of these positions."""
    step = KEYS_OF_PIECE
    if isinstance(memory, Dense):
        begin, count = memory.start, memory.key.shape[2]
        _check_cut(begin)
        return [
            (
                begin + n,
                Dense(
                    memory.key[:, :, n : n + step],
                    memory.value[:, :, n : n + step],
                    start=begin + n,
                ),
            )
            for n in range(0, count, step)
        ]
    if not isinstance(memory, Paged):
        return []
    page = memory.key.shape[2]
    if step % page:
        raise ArgumentError(
            f"the page size must divide {step:,}, but is {page}. Choose a power of two."
        )
    ends = torch.as_tensor(memory.lengths).long()
    first_page = torch.zeros_like(ends) if memory.first_page is None else memory.first_page
    begins = torch.as_tensor(first_page).long() * page
    for begin in begins.tolist():
        _check_cut(begin)
    found: list[tuple[int, Dense | Paged]] = []
    for first in range(int(begins.min()), int(ends.max()), step):
        low, high = begins.clamp(min=first), ends.clamp(max=first + step)
        high = torch.maximum(low.clamp(max=first + step), high)
        part = replace(memory, lengths=high, first_page=low.clamp(max=first + step) // page)
        found.append((first, part))
    return found


def _check_cut(begin: int) -> None:
    if begin % KEYS_OF_PIECE:
        raise ArgumentError(
            f"the part of a rank must begin at a multiple of {KEYS_OF_PIECE:,} positions for the "
            f"bits of one process, but begins at {begin}. Cut it there, or use merge_over_ranks."
        )
