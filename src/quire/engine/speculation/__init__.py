"""Guesses of the next tokens, which a step verifies all at once.

Before each step of an answer, a drafter returns guesses of what follows the text: one path, or a
tree of them. The model computes the last token and all guesses in one call. The sampler then draws
token after token from these rows, and goes on while a token is one that was guessed. So an answer
has the tokens and the bits that it has without drafts: a wrong guess costs time only.

Each answer gets a `PromptLookup` of its own; a `DraftModel` serves all answers of an engine.
"""

from __future__ import annotations

from quire.engine.speculation.lookup import PromptLookup
from quire.engine.speculation.model import DraftModel
from quire.engine.speculation.tree import DraftTree

__all__ = ["DraftModel", "DraftTree", "PromptLookup"]
