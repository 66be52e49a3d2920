"""Who is computed in a step, and how much of each. Nothing here knows of tensors or pages.

    budget of 8 tokens     a7 │ b3 │ c0 c1 c2 c3 c4 c5       a and b answer: a token each
                                                             c reads its prompt: what is left

All decisions follow one order, that of `Turn.rank`: who came first, where a request of priority p
counts as one that came p * PATIENCE steps earlier. The order never changes, and everybody moves up
in it, so nobody waits for ever. The first in the order are admitted first and read their prompts
first; when pages run out, the last gives its pages back.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

PATIENCE = 256
"""How many steps a priority is worth."""


@dataclass(eq=False, kw_only=True)
class Turn:
    """What the scheduler knows of one answer.

    tokens    prompt ──────┤ answer ──┤        the last one is not in pages yet
    done      in pages ───────────────┤        after a preemption 0, and all are computed again
    drafts    guesses of what follows ├──▶     one path, or several that branch like a tree
    """

    number: int  # in the order of arrival
    arrived: int  # the step
    priority: int = 0
    tokens: list[int]
    num_prompt: int
    done: int = 0
    width: int = 1  # how many texts of this length are written side by side: its beams
    drafts: list[list[int]] = field(default_factory=list)
    whole: bool = False  # whether its prompt must be read in one piece

    @property
    def rank(self) -> tuple[int, int]:
        """The place in the order of all turns: smaller is sooner."""
        return self.arrived - self.priority * PATIENCE, self.number

    @property
    def left(self) -> int:
        """The number of tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.done


AnyTurn = TypeVar("AnyTurn", bound=Turn)


class Limits(NamedTuple):
    """What a step may do: `tokens` in all, `chunk` tokens of one prompt, `requests` at a time."""

    tokens: int
    chunk: int
    requests: int


def in_turn(turns: Iterable[AnyTurn]) -> list[AnyTurn]:
    """Return turns in the order in which they are served."""
    return sorted(turns, key=lambda turn: turn.rank)


def choose(running: Sequence[AnyTurn], limits: Limits) -> list[tuple[AnyTurn, int]]:
    """Return who is computed in the next step, with the number of tokens of each.

    Answers come first, then their drafts as far as the budget goes: those beyond it are dropped.
    Prompts share what is left, one token at least. A prompt that must be read whole, and a prompt
    of several beams, may exceed the budget.
    """
    order = in_turn(running)
    chosen = [(turn, 1) for turn in order if turn.left == 1]
    left = limits.tokens - sum(turn.width for turn, _ in chosen)
    for turn, _ in chosen:
        if turn.drafts:
            turn.drafts, left = fitting(turn.drafts, left)
    left = max(1, left)
    for turn in (each for each in order if each.left > 1):
        if left <= 0:
            break
        count = _piece(turn, max(1, min(left // turn.width, limits.chunk)))
        chosen.append((turn, count))
        left -= count * turn.width
    return chosen


def fitting(paths: Sequence[list[int]], room: int) -> tuple[list[list[int]], int]:
    """Return the drafts that `room` more tokens allow, and what is left of it.

    Each path after the first one computes the last token of the text once more.
    """
    kept: list[list[int]] = []
    for path in paths:
        most = room - bool(kept)
        if most <= 0:
            break
        kept.append(path[:most])
        room = most - len(kept[-1])
    return kept, room


def _piece(turn: Turn, most: int) -> int:
    """Return how many tokens are computed of a turn that has several left."""
    if not turn.whole:
        return min(turn.left, most)
    # What was computed in one piece must be again: first the prompt, then token by token.
    return turn.num_prompt - turn.done if turn.done < turn.num_prompt else 1
