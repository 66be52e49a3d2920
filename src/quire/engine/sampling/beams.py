"""A beam search: the texts with the largest log-probability, of which several grow side by side.

    live beams          rows of logits            candidates            live beams
      a  -1.2     ──▶    V of a       ╲            ax  -1.9                ax
      b  -1.5     ──▶    V of b       ╱──best──▶   by  -2.0                by
                                                   a.  -2.1     ──▶  finished: "a."

It chooses what `generate(num_beams=...)` of transformers chooses. A text that ends is an answer if
it is among the best `most` candidates; its score is its log-probability, divided by its length to
the power of `length_penalty`. Nothing here knows of pages: `advance` says which beam each new one
goes on from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from quire.engine.sampling.distribution import Floats, largest_first, log_normaliser
from quire.engine.sampling.sampler import Sampled, Sampler
from quire.errors import ArgumentError


@dataclass(frozen=True, eq=False)
class Beam:
    """A text: the state of its sampler, and the sum of log-probabilities.

    `found` has each token, and the text that can be shown since it came.
    """

    sampler: Sampler
    total: np.float32 = field(default_factory=lambda: np.float32(0))
    found: tuple[tuple[Sampled, str], ...] = ()

    def then(self, token: int, total: np.float32, row: Floats) -> Beam:
        """Return the beam with one token more."""
        sampler = self.sampler.fork(self.sampler.stream)
        sampler.accept(token)
        text = sampler.text[len(self.sampler.text) :]
        return Beam(sampler, total, (*self.found, (sampler.described(token, row), text)))

    @property
    def score(self) -> np.float32:
        """The total, for a length that `length_penalty` makes comparable."""
        penalty = self.sampler.options.length_penalty
        return np.float32(self.total / len(self.sampler.tokens) ** penalty)


class Beams:
    """The state of a search for one prompt [n], which starts from its `sampler`."""

    def __init__(self, sampler: Sampler, prompt: Sequence[int]) -> None:
        options = sampler.options
        self.most = options.beams
        self.answers: list[Beam] = []  # those that ended, the best first
        self.live = [Beam(sampler)]
        self.texts = [list(prompt)]  # the tokens of the live beams, with the prompt
        self._prompt = list(prompt)
        # As many candidates as may end, and `most` that do not.
        self._num_candidates = max(2, 1 + sampler.num_ends) * self.most
        size = sampler.vocabulary.size
        if self._num_candidates > size:
            raise ArgumentError(
                f"beams must be at most {size * self.most // self._num_candidates} for {size} "
                f"tokens, but are {self.most}. Ask for fewer."
            )
        self.finished = False

    def advance(self, rows: Sequence[Floats]) -> list[int]:
        """Go on by one token, by `rows` [V] of logits, one for each live beam.

        Return the number of the beam that each new live beam continues.
        """
        candidates = self._candidates(
            [b.sampler.row(r) for b, r in zip(self.live, rows, strict=True)]
        )
        running = [each for each in candidates if each[1].sampler.finished is None][: self.most]
        best = candidates[: self.most]
        self._take([beam for _, beam in best if beam.sampler.finished is not None])
        self.live = [beam for _, beam in running]
        self.texts = [[*self._prompt, *beam.sampler.tokens] for beam in self.live]
        self.finished = not (self.live and self._may_improve())
        return [parent for parent, _ in running]

    def _candidates(self, rows: Sequence[Floats]) -> list[tuple[int, Beam]]:
        """Return the likeliest continuations of all beams, each with its parent."""
        found: list[tuple[float, int, int]] = []
        for parent, (beam, row) in enumerate(zip(self.live, rows, strict=True)):
            own = row - np.float32(log_normaliser(row))
            totals = beam.sampler.changed(own) + beam.total
            for token in largest_first(totals, self._num_candidates).tolist():
                if totals[token] > -np.inf:
                    found.append((-float(totals[token]), parent, token))
        return [
            (parent, self.live[parent].then(token, np.float32(-total), rows[parent]))
            for total, parent, token in sorted(found)[: self._num_candidates]
        ]

    def _take(self, ended: Sequence[Beam]) -> None:
        """Add beams to the answers, and keep the best ones."""
        if not self._is_full or self.live[0].sampler.options.early_stopping is not True:
            self.answers = sorted([*self.answers, *ended], key=lambda beam: -beam.score)[
                : self.most
            ]

    @property
    def _is_full(self) -> bool:
        return len(self.answers) == self.most

    def _may_improve(self) -> bool:
        """Return whether a live beam may become better than the worst answer.

        It is a guess as that of transformers: by the length that beams have now, or by the longest
        one if `early_stopping` is "never".
        """
        if not self._is_full:
            return True
        options = self.live[0].sampler.options
        if options.early_stopping is True:
            return False
        length = len(self.live[0].sampler.tokens)
        if options.early_stopping == "never" and options.length_penalty > 0:
            length = options.max_tokens
        return bool(self.live[0].total / length**options.length_penalty > self.answers[-1].score)
