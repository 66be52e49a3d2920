"""Nested attention where PyTorch makes a graph: the numbers in offsets and lengths are unknown.

torch.compile runs F.scaled_dot_product_attention on nested tensors whose values, offsets and
lengths are fake or functional. So the offsets go into the graph unchecked, and are checked when it
runs. The graph breaks where their values are needed earlier: for a nested attn_mask, for one
sequence that is used for a whole batch, and for keys and values with different offsets.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.api.attention import attention
from quire.api.nested.mask import as_mod
from quire.api.nested.rows import with_heads
from quire.config import Backend as BackendName
from quire.memory import Ragged
from quire.mods import causal
from quire.support import torch_private


def makes_graph(nested: Any) -> bool:
    """Return whether the values of a nested tensor are fake, since a graph is being made."""
    return torch_private.is_in_a_graph(torch_private.nested_values(nested))


def break_graph() -> Exception:
    """Return the exception that makes Dynamo break its graph at the attention."""
    return torch_private.unsupported_operator(torch.ops.aten.scaled_dot_product_attention.default)


def lie_alike(one: Any, other: Any) -> bool:
    """Return whether two nested tensors are known to have their sequences at the same rows."""
    sizes = [torch_private.nested_size(x)[torch_private.ragged_dimension(x)] for x in (one, other)]
    if one.lengths() is None and other.lengths() is None:
        return bool(sizes[0] == sizes[1])  # equal offsets have the same symbol as ragged size
    return one.lengths() is other.lengths() and one.offsets() is other.offsets()


def attend(
    operands: tuple[Any, Any, Any],
    attn_mask: Any,
    *,
    is_causal: bool,
    enable_gqa: bool,
    scale: float | None,
    dropout_p: float,
    backend: BackendName,
) -> Tensor:
    """Return the output rows [total, H, Dv] of nested tensors [B, H, j, D] or [B, j, D]."""
    query, key, value = operands
    batch = torch_private.nested_size(query)[0]
    nested_mask = attn_mask is not None and attn_mask.is_nested
    if batch != torch_private.nested_size(key)[0] or nested_mask or not lie_alike(key, value):
        raise break_graph()
    flat = [x.values() for x in operands]
    has_heads = flat[0].dim() > 2
    rows = [x.transpose(0, 1) if has_heads else x.unsqueeze(1) for x in flat]
    q, k, v = with_heads(rows, enable_gqa)
    mods: dict[str, Any] = {"mask": causal} if is_causal else {}
    if attn_mask is not None:
        mods = as_mod(attn_mask, None, q.shape[1] if has_heads else None, batch)
    out: Tensor = attention(
        q,
        Ragged(k, v, key.offsets(), key.lengths()),
        q_offsets=query.offsets(),
        q_lengths=query.lengths(),
        q_start=0,
        **mods,
        scale=scale,
        dropout_p=dropout_p,
        backend=backend,
    )
    return out
