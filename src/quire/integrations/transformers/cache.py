"""A cache of transformers that keeps keys and values in pages.

    cache = PagedCache(model.config)
    model.generate(**batch, past_key_values=cache)      # attn_implementation="quire"

`update` returns an object that only `attend` can read. `attend` writes new tokens to pages, as it
knows which tokens are padding. Prompts of unequal lengths take pages for their own tokens only.
Equal rows, such as samples and beams at their start, share pages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

from quire.errors import ArgumentError
from quire.integrations.transformers.mask import Padding
from quire.integrations.transformers.rows import CachedRows, Written
from quire.kv import Group, PagedKVCache
from quire.memory import Dense

NO_LIMIT = 2**62
GROWTH = 1.125
"""Small, so that little memory is unused. The cache grows every few dozen steps."""
KEPT_WHOLE = ("full_attention", "chunked_attention")


class LayerStates:
    """What a layer gets in place of the tensors key and value, if these are in pages.

    Only quire can read it. The model may ask for its shape. `latent` says how many numbers of keys
    are values, if each token is stored once.
    """

    latent: int | None = None

    def attend(self, module: nn.Module, query: Tensor, mask: Any, **options: Any) -> Tensor:
        """Return the attention of a layer, if these states compute it themselves."""
        raise NotImplementedError(f"{type(self).__name__} has no attention of its own")

    def joined(self) -> LayerStates:
        """Return these states as those of a layer that caches latents, see `latent.py`."""
        _refuse("latents")

    def __getitem__(self, _: object) -> NoReturn:
        _refuse("an index")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        _refuse(name)

    @classmethod
    def __torch_function__(cls, function: Any, *_: object, **__: object) -> NoReturn:
        _refuse(getattr(function, "__name__", str(function)))


@dataclass(frozen=True, eq=False)
class NewStates(LayerStates):
    """New keys and values [B, Hkv, L, D] of a layer, and the cache that has the earlier ones.

    Layers get this object in place of the tensors key and value.
    """

    cache: PagedCache
    layer: int
    key: Tensor
    value: Tensor | None
    before: int
    latent: int | None = None

    def joined(self) -> NewStates:
        """Return states whose keys are the latents and what follows them, without values."""
        return replace(self, **joined_latents(self.key, self.value))

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The shape of all keys: B, Hkv, S, D."""
        batch, heads, count, width = self.key.shape
        return batch, heads, self.before + count, width

    def write(self, padding: Padding | None) -> Written:
        """Write the new tokens to pages. Return what the layer attends to."""
        rows = self.cache.rows_for(self.key, self.value, self.latent)
        return rows.write(self.layer, self.before, self.key, self.value, padding)


def joined_latents(key: Tensor, value: Tensor | None) -> dict[str, Any]:
    """Return key, value and latent of states, given latents [B, 1, L, R] and rotated keys."""
    assert value is not None, "states are joined once"
    return {"key": torch.cat((key, value), -1), "value": None, "latent": key.shape[3]}


def _refuse(what: str) -> NoReturn:
    raise ArgumentError(
        f"keys and values in a PagedCache must be read by quire only, but the model has asked for "
        f'{what} of them. Load it with attn_implementation="quire", or call enable(model).'
    )


class PagedLayer(CacheLayerMixin):
    """A layer of a cache, as transformers defines it. The whole cache has the pages."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: PagedCache, index: int, window: int | None) -> None:
        self._cache = cache
        self._index = index
        self.window = window
        self.is_sliding = window is not None
        self.is_initialized = False  # the layer has no tensors that transformers could move
        self.seen = 0

    @property
    def keys(self) -> Tensor | None:
        """A copy of the keys [B, Hkv, S, D], as in transformers' caches. None before any step."""
        copy = self._copy()
        return None if copy is None else copy.key

    @property
    def values(self) -> Tensor | None:
        """A copy of the values [B, Hkv, S, Dv]. None before any step."""
        copy = self._copy()
        return None if copy is None else copy.value

    def _copy(self) -> Dense | None:
        width = self.seen if self.window is None else min(self.seen, self.window - 1)
        return self._cache.copy_of(self._index, width)

    def get_seq_length(self) -> int:
        """The number of tokens of each row, including padding."""
        return self.seen

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the number of keys and the position of the first: 0, also if there is a window."""
        return self.seen + query_length, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the first step makes the pages."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> NoReturn:
        """Raise: the cache updates its layers, not the layer itself."""
        raise NotImplementedError("PagedCache.update writes all layers")


class PagedCache(Cache):
    """Keys and values of a batch in pages: `generate(..., past_key_values=PagedCache(config))`.

    `config` is the config of the model. Memory is allocated when it is needed, up to `max_bytes`.
    `dtype` is that of pages, such as torch.int8 or torch.float8_e4m3fn; by default that of keys.
    `pages` is the `PagedKVCache` with the content, after the first step.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        page_size: int = 16,
        max_bytes: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        windows = enumerate(windows_of(config))
        super().__init__(layers=[PagedLayer(self, index, window) for index, window in windows])
        self._page_size, self._dtype = page_size, dtype
        self._max_bytes = NO_LIMIT if max_bytes is None else max_bytes
        self._rows: CachedRows | None = None

    @property
    def pages(self) -> PagedKVCache | None:
        """The cache that has the pages. None before the first step."""
        return None if self._rows is None else self._rows.pages

    def rows_for(self, key: Tensor, value: Tensor | None, latent: int | None = None) -> CachedRows:
        """Return the rows of the batch.

        The first call makes the pages, with the sizes of `key` and `value` [B, Hkv, L, D].
        """
        if self._rows is None:
            windows = [layer.window for layer in self.layers]
            groups = [
                Group(
                    [layer for layer, each in enumerate(windows) if each == window],
                    # A window of transformers includes the query itself.
                    None if window is None else max(1, window - 1),
                )
                for window in dict.fromkeys(windows)
            ]
            pages = PagedKVCache(
                groups=groups,
                heads=key.shape[1],
                head_dim=key.shape[3],
                value_dim=None if value is None else value.shape[3],
                latent=latent,
                page_size=self._page_size,
                max_bytes=self._max_bytes,
                growth=GROWTH,
                dtype=self._dtype or key.dtype,
            )
            self._rows = CachedRows(pages)
        return self._rows

    def copy_of(self, layer: int, width: int) -> Dense | None:
        """Return a copy of the last `width` positions of all rows, or None if there are none."""
        if self._rows is None or not self._rows.sequences:
            return None
        return self._rows.copy_of(layer, width)

    # --- what transformers calls

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[NewStates, NewStates]:
        """Return an object with the new keys and values, which `attend` gets as key and as value.

        `key_states` and `value_states` are [B, Hkv, L, D].
        """
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise ArgumentError(
                "keys and values in a PagedCache must not require grad, since no gradient passes "
                "through a cache, but do. Run the model under torch.no_grad(), or train without a "
                "cache."
            )
        layer = self.layers[layer_idx]
        states = NewStates(self, layer_idx, key_states, value_states, layer.seen)
        layer.seen += key_states.shape[2]
        return states, states

    def reset(self) -> None:
        """Drop all rows. The memory stays for the next batch."""
        if self._rows is not None:
            self._rows.clear()
        for layer in self.layers:
            layer.seen = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last tokens of every row. Their number is negative, as in transformers."""
        if tokens_to_remove > 0:
            raise ArgumentError(
                f"tokens_to_remove must be negative or 0, but is {tokens_to_remove}. Give "
                f"-{tokens_to_remove} to remove {tokens_to_remove} tokens."
            )
        if self._rows is not None:
            self._rows.truncate(-tokens_to_remove)
        for layer in self.layers:
            layer.seen = max(0, layer.seen + tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Continue with the beams `beam_idx` [B]. Copies of a beam share its pages."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep only the rows `indices` [n], in this order."""
        if self._rows is not None:
            chosen = torch.arange(len(self._rows.sequences))[indices]
            self._rows.select(chosen.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each row `repeats` times."""
        if self._rows is not None:
            count = len(self._rows.sequences)
            self._rows.select([row for row in range(count) for _ in range(repeats)])


def windows_of(config: PreTrainedConfig) -> list[int | None]:
    """Return the sliding window of each layer, as transformers' caches read it from a config."""
    kinds, options = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    for kind in kinds:
        if kind not in (*KEPT_WHOLE, "sliding_attention"):
            raise ArgumentError(
                f"layers must have full or sliding attention, but one is {kind!r}, which keeps "
                f"more than keys and values. Use transformers' own cache for this model."
            )
    return [
        option["sliding_window"] if kind == "sliding_attention" else None
        for kind, option in zip(kinds, options, strict=True)
    ]
