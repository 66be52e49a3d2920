"""A real language model says the same with quire as without, from tensors and from pages."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from quire.errors import MissingModelError
from quire.integrations import smollm2

PROMPTS = (
    "What is the capital of France?",
    "Write a list of five fruits, separated by commas. Do not explain or number them.",
    "Explain in one sentence why the sky is blue.",
)
NEW = 9


class Chat(NamedTuple):
    """The model, and a padded batch of questions."""

    model: Any
    tokenizer: Any
    batch: Any

    def answer(self, attention: str, **options: Any) -> Any:
        self.model.set_attn_implementation(attention)
        torch.manual_seed(0)
        return self.model.generate(
            **self.batch,
            **{"max_new_tokens": NEW, "do_sample": False, **options},
            return_dict_in_generate=True,
            output_scores=True,
        )

    def texts(self, found: Any) -> list[str]:
        new = found.sequences[:, self.batch["input_ids"].shape[1] :]
        return self.tokenizer.batch_decode(new, skip_special_tokens=True)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def chat() -> Iterator[Chat]:
    if absent := smollm2.missing():
        pytest.skip(f"{' and '.join(absent)} not installed: {smollm2.HOW_TO_INSTALL}")

    def refuse(*_: object) -> None:
        raise AssertionError("the model is on the disk: nothing may be asked for over the network")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", refuse)
        model, tokenizer = smollm2.load()
        asked = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        batch = tokenizer.apply_chat_template(
            asked, add_generation_prompt=True, return_tensors="pt", return_dict=True, padding=True
        )
        yield Chat(model, tokenizer, batch)


@pytest.mark.slow
def test_greedy_answers_of_a_padded_batch(chat: Chat) -> None:
    from tiny_models import assert_same_text

    from quire.integrations.transformers import PagedCache

    prompt = chat.batch["input_ids"].shape[1]
    lengths = chat.batch["attention_mask"].sum(1)
    assert len(set(lengths.tolist())) == 3
    wanted = chat.answer("eager")
    assert "Paris" in chat.texts(wanted)[0]
    assert_same_text(chat.answer("quire"), wanted, prompt)
    cache = PagedCache(chat.model.config)
    assert_same_text(chat.answer("quire", past_key_values=cache), wanted, prompt)
    assert cache.pages is not None
    steps = wanted.sequences.shape[1] - prompt
    assert cache.pages.statistics().tokens == int(lengths.sum()) + 3 * (steps - 1)


@pytest.mark.slow
def test_samples_share_the_pages_of_their_prompt(chat: Chat) -> None:
    from quire.integrations.transformers import PagedCache

    cache = PagedCache(chat.model.config)
    chat.answer(
        "quire", do_sample=True, num_return_sequences=3, max_new_tokens=3, past_key_values=cache
    )
    assert cache.pages is not None
    lengths = chat.batch["attention_mask"].sum(1)
    assert cache.pages.statistics().shared == int((lengths // 16).sum())


def test_the_file_is_found_without_importing_its_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "a_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(smollm2, "PACKAGE", "a_model")
    monkeypatch.setattr(smollm2, "NEEDED", ("a_model",))
    with pytest.raises(
        MissingModelError, match=r"must be .*, but there is no such file\. Install: pip"
    ):
        smollm2.weights()
    (package / smollm2.FILE).write_bytes(b"GGUF, but another")
    with pytest.raises(
        MissingModelError, match=f"with sha256 {smollm2.SHA256}, but its sha256 is [0-9a-f]{{64}}"
    ):
        smollm2.weights()


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "NEEDED", ("torch", "no_such_package"))
    assert smollm2.missing() == ["no_such_package"]
    with pytest.raises(
        MissingModelError, match=r"no_such_package must be installed .* Install: pip install"
    ):
        smollm2.load()
