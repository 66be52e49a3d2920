"""The tokens of a model: their bytes, those that end an answer, and llguidance's view of them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

from quire.checks.arguments import whole_number
from quire.errors import ArgumentError, MissingPackageError
from quire.support.locks import lock


class Vocabulary:
    """The tokens of a model with `size` logits, spelled by a tokenizer of transformers.

    `ends` are the tokens that end an answer, by default the tokenizer's own. Without a tokenizer
    tokens have no text: answers are ids, and neither stop strings nor grammars can be asked for.
    """

    def __init__(
        self, tokenizer: Any = None, *, size: int, ends: Iterable[int] | None = None
    ) -> None:
        advice = "Give the number of logits of the model."
        self.size = whole_number("size", size, minimum=1, advice=advice)
        self.tokenizer = tokenizer
        if ends is None:
            own = getattr(tokenizer, "eos_token_id", None)
            ends = [] if own is None else own if isinstance(own, Sequence) else [own]
        self.ends = frozenset(int(end) for end in ends)
        # A model may have more logits than tokens, so that their number is round.
        self._spelled = 0 if tokenizer is None else len(tokenizer)
        self._special = _special_tokens(tokenizer)
        self._bytes: dict[int, bytes] = {}
        self._lock = lock()

    @functools.cached_property
    def guidance(self) -> Any:
        """The tokenizer of llguidance with these tokens. Making it takes a fifth of a second."""
        if not hasattr(self.tokenizer, "backend_tokenizer"):
            raise ArgumentError(
                f"the tokenizer must be a fast one of transformers for text, stop strings and "
                f"grammars, but is {type(self.tokenizer).__name__}. Give the model's own tokenizer."
            )
        try:
            from llguidance.hf import from_tokenizer
        except ModuleNotFoundError as error:
            raise MissingPackageError(
                "the package llguidance must be installed for text and grammars, but is not. "
                "Install it: pip install 'quire[engine]'."
            ) from error
        with self._lock:
            ends = sorted(self.ends) or None
            try:
                return from_tokenizer(self.tokenizer, n_vocab=self.size, eos_token=ends, slices=[])
            except ValueError as error:
                raise ArgumentError(
                    f"the tokenizer must spell its tokens by bytes and have at most {self.size} of "
                    f"them, but llguidance says: {error}. Give the model's own tokenizer."
                ) from error

    def spelling(self, token: int) -> bytes:
        """Return the bytes of a token, those of its name if it is special.

        They need not be whole characters.
        """
        known = self._bytes.get(token)
        if known is None:
            known = self._bytes[token] = bytes(self.guidance.decode_bytes([token]))
        return known

    def text_bytes(self, token: int) -> bytes:
        """Return what a token adds to the text of an answer: nothing if it is special."""
        if self.tokenizer is None or token in self._special or token >= self._spelled:
            return b""
        return self.spelling(token)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with those that the tokenizer puts before every text."""
        return list(self.tokenizer(text)["input_ids"])


def _special_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that are not text, such as the end of a turn."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    special = (token for token, content in added.items() if content.special)
    return frozenset([*special, *getattr(tokenizer, "all_special_ids", ())])
