"""What an engine and a request are given, checked before anything is computed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.checks.arguments import whole_number
from quire.engine.events import EngineWarning
from quire.engine.job import Drafter
from quire.engine.loading import longest
from quire.engine.sampling import Beams, Sampler, Sampling
from quire.engine.speculation import PromptLookup
from quire.errors import ArgumentError
from quire.linear.rowwise import first_not_packed
from quire.support.warn import warn


def check_threads(num_threads: int | None, *, start: bool) -> None:
    """Raise unless the engine's thread can compute with so many threads."""
    if num_threads is None:
        return
    advice = "Leave it out for as many as torch has."
    whole_number("num_threads", num_threads, minimum=1, advice=advice)
    if not start:
        raise ArgumentError(
            f"num_threads must be None with start=False, since steps have the threads of whoever "
            f"computes them, but is {num_threads}. Call torch.set_num_threads."
        )


def prefix_of(model: Any, wanted: bool | None) -> bool:
    """Return whether pages are kept for later prompts. By default they are, if the bits allow it.

    Keys that another request has computed have the same bits only where rows are independent.
    """
    if wanted is not None:
        return wanted
    loose = first_not_packed(model)
    if loose is not None:
        warn(
            f"the model must be packed so that tokens do not depend on the batch, but its "
            f"{loose!r} is not. Use quire.linear.pack, or give prefix=True or False: now no pages "
            f"are kept for later prompts.",
            EngineWarning,
        )
    return loose is None


def sampling_of(given: Sampling | None, options: dict[str, Any]) -> Sampling:
    """Return what a request asks for: as a whole, or by its options."""
    if given is not None and options:
        raise ArgumentError(
            f"either a Sampling or its options must be given, but both are: {sorted(options)}. Use "
            f"dataclasses.replace to change some options of a Sampling."
        )
    if given is not None and not isinstance(given, Sampling):
        raise ArgumentError(
            f"sampling must be a Sampling, but is {given!r}. Make one, or give its options by name."
        )
    return Sampling(**options) if given is None else given


def drafter_of(given: Drafter | None) -> Drafter | None:
    """Return the drafter of one answer. One that remembers a text is made anew for each."""
    return given.of_one_answer() if isinstance(given, PromptLookup) else given


def beams_of(sampler: Sampler, prompt: Sequence[int], count: int) -> Beams | None:
    """Return the beam search that a request asks for, or None. Raise if it has too few beams."""
    most = sampler.options.beams
    if 1 < most < count:
        raise ArgumentError(
            f"n must be at most {most}, the number of beams, but is {count}. Ask for more beams."
        )
    return None if most == 1 else Beams(sampler, prompt)


def ends_of(model: Any, tokenizer: Any) -> set[int]:
    """Return the tokens that end an answer: those of the model's own settings, or its tokenizer."""
    settings = getattr(model, "generation_config", None)
    found = getattr(settings, "eos_token_id", None)
    if found is None:
        found = getattr(tokenizer, "eos_token_id", None)
    if found is None:
        return set()
    return {int(each) for each in found} if isinstance(found, Sequence) else {int(found)}


def max_length_of(config: Any, wanted: int | None) -> int | None:
    """Return the most tokens of a request: what is wanted, if the model has positions for it."""
    own = longest(config)
    if wanted is None:
        return own
    advice = "Give the most tokens of a prompt and its answer."
    whole_number("max_length", wanted, minimum=1, advice=advice)
    return wanted if own is None else min(own, wanted)
