"""A cache of transformers that keeps keys and values in pages.

    cache = PagedCache(model.config)
    model.generate(**batch, past_key_values=cache)      # attn_implementation="quire"

What `update` returns stands for the pages and is read by `attend` alone, which writes new tokens
when it knows what is padding. Prompts of unequal lengths take pages for their own tokens; equal
rows, which samples and beams begin as, share them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, get_layer_types_and_kwargs

from quire.errors import ArgumentError
from quire.integrations.transformers.mask import Padding
from quire.integrations.transformers.rows import CachedRows, Written
from quire.kv import Group, PagedKVCache
from quire.memory import Dense

NO_LIMIT = 2**62
GROWTH = 1.125
"""More pages are taken every few dozen steps, and little of their memory is ever empty."""
KEPT_WHOLE = ("full_attention", "chunked_attention")


@dataclass(frozen=True, eq=False)
class NewStates:
    """Keys and values [B, Hkv, L, D] that a layer has computed, and all that came before them.

    It is what a layer gets in place of both tensors.
    """

    cache: PagedCache
    layer: int
    key: Tensor
    value: Tensor
    before: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of the keys: B, Hkv, S, D."""
        batch, heads, count, width = self.key.shape
        return batch, heads, self.before + count, width

    def write(self, padding: Padding | None) -> Written:
        """Put the tokens where they belong."""
        rows = self.cache.rows_for(self.key, self.value)
        return rows.write(self.layer, self.before, self.key, self.value, padding)

    def __getitem__(self, _: object) -> NoReturn:
        _refuse("an index")

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("_"):
            raise AttributeError(name)
        _refuse(name)

    @classmethod
    def __torch_function__(cls, function: Any, *_: object, **__: object) -> NoReturn:
        _refuse(getattr(function, "__name__", str(function)))


def _refuse(what: str) -> NoReturn:
    raise ArgumentError(
        f"keys and values in a PagedCache are read by quire alone, but the model has asked for "
        f'{what} of them. Load it with attn_implementation="quire", or call enable(model).'
    )


class PagedLayer(CacheLayerMixin):
    """What transformers asks a layer of a cache. The pages are those of the whole cache."""

    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: PagedCache, index: int, window: int | None) -> None:
        self._cache = cache
        self._index = index
        self.window = window
        self.is_sliding = window is not None
        self.is_initialized = False  # there are no tensors for transformers to move
        self.seen = 0

    @property
    def keys(self) -> Tensor | None:
        """A copy [B, Hkv, S, D] as transformers' own caches have it; None before the first step."""
        copy = self._copy()
        return None if copy is None else copy.key

    @property
    def values(self) -> Tensor | None:
        """As `keys`."""
        copy = self._copy()
        return None if copy is None else copy.value

    def _copy(self) -> Dense | None:
        width = self.seen if self.window is None else min(self.seen, self.window - 1)
        return self._cache.copy_of(self._index, width)

    def get_seq_length(self) -> int:
        """How many tokens of each row there are, padding among them."""
        return self.seen

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Positions count from the first token, also where a window has left it behind."""
        return self.seen + query_length, 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Pages are made by the first step."""

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> NoReturn:
        """Not by itself."""
        raise NotImplementedError("PagedCache.update writes all layers")


class PagedCache(Cache):
    """Keys and values of a batch in pages: `generate(..., past_key_values=PagedCache(config))`.

    `config` is the model's. Memory is taken as it is needed, up to `max_bytes`. `pages` is the
    `PagedKVCache` behind it, once there is something in it.
    """

    def __init__(
        self, config: PreTrainedConfig, *, page_size: int = 16, max_bytes: int | None = None
    ) -> None:
        windows = enumerate(_windows(config))
        super().__init__(layers=[PagedLayer(self, index, window) for index, window in windows])
        self._page_size = page_size
        self._max_bytes = NO_LIMIT if max_bytes is None else max_bytes
        self._rows: CachedRows | None = None

    @property
    def pages(self) -> PagedKVCache | None:
        """Where everything is; None before the first step."""
        return None if self._rows is None else self._rows.pages

    def rows_for(self, key: Tensor, value: Tensor) -> CachedRows:
        """The rows of the batch; the first keys and values say how wide pages are."""
        if self._rows is None:
            windows = [layer.window for layer in self.layers]
            groups = [
                Group(
                    [layer for layer, each in enumerate(windows) if each == window],
                    # transformers counts the query itself.
                    None if window is None else max(1, window - 1),
                )
                for window in dict.fromkeys(windows)
            ]
            pages = PagedKVCache(
                groups=groups,
                heads=key.shape[1],
                head_dim=key.shape[3],
                value_dim=value.shape[3],
                page_size=self._page_size,
                max_bytes=self._max_bytes,
                growth=GROWTH,
                dtype=key.dtype,
            )
            self._rows = CachedRows(pages)
        return self._rows

    def copy_of(self, layer: int, width: int) -> Dense | None:
        """The last `width` positions of all rows in tensors; None where nothing is cached."""
        if self._rows is None or not self._rows.sequences:
            return None
        return self._rows.copy_of(layer, width)

    # --- what transformers calls

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[NewStates, NewStates]:
        """Take new tokens; what is returned goes to `attend` as key and as value."""
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise ArgumentError(
                "a PagedCache keeps numbers, through which no gradient flows, but got keys that "
                "require grad. Run the model under torch.no_grad(), or train without a cache."
            )
        layer = self.layers[layer_idx]
        states = NewStates(self, layer_idx, key_states, value_states, layer.seen)
        layer.seen += key_states.shape[2]
        return states, states

    def reset(self) -> None:
        """Forget everything; the memory stays for the next batch."""
        if self._rows is not None:
            self._rows.clear()
        for layer in self.layers:
            layer.seen = 0

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens of every row; transformers gives their number with a minus."""
        if tokens_to_remove > 0:
            raise ArgumentError(
                f"crop expects how many tokens to remove, as a negative number, got "
                f"{tokens_to_remove}. Give -{tokens_to_remove} to remove so many."
            )
        if self._rows is not None:
            self._rows.truncate(-tokens_to_remove)
        for layer in self.layers:
            layer.seen = max(0, layer.seen + tokens_to_remove)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Go on with these beams. One that is chosen twice shares its pages."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order."""
        if self._rows is not None:
            chosen = torch.arange(len(self._rows.sequences))[indices]
            self._rows.select(chosen.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row so many times."""
        if self._rows is not None:
            count = len(self._rows.sequences)
            self._rows.select([row for row in range(count) for _ in range(repeats)])


def _windows(config: PreTrainedConfig) -> list[int | None]:
    """The sliding window of each layer, as transformers' own caches read it from a config."""
    kinds, options = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    for kind in kinds:
        if kind not in (*KEPT_WHOLE, "sliding_attention"):
            raise ArgumentError(
                f"expected layers of full or sliding attention, got one of {kind!r}, which keeps "
                f"more than keys and values. Use transformers' own cache for this model."
            )
    return [
        option["sliding_window"] if kind == "sliding_attention" else None
        for kind, option in zip(kinds, options, strict=True)
    ]
