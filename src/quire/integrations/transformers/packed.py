"""One packed row of tokens of many sequences, whose keys and values are in pages.

    tokens of the row       a7 │ b3 │ c0 c1 c2 c3 │ d5 d6        each after those that are in pages
    parts                   ╰──────╯ ╰────────────────────╯      one call of attention for each

A model is called once for the whole row: `model(ids[None], position_ids=positions[None],
past_key_values=cache)`. Linear layers and norms see one long row. Attention sees the sequences: new
keys and values go to pages, and each part is computed by one call over them. Sequences of a part
have the same mods. Those with one token form a part of their own, since decoding has its own plans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import causal_mask_function

from quire import mods
from quire.api.attention import attention
from quire.errors import ArgumentError
from quire.integrations.transformers.cache import LayerStates, joined_latents, windows_of
from quire.integrations.transformers.mask import TokenMask
from quire.integrations.transformers.user_mods import NO_MODS, Mods
from quire.kv import PagedKVCache, Rows, SequenceHandle
from quire.memory import Paged
from quire.mods.compose import MaskMod, ScoreMod, all_of, chain


class PackedPart(NamedTuple):
    """Neighbours in a packed row that one call of attention computes.

    `offsets` [B + 1] are the first tokens of the sequences, counted within the part. They are None
    if each sequence has one token.
    """

    sequences: slice
    tokens: slice
    offsets: Tensor | None
    mods: Mods


class PartFailure(Exception):
    """A part could not be computed: its mods are at fault, or what they capture."""

    def __init__(self, part: PackedPart) -> None:
        super().__init__(part)
        self.part = part


@dataclass(frozen=True, eq=False)
class PackedStep:
    """What a call of the model adds to sequences: `rows` are reserved, and `parts` cover them.

    `mods` hold for all parts, beside those of each. Those of `enable` do not: a model may serve
    several engines, each with mods of its own.
    """

    pages: PagedKVCache
    sequences: Sequence[SequenceHandle]
    rows: Rows
    parts: Sequence[PackedPart]
    mods: Mods = NO_MODS


class PackedLayer(CacheLayerMixin):
    """A layer of a `PackedCache`, as transformers defines it."""

    is_compileable = False
    supports_early_init = False

    def __init__(self, window: int | None) -> None:
        super().__init__()
        self.window, self.is_sliding = window, window is not None

    def get_seq_length(self) -> int:
        """Return 0: each sequence has a length of its own."""
        return 0

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return sizes that nothing reads: masks are functions of positions."""
        return query_length, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the pages exist."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> NoReturn:
        """Raise: the cache updates its layers, not the layer itself."""
        raise NotImplementedError("PackedCache.update writes all layers")


class PackedCache(Cache):
    """The `past_key_values` of a model that computes packed rows. Set `step` before each call."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(layers=[PackedLayer(window) for window in windows_of(config)])
        self.step: PackedStep | None = None
        self._views: dict[tuple[int, int], Paged] = {}

    def begin(self, step: PackedStep) -> None:
        """Take the keys and values of the next call as those of this step."""
        self.step = step
        self._views.clear()

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[PackedStates, PackedStates]:
        """Return an object that computes the layer's attention in place of key and value."""
        states = PackedStates(self, layer_idx, key_states, value_states)
        return states, states

    def memory(self, layer: int, place: int) -> Paged:
        """Return the pages of the sequences of a part, in one layer."""
        step = self.step
        assert step is not None, "begin gives the step"
        whole = step.pages.memory(layer, step.sequences)
        chosen = step.parts[place].sequences
        if len(step.parts) == 1:
            return whole
        # All layers of a group have the same table; a part of it is cut once.
        view = self._views.get((id(whole.page_table), place))
        if view is None:
            first = whole.first_page
            view = replace(
                whole,
                page_table=whole.page_table[chosen],
                lengths=torch.as_tensor(whole.lengths)[chosen],
                first_page=None if first is None else torch.as_tensor(first)[chosen],
            )
            self._views[id(whole.page_table), place] = view
        return replace(
            view,
            key=whole.key,
            value=whole.value,
            key_scale=whole.key_scale,
            value_scale=whole.value_scale,
        )


@dataclass(frozen=True, eq=False)
class PackedStates(LayerStates):
    """New keys and values [1, Hkv, T, D] of a layer, for the tokens of a packed row."""

    cache: PackedCache
    layer: int
    key: Tensor
    value: Tensor | None
    latent: int | None = None

    def joined(self) -> PackedStates:
        """Return states whose keys are the latents and what follows them, without values."""
        return replace(self, **joined_latents(self.key, self.value))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the new keys."""
        return tuple(self.key.shape)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        mask: TokenMask | Tensor | None,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        position_bias: Tensor | None = None,
        is_causal: bool | None = None,
        **_: Any,
    ) -> Tensor:
        """Write the new tokens to pages, and return the attention [1, T, Hq, Dv] of all parts."""
        step = self.cache.step
        assert step is not None, "begin gives the step"
        if position_bias is not None or isinstance(mask, Tensor):
            raise ArgumentError(
                "a packed row must be computed with masks and biases that are functions of "
                "positions, but this model gives a matrix. Use generate for it."
            )
        new = [x[0].transpose(0, 1) for x in (self.key, self.value) if x is not None]
        step.pages.write(self.layer, step.rows, *new)
        options: dict[str, Any] = {
            "scaling": scaling,
            "softcap": softcap,
            "sink": s_aux,
            "is_causal": is_causal,
        }
        outs = [
            self.attend_part(module, query, mask, place, **options)
            for place in range(len(step.parts))
        ]
        return (outs[0] if len(outs) == 1 else torch.cat(outs)).unsqueeze(0)

    def attend_part(
        self,
        module: nn.Module,
        query: Tensor,
        mask: TokenMask | None,
        place: int,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        sink: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """Return the attention [T, Hq, Dv] of a part, whose tokens are in pages."""
        step = self.cache.step
        assert step is not None, "begin gives the step"
        part = step.parts[place]
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        seen = (mods.causal if causal else None) if mask is None else mask.seen
        common, given = step.mods, part.mods
        options: dict[str, Any] = {
            "mask": all_of(self._model_mask(seen, part), of_one(common.mask), of_one(given.mask)),
            "score_mod": chain(
                None if softcap is None else mods.softcap(softcap),
                score_of_one(common.score_mod),
                score_of_one(given.score_mod),
            ),
            "scale": scaling,
            "sink": sink,
        }
        memory, tokens = self.cache.memory(self.layer, place), query[0].transpose(0, 1)[part.tokens]
        try:
            if part.offsets is None:
                out: Tensor = attention(tokens.unsqueeze(2), memory, **options).squeeze(2)
            else:
                out = attention(tokens, memory, q_offsets=part.offsets, **options)
        except Exception as error:
            raise PartFailure(part) from error
        return out

    def _model_mask(self, seen: MaskMod | None, part: PackedPart) -> MaskMod | None:
        """Return the model's own mask for a part. A single query reads all keys of a causal mask.

        If the mods of the part take its place, a window still holds: keys before it are gone.
        """
        step = self.cache.step
        assert step is not None, "begin gives the step"
        if not (part.mods.causal and step.mods.causal):
            window = self.cache.layers[self.layer].window
            return None if window is None else lambda b, h, q_idx, kv_idx: q_idx - kv_idx < window
        if seen is causal_mask_function or seen is mods.causal:
            return None if part.offsets is None else mods.causal
        return of_one(seen)


def of_one(mod: MaskMod | None) -> MaskMod | None:
    """Return a mask for which every sequence is number 0, so that it does not know its neighbours.

    transformers' own masks index what they know of a row by `b`, and there is one row.
    """
    if mod is None:
        return None
    return lambda b, h, q_idx, kv_idx: mod(b * 0, h, q_idx, kv_idx)


def score_of_one(mod: ScoreMod | None) -> ScoreMod | None:
    """Return a score_mod for which every sequence is number 0."""
    if mod is None:
        return None
    return lambda score, b, h, q_idx, kv_idx: mod(score, b * 0, h, q_idx, kv_idx)
