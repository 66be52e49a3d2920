"""Attention under transformers' own continuous batching: over its pages, without a copy of them.

    ContinuousBatchingManager.switch_to_cb_friendly_attn = lambda *_, **__: None
    model.generate_batch(prompts)               # attn_implementation="quire"

transformers refuses names that it does not know, hence the first line. It gives every layer a
`cache` with all pages, and lists of the slots of its keys: slot = page * page size + row.
"""

from __future__ import annotations

from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from quire import mods
from quire.api.attention import attention
from quire.errors import ArgumentError
from quire.integrations.transformers.packed import of_one, score_of_one
from quire.integrations.transformers.user_mods import ATTRIBUTE, NO_MODS, Mods
from quire.memory import Memory, Paged, Ragged
from quire.mods.compose import all_of, chain

Slots: TypeAlias = list[Tensor]
"""For each kind of layer, the slots of keys [n]."""


def attend_to_cache(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    cache: Any,
    cu_seq_lens_q: Tensor,
    cu_seq_lens_k: dict[str, Tensor],
    read_index: Slots,
    write_index: Slots,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    block_table: Tensor | None = None,
    **rest: Any,
) -> Tensor:
    """Write new keys and values to transformers' pages. Return the attention [1, T, Hq, Dv].

    query [1, Hq, T, D], key and value [1, Hkv, T, D] are those of all requests of a step.
    """
    _check(cache, block_table)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    allocator = cache.layer_to_allocator[layer]
    ends, place = cu_seq_lens_k[allocator.layer_type], allocator.index
    given = getattr(module, ATTRIBUTE, NO_MODS)
    added = Mods(of_one(given.mask), score_of_one(given.score_mod))
    window: int | None = None
    memory: Memory
    if allocator.layer_type == "full_attention":
        new = tuple(states[0].transpose(0, 1) for states in (key, value))
        memory = _in_pages(allocator, layer, new, (read_index[place], write_index[place]), ends)
    else:  # a ring of slots for the window, which only its allocator can read
        window = allocator.sliding_window
        indices = {"read_index": read_index, "write_index": write_index}
        given = {"cu_seq_lens_k": cu_seq_lens_k, "block_table": None, **indices, **rest}
        states = cache.update(key_states=key, value_states=value, layer_idx=layer, kwargs=given)
        rows = [each[0].transpose(0, 1) for each in states]
        memory = Ragged(rows[0], rows[1], ends.long())
        added = _shifted(added, rest.get("position_ids"), cu_seq_lens_q, ends)
    out = attention(
        query[0].transpose(0, 1),
        memory,
        mask=all_of(mods.causal, _within(window), added.mask),
        score_mod=chain(None if softcap is None else mods.softcap(softcap), added.score_mod),
        scale=scaling,
        sink=s_aux,
        q_offsets=cu_seq_lens_q.long(),
    )
    return out.unsqueeze(0)


def _check(cache: Any, block_table: Tensor | None) -> None:
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    if not isinstance(cache, PagedAttentionCache):
        raise ArgumentError(
            f"cache must be the one of transformers' continuous batching, but is "
            f"{type(cache).__name__}. Use past_key_values for a cache of generate."
        )
    if block_table is not None:
        raise ArgumentError(
            "block_table must be None, since transformers makes it for kernels that write to the "
            "cache themselves, but is given. Set max_blocks_per_request=0 in the config of "
            "continuous batching."
        )


def _in_pages(
    allocator: Any,
    layer: int,
    new: tuple[Tensor, ...],
    slots: tuple[Tensor, Tensor],
    ends: Tensor,
) -> Memory:
    """Write rows [T, Hkv, D] to their slots, and return the pages of all sequences."""
    read, write = slots
    pages = allocator.get_cache_for_block_table(layer)  # [P, page, Hkv, D]
    for states, side in zip(new, pages, strict=True):
        side.flatten(0, 1).index_copy_(0, write, states)
    # If nothing was cached before this step, transformers lists no slots to read.
    listed = (read if read.numel() else write).numpy()
    key, value = (side.transpose(1, 2) for side in pages)
    offsets = ends.numpy().astype(np.int64)
    table = page_table_of(listed, offsets, allocator.tokens_per_page)
    return Paged(key, value, torch.from_numpy(table), torch.from_numpy(np.diff(offsets)))


def page_table_of(
    slots: NDArray[np.int64], offsets: NDArray[np.int64], page: int
) -> NDArray[np.int32]:
    """Return the pages [B, most] of sequences whose keys lie in slots [n], by offsets [B + 1]."""
    counts = -(-np.diff(offsets) // page)
    table = np.zeros((len(counts), int(counts.max(initial=0))), np.int32)
    for row, (start, count) in enumerate(zip(offsets[:-1], counts, strict=True)):
        table[row, :count] = slots[start : start + count * page : page][:count] // page
    return table


def _shifted(added: Mods, positions: Tensor | None, starts: Tensor, ends: Tensor) -> Mods:
    """Return mods for keys [n] of a window, which count from the first key that is still there."""
    mask, score_mod = added.mask, added.score_mod
    if mask is None and score_mod is None:
        return added
    if positions is None:
        raise ArgumentError(
            "position_ids must be given to layers with a window for mods of yours, since the keys "
            "before the window are gone, but are None. Leave the mods out, or use generate."
        )
    lengths = ends.diff()
    gone = positions.flatten()[starts[1:].long() - 1].long() + 1 - lengths
    return Mods(
        None
        if mask is None
        else lambda b, h, q_idx, kv_idx: mask(b, h, q_idx + gone[b], kv_idx + gone[b]),
        None
        if score_mod is None
        else lambda score, b, h, q_idx, kv_idx: score_mod(
            score, b, h, q_idx + gone[b], kv_idx + gone[b]
        ),
    )


def _within(window: int | None) -> Any:
    """Return the mask of a window of transformers, which includes the query itself."""
    return None if window is None else partial(_in_window, window=window)


def _in_window(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor, *, window: int) -> Tensor:
    return q_idx - kv_idx < window
