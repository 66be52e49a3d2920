"""The state of one request: what it has said so far, and how it chooses what comes next."""

from __future__ import annotations

import copy
import secrets
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quire.engine.sampling.distribution import (
    Floats,
    candidates,
    draw,
    highest,
    largest_first,
    log_normaliser,
    penalise,
    uniform,
)
from quire.engine.sampling.grammar import GrammarState
from quire.engine.sampling.options import Sampling
from quire.engine.sampling.transcript import Transcript
from quire.engine.sampling.vocabulary import Vocabulary
from quire.errors import ArgumentError, ShapeError

GREEDY_BELOW = 1e-5
"""Temperatures below this take the likeliest token, as in vLLM: quotients by them overflow."""

Finish = Literal["stop", "length"]


class Sampled(NamedTuple):
    """A token, and the log-probabilities that the request asked for.

    They are those of the model, before options change its logits. `top_logprobs` has the likeliest
    tokens with theirs, falling.
    """

    token: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


class Sampler:
    """The state of one request; it holds nothing of another.

    `prompt` [n] are the tokens before the answer, and `stream` is the number of this sample of
    several with one seed. `sample` chooses the next token and changes nothing, `accept` adds one to
    the answer. The random number of a token depends on seed, stream and place in the answer alone.
    """

    def __init__(
        self,
        options: Sampling,
        prompt: Sequence[int],
        vocabulary: Vocabulary,
        *,
        stream: int = 0,
    ) -> None:
        _check(options, vocabulary)
        self.options = options
        self.vocabulary = vocabulary
        self.seed = secrets.randbits(63) if options.seed is None else options.seed
        self.stream = stream
        self.tokens: list[int] = []
        self.finished: Finish | None = None
        self._penalises = (
            options.repetition_penalty != 1
            or options.presence_penalty != 0
            or options.frequency_penalty != 0
        )
        self._prompt = np.unique(np.asarray(prompt if self._penalises else [], np.int64))
        self._counts: dict[int, int] = {}
        self._biased = np.array([*options.logit_bias.keys()], np.int64)
        self._bias = np.array([*options.logit_bias.values()], np.float32)
        self._ends = frozenset(options.stop_tokens)
        if not options.ignore_eos:
            self._ends |= vocabulary.ends
        wanted = options.grammar
        self._grammar = None if wanted is None else GrammarState(wanted, vocabulary)
        self._transcript = Transcript(options.stop)

    @property
    def num_ends(self) -> int:
        """How many tokens end the answer."""
        return len(self._ends)

    @property
    def text(self) -> str:
        """The text of the answer that may be shown now: no later token changes it."""
        return self._transcript.text

    def sample(self, logits: Tensor | Floats) -> Sampled:
        """Return the next token by `logits` [V] of float32. Nothing changes, so ask again at will.

        The token of a row is the same whichever rows were computed with it.
        """
        row = self.row(logits)
        changed = self.changed(row)
        if self.options.temperature < GREEDY_BELOW:
            token, _ = highest(changed)
        else:
            number = uniform(self.seed, self.stream, len(self.tokens))
            token = draw(candidates(changed, self.options), number)
        return self.described(token, row)

    def described(self, token: int, row: Floats) -> Sampled:
        """Return a token with the log-probabilities that the request asked for."""
        if self.options.logprobs is None:
            return Sampled(token)
        normaliser = log_normaliser(row)
        top = largest_first(row, self.options.logprobs).tolist()
        return Sampled(
            token,
            float(row[token]) - normaliser,
            tuple((each, float(row[each]) - normaliser) for each in top),
        )

    def accept(self, token: int) -> None:
        """Add a token to the answer, and find out whether the answer is finished."""
        assert self.finished is None, "the answer is finished, so no token can follow"
        self.tokens.append(token)
        if self._penalises:
            self._counts[token] = self._counts.get(token, 0) + 1
        ended = token in self._ends
        if self._grammar is not None:
            self._grammar.accept(token)
            ended = ended or self._grammar.finished
        if token not in self._ends:
            self._transcript.add(self.vocabulary.text_bytes(token))
        if ended or self._transcript.stopped:
            self.finished = "stop"
        elif len(self.tokens) >= self.options.max_tokens:
            self.finished = "length"
        if self.finished is not None:
            self._transcript.close()
            if self._transcript.stopped:
                self.finished = "stop"

    def fork(self, stream: int) -> Sampler:
        """Return a copy that goes on by itself, with the random numbers of another stream."""
        copied = copy.copy(self)
        copied.stream = stream
        copied.tokens, copied._counts = self.tokens.copy(), self._counts.copy()
        copied._transcript = self._transcript.fork()
        copied._grammar = None if self._grammar is None else self._grammar.fork()
        return copied

    def row(self, logits: Tensor | Floats) -> Floats:
        """Return the logits [V] of one position as numbers of numpy. Raise if they are others."""
        size = self.vocabulary.size
        if logits.shape != (size,) or logits.dtype not in (np.float32, torch.float32):
            raise ShapeError(
                f"logits must be [{size}] of float32, but are {list(logits.shape)} of "
                f"{logits.dtype}. Give the logits of one position."
            )
        row: Floats = logits if isinstance(logits, np.ndarray) else logits.detach().numpy()
        return row

    def changed(self, row: Floats) -> Floats:
        """Return logits or log-probabilities after the grammar, the bias and the penalties."""
        if self._grammar is not None:
            row = np.where(self._grammar.allowed(), row, np.float32(-np.inf))
        elif len(self._biased) or self._penalises:
            row = row.copy()
        if len(self._biased):
            row[self._biased] += self._bias
        if self._penalises:
            penalise(row, self.options, self._prompt, self._counts)
        return row


def _check(options: Sampling, vocabulary: Vocabulary) -> None:
    """Raise if the options ask for what the vocabulary does not have."""
    largest = max([*options.logit_bias, *options.stop_tokens], default=-1)
    if largest >= vocabulary.size:
        raise ArgumentError(
            f"a token of logit_bias or stop_tokens must be below {vocabulary.size}, the number of "
            f"tokens, but is {largest}. Give ids of tokens of this model."
        )
    if vocabulary.tokenizer is None and (options.stop or options.grammar):
        raise ArgumentError(
            "stop strings and grammars must have a tokenizer that spells tokens, but the engine "
            "has none. Give it a tokenizer, or use stop_tokens."
        )
