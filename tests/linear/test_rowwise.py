"""Whole decoders whose rows do not know each other: layers, norms, activations, experts."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import torch.nn.functional as F
import transformers as hf
from torch import Tensor, nn

from quire.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    PackedTrainingError,
    ShapeError,
)
from quire.linear import PackedLinear, load, pack, save, unpack
from quire.linear.experts import gate_of
from quire.linear.rowwise import RowWise, kind_of, place_rows

MIXTRAL = hf.MixtralConfig(
    **tiny_models._DECODER, num_local_experts=4, num_experts_per_tok=2, sliding_window=None
)
CONFIGS = {**tiny_models.DECODERS, "mixtral": MIXTRAL}
FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "mistral",
    "gemma2",
    "gemma3",
    "gpt2",
    "gpt_oss",
    "mixtral",
    "llama4",
)
IDS = torch.randint(1, tiny_models.VOCABULARY, (65, 7), generator=torch.Generator().manual_seed(0))
WIDTHS = (1, 3, 16, 33, 63, 100, 576, 577)


def untrained(family: str) -> Any:
    config = copy.deepcopy(CONFIGS[family])
    return hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def tiny(family: str, dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    model = untrained(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name or ".ln_" in name:
                parameter.uniform_(0.5, 1.5)
            elif parameter.dim() == 3 or "router" in name:
                parameter.normal_(0, 0.3)
    return model.to(dtype)


def on_quire(family: str, weights: Any = "float32", dtype: torch.dtype = torch.float32) -> Any:
    model = pack(tiny(family, dtype), weights)
    model.set_attn_implementation("quire")
    return model


@torch.no_grad()
def states(model: Any, ids: Tensor) -> list[Tensor]:
    """The hidden states after every layer, and the logits."""
    found = model(ids, output_hidden_states=True, use_cache=False)
    return [*found.hidden_states, found.logits]


def assert_equal(found: list[Tensor], expected: list[Tensor], what: str) -> None:
    for depth, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(ours, theirs), f"{what}: layer {depth}"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_does_not_know_the_others(family: str) -> None:
    model = on_quire(family)
    for length in (1, 7):
        torch.set_num_threads(1)
        alone = {row: states(model, IDS[row : row + 1, :length]) for row in (0, 5, 64)}
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for first, last in ((0, 1), (0, 2), (4, 7), (3, 8), (60, 65), (0, 17), (0, 65)):
                batch = states(model, IDS[first:last, :length])
                for row in alone.keys() & range(first, last):
                    place = row - first
                    mine = [each[place : place + 1] for each in batch]
                    assert_equal(
                        mine, alone[row], f"row {row} of {first}:{last}, {threads} threads"
                    )


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_does_not_know_those_after_it(family: str) -> None:
    model = on_quire(family)
    whole = states(model, IDS[:1])
    for length in (1, 2, 5):
        mine = states(model, IDS[:1, :length])
        assert_equal(mine, [each[:, :length] for each in whole], f"the first {length}")


@pytest.mark.parametrize("weights", ["bfloat16", "int8", "w4a8"])
@pytest.mark.parametrize("family", ["gpt2", "gpt_oss", "gemma2"])
def test_other_formats(family: str, weights: Any) -> None:
    model = on_quire(family, weights, torch.bfloat16)
    alone = states(model, IDS[5:6])
    for first, last in ((4, 7), (0, 33)):
        batch = states(model, IDS[first:last])
        assert_equal([each[5 - first : 6 - first] for each in batch], alone, f"{first}:{last}")


@pytest.mark.parametrize("family", FAMILIES)
def test_it_says_what_the_model_said(family: str) -> None:
    model = tiny(family)
    expected = states(model, IDS[:4])
    packed = pack(copy.deepcopy(model))
    for ours, theirs in zip(states(packed, IDS[:4]), expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4, rtol=1e-4)
    unpacked = unpack(packed)
    assert {*unpacked.state_dict()} == {*model.state_dict()}
    assert_equal(states(unpacked, IDS[:4]), expected, "unpacked")


@pytest.mark.parametrize("family", ["gpt2", "gpt_oss", "gemma3", "mixtral", "llama4"])
def test_files_copies_and_pickles(family: str, tmp_path: Path) -> None:
    packed = pack(tiny(family), "int8")
    others = [copy.deepcopy(packed), pickle.loads(pickle.dumps(packed))]
    expected = states(packed, IDS[:2])
    save(packed, tmp_path / "model.safetensors")
    with torch.device("meta"):
        empty = untrained(family)
    loaded = load(empty, tmp_path / "model.safetensors")
    for other in (loaded, *others):
        assert_equal(states(other, IDS[:2]), expected, "another")
    assert {*unpack(loaded).state_dict()} == {*unpack(packed).state_dict()}


def test_every_product_of_these_models_is_packed() -> None:
    for family in FAMILIES:
        for name, module in pack(tiny(family)).named_modules():
            own = [each for each in module._parameters.values() if each is not None]
            known = isinstance(module, PackedLinear | nn.Embedding) or "packed" in dir(module)
            assert known or all(each.dim() < 2 for each in own), f"{family}: {name}"
            norm = "Norm" in type(module).__name__ and own
            assert not norm or isinstance(module.forward, RowWise), f"{family}: {name}"


def test_a_row_without_an_expert_gets_nothing_from_it() -> None:
    """A process that has some of the experts gives the others a number that no expert has."""
    experts = tiny("mixtral").model.layers[0].mlp.experts
    pack(nn.ModuleList([experts]))
    rows, chosen = torch.randn(5, 32), torch.tensor([[0, 1]]).expand(5, 2).clone()
    weights = torch.full((5, 2), 0.5)
    chosen[:, 1], weights[:, 1] = experts.num_experts, 0
    expected = experts.down[0](experts.gate_up[0](rows)) * 0.5
    with pytest.MonkeyPatch.context() as patch:  # memory that was used before may hold anything
        patch.setattr(Tensor, "new_empty", lambda x, *shape: x.new_full(shape, torch.nan))
        assert torch.equal(experts(rows, chosen, weights), expected)


def test_a_model_that_is_only_looked_at_stays_as_it_is() -> None:
    experts = tiny("llama4").model.layers[0].feed_forward.experts
    before = {*vars(experts)}
    assert gate_of(experts) is not None and {*vars(experts)} == before


def test_a_router_scores_each_row_by_itself() -> None:
    """PyTorch's sigmoid computes the end of an array by other instructions than the rest."""
    config = hf.Llama4TextConfig(hidden_size=32, num_local_experts=3, num_experts_per_tok=2)
    router = hf.models.llama4.modeling_llama4.Llama4Router(config)
    pack(nn.ModuleList([router]))
    x = torch.randn(65, 32)
    scores, logits = router(x)
    for row in range(65):
        alone, _ = router(x[row : row + 1])
        assert torch.equal(alone, scores[row : row + 1])
    expected = torch.where(scores > 0, logits.sigmoid(), 0)
    assert torch.allclose(scores, expected) and (scores > 0).sum() == 2 * 65


@pytest.mark.parametrize("family", ["mixtral", "llama4"])
def test_experts_and_routers_that_somebody_has_changed(family: str) -> None:
    """A hook on experts stays there. Another forward function would be lost."""
    model = tiny(family)
    named = dict(model.model.layers[0].named_modules())
    experts = next(each for name, each in named.items() if name.endswith("experts"))
    router = next(each for each in named.values() if type(each).__name__.endswith("Router"))
    for module in (experts, router):
        module.forward = lambda x, *args, own=module.forward: own(2 * x, *args)
    second = next(
        each for name, each in model.model.layers[1].named_modules() if name.endswith("experts")
    )
    second.act_fn = nn.SiLU()
    second.act_fn.register_forward_hook(lambda module, args, y: y * 2)
    expected = states(model, IDS[:4])
    packed = pack(model)
    assert not any("gate_up" in name for name, _ in packed.named_modules())
    for ours, theirs in zip(states(packed, IDS[:4]), expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-4, rtol=1e-4)


# --- norms and activations by themselves

MODULES: dict[str, Any] = {
    "rms": lambda width: nn.RMSNorm(width, eps=1e-6),
    "layer": lambda width: nn.LayerNorm(width),
    "no bias": lambda width: nn.LayerNorm(width, bias=False),
    "gemma": lambda width: hf.models.gemma2.modeling_gemma2.Gemma2RMSNorm(width),
    "nemotron": lambda width: hf.models.nemotron.modeling_nemotron.NemotronLayerNorm1P(width),
    "silu": lambda width: nn.SiLU(),
    "gelu": lambda width: nn.GELU(),
    "gelu tanh": lambda width: nn.GELU(approximate="tanh"),
    "new gelu": lambda width: hf.activations.ACT2FN["gelu_new"],
    "quick gelu": lambda width: hf.activations.ACT2FN["quick_gelu"],
    "sigmoid": lambda width: nn.Sigmoid(),
}


def module_of(name: str, width: int) -> Any:
    module = MODULES[name](width).requires_grad_(False)
    for parameter in module.parameters():
        parameter.uniform_(0.5, 1.5)
    return module


@pytest.mark.every_width
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", MODULES)
def test_a_row_is_computed_by_itself(name: str, dtype: torch.dtype) -> None:
    for width in WIDTHS:
        module = module_of(name, width).to(dtype)
        x = (torch.randn(130, 2 * width) * 3).to(dtype)[:, ::2]
        expected = copy.deepcopy(module).float()(x.float())
        kind = kind_of(module)
        assert kind is not None
        place_rows(module, kind)
        found = module(x)
        near = 4 * torch.finfo(dtype).eps
        assert torch.allclose(found.float(), expected, rtol=near, atol=near * 4)
        for first, last in ((0, 1), (1, 3), (0, 65), (129, 130)):
            for rows in (x[first:last], x[first:last].contiguous()):
                assert torch.equal(module(rows), found[first:last])
        torch.set_num_threads(1)
        assert torch.equal(module(x.unflatten(0, (2, 65))), found.unflatten(0, (2, 65)))
        torch.set_num_threads(2)


def test_a_norm_has_the_bits_of_a_fused_one() -> None:
    norm, x = module_of("rms", 70), torch.randn(9, 70)
    eye = PackedLinear.from_weight(torch.eye(70), norm=norm)
    expected = eye(x)
    place_rows(norm, kind_of(norm) or pytest.fail("not known"))
    assert torch.equal(norm(x), expected)


def test_other_weights_are_seen() -> None:
    norm, x = module_of("gemma", 32), torch.randn(2, 32)
    place_rows(norm, kind_of(norm) or pytest.fail("not known"))
    before = norm(x)
    norm.weight += 1
    assert torch.allclose(norm(x), before + F.rms_norm(x, (32,), eps=1e-6), atol=1e-5)
    norm.weight = nn.Parameter(norm.weight - 1, requires_grad=False)
    assert torch.allclose(norm(x), before, atol=1e-6)


def test_rows_under_another_default_device_and_with_gradients() -> None:
    norm, silu = nn.LayerNorm(59), nn.SiLU()  # of a size that no other test has
    x = torch.randn(3, 59, dtype=torch.complex64).conj().imag
    with torch.no_grad():
        expected = norm(x), silu(x)
    with torch.device("meta"):
        pack(nn.ModuleList([norm, silu]))
        assert all(isinstance(each.forward, RowWise) for each in (norm, silu))
        found = norm(x), silu(x)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    norm.weight.requires_grad_()
    with pytest.raises(PackedTrainingError, match="weight must not require a gradient"):
        norm(x)
    with torch.no_grad():
        assert torch.equal(norm(x), found[0])
    norm.to("meta")
    with torch.no_grad(), pytest.raises(DeviceError, match="weight must be on the CPU"):
        norm(x)


def test_what_is_no_rows() -> None:
    module = module_of("rms", 8)
    place_rows(module, kind_of(module) or pytest.fail("not known"))
    assert module(torch.empty(0, 3, 8)).shape == (0, 3, 8)
    with pytest.raises(ShapeError, match="end with 8"):
        module(torch.randn(2, 7))
    with pytest.raises(DtypeError, match="float64"):
        module(torch.randn(2, 8).double())
    with pytest.raises(PackedTrainingError):
        module(torch.randn(2, 8, requires_grad=True))


class CenteredRMSNorm(nn.RMSNorm):
    """Has the name of a known norm, and computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x - x.mean(-1, keepdim=True))


def test_a_norm_that_only_looks_known() -> None:
    norm = CenteredRMSNorm(12)
    assert kind_of(norm) is None
    with pytest.raises(ArgumentError, match="CenteredRMSNorm computes something else"):
        PackedLinear.from_weight(torch.randn(4, 12), norm=norm)
    model = nn.Sequential(nn.Linear(12, 12), norm)
    x = torch.randn(3, 12)
    with torch.no_grad():
        expected = model(x)
    assert torch.allclose(pack(model)(x), expected, atol=1e-5)


class FarLayerNorm(nn.LayerNorm):
    """Inherits from a known norm, and computes something else."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).clamp(max=0.5)


class GatedRMSNorm(nn.RMSNorm):
    """Takes a second tensor."""

    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(x if gate is None else x * gate)


class NeedsGateRMSNorm(nn.RMSNorm):
    """Takes a second tensor always."""

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return super().forward(x * gate)


class SplitRMSNorm(nn.RMSNorm):
    """Returns two tensors."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x), x


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (FarLayerNorm, "FarLayerNorm computes something else"),
        (GatedRMSNorm, "takes x, gate"),
        (NeedsGateRMSNorm, "raises TypeError"),
        (SplitRMSNorm, "returns something else"),
    ],
)
def test_norms_of_others_are_left_alone(kind: type[nn.Module], reason: str) -> None:
    norm = kind(12)
    with pytest.raises(ArgumentError, match=reason):
        PackedLinear.from_weight(torch.randn(4, 12), norm=norm)
    model = pack(nn.ModuleList([norm, nn.Linear(12, 12)]))
    assert "forward" not in vars(model[0]) and isinstance(model[1], PackedLinear)


def test_a_norm_on_another_device_is_left_alone() -> None:
    norm = nn.LayerNorm(12, device="meta")
    assert kind_of(norm) is None
    with pytest.raises(DeviceError, match="norm_weight must be on the CPU"):
        PackedLinear.from_weight(torch.randn(4, 12), norm=norm)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_large_weights_hide_no_offset(dtype: torch.dtype) -> None:
    for name, offset in (("gemma", 1), ("rms", 0), ("nemotron", 1), ("layer", 0)):
        norm = module_of(name, 24).to(dtype)
        norm.weight.uniform_(50, 60)
        kind = kind_of(norm)
        assert kind is not None and kind.offset == offset, name


@pytest.mark.parametrize("name", ["gemma", "nemotron"])
def test_a_norm_that_adds_to_its_weight_can_be_fused(name: str) -> None:
    norm, x = module_of(name, 24), torch.randn(3, 24)
    weight = torch.randn(10, 24)
    fused = PackedLinear.from_weight(weight, norm=norm)(x)
    assert torch.allclose(fused, norm(x) @ weight.T, atol=1e-4)


def test_rows_can_be_left_as_they_are() -> None:
    plain = pack(tiny("llama"), rowwise=False)
    some = pack(tiny("llama"), only=["lm_head"])
    both = pack(tiny("llama"), only=["lm_head"], rowwise=True)
    kinds = [isinstance(each.model.norm.forward, RowWise) for each in (plain, some, both)]
    assert kinds == [False, False, True]
