"""What an engine tells of itself: events while it works, and statistics at any time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

EventKind = Literal["submit", "admit", "chunk", "token", "preempt", "finish"]


class EngineWarning(UserWarning):
    """What ends no request: a listener or a draft model that raises, a model that is not packed."""


class Event(NamedTuple):
    """Something that happened to an answer in a step.

    `size` is the number of tokens: found in pages (admit), computed (chunk), sampled so far
    (token), dropped (preempt) or of the whole answer (finish). `detail` is the reason of a finish.
    """

    kind: EventKind
    step: int
    answer: int
    size: int = 0
    detail: str = ""


Listener: TypeAlias = Callable[[Event], None]


@dataclass
class Counts:
    """Sums since the engine was made. `model_seconds` are spent in the model, of `seconds`."""

    steps: int = 0
    submitted: int = 0
    finished: int = 0
    preempted: int = 0
    prompt_tokens: int = 0  # that were computed, again after a preemption
    cached_tokens: int = 0  # of prompts, whose pages were found
    output_tokens: int = 0
    seconds: float = 0.0
    model_seconds: float = 0.0


class EngineStatistics(NamedTuple):
    """The state of an engine: who waits and who runs, sums so far, and pages."""

    waiting: int
    running: int
    steps: int
    submitted: int
    finished: int
    preempted: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    seconds: float
    model_seconds: float
    pages: int
    free_pages: int
    shared_pages: int
    kept_pages: int
    num_bytes: int
