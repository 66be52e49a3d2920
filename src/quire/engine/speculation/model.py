"""Drafts by a smaller model, for all answers of an engine at a time.

    text of an answer      a b c d e f          the last token is new to the draft model, too
    in its own pages       a b c d x y          x and y were its last guesses, and are dropped
    it computes                    e f          in one packed call with the other answers,
                                      g h i     and then a guess at a time

A guess is what the request's own sampler takes from the draft model's logits: with the same
grammar, penalties and random numbers. So guesses come true often at any temperature.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from quire.checks.arguments import whole_number
from quire.engine.loading import longest
from quire.engine.runner import Chunk, Runner
from quire.engine.sampling import Sampler
from quire.engine.sampling.distribution import Floats, largest_first
from quire.errors import ArgumentError, OutOfPages, ReleasedRowsError
from quire.kv import SequenceHandle


class Draftable(NamedTuple):
    """An answer that can use up to `room` guesses in a row."""

    number: int
    tokens: Sequence[int]
    sampler: Sampler
    room: int


@dataclass(eq=False)
class _Text:
    """What the pages of an answer hold: `tokens`, of which the first `agreed` are its text."""

    sequence: SequenceHandle
    tokens: list[int] = field(default_factory=list)
    agreed: int = 0


@dataclass(frozen=True, eq=False)
class _Path:
    """Guesses of one answer, one after the other. `sampler` has accepted them.

    `sequence` holds all but the last one. `ranks` are their places among their siblings.
    """

    asked: Draftable
    sequence: SequenceHandle
    sampler: Sampler
    tokens: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()

    @property
    def is_open(self) -> bool:
        """Whether another guess may follow."""
        return len(self.tokens) < self.asked.room and self.sampler.finished is None


class DraftModel:
    """A small causal language model that drafts for one engine: `Engine(large, drafts=...)`.

        drafts = DraftModel(small, widths=(1, 1, 1, 1))     # four guesses, one after the other
        drafts = DraftModel(small, widths=(3, 1, 1))        # a tree of three paths

    `widths` says how many guesses follow each guess: first the one that the request's sampler
    takes, then the likeliest others. The model must have the tokens of the large one. Its keys and
    values have pages of their own, limited by `n_pages` or `max_bytes`; if they run out, or the
    model raises, there are no guesses for a step. A step reads up to `max_tokens` tokens that are
    new to the draft model.
    """

    def __init__(
        self,
        model: Any,
        *,
        widths: Sequence[int] = (1, 1, 1, 1),
        page_size: int = 16,
        n_pages: int | None = None,
        max_bytes: int | None = None,
        max_tokens: int = 256,
    ) -> None:
        advice = "Give a number of guesses for each place, such as (1, 1, 1)."
        self.widths = tuple(
            whole_number("a width", each, minimum=1, advice=advice) for each in widths
        )
        if not self.widths:
            raise ArgumentError(f"widths must have a number at least, but have none. {advice}")
        self.max_tokens = whole_number("max_tokens", max_tokens, minimum=1, advice="Say how many.")
        if n_pages is None and max_bytes is None:
            max_bytes = 1 << 28
        self.runner = Runner(
            model, page_size=page_size, n_pages=n_pages, max_bytes=max_bytes, prefix=False
        )
        self._longest = longest(self.runner.config)
        self._texts: dict[int, _Text] = {}
        self._is_taken = False

    def serve(self, num_logits: int) -> None:
        """Draft for an engine from now on, whose model has so many logits. Raise if it cannot."""
        if num_logits != self.runner.num_logits:
            raise ArgumentError(
                f"a draft model must have the {num_logits} tokens of the model, but has "
                f"{self.runner.num_logits}. Use models with the same tokenizer."
            )
        if self._is_taken:
            raise ArgumentError(
                "a DraftModel must serve one engine, but serves another already. Make one for "
                "each, or close that one."
            )
        self._is_taken = True

    def leave(self) -> None:
        """Draft for the engine no more, so that another one can be served."""
        self._is_taken = False

    def draft(self, asked: Sequence[Draftable]) -> list[list[list[int]]]:
        """Return paths of guesses for each answer. Those whose text is not read yet have none.

        If the model raises, pages of these answers are given back, so that they are read again.
        """
        try:
            return self._draft(asked)
        except Exception:
            self.forget(*(each.number for each in asked))
            raise

    def _draft(self, asked: Sequence[Draftable]) -> list[list[list[int]]]:
        try:
            paths, rows = self._read([each for each in asked if self._reaches(each)])
        except OutOfPages:  # the last has no guesses, so that the others have some
            self.forget(asked[-1].number)
            return [*(self._draft(asked[:-1]) if asked[:-1] else []), []]
        forks: list[SequenceHandle] = []
        try:
            found = self._grow(paths, rows, forks)
        finally:
            self.runner.pages.free(*forks)
        found.sort(key=lambda path: path.ranks)
        return [[list(path.tokens) for path in found if path.asked is each] for each in asked]

    def _grow(
        self, paths: Sequence[_Path], rows: Sequence[Floats], forks: list[SequenceHandle]
    ) -> list[_Path]:
        """Return the guesses after some texts, by the rows after each. Sequences go to `forks`."""
        found: list[_Path] = []
        with contextlib.suppress(OutOfPages):  # what is found so far is of use
            for place, width in enumerate(self.widths):
                if place:
                    rows = self._guess(paths)
                grown: list[_Path] = []
                for path, row in zip(paths, rows, strict=True):
                    children = self._children(path, row, width, forks)
                    grown += children
                    found = [each for each in found if each is not path or not children]
                found += grown
                paths = [path for path in grown if path.is_open]
        return found

    def forget(self, *numbers: int) -> None:
        """Give back the pages of answers that wait or have ended."""
        for number in numbers:
            text = self._texts.pop(number, None)
            if text is not None:
                self.runner.pages.free(text.sequence)

    def _reaches(self, asked: Draftable) -> bool:
        """Return whether the model has positions for a text and guesses."""
        return self._longest is None or len(asked.tokens) + len(self.widths) <= self._longest

    def _read(self, asked: Sequence[Draftable]) -> tuple[list[_Path], list[Floats]]:
        """Read what is new of each text. Return those that are read to the end, and their rows."""
        chunks: list[Chunk] = []
        read: list[tuple[Draftable, _Text]] = []
        left = self.max_tokens
        for each in asked:
            if left <= 0:
                break
            text = self._text(each)
            start = len(text.tokens)
            piece = list(each.tokens[start : start + left])
            left -= len(piece)
            ends = start + len(piece) == len(each.tokens)
            chunks.append(Chunk(text.sequence, start, piece, num_logits=int(ends)))
            read.append((each, text))
        rows = self._compute(chunks)
        for (_, text), chunk in zip(read, chunks, strict=True):
            text.tokens += chunk.tokens
            text.agreed = len(text.tokens)
        ready = [
            (each, text, row) for (each, text), row in zip(read, rows, strict=True) if len(row)
        ]
        paths = [_Path(each, text.sequence, each.sampler) for each, text, _ in ready]
        return paths, [row for *_, row in ready]

    def _text(self, asked: Draftable) -> _Text:
        """Return the text of an answer without guesses that did not come true."""
        text = self._texts.get(asked.number)
        pages = self.runner.pages
        if text is not None:
            same, most = text.agreed, min(len(text.tokens), len(asked.tokens) - 1)
            while same < most and text.tokens[same] == asked.tokens[same]:
                same += 1
            same = min(same, most)
            try:
                pages.truncate(text.sequence, same)
                del text.tokens[same:]
                return text
            except ReleasedRowsError:  # the guesses have moved a window on
                self.forget(asked.number)
        text = self._texts[asked.number] = _Text(pages.sequence())
        return text

    def _guess(self, paths: Sequence[_Path]) -> list[Floats]:
        """Compute the last guess of each path."""
        starts = [len(path.asked.tokens) + len(path.tokens) - 1 for path in paths]
        rows = self._compute(
            [
                Chunk(path.sequence, start, path.tokens[-1:], num_logits=1)
                for path, start in zip(paths, starts, strict=True)
            ]
        )
        for path in paths:
            text = self._texts[path.asked.number]
            if path.sequence is text.sequence:
                text.tokens.append(path.tokens[-1])
        return rows

    def _compute(self, chunks: Sequence[Chunk]) -> list[Floats]:
        return self.runner.compute(self.runner.reserve(chunks)) if chunks else []

    def _children(
        self, path: _Path, row: Floats, width: int, forks: list[SequenceHandle]
    ) -> list[_Path]:
        """Return a path with `width` guesses that may follow, each in a sequence of its own."""
        children: list[_Path] = []
        with contextlib.suppress(Exception):  # the request's own sampler will raise it
            tokens = [path.sampler.sample(row[0]).token]
            if width > 1:
                scores = path.sampler.changed(path.sampler.row(row[0]))
                likely = largest_first(scores, width).tolist()
                others = [each for each in likely if each != tokens[0] and scores[each] > -np.inf]
                tokens += others[: width - 1]
            for rank, token in enumerate(tokens):
                sampler = path.sampler.fork(path.sampler.stream)
                sampler.accept(token)
                sequence = path.sequence
                if rank:
                    sequence = self.runner.pages.fork(path.sequence)
                    forks.append(sequence)
                ranks = *path.ranks, rank
                children.append(_Path(path.asked, sequence, sampler, (*path.tokens, token), ranks))
        return children
