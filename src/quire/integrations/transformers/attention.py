"""The attention function that transformers calls in every layer."""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.masking_utils import causal_mask_function

from quire import mods
from quire.api.attention import attention
from quire.aux_outputs import AuxRequest
from quire.errors import ArgumentError
from quire.integrations.transformers.cache import LayerStates, NewStates
from quire.integrations.transformers.continuous import attend_to_cache
from quire.integrations.transformers.latent import Absorbed
from quire.integrations.transformers.mask import TokenMask, of_tensor
from quire.integrations.transformers.user_mods import ATTRIBUTE, Mods
from quire.memory import Dense, Memory
from quire.mods.compose import MaskMod, ScoreMod, all_of, chain, shift
from quire.support.dynamo import never_traced
from quire.support.warn import warn


class AttentionWeightsWarning(UserWarning):
    """The model was asked for more attention weights than quire gives."""


MOST_WEIGHTS = 2**26
"""The most attention weights of a layer: 256 MB in float32."""


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor | NewStates,
    value: Tensor | NewStates,
    attention_mask: TokenMask | Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Compute attention as transformers calls it. torch.compile puts it into the graph.

    With a `PagedCache` the graph breaks here, since Python code decides which pages are written.
    """
    if options.get("cache") is not None:
        assert isinstance(key, Tensor) and isinstance(value, Tensor), "one cache at a time"
        _warn_of_no_weights("in continuous batching", options.get("output_attentions"))
        return attend_to_cache(module, query, key, value, **options), None
    if isinstance(key, LayerStates):
        return _between_graphs(module, query, key, attention_mask, **options)
    return layer_attention(module, query, key, value, attention_mask, **options)


@never_traced
def _between_graphs(
    module: nn.Module, query: Tensor, states: LayerStates, mask: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    if states.latent is not None:
        absorbed = Absorbed(module, query, states.latent, states.shape[3] - states.latent)
        options["scaling"] = options.get("scaling") or absorbed.scale
        out, weights = _over_states(module, absorbed.query(query), states, mask, **options)
        return absorbed.out(out), weights
    return _over_states(module, query, states, mask, **options)


def _over_states(
    module: nn.Module, query: Tensor, states: LayerStates, mask: Any, **options: Any
) -> tuple[Tensor, Tensor | None]:
    if isinstance(states, NewStates):
        return layer_attention(module, query, states, states, mask, **options)
    _warn_of_no_weights("in an engine", options.get("output_attentions"))
    return states.attend(module, query, mask, **options), None


def layer_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | NewStates,
    value: Tensor | NewStates,
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
) -> tuple[Tensor, Tensor | None]:
    """Return the output of a layer's attention [B, L, Hq, Dv], and weights [B, Hq, L, S] or None.

    query [B, Hq, L, D]. key [B, Hkv, S, D] and value [B, Hkv, S, Dv] are tensors, or `NewStates` of
    a `PagedCache`. `position_bias` is [B, H, L, S], and `s_aux` [Hq] is a sink.
    """
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    mask, bias = read_mask(attention_mask, query, key, is_causal)
    added = getattr(module, ATTRIBUTE, Mods())
    if isinstance(key, NewStates):
        place = in_pages(query, key, mask)
    else:
        assert isinstance(value, Tensor), "keys and values come from one cache"
        place = in_tensors(query, key, value, mask)
    by_model, by_token = place.by_transformers, place.by_first_token
    call = partial(
        attention,
        place.query,
        place.memory,
        mask=all_of(*place.masks, shift(added.mask, "mask", by_token, by_token)),
        score_mod=chain(
            None if softcap is None else mods.softcap(softcap),
            shift(table_from(position_bias, mask.q_start), "score", by_model, by_model),
            shift(table_from(bias, mask.q_start), "score", by_model, by_model),
            shift(added.score_mod, "score", by_token, by_token),
        ),
        scale=scaling,
        dropout_p=dropout if module.training else 0.0,
        sink=s_aux,
        q_start=place.q_start,
        q_offsets=place.q_offsets,
        q_lengths=place.q_lengths,
    )
    shape, weights = (*query.shape[:3], key.shape[2]), None
    if output_attentions and _can_show_weights(math.prod(shape)):
        rows = place.query.shape[0 if place.query.dim() == 3 else 2]
        out, aux = call(return_aux=AuxRequest(weights=range(rows)))
        weights = _where_keys_are(aux.weights.to(query.dtype), place, shape)
    else:
        out = call()
    if out.dim() == 3:
        return out.reshape(query.shape[0], query.shape[2], *out.shape[1:]), weights
    return out.transpose(1, 2).contiguous(), weights


def _can_show_weights(count: int) -> bool:
    """Return whether a layer can give so many weights; warn if not."""
    if count <= MOST_WEIGHTS:
        return True
    warn(
        f'output_attentions=True: attn_implementation="quire" returns None, since {count:,} '
        f"weights of a layer are more than {MOST_WEIGHTS:,}. Give fewer tokens, or ask "
        f"quire.attention for single rows.",
        AttentionWeightsWarning,
    )
    return False


def _warn_of_no_weights(where: str, asked: bool | None) -> None:
    if asked:
        warn(
            f'output_attentions=True: attn_implementation="quire" returns None {where}. Call the '
            f"model itself, with a cache of transformers or a PagedCache.",
            AttentionWeightsWarning,
        )


def _where_keys_are(found: Tensor, place: Place, shape: tuple[int, ...]) -> Tensor:
    """Return weights as [B, Hq, L, S], with those of padding.

    Queries may be packed, [B * L, Hq, S]. Keys in pages are counted from the first token of a row.
    """
    batch, heads, q_len, kv_len = shape
    if isinstance(place.memory, Dense):
        return found
    if found.dim() == 3:
        found = found.view(batch, q_len, heads, -1).transpose(1, 2)
    whole = found.new_zeros(shape)
    for row, first in enumerate(torch.as_tensor(place.by_transformers).expand(batch).tolist()):
        count = min(kv_len - first, found.shape[3])
        whole[row, :, :, first : first + count] = found[row, :, :, :count]
    return whole


class Place(NamedTuple):
    """Queries, memory and masks of a call, and how far positions in mods are shifted.

    `by_transformers` is the shift for mods that count padding, `by_first_token` for mods that count
    from the first token of a row.
    """

    query: Tensor
    memory: Memory
    masks: list[MaskMod | None]
    by_transformers: Tensor | int = 0
    by_first_token: Tensor | int = 0
    q_start: int | None = None
    q_offsets: Tensor | None = None
    q_lengths: Tensor | None = None


def in_tensors(query: Tensor, key: Tensor, value: Tensor, mask: TokenMask) -> Place:
    """Return the place of keys and values in tensors, which include padding."""
    padding, origins = mask.padding, mask.origins
    return Place(
        query,
        Dense(key, value, mask.kv_start),
        [mask.seen, None if padding is None else padding.mask],
        by_first_token=0 if origins is None else -origins,
        q_start=mask.q_start,
    )


def in_pages(query: Tensor, states: NewStates, mask: TokenMask) -> Place:
    """Write new tokens to pages, and return the place. Pages do not hold padding on the left."""
    memory, step, found = states.write(mask.padding)
    origins = 0 if found is None else found
    hides = mask.padding if step.hides else None
    seen: MaskMod | None = mask.seen
    if seen is causal_mask_function or seen is mods.causal:
        # A causal mask does not depend on where a row begins. A single query reads all keys.
        seen = None if step.count == 1 else mods.causal
    else:
        seen = shift(seen, "mask", origins, origins)
    hidden: MaskMod | None = None if hides is None else hides.mask
    masks = [seen, shift(hidden, "mask", origins, origins)]
    if step.dropped is None:
        return Place(query, memory, masks, by_transformers=origins)
    batch, _, count, _ = query.shape
    first = torch.arange(0, (batch + 1) * count, count)
    return Place(
        query.transpose(1, 2).flatten(0, 1),
        memory,
        masks,
        by_transformers=origins,
        q_offsets=first + torch.nn.functional.pad(step.dropped, (0, 1)),
        q_lengths=count - step.dropped,
    )


def read_mask(
    given: TokenMask | Tensor | None, query: Tensor, key: Tensor | NewStates, is_causal: bool
) -> tuple[TokenMask, Tensor | None]:
    """Return the attention mask of a layer as a `TokenMask`, and a bias to add to scores."""
    if isinstance(given, TokenMask):
        return given, None
    q_length, kv_length = query.shape[2], key.shape[2]
    # PyTorch's causal mask has the first query at the first key.
    q_start = key.before if isinstance(key, NewStates) else 0
    seen = mods.causal if given is None and is_causal and q_length > 1 else None
    plain = TokenMask(seen, None, q_start, 0, (1, 1, q_length, kv_length))
    if given is None:
        return plain, None
    if not isinstance(given, Tensor) or given.dim() != 4:
        raise ArgumentError(
            f"attention_mask must be a tensor of 0 and 1 [B, S], or a mask [B, H, L, S] of truth "
            f"values or of numbers to add, but is {type(given).__name__} in a layer. Leave it to "
            f"transformers, or give one of these."
        )
    table = given[..., :kv_length]
    return (of_tensor(table, q_start), None) if table.dtype == torch.bool else (plain, table)


def table_from(table: Tensor | None, q_start: int) -> ScoreMod | None:
    """Return a score_mod that adds a bias [B, H, L, S]. Its first row is the query at `q_start`."""
    return None if table is None else mods.offset(mods.table_bias(table), -q_start)
