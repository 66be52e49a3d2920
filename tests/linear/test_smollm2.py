"""A real language model on packed layers: its logits, its answers, and rows that stay the same."""

from __future__ import annotations

import copy
import importlib
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from quire.errors import PackedFileError
from quire.integrations import smollm2
from quire.linear import pack, packed_layers
from quire.linear.gguf import FileWeights

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


class Plain(NamedTuple):
    model: Any
    tokenizer: Any
    ids: torch.Tensor
    logits: torch.Tensor


@pytest.fixture(scope="module")
def plain() -> Iterator[Plain]:
    if absent := smollm2.missing():
        pytest.skip(f"{' and '.join(absent)} not installed: {smollm2.HOW_TO_INSTALL}")
    model, tokenizer = smollm2.load("sdpa")
    ids = tokenizer("The capital of France is a city that", return_tensors="pt").input_ids
    with torch.no_grad():
        yield Plain(model, tokenizer, ids, model(ids).logits)


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("answers")


def packed(plain: Plain, **options: Any) -> Any:
    return pack(copy.deepcopy(plain.model), **options)


@pytest.mark.parametrize("fused", [True, False])
def test_float32_has_the_logits_of_transformers(plain: Plain, fused: bool) -> None:
    logits = packed(plain, fused=fused)(plain.ids).logits
    assert (logits - plain.logits).abs().max() < 1e-4


def test_blocks_of_its_file_have_the_bits_of_float32(plain: Plain) -> None:
    """The file has Q4_1 and Q8_0 blocks, which transformers decodes to float32."""
    model = packed(plain, gguf=smollm2.weights())
    assert {layer.shape.weights for _, layer in packed_layers(model)} == {"int4", "int8"}
    assert sum(layer.packed.nbytes for _, layer in packed_layers(model)) < 97e6
    assert torch.equal(model(plain.ids).logits, packed(plain)(plain.ids).logits)


def test_a_file_is_read_layer_by_layer(plain: Plain, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most q, k and v are integers at a time, which become one layer."""
    seen: list[weakref.ref[torch.Tensor]] = []
    counts, own = [], FileWeights.get

    def get(self: FileWeights, name: str) -> Any:
        found = own(self, name)
        if found is not None:
            seen.append(weakref.ref(found.numbers))
        counts.append(sum(each() is not None for each in seen))
        return found

    monkeypatch.setattr(FileWeights, "get", get)
    packed(plain, gguf=smollm2.weights())
    assert len(seen) == 30 * 7 + 1 and max(counts) == 3


def test_another_file_is_refused(plain: Plain) -> None:
    other = copy.deepcopy(plain.model)
    with torch.no_grad():
        other.model.layers[3].mlp.up_proj.weight[0, 0] += 1
    with pytest.raises(PackedFileError, match=r"is not model\.layers\.3\.mlp\.up_proj"):
        pack(other, gguf=smollm2.weights())


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8"])
def test_narrow_weights_go_on_as_float32_does(
    plain: Plain, scores: ModuleType, weights: Any
) -> None:
    """A few of the 50 prompts of `benchmarks/answers.py --only answers`."""
    prompts = scores.PROMPTS[:4]
    answers = scores.greedy(plain.model, plain.tokenizer, prompts, new=12)
    assert all(0 < ids.shape[1] - prompt <= 12 for ids, prompt in answers)
    share = scores.agreement(packed(plain, weights=weights), answers)
    assert share == 1.0 if weights == "float32" else share >= 0.95


@pytest.mark.parametrize("weights", ["w8a8"])
def test_perplexity_hardly_changes(plain: Plain, scores: ModuleType, weights: Any) -> None:
    ids = plain.tokenizer(scores.PAGE.read_text(), return_tensors="pt").input_ids[:, :256]
    before = scores.perplexity_of(plain.model, ids)
    after = scores.perplexity_of(packed(plain, weights=weights), ids)
    assert abs(after / before - 1) < 0.03


@pytest.mark.parametrize("weights", ["int8"])
def test_a_token_does_not_depend_on_the_batch(plain: Plain, weights: Any) -> None:
    model = packed(plain, weights=weights)
    model.set_attn_implementation("quire")
    alone = model(plain.ids).logits
    many = torch.randint(100, 40_000, (9, plain.ids.shape[1]))
    many[4] = plain.ids[0]
    assert torch.equal(model(many).logits[4:5], alone)
