"""Embeddings of texts by all-MiniLM-L6-v2, from its package, packed without padding.

Texts follow each other in one row, and quire computes attention within each. The linear layers are
packed, so that a text has the same bits whichever texts come with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.api.attention import attention
from quire.errors import ApiError
from quire.integrations import minilm
from quire.linear import pack
from quire.memory import Ragged
from quire.support.locks import lock

NAME = "all-MiniLM-L6-v2"
ROW = 2048
"""The most tokens that are computed in one call, unless one text has more."""


class Embedder:
    """The model and its tokenizer. They are loaded when they are first needed."""

    def __init__(self) -> None:
        self._lock = lock()
        self._pool = ThreadPoolExecutor(1)  # of its own, so that no other request waits for it
        self._loaded: tuple[Any, Any] | None = None

    @property
    def missing(self) -> list[str]:
        """The packages that embeddings need and that are not installed."""
        return minilm.missing()

    async def answer(self, given: Sequence[str] | Sequence[Sequence[int]]) -> tuple[Tensor, int]:
        """Return what `embed` returns. If it is cancelled, no further rows are computed."""
        left = Event()
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._pool, self.embed, given, left)
        finally:
            left.set()

    def embed(
        self, given: Sequence[str] | Sequence[Sequence[int]], left: Event | None = None
    ) -> tuple[Tensor, int]:
        """Return vectors of length 1 [texts, 384], and the number of tokens of all texts."""
        with self._lock:
            if self._loaded is None:
                self._loaded = _load()
        model, tokenizer = self._loaded
        texts = [self._tokens(tokenizer, each) for each in given]
        with torch.inference_mode():
            found = []
            for row in _rows(texts):
                if left is not None and left.is_set():
                    raise ApiError("nobody waits for the vectors.", status=499)
                found.append(_embed(model, row))
        return torch.cat(found), sum(map(len, texts))

    def _tokens(self, tokenizer: Any, given: str | Sequence[int]) -> list[int]:
        most = tokenizer.model_max_length
        tokens = tokenizer(given)["input_ids"] if isinstance(given, str) else list(given)
        if len(tokens) > most:
            raise ApiError(
                f"a text must have at most {most} tokens, but one has {len(tokens)}.",
                param="input",
                code="context_length_exceeded",
            )
        if max(tokens) >= len(tokenizer):
            raise ApiError(
                f"tokens must be below {len(tokenizer)}, but one is {max(tokens)}.", param="input"
            )
        return tokens


def _load() -> tuple[Any, Any]:
    model, tokenizer = minilm.load(_within_texts)
    pack(model)
    return model, tokenizer


def _within_texts(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **options: Any
) -> tuple[Tensor, None]:
    """Compute attention within each text; transformers calls this in every layer."""
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    memory = Ragged(key, value, options["offsets"])
    return attention(query, memory, scale=options["scaling"])[None], None


def _rows(texts: list[list[int]]) -> list[list[list[int]]]:
    """Return texts in rows of up to `ROW` tokens, in their order."""
    rows: list[list[list[int]]] = []
    room = 0
    for text in texts:
        if not rows or len(text) > room:
            rows.append([])
            room = ROW
        rows[-1].append(text)
        room -= len(text)
    return rows


def _embed(model: Any, texts: list[list[int]]) -> Tensor:
    """Return the vectors of texts [texts, 384]: means of the last layer, of length 1."""
    lengths = torch.tensor([len(text) for text in texts])
    hidden = model(
        torch.tensor([[token for text in texts for token in text]]),
        position_ids=torch.cat([torch.arange(len(text)) for text in texts])[None],
        offsets=F.pad(lengths.cumsum(0), (1, 0)),
    ).last_hidden_state
    return F.normalize(torch.segment_reduce(hidden[0], "mean", lengths=lengths), dim=-1)
