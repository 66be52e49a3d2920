"""The questions of the tour to a language model, and a run that answers them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import quire
from quire.kv import PageMap
from quire.tools.demo.talker import Asked, Talker

QUESTIONS = (
    "What is the capital of France?",
    "Name three fruits.",
    "Write one sentence about the sea.",
    f"What does this function do? {' '.join((quire.attention.__doc__ or '').split())}",
)
SOURCE = """\
def window_with_a_sink(b, h, q_idx, kv_idx):
    return (q_idx - kv_idx < 64) | (kv_idx < 4)
"""
"""The text that is shown is the text that runs."""

Show = Callable[[list[str]], None]
"""Called with the answers as far as they are known, for every new token."""


class TalkResult(NamedTuple):
    """The answers of one run, its times, and its cache at the end."""

    answers: list[str]
    seconds: float
    first: float  # seconds until the first token
    num_tokens: int
    cache_bytes: int
    maps: list[PageMap]
    cache: Any

    @property
    def rate(self) -> float:
        """New tokens a second, without the time to read the prompts."""
        return self.num_tokens / max(self.seconds - self.first, 1e-9)


class Watcher:
    """A streamer of transformers, which `generate` calls for every token."""

    def __init__(self, talker: Talker, cache: Any, show: Show) -> None:
        self.start, self.first = time.perf_counter(), 0.0
        self.steps: list[Tensor] = []
        self.maps: list[PageMap] = []
        self._talker, self._cache, self._show = talker, cache, show
        self._prompt = True

    def put(self, tokens: Tensor) -> None:
        """Take the prompt, and then a token for each row."""
        if self._prompt:
            self._prompt = False
            return
        if not self.steps:
            self.first = time.perf_counter() - self.start
        self.steps.append(tokens)
        pages = getattr(self._cache, "pages", None)
        if pages is not None:
            self.maps.append(pages.page_map())
        self._show(self.answers())

    def end(self) -> None:
        """Do nothing at the end."""

    def answers(self) -> list[str]:
        """Return the text of each row."""
        return [self._talker.text(row) for row in torch.stack(self.steps, 1)]


def talk(
    talker: Talker,
    questions: Sequence[Asked],
    new: int,
    show: Show,
    *,
    ours: bool,
    samples: int = 1,
) -> TalkResult:
    """Answer questions in one batch: with quire on pages, or with PyTorch's attention, padded."""
    from transformers import DynamicCache

    from quire.integrations.transformers import PagedCache

    model = talker.model
    model.set_attn_implementation("quire" if ours else "sdpa")
    cache = PagedCache(model.config) if ours else DynamicCache(config=model.config)
    watcher = Watcher(talker, cache, show)
    torch.manual_seed(1)
    model.generate(
        **talker.batch(questions),
        past_key_values=cache,
        streamer=watcher,
        max_new_tokens=new,
        do_sample=samples > 1,
        num_return_sequences=samples,
    )
    seconds = time.perf_counter() - watcher.start
    count = len(questions) * samples * (len(watcher.steps) - 1)
    return TalkResult(
        answers=watcher.answers(),
        seconds=seconds,
        first=watcher.first,
        num_tokens=count,
        cache_bytes=cache_bytes(cache),
        maps=watcher.maps,
        cache=cache,
    )


def cache_bytes(cache: Any) -> int:
    """Return the memory of keys and values in bytes."""
    pages = getattr(cache, "pages", None)
    if pages is not None:
        return int(pages.statistics().num_bytes)
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def mask_mod() -> Callable[..., Any]:
    """Return the function of SOURCE."""
    names: dict[str, Any] = {}
    exec(SOURCE, names)
    found: Callable[..., Any] = names["window_with_a_sink"]
    return found
