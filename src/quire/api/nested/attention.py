"""jagged_scaled_dot_product_attention(): check, pack, compute, make a nested tensor again."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.api.attention import attention
from quire.api.nested.checks import check
from quire.api.nested.choice import allowed_backend, no_backend, told_by
from quire.api.nested.in_graph import attend, break_graph, lie_alike, makes_graph
from quire.api.nested.mask import as_mod
from quire.api.nested.rows import aligned, is_watched, rows_of
from quire.errors import BackendError, DeviceError, ShapeError
from quire.memory import Ragged
from quire.mods import causal
from quire.request import autocast
from quire.support import torch_private
from quire.support.dynamo import as_one_node


@as_one_node
def jagged_scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention of nested tensors in the layout torch.jagged.

        jagged_scaled_dot_product_attention(query, key, value, is_causal=True)

    `query`, `key` and `value` are [B, H, j, D], or [B, j, D] for one head. A causal mask counts
    from the first query and the first key. `attn_mask` is a dense tensor [.., L, S], which is cut
    to each sequence, or a nested one. A boolean mask says which keys are read, and any other is
    added to the scores. The output has the offsets, lengths and longest sequence of the query.
    """
    with torch_private.without_hooks():
        query, key, value, attn_mask = _autocast(query, key, value, attn_mask)
        check(query, key, value, attn_mask, is_causal)
        operands = cast("tuple[Any, Any, Any]", (query, key, value))
        num_dims = len(torch_private.nested_size(operands[0]))
        if num_dims > 3 and torch_private.ragged_dimension(operands[0]) < num_dims - 2:
            options = {"dropout_p": dropout_p, "is_causal": is_causal, "enable_gqa": enable_gqa}
            return _dense_buffers(*operands, attn_mask, scale=scale, **options)
        if query.is_meta:
            return _counted(*operands, dropout_p=dropout_p, is_causal=is_causal, scale=scale)
        given: dict[str, Any] = {
            "scale": scale,
            "dropout_p": dropout_p,
            "backend": allowed_backend(),
        }
        if makes_graph(query):
            flags: dict[str, Any] = {"is_causal": is_causal, "enable_gqa": enable_gqa}
            out = attend(operands, attn_mask, **flags, **given)
            return _nested_like(query, _values(query, out))
        q, k, v = aligned(rows_of(query, key, value), enable_gqa)
        mods: dict[str, Any] = {"mask": causal} if is_causal else {}
        if attn_mask is not None:
            heads = q.rows.shape[1] if num_dims > 3 else None
            mods = as_mod(attn_mask, (q.lengths, k.lengths), heads, len(q.lengths))
        q_spans = (None, None) if q.lie_like(k) else q.spans
    try:
        out = attention(
            q.rows,
            Ragged(k.rows, v.rows, *k.spans),
            q_offsets=q_spans[0],
            q_lengths=q_spans[1],
            q_start=0,
            **mods,
            **given,
        )
    except BackendError as error:
        raise no_backend(told_by(error)) from error
    with torch_private.without_hooks():
        return _like(operands[0], out, len(q.lengths))


def _autocast(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return all tensors in the dtype of an enclosing autocast. float64 stays."""
    if not all(isinstance(x, Tensor) for x in (query, key, value)) or query.is_meta:
        return query, key, value, attn_mask
    if isinstance(attn_mask, Tensor) and attn_mask.is_floating_point():
        query, key, value, attn_mask = autocast(query, key, value, attn_mask)
    else:
        query, key, value = autocast(query, key, value)
    return query, key, value, attn_mask


def _like(query: Any, out: Tensor, batch: int) -> Tensor:
    """Return out [total, H, Dv] as a nested tensor with the sequences of `query`."""
    values = _values(query, out)
    if batch == torch_private.nested_size(query)[0]:
        return _nested_like(query, values)
    length = len(out) // batch  # one query for several sequences of keys
    offsets = length * torch.arange(batch + 1, device=out.device)
    return _nested(query, values, offsets, None, (length, length))


def _values(query: Any, out: Tensor) -> Tensor:
    """Return out [total, H, Dv] with the dimensions of the values of `query`."""
    return out.squeeze(1) if len(torch_private.nested_size(query)) == 3 else out.transpose(0, 1)


def _nested_like(query: Any, values: Tensor) -> Tensor:
    """Return `values` as a nested tensor with the offsets and lengths of `query`."""
    extremes = torch_private.shortest(query), torch_private.longest(query)
    return _nested(query, values, query.offsets(), query.lengths(), extremes)


def _nested(
    query: Any,
    values: Tensor,
    offsets: Tensor,
    lengths: Tensor | None,
    extremes: tuple[int | None, int | None],
) -> Tensor:
    """Return a nested tensor, ragged where `query` is, whose sequences have these extreme sizes."""
    ragged = torch_private.ragged_dimension(query)
    sizes = dict(zip(("min_seqlen", "max_seqlen"), extremes, strict=True))
    if is_watched(values) or torch_private.is_in_a_graph(values):
        nested: Tensor = torch_private.nested_view(
            values, offsets, lengths, ragged_idx=ragged, **sizes
        )
        return nested
    cache = {name: torch.empty(size, 0) for name, size in sizes.items() if size is not None}
    return torch_private.nested_tensor(values, offsets, lengths, ragged, cache)


def _dense_buffers(query: Any, key: Any, value: Any, attn_mask: Any, **options: Any) -> Tensor:
    """Compute attention along a dense dimension. The ragged dimension is part of the batch."""
    in_graph = makes_graph(query)
    for name, other in (("key", key), ("value", value)):
        if in_graph:
            if not lie_alike(query, other):
                raise break_graph()
        elif not torch.equal(query.offsets(), other.offsets()):
            raise ShapeError(
                f"query and {name} must have the same offsets if the ragged dimension is not "
                f"the sequence, but have {query.offsets().tolist()} and "
                f"{other.offsets().tolist()}. Give them as many rows of each."
            )
    out = F.scaled_dot_product_attention(
        query.values(),
        key.values(),
        value.values(),
        attn_mask=attn_mask.values() if torch_private.is_jagged(attn_mask) else attn_mask,
        **options,
    )
    return _nested_like(query, out)


def _counted(
    query: Any, key: Any, value: Any, *, dropout_p: float, is_causal: bool, scale: float | None
) -> Tensor:
    """Return a meta tensor in the right shape.

    It calls PyTorch's operator, so that PyTorch's counters see its multiplications.
    """
    longest = [torch_private.longest(x) for x in (query, key)]
    if None in longest:
        raise DeviceError(
            "nested tensors on the meta device must know their longest sequence, but one does "
            "not, and it cannot be read there. Give max_seqlen to torch.nested.nested_tensor_from"
            "_jagged."
        )
    flat = [x.values() if x.dim() == 3 else x.values().transpose(0, 1) for x in (query, key, value)]
    packed = [x.unsqueeze(1) if x.dim() == 2 else x for x in flat]
    out = torch_private.flash_attention_forward(
        *packed,
        cum_seq_q=query.offsets().int(),
        cum_seq_k=key.offsets().int(),
        max_q=longest[0],
        max_k=longest[1],
        dropout_p=dropout_p,
        is_causal=is_causal,
        return_debug_mask=False,
        scale=scale,
    )[0]
    return _like(query, out[..., : value.size(-1)], query.size(0))
