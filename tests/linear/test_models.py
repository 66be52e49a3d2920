"""`pack` and `unpack` of whole models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from quire.errors import ArgumentError, DtypeError
from quire.linear import PackedEmbedding, PackedLinear, pack, packed_layers, unpack


class Tied(nn.Module):
    """A language model of one layer, whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 48, padding_idx=0)
        self.mix = nn.Sequential(nn.Linear(48, 80), nn.GELU(), nn.Linear(80, 48, bias=False))
        self.head = nn.Linear(48, 100, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Any) -> Any:
        x = self.embed(ids)
        return self.head(x + self.mix(x))


IDS = torch.tensor([[1, 5, 99, 0, 17]])


def test_all_layers_are_exchanged_and_come_back() -> None:
    model = Tied()
    with torch.no_grad():
        expected = model(IDS)
    assert pack(model) is model
    assert [name for name, _ in packed_layers(model)] == ["mix.0", "mix.2", "head"]
    assert torch.allclose(model(IDS), expected, atol=1e-5)
    unpack(model)
    assert type(model.head) is nn.Linear and type(model.embed) is nn.Embedding
    assert torch.equal(model(IDS), expected)
    assert model.embed.padding_idx == 0


def test_tied_weights_stay_tied_and_are_stored_once() -> None:
    model = pack(Tied(), "int8")
    assert isinstance(model.embed, PackedEmbedding) and isinstance(model.head, PackedLinear)
    assert model.embed.layer is model.head
    assert "100, 48, weights='int8', tied" in repr(model.embed)
    sizes = [tensor.nbytes for tensor in model.state_dict().values()]
    assert sum(sizes) < 1.3 * (100 * 64 + 80 * 64 + 48 * 128) * 17 / 16 + 80 * 4 + 7000
    assert torch.equal(model.embed(IDS)[0, 2], model.head.weight[99])
    assert torch.equal(model.embed(torch.tensor(99)), model.head.weight[99])
    assert model.embed(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0, 48)
    with pytest.raises(ArgumentError, match="ids must be from 0 to 99, but are from -1 to 5"):
        model.embed(torch.tensor([5, -1]))
    unpack(model)
    assert model.embed.weight is model.head.weight


def test_state_dicts_of_packed_models() -> None:
    model, other = pack(Tied(), "int8"), pack(Tied(), "int8")
    expected = model(IDS)
    assert not torch.equal(other(IDS), expected)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(IDS), expected) and other.embed.layer is other.head
    with pytest.raises(RuntimeError, match="size mismatch"):
        pack(Tied(), "int4").load_state_dict(model.state_dict())


def test_two_layers_with_one_weight_share_it() -> None:
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False))
    model[1].weight = model[0].weight
    pack(model)
    assert model[0] is model[1]


def test_what_is_registered_twice_is_exchanged_in_both_places() -> None:
    model = Tied()
    model.again = nn.ModuleDict({"embed": model.embed, "head": model.head, "mix": model.mix})
    with torch.no_grad():
        expected = model(IDS)
    pack(model)
    assert model.again["head"] is model.head and isinstance(model.head, PackedLinear)
    assert model.again["embed"] is model.embed and isinstance(model.embed, PackedEmbedding)
    assert torch.allclose(model(IDS), expected, atol=1e-5)
    unpack(model)
    assert model.again["head"] is model.head and model.again["embed"] is model.embed
    assert torch.equal(model(IDS), expected) and model.embed.weight is model.head.weight


@pytest.mark.parametrize("only", ["mix.*", ["mix.*"], lambda name, layer: name.startswith("mix")])
def test_some_layers_only(only: Any) -> None:
    model = pack(Tied(), only=only)
    assert type(model.head) is nn.Linear and model.head.weight is model.embed.weight
    assert isinstance(model.mix[0], PackedLinear)


@pytest.mark.parametrize("only", ["heads", ["mix.0", "heads"], ["mix.1"], ["*", "1*"]])
def test_a_name_that_no_layer_has(only: Any) -> None:
    model = Tied()
    with pytest.raises(
        ArgumentError, match=r"'(heads|mix.1|1\*)' is the name of none. .* mix\.0, "
    ):
        pack(model, only=only)
    assert type(model.mix[0]) is nn.Linear and model.mix[0].weight.requires_grad


def test_nothing_can_be_trained_afterwards(capfd: pytest.CaptureFixture[str]) -> None:
    model = pack(Tied(), progress=True)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not model(IDS).requires_grad
    assert "3/3" in capfd.readouterr().err


def test_old_weights_are_freed() -> None:
    linear = nn.Linear(32, 32)
    pack(nn.Sequential(linear))
    assert linear.weight.numel() == 0


def test_a_layer_by_itself_is_refused() -> None:
    with pytest.raises(ArgumentError, match="is one itself"):
        pack(nn.Linear(3, 3))
    with pytest.raises(ArgumentError, match="weights must be one of"):
        pack(Tied(), "int5")  # type: ignore[arg-type]


def test_a_model_of_other_floats_is_refused_and_stays_as_it_is() -> None:
    """Its rows would be refused by the first layer that is packed."""
    model = Tied()
    model.mix[2].double()
    with pytest.raises(DtypeError, match=r"mix\.2\.weight must be float32, .* but is float64"):
        pack(model)
    assert type(model.mix[0]) is nn.Linear and model.mix[0].weight.requires_grad
    assert isinstance(pack(model, only="head").head, PackedLinear)


def test_fused_layers_are_not_unpacked() -> None:
    layer = PackedLinear.from_linear(nn.Linear(32, 32), norm=nn.RMSNorm(32))
    with pytest.raises(ArgumentError, match="0 must be a plain layer"):
        unpack(nn.Sequential(layer))
    model = nn.Sequential(pack(nn.Sequential(nn.Linear(32, 32), nn.SiLU())), layer)
    before = dict(model.named_modules())
    with pytest.raises(ArgumentError, match="1 must be a plain layer"):
        unpack(model)
    assert dict(model.named_modules()) == before and "forward" in vars(model[0][1])


def test_an_embedding_that_does_more_keeps_its_weights() -> None:
    class Scaled(nn.Embedding):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return super().forward(ids) * 2

    model = Tied()
    model.embed = Scaled(100, 48, padding_idx=0)
    model.head.weight = model.embed.weight
    with torch.no_grad():
        expected = model(IDS)
    pack(model)
    assert isinstance(model.embed, Scaled) and isinstance(model.head, PackedLinear)
    assert torch.allclose(model(IDS), expected, atol=1e-5)


def doubled(module: nn.Module) -> None:
    module.forward = lambda x, own=module.forward: own(x) * 2  # type: ignore[method-assign]


CHANGES: dict[str, Any] = {
    "hook": lambda module: module.register_forward_hook(lambda module, args, y: y * 2),
    "hook before": lambda module: module.register_forward_pre_hook(
        lambda module, args: (args[0].roll(1, -1),)
    ),
    "hook of gradients": lambda module: module.register_full_backward_hook(lambda *args: None),
    "forward": doubled,
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_layers_that_somebody_has_changed_stay_as_they_are(change: Any) -> None:
    model = Tied()
    change(model.mix[0])
    change(model.mix[1])
    change(model.embed)
    with torch.no_grad():
        expected = model(IDS)
    pack(model)
    assert [name for name, _ in packed_layers(model)] == ["mix.2", "head"]
    assert type(model.embed) is nn.Embedding and model.embed.weight.numel()
    assert torch.allclose(model(IDS), expected, atol=1e-5)
