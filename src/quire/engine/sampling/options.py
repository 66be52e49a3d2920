"""What a request asks of sampling, checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from quire.checks.arguments import whole_number
from quire.engine.sampling.grammar import Grammar
from quire.errors import ArgumentError

MOST_LOGPROBS = 20
"""As many alternatives as OpenAI's interface gives for each token."""

MOST_STOPS = 64

LARGEST = float(np.finfo(np.float32).max)
"""The largest number that sampling can compute with."""


@dataclass(frozen=True)
class Sampling:
    """What one request asks for.

    Options mean what they mean in transformers and vLLM, and apply in this order: the grammar,
    `logit_bias`, penalties, `temperature` (0 takes the likeliest token), `top_k`, `top_p`, `min_p`.
    `repetition_penalty` is for tokens of the prompt and the answer, the two other penalties are for
    tokens of the answer. `logprobs` is the number of alternatives that are returned for each token,
    with the probabilities of the model itself; with 0 only the chosen token has one. `stop` are
    strings that end the answer and are not part of it, `stop_tokens` are tokens that end it. With
    the same `seed`, the same request gives the same answer; without one, a seed is drawn.

    With `beams` above 1, answers are found by a beam search, as by `generate(num_beams=...)` of
    transformers: so many texts are written side by side, and those whose log-probability divided
    by length ** `length_penalty` is largest are the answers. `early_stopping=True` ends the search
    when there are enough answers, and "never" only when no better one can come.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    grammar: Grammar | None = None
    beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False

    def __post_init__(self) -> None:
        whole_number("max_tokens", self.max_tokens, minimum=1, advice="Say how long it may get.")
        _number("temperature", self.temperature, 0, math.inf, "Use 0 for the likeliest token.")
        _number("top_p", self.top_p, 0, 1, "Use 1 for all tokens.", above=True)
        _number("min_p", self.min_p, 0, 1, "Use 0 for all tokens.")
        advice = "Use 1 for no penalty."
        _number("repetition_penalty", self.repetition_penalty, 0, math.inf, advice, above=True)
        for name in ("presence_penalty", "frequency_penalty"):
            _number(name, getattr(self, name), -2, 2, "Use 0 for no penalty.")
        if self.top_k is not None:
            whole_number("top_k", self.top_k, minimum=1, advice="Use None for all tokens.")
        if self.seed is not None:
            whole_number("seed", self.seed, advice="Use None to draw one.")
        self._check_logprobs()
        self._check_bias()
        self._check_stops()
        self._check_grammar()
        self._check_beams()

    def _check_beams(self) -> None:
        whole_number("beams", self.beams, minimum=1, advice="Use 1 for no search.")
        _number("length_penalty", self.length_penalty, -math.inf, math.inf, "Use 1 for the mean.")
        if not isinstance(self.early_stopping, bool) and self.early_stopping != "never":
            raise ArgumentError(
                f'early_stopping must be True, False or "never", but is {self.early_stopping!r}. '
                f"Use False if you are not sure."
            )
        if self.beams > 1 and self.temperature != 0:
            raise ArgumentError(
                f"temperature must be 0 with beams, which are the likeliest texts, but is "
                f"{self.temperature}. Leave one of them out."
            )

    def _check_logprobs(self) -> None:
        if self.logprobs is None:
            return
        advice = "Use None for no probabilities."
        if whole_number("logprobs", self.logprobs, minimum=0, advice=advice) > MOST_LOGPROBS:
            raise ArgumentError(
                f"logprobs must be at most {MOST_LOGPROBS}, but is {self.logprobs}. {advice}"
            )

    def _check_bias(self) -> None:
        advice = "Give token ids and what is added to their logits, as in {42: -100}."
        if not isinstance(self.logit_bias, Mapping):
            raise ArgumentError(f"logit_bias must be a dict, but is {self.logit_bias!r}. {advice}")
        for token, bias in self.logit_bias.items():
            whole_number("a token of logit_bias", token, minimum=0, advice=advice)
            if not _is_number(bias) or not (abs(bias) <= LARGEST or bias == -math.inf):
                raise ArgumentError(
                    f"a number of logit_bias must be finite or -inf in float32, but is {bias!r}. "
                    f"{advice}"
                )
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    def _check_stops(self) -> None:
        stops = (self.stop,) if isinstance(self.stop, str) else _several("stop", self.stop)
        if not all(isinstance(each, str) and each for each in stops) or len(stops) > MOST_STOPS:
            raise ArgumentError(
                f"stop must be up to {MOST_STOPS} strings that are not empty, but is {stops!r}. "
                f"Leave it out to end where the model ends."
            )
        tokens = _several("stop_tokens", self.stop_tokens)
        for token in tokens:
            whole_number("a stop token", token, minimum=0, advice="Give ids of tokens.")
        object.__setattr__(self, "stop", stops)
        object.__setattr__(self, "stop_tokens", tokens)

    def _check_grammar(self) -> None:
        if self.grammar is not None and not isinstance(self.grammar, Grammar):
            raise ArgumentError(
                f"grammar must be a Grammar, but is {self.grammar!r}. Use Grammar.json_schema, "
                f"Grammar.regex or Grammar.lark."
            )


def _several(name: str, given: object) -> tuple[Any, ...]:
    """Return the things of a list, or nothing for None."""
    if given is not None and not isinstance(given, Iterable):
        raise ArgumentError(f"{name} must be a list, but is {given!r}. Put it into one.")
    return () if given is None else tuple(given)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(
    name: str, value: float, low: float, high: float, advice: str, *, above: bool = False
) -> None:
    """Raise unless `value` is finite, from `low` (or above it) to `high`, in float32, too."""
    fits = _is_number(value) and low <= value <= high and abs(value) < math.inf
    if fits and abs(value) > LARGEST:
        raise ArgumentError(
            f"{name} must be at most {LARGEST:.2g}, the largest float32, but is {value!r}. {advice}"
        )
    if not fits or (above and np.float32(value) == low):
        start = f"above {low:g}" if above else f"of at least {low:g}"
        end = "" if high == math.inf else f" and at most {high:g}"
        raise ArgumentError(
            f"{name} must be a finite number {start}{end}, but is {value!r}. {advice}"
        )
