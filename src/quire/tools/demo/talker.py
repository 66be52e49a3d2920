"""The language model of the demo: SmolLM2 where it is installed, else one that knows nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from quire.integrations import smollm2

LETTERS = " abcdefghijklmnopqrstuvwxyz.,"


Asked: TypeAlias = str | Sequence[dict[str, str]]
"""A question, or a conversation whose last turn is one."""


class Talker(NamedTuple):
    """A model on quire, and what turns text into tokens and back."""

    model: Any
    tokenizer: Any
    name: str
    missing: tuple[str, ...] = ()

    def batch(self, questions: Sequence[Asked]) -> dict[str, Tensor]:
        """Questions to the assistant, padded on the left."""
        asked = [
            [{"role": "user", "content": question}] if isinstance(question, str) else question
            for question in questions
        ]
        found = self.tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        return {name: found[name] for name in ("input_ids", "attention_mask")}

    def text(self, tokens: Tensor) -> str:
        """One answer."""
        found: str = self.tokenizer.decode(tokens, skip_special_tokens=True)
        return " ".join(found.split())


def talker() -> Talker:
    """The best that there is."""
    if absent := smollm2.missing():
        return Talker(_random_model(), Spelling(), "a small random model", tuple(absent))
    model, tokenizer = smollm2.load()
    return Talker(model, tokenizer, "SmolLM2-135M-Instruct")


def _random_model() -> Any:
    from transformers import AutoModelForCausalLM, LlamaConfig

    import quire.integrations.transformers  # noqa: F401  makes the name known

    config = LlamaConfig(
        vocab_size=len(LETTERS) + 1,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=len(LETTERS),
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="quire").eval()


class Spelling:
    """A tokenizer of single letters, with what the demo asks of one."""

    def apply_chat_template(
        self, asked: Sequence[Sequence[dict[str, str]]], **_: object
    ) -> dict[str, Tensor]:
        """Letters, padded on the left."""
        texts = ["".join(each["content"] for each in turn).lower() for turn in asked]
        rows = [[max(0, LETTERS.find(letter)) for letter in text] for text in texts]
        width = max(map(len, rows))
        padded = [[len(LETTERS)] * (width - len(row)) + row for row in rows]
        tokens = torch.tensor(padded)
        return {"input_ids": tokens, "attention_mask": (tokens < len(LETTERS)).long()}

    def decode(self, tokens: Tensor, **_: object) -> str:
        """The letters."""
        return "".join(LETTERS[token] for token in tokens.tolist() if token < len(LETTERS))
