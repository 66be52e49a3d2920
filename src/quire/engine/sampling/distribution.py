"""From logits to probabilities, and from probabilities to a token. Pure functions of one row.

numpy computes all of this on one thread and in a fixed order: sums run by token id, and equal
probabilities are sorted by token id. So a row gives the same bits in every batch.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from quire.engine.sampling.options import Sampling
from quire.errors import SamplingError

Floats: TypeAlias = NDArray[np.float32]
Ids: TypeAlias = NDArray[np.int64]

_64_BITS = 2**64 - 1


class WeighedTokens(NamedTuple):
    """The tokens that may be drawn, in ascending order, and weights in proportion to their
    probability: the largest weight is 1. `ids` is None if all tokens are candidates.
    """

    ids: Ids | None
    weights: Floats

    def of(self, chosen: Ids) -> WeighedTokens:
        """Return some of the candidates, by their places in ascending order."""
        return WeighedTokens(chosen if self.ids is None else self.ids[chosen], self.weights[chosen])


def highest(logits: Floats) -> tuple[int, float]:
    """Return the token with the largest logit, the first of equal ones, and that logit."""
    token = int(logits.argmax())  # NaN counts as the largest
    largest = float(logits[token])
    if not math.isfinite(largest):
        raise SamplingError(
            f"one logit at least must be finite, and none NaN or +inf, but the largest is "
            f"{largest}. Look for a mask, a bias or weights that overflow."
        )
    return token, largest


def candidates(logits: Floats, options: Sampling) -> WeighedTokens:
    """Return what may be drawn from `logits` [V] at the temperature above 0 of the options."""
    _, largest = highest(logits)
    with np.errstate(over="ignore"):  # what is far below the largest becomes -inf
        scores = (logits - np.float32(largest)) / np.float32(options.temperature)
    ids = None
    if options.top_k is not None and options.top_k < len(scores):
        place = len(scores) - options.top_k
        ids = np.flatnonzero(scores >= np.partition(scores, place)[place])
        scores = scores[ids]
    found = WeighedTokens(ids, np.exp(scores))
    if options.top_p < 1:
        found = found.of(_nucleus(found.weights, options.top_p))
    if options.min_p > 0:
        found = found.of(np.flatnonzero(found.weights >= np.float32(options.min_p)))
    return found


def _nucleus(weights: Floats, top_p: float) -> Ids:
    """Return the places of the fewest largest weights that make up `top_p` of the sum, ascending.

    A weight is in if those before it sum up to less than `top_p`.
    """
    total = float(weights.sum(dtype=np.float64))
    # All weights below this sum up to less than half of what is left out: no need to sort them.
    small = 0.5 * (1 - top_p) * total / len(weights)
    places = np.flatnonzero(weights >= np.float32(small))
    falling = ~weights[places].view(np.uint32)  # the bits of positive floats are in their order
    keys = falling.astype(np.uint64) << np.uint64(32) | places.astype(np.uint64)
    keys.sort()
    order = (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)
    sums = np.cumsum(weights[order].astype(np.float64))
    before = np.concatenate([[0.0], sums[:-1]])
    return np.sort(order[before < top_p * total])


def draw(found: WeighedTokens, uniform: float) -> int:
    """Return the token whose share of [0, 1) holds `uniform`; shares are in the order of ids."""
    sums = np.cumsum(found.weights.astype(np.float64))
    place = int(np.searchsorted(sums, uniform * sums[-1], side="right"))
    if place == len(sums):  # uniform is so close to 1 that the product was rounded up
        place = int(np.flatnonzero(found.weights)[-1])
    return place if found.ids is None else int(found.ids[place])


def uniform(seed: int, stream: int, position: int) -> float:
    """Return the random number in [0, 1) of a position, by a generator that only counts.

    `stream` is the number of the sample, of several that a request asks for.
    """
    key = (seed & _64_BITS) | (stream & _64_BITS) << 64
    bits = int(np.random.Philox(key=key, counter=position).random_raw())
    return (bits >> 11) * 2.0**-53


def log_normaliser(logits: Floats) -> float:
    """Return the log of the sum of exp(logits)."""
    _, largest = highest(logits)
    total = np.exp(logits - np.float32(largest)).sum(dtype=np.float64)
    return largest + float(np.log(total))


def largest_first(logits: Floats, count: int) -> Ids:
    """Return the ids of the `count` largest logits, falling; equal ones by id."""
    if count == 0:
        return np.zeros(0, np.int64)
    place = max(0, len(logits) - count)
    ids = np.flatnonzero(logits >= np.partition(logits, place)[place])
    return ids[np.argsort(-logits[ids], kind="stable")][:count]


def penalise(logits: Floats, options: Sampling, prompt: Ids, counts: dict[int, int]) -> None:
    """Lower the logits of tokens of the prompt and of the answer, in place.

    `prompt` are its distinct tokens, and `counts` says how often the answer has each token.
    """
    ids = np.fromiter(counts.keys(), np.int64, len(counts))
    if options.repetition_penalty != 1:
        seen = np.union1d(prompt, ids)
        penalty = np.float32(options.repetition_penalty)
        logits[seen] = np.where(logits[seen] < 0, logits[seen] * penalty, logits[seen] / penalty)
    if options.presence_penalty or options.frequency_penalty:
        often = np.fromiter(counts.values(), np.float32, len(counts))
        often *= np.float32(options.frequency_penalty)
        logits[ids] -= often
        logits[ids] -= np.float32(options.presence_penalty)
