"""The model: one packed call for all sequences of a step.

    logits = runner.compute(runner.reserve(chunks))      # [rows, V] for each chunk

A chunk is what a step adds to one sequence: some tokens of its prompt, or the last token of its
answer. The head is computed for the rows that are sampled, and for no others.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.engine.decoder import Decoder
from quire.engine.sampling.distribution import Floats
from quire.errors import ArgumentError
from quire.integrations.transformers import on_quire
from quire.integrations.transformers.cache import LayerStates, windows_of
from quire.integrations.transformers.packed import PackedCache, PackedPart, PackedStep
from quire.integrations.transformers.user_mods import NO_MODS, Mods
from quire.kv import Group, PagedKVCache, SequenceHandle


class Chunk(NamedTuple):
    """New tokens of one sequence, the first of them at position `start`."""

    sequence: SequenceHandle
    start: int
    tokens: Sequence[int]
    num_logits: int  # for how many tokens, counted from the last, the head is computed
    mods: Mods = NO_MODS
    apart: bool = False  # whether the chunk has a call of attention of its own


@dataclass(frozen=True, eq=False)
class Reserved:
    """The chunks of a step, with rows in pages. `order` is their order in the packed row."""

    chunks: list[Chunk]
    order: list[int]
    step: PackedStep

    def members(self, part: PackedPart) -> list[int]:
        """Return the places of the chunks of a part."""
        return self.order[part.sequences]


class KeyShape(NamedTuple):
    """What each layer writes to pages for one token."""

    heads: int
    head_dim: int
    value_dim: int | None
    dtype: torch.dtype
    latent: int | None = None  # how many numbers of keys are values, if they are a part of keys


class Runner:
    """Computes packed rows with a causal language model of transformers, and has its pages."""

    def __init__(
        self,
        model: Any,
        *,
        mods: Mods = NO_MODS,
        page_size: int,
        n_pages: int | None,
        max_bytes: int | None,
        prefix: bool,
    ) -> None:
        self.model = on_quire(model).eval()
        self.mods = mods
        self.config = model.config.get_text_config(decoder=True)
        self._packed = PackedCache(model.config)
        self._keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        shape, self.num_logits = self._probe()
        groups = self._groups()
        self.prefix = prefix and len(groups) == 1 and groups[0].window is None
        self.pages = PagedKVCache(
            groups=groups,
            page_size=page_size,
            n_pages=n_pages,
            max_bytes=max_bytes,
            prefix=self.prefix,
            **shape._asdict(),
        )
        self._make_program = functools.partial(Decoder.of, self.model, groups, shape.dtype)
        self._decoder = self._make_program()
        self._has_looked = True

    def look_again(self) -> None:
        """See before the next step whether the model is still what its program was made of."""
        self._has_looked = False

    # --- pages

    def _groups(self) -> list[Group]:
        """Return the layers of the model by the positions that they keep."""
        windows = windows_of(self.model.config)
        return [
            Group(
                [layer for layer, each in enumerate(windows) if each == window],
                # A window of transformers includes the query itself.
                None if window is None else max(1, window - 1),
            )
            for window in dict.fromkeys(windows)
        ]

    def _probe(self) -> tuple[KeyShape, int]:
        """Ask the model for one token. Return the shape of keys, and the number of logits."""
        probe = _Probe(self.model.config)
        with torch.inference_mode():
            first = torch.zeros(1, 1, dtype=torch.long)
            try:
                logits = self._call(first, first, [0], probe)
            except ArgumentError as error:  # it does something else with keys
                raise ArgumentError(
                    f"the model must take its attention from the attention interface of "
                    f"transformers, but {type(self.model).__name__} computes it itself. Use "
                    f"generate for this model, without quire."
                ) from error
        missing = len(probe.layers) - len(probe.seen)
        if missing or len(set(probe.seen.values())) != 1:
            raise ArgumentError(
                f"all layers must have keys and values of one shape, and give them to the cache, "
                f"but {missing} of {len(probe.layers)} gave none, and the others "
                f"{sorted(set(map(str, probe.seen.values())))}. Use generate for this model."
            )
        return next(iter(probe.seen.values())), logits.shape[-1]

    # --- a step

    def reserve(self, chunks: Sequence[Chunk]) -> Reserved:
        """Reserve pages for the chunks of a step, or raise OutOfPages and change nothing."""
        keys = [_part_key(chunk, place) for place, chunk in enumerate(chunks)]
        order = sorted(range(len(chunks)), key=keys.__getitem__)
        ordered = [chunks[place] for place in order]
        handles = [chunk.sequence for chunk in ordered]
        rows = self.pages.extend(handles, [len(chunk.tokens) for chunk in ordered])
        parts = parts_of(ordered, [keys[place] for place in order])
        step = PackedStep(self.pages, handles, rows, parts, self.mods)
        return Reserved(list(chunks), order, step)

    def compute(self, reserved: Reserved) -> list[Floats]:
        """Compute the chunks in one call. Return their logits [num_logits, V] in float32.

        The next call may write over them. If the model raises, the pages that were reserved are
        given back.
        """
        ordered = [reserved.chunks[place] for place in reserved.order]
        ids: list[int] = []
        positions: list[int] = []
        wanted: list[int] = []
        for chunk in ordered:
            ids += chunk.tokens
            positions += range(chunk.start, chunk.start + len(chunk.tokens))
            wanted += range(len(ids) - chunk.num_logits, len(ids))
        try:
            self._packed.begin(reserved.step)
            with torch.inference_mode():
                logits: Floats = self._logits(ids, positions, wanted).numpy()
        except BaseException:
            for chunk in ordered:
                self.pages.truncate(chunk.sequence, chunk.start)
            raise
        found, end = [logits[:0]] * len(ordered), 0
        for place, chunk in zip(reserved.order, ordered, strict=True):
            found[place] = logits[end : end + chunk.num_logits]
            end += chunk.num_logits
        return found

    def _logits(self, ids: list[int], positions: list[int], wanted: list[int]) -> Tensor:
        """Return logits [rows, V] of some rows: by a program if there is one, or by modules."""
        if self._decoder is not None and not self._has_looked and not self._decoder.holds:
            self._decoder = self._make_program()
        self._has_looked = True
        if self._decoder is not None:
            logits = self._decoder.compute(self._packed, ids, positions, wanted)
            if logits is not None:
                return logits.float()
        return self._call(torch.tensor([ids]), torch.tensor([positions]), wanted)

    def _call(
        self, ids: Tensor, positions: Tensor, rows: list[int], cache: PackedCache | None = None
    ) -> Tensor:
        """Return logits [rows, V] of some rows."""
        cache = self._packed if cache is None else cache
        options: dict[str, Any] = (
            {"logits_to_keep": torch.tensor(rows, dtype=torch.long)} if self._keeps else {}
        )
        out = self.model(
            input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, **options
        )
        logits: Tensor = out.logits[0] if self._keeps else out.logits[0, rows]
        return logits.float()


def _part_key(chunk: Chunk, place: int) -> tuple[int, ...]:
    """Chunks with equal keys are computed by one call of attention."""
    mask, score_mod, causal = chunk.mods
    apart = place if chunk.apart else -1
    many = len(chunk.tokens) > 1
    return (
        apart,
        0 if mask is None else id(mask),
        0 if score_mod is None else id(score_mod),
        causal,
        many,
    )


def parts_of(chunks: Sequence[Chunk], keys: Sequence[tuple[int, ...]]) -> list[PackedPart]:
    """Return the parts of a packed row: neighbours with equal keys."""
    parts, first, token = [], 0, 0
    for (*_, many), group in groupby(range(len(chunks)), key=keys.__getitem__):
        members = [chunks[place] for place in group]
        ends = [0, *accumulate(len(chunk.tokens) for chunk in members)]
        parts.append(
            PackedPart(
                sequences=slice(first, first + len(members)),
                tokens=slice(token, token + ends[-1]),
                offsets=torch.tensor(ends) if many else None,
                mods=members[0].mods,
            )
        )
        first, token = first + len(members), token + ends[-1]
    return parts


class _Probe(PackedCache):
    """A cache that notes the shape of the keys of each layer, and keeps nothing."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.seen: dict[int, KeyShape] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> Any:
        """Note the shapes of keys and values [1, Hkv, 1, D]."""
        heads, width = key_states.shape[1], key_states.shape[3]
        self.seen[layer_idx] = KeyShape(heads, width, value_states.shape[3], key_states.dtype)
        return (_Noted(self, layer_idx, key_states, value_states),) * 2


class _Noted(LayerStates):
    """The states of a layer that is only probed."""

    def __init__(self, cache: _Probe, layer: int, key: Tensor, value: Tensor) -> None:
        self.cache, self.layer, self.key, self.value = cache, layer, key, value

    @property
    def shape(self) -> torch.Size:
        """The shape of the new keys."""
        return self.key.shape

    def joined(self) -> _Noted:
        """Note that each token is stored once: a latent, and the rotated part of the key."""
        whole = torch.cat((self.key, self.value), -1)
        noted = _Noted(self.cache, self.layer, whole, self.key)
        noted.latent = self.key.shape[3]
        self.cache.seen[self.layer] = KeyShape(
            whole.shape[1], whole.shape[3], None, whole.dtype, noted.latent
        )
        return noted

    def attend(self, module: Any, query: Tensor, mask: Any, **options: Any) -> Tensor:
        """Return zeros [1, T, Hq, Dv]."""
        batch, heads, count, _ = query.shape
        return query.new_zeros(batch, count, heads, self.value.shape[3])
