"""Decoder layers of known families: fused, they say what they said before."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import tiny_models
import torch
import transformers as hf
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from quire.errors import DeviceError
from quire.linear import PackedLinear, pack, unpack
from quire.linear.families import GatedMLP

IDS = torch.randint(1, tiny_models.VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(0))
FUSED = ("llama", "qwen2", "mistral")


def tiny(family: str) -> Any:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(tiny_models.DECODERS[family]).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name:
                parameter.uniform_(0.5, 1.5)
    return model


def logits(model: Any, ids: torch.Tensor = IDS, **options: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(ids, **options).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("attention", ["eager", "sdpa", "quire"])
@pytest.mark.parametrize("family", FUSED)
def test_a_fused_model_says_the_same(family: str, attention: str) -> None:
    model = tiny(family)
    expected = logits(model)
    packed = pack(copy.deepcopy(model))
    assert isinstance(packed.model.layers[1].mlp, GatedMLP)
    assert isinstance(packed.model.layers[1].self_attn.qkv, PackedLinear)
    packed.set_attn_implementation(attention)
    assert torch.allclose(logits(packed), expected, **tiny_models.CLOSE)
    new = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(packed.generate(IDS, **new), model.generate(IDS, **new))


@pytest.mark.parametrize("family", FUSED)
def test_unpacked_it_is_the_model_that_it_was(family: str) -> None:
    model = tiny(family)
    again = unpack(pack(copy.deepcopy(model)))
    assert torch.equal(logits(again), logits(model))
    assert {*again.state_dict()} == {*model.state_dict()}


def test_of_qwen3_the_mlp_is_fused() -> None:
    model = tiny("qwen3")
    packed = pack(copy.deepcopy(model))
    layer = packed.model.layers[1]
    assert isinstance(layer.mlp, GatedMLP) and isinstance(layer.self_attn.q_proj, PackedLinear)
    assert torch.allclose(logits(packed), logits(model), **tiny_models.CLOSE)
    again = unpack(packed)
    assert torch.equal(logits(again), logits(model))
    assert {*again.state_dict()} == {*model.state_dict()}


class ParallelLayer(LlamaDecoderLayer):
    """Has the attention and the MLP of a known family, and uses the second norm for both."""

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        x = self.post_attention_layernorm(hidden_states)
        attended, _ = self.self_attn(hidden_states=x, **kwargs)
        return hidden_states + attended + self.mlp(x)  # type: ignore[no-any-return]


class ShiftedRMSNorm(torch.nn.RMSNorm):
    """Is not the norm that a family has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 1


def share_the_gate(layers: Any) -> None:
    layers[1].mlp.gate_proj = layers[0].mlp.gate_proj
    layers[1].self_attn.k_proj = layers[0].self_attn.k_proj


def make_parallel(layers: Any) -> None:
    for layer in layers:
        layer.__class__ = ParallelLayer


def exchange_norms(layers: Any) -> None:
    for layer in layers:
        layer.input_layernorm, layer.post_attention_layernorm = (
            ShiftedRMSNorm(32),
            ShiftedRMSNorm(32),
        )


def exchange_forward(layers: Any) -> None:
    for layer in layers:
        norm, whole = layer.post_attention_layernorm, layer.forward
        layer.forward = lambda x, whole=whole, norm=norm, **options: whole(norm(x), **options)


@pytest.mark.parametrize(
    "change", [share_the_gate, make_parallel, exchange_norms, exchange_forward]
)
def test_what_only_looks_like_a_family_gets_plain_layers(change: Any) -> None:
    model = tiny("llama")
    change(model.model.layers)
    expected = logits(model)
    packed = pack(model)
    assert not any(isinstance(module, GatedMLP) for module in packed.modules())
    assert torch.allclose(logits(packed), expected, atol=5e-5)


FUSED_PARTS = ("self_attn.k_proj", "input_layernorm", "mlp", "mlp.up_proj", "mlp.act_fn")


def twice(module: Any) -> None:
    module.forward = lambda *args, own=module.forward: own(*args) * 2


def hooked(module: Any) -> None:
    module.register_forward_hook(lambda module, args, y: y * 2)


@pytest.mark.parametrize("change", [twice, hooked])
@pytest.mark.parametrize("place", FUSED_PARTS)
def test_what_somebody_has_changed_is_not_fused(place: str, change: Any) -> None:
    model = tiny("llama")
    layers = model.model.layers
    change(layers[0].get_submodule(place))
    expected = logits(model)
    packed = pack(model)
    whole = [hasattr(layers[0].self_attn, "qkv"), isinstance(layers[0].mlp, GatedMLP)]
    assert whole == ([True, False] if "mlp" in place else [False, True])
    assert hasattr(layers[1].self_attn, "qkv") and isinstance(layers[1].mlp, GatedMLP)
    assert torch.allclose(logits(packed), expected, atol=5e-5)


def test_norms_that_are_row_wise_already_are_fused_and_come_back() -> None:
    model = tiny("llama")
    expected = logits(model)
    packed = pack(pack(model, only="lm_head", rowwise=True))
    assert isinstance(packed.model.layers[0].mlp, GatedMLP)
    again = unpack(packed)
    assert not any("forward" in vars(module) for module in again.modules())
    assert torch.equal(logits(again), expected)


def test_a_model_on_another_device_is_refused_and_keeps_its_weights() -> None:
    model = tiny("llama").to("meta")
    with pytest.raises(DeviceError, match="must be on the CPU"):
        pack(model)
    layer = model.model.layers[0]
    parts = [layer.self_attn.q_proj, layer.self_attn.k_proj, layer.mlp.up_proj]
    assert all(part.weight.numel() for part in parts)


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_other_families_get_plain_layers(family: str) -> None:
    model = tiny(family)
    packed = pack(copy.deepcopy(model))
    assert not any(isinstance(module, GatedMLP) for module in packed.modules())
    assert torch.allclose(logits(packed), logits(model), atol=5e-5)


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8", "w8a8"])
def test_a_sequence_does_not_depend_on_its_neighbours(weights: Any) -> None:
    packed = pack(tiny("llama"), weights)
    packed.set_attn_implementation("quire")
    whole = logits(packed)
    for first, last in ((0, 1), (1, 3), (2, 3)):
        assert torch.equal(logits(packed, IDS[first:last]), whole[first:last])


def test_fusing_can_be_left_out_or_chosen() -> None:
    plain = pack(tiny("llama"), fused=False)
    assert isinstance(plain.model.layers[0].self_attn.q_proj, PackedLinear)
    some = pack(tiny("llama"), only=["*.mlp.*"])
    assert isinstance(some.model.layers[0].mlp, GatedMLP)
    assert type(some.model.layers[0].self_attn.q_proj) is torch.nn.Linear
    assert torch.allclose(logits(some), logits(plain), **tiny_models.CLOSE)


def test_progress_counts_fused_layers(capfd: pytest.CaptureFixture[str]) -> None:
    pack(tiny("llama"), progress=True)
    shown = capfd.readouterr().err.split("\r")
    seen = [(line.split()[-2], line.split()[-1]) for line in shown if "layers" in line]
    assert seen[:3] == [
        ("0/15", "model.layers.0.self_attn.qkv"),
        ("3/15", "model.layers.0.mlp.gate_up"),
        ("5/15", "model.layers.1.self_attn.qkv"),
    ]
    assert "15/15" in shown[-1]


def test_fused_models_are_copied_pickled_and_watched() -> None:
    packed = pack(tiny("llama"), "int8")
    expected = logits(packed)
    for other in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))):
        again = logits(other)
        assert torch.equal(again, expected)
        assert other.model.layers[0].self_attn.forward.args[0] is other.model.layers[0].self_attn
    with torch.no_grad():
        seen = packed(IDS, output_hidden_states=True)
    assert len(seen.hidden_states) == 3


def test_in_bfloat16() -> None:
    model = tiny("llama").to(torch.bfloat16)
    packed = pack(copy.deepcopy(model), "bfloat16")
    assert torch.allclose(logits(packed).float(), logits(model).float(), atol=0.2)
    assert unpack(packed).model.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
