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
    """

    number: int  # in the order of arrival
    arrived: int  # the step
    priority: int = 0
    tokens: list[int]
    num_prompt: int
    done: int = 0
    drafts: list[int] = field(default_factory=list)  # guesses of what follows the last token
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

    Answers come first, with their drafts as far as the budget goes. Prompts share what is left, one
    token at least. A prompt that must be read whole may exceed the budget.
    """
    order, left = in_turn(running), limits.tokens
    chosen = []
    for turn in (each for each in order if each.left == 1):
        count = 1 + min(len(turn.drafts), max(0, left - 1))
        chosen.append((turn, count))
        left -= count
    left = max(1, left)
    for turn in (each for each in order if each.left > 1):
        if left <= 0:
            break
        count = _piece(turn, min(left, limits.chunk))
        chosen.append((turn, count))
        left -= count
    return chosen


def _piece(turn: Turn, most: int) -> int:
    """Return how many tokens are computed of a turn that has several left."""
    if not turn.whole:
        return min(turn.left, most)
    # What was computed in one piece must be again: first the prompt, then token by token.
    return turn.num_prompt - turn.done if turn.done < turn.num_prompt else 1
