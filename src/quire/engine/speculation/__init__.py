"""Guesses of the next tokens, which a step verifies all at once.

A drafter is asked before each step of an answer, with the tokens so far, and returns guesses of
what follows. The model computes the last token and all guesses in one piece. The sampler then draws
token after token from these rows, and goes on while a token is the one that was guessed. So an
answer has the tokens and the bits that it has without drafts: a wrong guess costs time only.
"""

from __future__ import annotations

from quire.engine.speculation.lookup import PromptLookup

__all__ = ["PromptLookup"]
