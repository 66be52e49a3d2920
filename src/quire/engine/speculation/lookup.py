"""Drafts from the text itself: what followed the last few tokens when they came before.

    ... the quick brown fox jumps ... the quick       the last tokens came before,
                brown fox jumps                       so this is the draft

Answers that quote their prompt, such as summaries, edits and code, gain most.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.checks.arguments import whole_number

_ADVICE = "Use the default if you are not sure."


class PromptLookup:
    """A drafter that looks for the last tokens of a text, `longest` of them or fewer.

    The longest run of tokens that came before counts, and of several places the last one. A draft
    has at most `most` tokens. After drafts that were wrong it becomes shorter, and longer again
    after drafts that were right. An engine makes one like it for each answer.

    >>> draft = PromptLookup(most=3)
    >>> draft([5, 6, 7, 8, 9, 1, 5, 6])
    [7, 8, 9]
    """

    def __init__(self, most: int = 8, *, longest: int = 4, shortest: int = 2) -> None:
        self.most = whole_number("most", most, minimum=1, advice=_ADVICE)
        self.shortest = whole_number("shortest", shortest, minimum=1, advice=_ADVICE)
        self.longest = whole_number("longest", longest, minimum=shortest, advice=_ADVICE)
        self._size = self.most
        self._indexed = 0  # the tokens before this place, and runs that end there, are known
        self._after: dict[tuple[int, ...], int] = {}  # where a run of tokens ended last
        self._last: list[int] = []  # the last draft, and where it began
        self._began = 0

    def of_one_answer(self) -> PromptLookup:
        """Return a drafter of the same sizes that has seen no text."""
        return PromptLookup(self.most, longest=self.longest, shortest=self.shortest)

    def __call__(self, tokens: Sequence[int]) -> list[int]:
        """Return guesses of what follows `tokens` [n], which only grow from call to call."""
        self._learn(tokens)
        self._index(tokens)
        place = self._found(tokens)
        self._began = len(tokens)
        self._last = [] if place is None else list(tokens[place : place + self._size])
        return self._last

    def _learn(self, tokens: Sequence[int]) -> None:
        """Adapt the size of drafts to how much of the last one came true."""
        if not self._last or len(tokens) == self._began:  # a step that did not take place
            return
        came = tokens[self._began : self._began + len(self._last)]
        right = len(_equal_start(came, self._last))
        grown = 2 * self._size if right == len(self._last) else right + 1
        self._size = max(1, min(self.most, grown))

    def _index(self, tokens: Sequence[int]) -> None:
        """Remember the runs that end before the last token: it has no token after it yet."""
        for end in range(max(1, self._indexed), len(tokens)):
            for size in range(self.shortest, min(self.longest, end) + 1):
                self._after[tuple(tokens[end - size : end])] = end
        self._indexed = max(1, len(tokens))

    def _found(self, tokens: Sequence[int]) -> int | None:
        """Return where a token followed the longest run at the end of `tokens`."""
        for size in range(min(self.longest, len(tokens)), self.shortest - 1, -1):
            place = self._after.get(tuple(tokens[len(tokens) - size :]))
            if place is not None:
                return place
        return None


def _equal_start(left: Sequence[int], right: Sequence[int]) -> Sequence[int]:
    """Return the tokens with which both begin."""
    for place, (mine, other) in enumerate(zip(left, right, strict=False)):
        if mine != other:
            return left[:place]
    return left[: len(right)]
