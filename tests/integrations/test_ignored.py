"""A model that ignores its attention function causes a warning, and no other model does."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

hf = pytest.importorskip("transformers")

from tiny_models import BERT, DECODERS, T5, VOCABULARY, WHISPER, tokens  # noqa: E402

from quire.errors import QuireError  # noqa: E402
from quire.integrations import transformers as ours  # noqa: E402
from quire.integrations.transformers import IgnoredAttentionWarning, enable  # noqa: E402

_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 40,
}
IGNORE: dict[str, Any] = {
    "openai-gpt": hf.OpenAIGPTConfig(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=64
    ),
    "megatron-bert": hf.MegatronBertConfig(**_SMALL),
    "xlnet": hf.XLNetConfig(
        vocab_size=VOCABULARY, d_model=32, n_layer=2, n_head=4, d_inner=40, d_head=8
    ),
    "mpnet": hf.MPNetConfig(**_SMALL),
    "roformer": hf.RoFormerConfig(**_SMALL),
    "squeezebert": hf.SqueezeBertConfig(
        **_SMALL, embedding_size=32, q_groups=1, k_groups=1, v_groups=1, post_attention_groups=1,
        intermediate_groups=1, output_groups=1,
    ),
}  # fmt: skip
USE: dict[str, Any] = {**DECODERS, "bert": BERT, "whisper": WHISPER, "t5": T5}


def built(config: Any) -> Any:
    return hf.AutoModel.from_config(copy.deepcopy(config), attn_implementation="quire").eval()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The layers that attend with quire."""
    called: list[nn.Module] = []

    def attend(module: nn.Module, *arguments: Any, **options: Any) -> Any:
        called.append(module)
        return ours.attend(module, *arguments, **options)

    hf.AttentionInterface.register("quire", attend)
    yield called
    ours.register()


@pytest.mark.parametrize("kind", IGNORE)
def test_a_model_that_attends_by_itself_is_told_of_once(kind: str, calls: list[nn.Module]) -> None:
    with pytest.warns(IgnoredAttentionWarning, match="but .* of .* computes its own") as told:
        model = built(IGNORE[kind])
    assert len(told) == 1 and told[0].filename == __file__
    plain = hf.AutoModel.from_config(
        copy.deepcopy(IGNORE[kind]), attn_implementation="eager"
    ).eval()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        got, wanted = (each(tokens(1, 5)).last_hidden_state for each in (model, plain))
    assert torch.equal(got, wanted)
    assert not calls, "it does use quire, and should not be told of"


@pytest.mark.parametrize("kind", USE)
def test_a_model_that_looks_its_attention_up_is_not(kind: str, calls: list[nn.Module]) -> None:
    model = built(USE[kind])  # a warning is an error here
    inputs: dict[str, Any] = {"input_ids": tokens(1, 5)}
    if kind == "whisper":
        inputs = {"input_features": torch.randn(1, 8, 60), "decoder_input_ids": tokens(1, 5)}
    if kind == "t5":
        inputs["decoder_input_ids"] = tokens(1, 5)
    with torch.no_grad():
        model(**inputs)
    assert calls


def test_a_layer_that_leaves_it_to_torch_is_told_of() -> None:
    config = hf.WavLMConfig(
        **_SMALL, conv_dim=(8,), conv_stride=(2,), conv_kernel=(3,), num_conv_pos_embedding_groups=2
    )
    with pytest.warns(IgnoredAttentionWarning, match="WavLMAttention"):
        built(config)


def test_parts_of_a_model_are_told_of_once() -> None:
    """The model with a head makes the model without, and both are models."""
    with pytest.warns(IgnoredAttentionWarning) as told:
        hf.MegatronBertForMaskedLM._from_config(
            IGNORE["megatron-bert"], attn_implementation="quire"
        )
    assert len(told) == 1 and "MegatronBertSelfAttention" in str(told[0].message)


def test_another_attention_is_none_of_our_business() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hf.AutoModel.from_config(copy.deepcopy(IGNORE["mpnet"]), attn_implementation="eager")
        hf.AutoModel.from_config(hf.MambaConfig(**_SMALL), attn_implementation="quire")


def test_a_loaded_model_is_told_of_too() -> None:
    model = hf.AutoModel.from_config(copy.deepcopy(IGNORE["mpnet"]), attn_implementation="eager")
    with pytest.warns(IgnoredAttentionWarning, match="MPNetSelfAttention") as told:
        enable(model)
    assert len(told) == 1 and told[0].filename == __file__


def test_it_can_be_made_an_error() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", IgnoredAttentionWarning)
        with pytest.raises(IgnoredAttentionWarning):
            built(IGNORE["roformer"])
    assert not issubclass(IgnoredAttentionWarning, QuireError)


def test_registering_again_does_not_watch_twice() -> None:
    before = hf.PreTrainedModel.post_init
    ours.register()
    assert hf.PreTrainedModel.post_init is before
