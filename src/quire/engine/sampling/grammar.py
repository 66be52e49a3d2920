"""Structured output: which tokens may come next, by llguidance.

Grammar.json_schema({"type": "object", ...})
Grammar.regex(r"[0-9]+ apples")
Grammar.lark('start: "yes" | "no"')
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from quire.errors import GrammarError

if TYPE_CHECKING:
    from quire.engine.sampling.vocabulary import Vocabulary

ADVICE = "See llguidance's documentation for what it supports."


@dataclass(frozen=True)
class Grammar:
    """What an answer must look like: `text` is a JSON schema, a regex or a grammar of Lark."""

    kind: Literal["json_schema", "regex", "lark"]
    text: str

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | str) -> Grammar:
        """Return the grammar of the JSON documents that a schema allows."""
        return cls("json_schema", schema if isinstance(schema, str) else json.dumps(schema))

    @classmethod
    def json(cls) -> Grammar:
        """Return the grammar of all JSON objects."""
        return cls.json_schema({"type": "object"})

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        """Return the grammar of the texts that match a regular expression as a whole."""
        return cls("regex", pattern)

    @classmethod
    def lark(cls, grammar: str) -> Grammar:
        """Return a grammar in Lark's language, whose first rule is `start`."""
        return cls("lark", grammar)


class GrammarState:
    """How far one answer has come in its grammar."""

    def __init__(self, grammar: Grammar, vocabulary: Vocabulary) -> None:
        from llguidance import LLMatcher

        make = getattr(LLMatcher, f"grammar_from_{grammar.kind}")
        try:
            compiled = make(grammar.text)
        except ValueError as error:
            raise _wrong(grammar, str(error)) from error
        self._matcher = LLMatcher(vocabulary.guidance, compiled, log_level=0)
        self._size = vocabulary.size
        if self._matcher.is_error():
            raise _wrong(grammar, self._matcher.get_error())

    def allowed(self) -> NDArray[np.bool_]:
        """Return which tokens [V] may come next."""
        words = np.zeros(-(-self._size // 32), np.int32)
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        self._raise_if_failed()
        bits = np.unpackbits(words.view(np.uint8), count=self._size, bitorder="little")
        return bits.view(np.bool_)

    def accept(self, token: int) -> None:
        """Go on by one token."""
        self._matcher.consume_token(token)
        self._raise_if_failed()

    @property
    def finished(self) -> bool:
        """Whether the answer is complete, and nothing can follow."""
        return bool(self._matcher.is_stopped())

    def fork(self) -> GrammarState:
        """Return a copy that goes on by itself."""
        copied = object.__new__(GrammarState)
        copied._matcher, copied._size = self._matcher.deep_copy(), self._size
        return copied

    def _raise_if_failed(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(
                f"the answer must follow its grammar, but llguidance says: "
                f"{_first_line(self._matcher.get_error())} Use a simpler grammar."
            )


def _wrong(grammar: Grammar, reason: str) -> GrammarError:
    kind = grammar.kind.replace("_", " ")
    return GrammarError(
        f"grammar must be a {kind} that llguidance can compile, but it says: "
        f"{_first_line(reason)} {ADVICE}"
    )


def _first_line(reason: str) -> str:
    line = next((line for line in reason.splitlines() if line.strip()), "nothing.").strip()
    return line if line.endswith(".") else f"{line}."
