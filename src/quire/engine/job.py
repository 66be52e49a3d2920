"""One answer that is being written, with the sequences of pages that hold its text.

                       pages of the text so far                 this step computes
    an answer          ══════════════════════════ one sequence  its last token
    with drafts        ══════════════════════════ one sequence  its last token, and guesses
    a tree of drafts   ══════════════════════════╤═ a sequence  its last token, and one path
                                                 └─ a fork      its last token, and another path
    beams              ══════════════════════════╤═ a sequence  the last token of one beam
                                                 └─ a fork      the last token of another beam

Sequences of a job have the same length, and forks share the pages of their common beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from quire.engine.answers import Answer
from quire.engine.runner import Chunk, Reserved
from quire.engine.sampling import Beams, Sampler
from quire.engine.scheduler import Turn
from quire.engine.speculation.tree import DraftTree
from quire.integrations.transformers.user_mods import NO_MODS, Mods
from quire.kv import SavedSequence, SequenceHandle

T = TypeVar("T")

Drafter = Callable[[Sequence[int]], list[int] | DraftTree]
"""Takes the tokens so far, and returns guesses of the next ones: one path, or a tree of them."""


@dataclass(eq=False, kw_only=True)
class Job(Turn):
    """One answer that is being written, or several that one beam search finds."""

    sampler: Sampler
    answers: list[Answer]
    mods: Mods = NO_MODS
    salt: bytes | None = b""  # None if its pages must not be shared
    drafter: Drafter | None = None
    beams: Beams | None = None
    sequences: list[SequenceHandle] = field(default_factory=list)  # none while it waits
    saved: list[SavedSequence] = field(default_factory=list)  # what they held before it waited
    path: int = 0  # the place of the drafts that came true, and of the sequence that holds them
    guesses: bool = True  # whether it may have drafts
    apart: bool = False  # whether its attention is computed by a call of its own
    leader: Job | None = None  # who reads the prompt for this sample
    was_placed: bool = False  # whether it had sequences before
    shown: int = 0  # characters of the answer's text that were given out
    followers: list[Job] = field(default_factory=list)

    @property
    def answer(self) -> Answer:
        """The answer, or the best one of several beams."""
        return self.answers[0]

    @property
    def most_width(self) -> int:
        """How many sequences the job may have once it answers."""
        return 1 if self.beams is None else self.beams.most

    @property
    def most_at_once(self) -> int:
        """How many tokens a sequence of the job must be able to get in one step."""
        return self.num_prompt if self.whole else 1

    @property
    def texts(self) -> list[list[int]]:
        """The tokens of each sequence, without drafts."""
        return [self.tokens] if self.beams is None else self.beams.texts

    @property
    def room(self) -> int:
        """How many drafts may follow the last token. Most jobs have no use for any.

        While others wait to fork its sequence, a job must hold no guesses. If a token may see later
        ones, it would see guesses, too.
        """
        if self.left != 1 or not self.guesses or self.followers or self.whole or self.beams:
            return 0
        return max(0, self.sampler.options.max_tokens - len(self.sampler.tokens) - 1)

    def chunks(self, count: int) -> list[Chunk]:
        """Return the next `count` tokens of each sequence. Drafts follow the last token."""
        ends = self.done + count >= len(self.tokens)
        paths = self.drafts if ends and self.drafts else [[]]
        texts = self.texts if self.beams is not None else [self.tokens] * len(paths)
        paths = paths if self.beams is None else paths * len(texts)
        return [
            Chunk(
                sequence,
                self.done,
                [*text[self.done : self.done + count], *path],
                num_logits=1 + len(path) if ends else 0,
                mods=self.mods,
                apart=self.apart,
            )
            for sequence, text, path in zip(self.sequences, texts, paths, strict=True)
        ]


@dataclass(frozen=True, eq=False)
class Scheduled:
    """The jobs of a step, how many sequences each has, and their reserved chunks."""

    jobs: list[Job]
    widths: list[int]
    reserved: Reserved

    def of_each_job(self, things: Sequence[T]) -> Iterator[Sequence[T]]:
        """Cut something that each chunk has into the parts of jobs."""
        start = 0
        for width in self.widths:
            yield things[start : start + width]
            start += width

    def jobs_of(self, places: Sequence[int]) -> list[Job]:
        """Return the jobs of some chunks, each once."""
        owners = [
            job for job, width in zip(self.jobs, self.widths, strict=True) for _ in range(width)
        ]
        return list(dict.fromkeys(owners[place] for place in places))
