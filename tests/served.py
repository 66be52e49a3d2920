"""Tiny models behind an engine, and what the same request gets when it is alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from tiny_models import decoder, tokens

from quire.engine import Completion, Engine
from quire.linear import pack

SIZES: dict[str, Any] = {"page_size": 4, "n_pages": 64, "max_tokens": 16, "start": False}


@functools.cache
def packed(family: str) -> Any:
    """A tiny random model with packed layers. Engines may share it: each has pages of its own."""
    return pack(decoder(family).ours)


def engine(family: str = "llama", **options: Any) -> Engine:
    """An engine whose steps are computed by hand."""
    return Engine(packed(family), **{**SIZES, **options})


def prompt(length: int, seed: int | None = None) -> list[int]:
    """Some tokens."""
    found: list[int] = tokens(length, seed=length if seed is None else seed).tolist()
    return found


def run(served: Engine) -> None:
    """Compute steps until nothing is left. Pages are right after each."""
    while served.step():
        served.check_integrity()
    served.check_integrity()


def alone(family: str, given: Sequence[int], **options: Any) -> Completion:
    """What an engine answers that serves nothing else, in one piece and with many pages."""
    with engine(family, n_pages=400, max_tokens=512, prefix=False) as served:
        return served.submit(given, **options).result()


def assert_same(one: Completion, other: Completion) -> None:
    """Both have the same tokens and the same log-probabilities, bit for bit."""
    assert one.tokens == other.tokens
    assert one.logprobs == other.logprobs and one.top_logprobs == other.top_logprobs
    assert (one.text, one.finish_reason) == (other.text, other.finish_reason)
