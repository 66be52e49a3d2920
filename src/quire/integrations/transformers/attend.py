"""The attention function that transformers calls in every layer."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quire import mods
from quire.attention import attention
from quire.errors import ArgumentError
from quire.integrations.transformers.join import all_of, from_first_token, in_turn
from quire.integrations.transformers.mask import TokenMask, of_tensor
from quire.memory import Dense
from quire.mods import MaskMod, ScoreMod
from quire.warn import warn

ATTRIBUTE = "quire_mods"
"""Of a module: the mods that `enable` gave to its model."""


class Mods(NamedTuple):
    """What a user adds to the attention of a model. Positions count from a row's first token."""

    mask: MaskMod | None = None
    score_mod: ScoreMod | None = None


class AttentionWeightsWarning(UserWarning):
    """The matrix of attention weights was asked for, which is never computed."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: TokenMask | Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    """As transformers calls it: [B, Hq, L, D] in, [B, L, Hq, Dv] out, and no weights."""
    if output_attentions:
        warn(
            'output_attentions=True: attn_implementation="quire" never has the matrix of weights '
            'and gives None. Load the model with "eager" to look at it.',
            AttentionWeightsWarning,
        )
    wants_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    mask, bias = read_mask(attention_mask, query.shape[2], key.shape[2], wants_causal)
    added = getattr(module, ATTRIBUTE, Mods())
    out = attention(
        query,
        Dense(key, value, mask.kv_start),
        mask=all_of(*mask.mods(), from_first_token(added.mask, mask.origins)),
        score_mod=in_turn(
            None if softcap is None else mods.softcap(softcap),
            table_from(position_bias, mask.q_start),
            table_from(bias, mask.q_start),
            from_first_token(added.score_mod, mask.origins),
        ),
        scale=scaling,
        dropout_p=dropout if module.training else 0.0,
        sink=s_aux,
        q_start=mask.q_start,
    )
    return out.transpose(1, 2).contiguous(), None


def read_mask(
    given: TokenMask | Tensor | None, q_length: int, kv_length: int, wants_causal: bool
) -> tuple[TokenMask, Tensor | None]:
    """Whatever a layer was given, as a mask and a bias that is added to scores."""
    if isinstance(given, TokenMask):
        return given, None
    if given is None:
        # Where PyTorch is asked for a causal mask, the first query is at the first key.
        seen = mods.causal if wants_causal and q_length > 1 else None
        return TokenMask(seen, None, 0, 0, (1, 1, q_length, kv_length)), None
    if not isinstance(given, Tensor) or given.dim() != 4:
        raise ArgumentError(
            f"attention_mask must be a tensor of 0 and 1 [B, S], or a mask [B, H, L, S] of truth "
            f"values or of numbers to add, but a layer got {type(given).__name__}. Leave it to "
            f"transformers, or give one of these."
        )
    table = given[..., :kv_length]
    if table.dtype == torch.bool:
        return of_tensor(table, 0), None
    return TokenMask(None, None, 0, 0, (1, 1, q_length, kv_length)), table


def table_from(table: Tensor | None, q_start: int) -> ScoreMod | None:
    """A bias [B, H, L, S] whose first row is for the query at `q_start`."""
    return None if table is None else mods.offset(mods.table_bias(table), -q_start)
