"""`pack` and `unpack`: all linear layers of a model."""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from quire.errors import ArgumentError
from quire.linear.module import PackedEmbedding, PackedLinear, Weights, stored_as

Choice = Sequence[str] | Callable[[str, nn.Module], bool]


def pack(
    model: nn.Module,
    weights: Weights = "float32",
    *,
    only: Choice | None = None,
    progress: bool = False,
) -> nn.Module:
    """Exchange the linear layers of a model for packed ones, in place, and return the model.

        quire.linear.pack(model, weights="int8", only=["model.layers.*"])

    `only` are names, in which * stands for anything, or a function of (name, layer). An embedding
    that is tied to a layer stays tied, and its weights are stored once. The model can no longer be
    trained, so none of its parameters requires a gradient afterwards. At any time there is at
    most one layer in both forms.
    """
    stored_as(weights)
    if isinstance(model, nn.Linear):
        raise ArgumentError(
            "model must have linear layers, but is one itself. Use PackedLinear.from_linear."
        )
    model.requires_grad_(False)
    chosen = [
        (name, layer) for name, layer in model.named_modules()
        if type(layer) is nn.Linear and is_chosen(only, name, layer)
    ]  # fmt: skip
    known: dict[int, PackedLinear] = {}  # by the weight of a layer that was packed
    for count, (name, layer) in enumerate(chosen):
        if progress:
            _show(count, len(chosen), name)
        _exchange(model, name, layer, weights, known)
    if progress:
        _show(len(chosen), len(chosen), "")
    return model


def _exchange(
    model: nn.Module,
    name: str,
    layer: nn.Linear,
    weights: Weights,
    known: dict[int, PackedLinear],
) -> None:
    """Pack one layer, and what is tied to it."""
    identity = id(layer.weight)
    packed = known.get(identity)
    if packed is None or layer.bias is not None or packed.bias is not None:
        packed = PackedLinear.from_linear(layer, weights)
    known[identity] = packed
    for other, module in list(model.named_modules()):
        if isinstance(module, nn.Embedding) and module.weight is layer.weight:
            set_module(model, other, PackedEmbedding(packed, module.padding_idx))
    set_module(model, name, packed)
    layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)  # frees the old weights


def unpack(model: nn.Module) -> nn.Module:
    """Exchange packed layers for linear layers, in place, and return the model.

    Weights are those that the packed layers multiplied by, in the dtype that they had before.
    """
    made: dict[int, nn.Linear] = {}
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if isinstance(layer, PackedLinear):
            made[id(layer)] = made.get(id(layer)) or _linear(layer, name)
            set_module(model, name, made[id(layer)])
    for name, module in list(model.named_modules()):
        if isinstance(module, PackedEmbedding):
            linear = made.get(id(module.layer)) or _linear(module.layer, name)
            with torch.device("meta"):
                embedding = nn.Embedding(
                    module.num_embeddings, module.embedding_dim, module.padding_idx
                )
            embedding.weight = linear.weight
            set_module(model, name, embedding)
    return model


def _linear(layer: PackedLinear, name: str) -> nn.Linear:
    shape = layer.shape
    if shape.norm != "none" or layer.epilogue is not None:
        raise ArgumentError(
            f"{name} must be a plain layer to be unpacked, but has a norm or an epilogue. Pack the "
            f"model without fusing, or keep the original."
        )
    dtype: torch.dtype = getattr(torch, shape.dtype)
    with torch.device("meta"):
        linear = nn.Linear(shape.in_features, shape.out_features, layer.bias is not None)
    linear.weight = nn.Parameter(layer.weight.to(dtype), requires_grad=False)
    if layer.bias is not None:
        linear.bias = nn.Parameter(layer.bias.to(dtype), requires_grad=False)
    return linear


def is_chosen(only: Choice | None, name: str, layer: nn.Module) -> bool:
    """Return whether a layer is to be packed."""
    if only is None:
        return True
    if callable(only):
        return only(name, layer)
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in only)


def set_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place of another."""
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, module.train(model.training))


def packed_layers(model: nn.Module) -> Iterator[tuple[str, PackedLinear]]:
    """Yield the packed layers of a model by name."""
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            yield name, module


def _show(count: int, total: int, name: str) -> None:
    """Draw a progress bar on standard error."""
    width = 30
    done = width * count // max(1, total)
    end = "\n" if count == total else ""
    bar = "█" * done + "░" * (width - done)
    print(f"\r\x1b[2Kpacking {bar} {count}/{total} {name}", end=end, file=sys.stderr, flush=True)
