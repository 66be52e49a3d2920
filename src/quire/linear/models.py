"""`pack` and `unpack`: all linear layers of a model."""

from __future__ import annotations

import fnmatch
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from quire.errors import ArgumentError
from quire.linear import families
from quire.linear.arguments import Weights, stored_as
from quire.linear.experts import pack_experts, put_experts_back
from quire.linear.gguf import integer_weights
from quire.linear.module import PackedEmbedding, PackedLinear
from quire.linear.packing import IntegerWeight
from quire.linear.rowwise import exchange_rows, put_rows_back

Choice = Sequence[str] | Callable[[str, nn.Module], bool]


def pack(
    model: nn.Module,
    weights: Weights = "float32",
    *,
    only: Choice | None = None,
    fused: bool = True,
    rowwise: bool | None = None,
    gguf: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> nn.Module:
    """Exchange the linear layers of a model for packed ones, in place, and return the model.

        quire.linear.pack(model, weights="int8", only=["model.layers.*"])

    `only` are names, in which * stands for anything, or a function of (name, layer). An embedding
    that is tied to a layer stays tied, and its weights are stored once. In the families that are
    known (`linear/families.py`), norms, rotary embeddings and activations are fused with the layers
    beside them, unless `fused` is False. Experts and their routers are packed, too.

    With `rowwise`, norms and activations are computed row by row (`linear/rowwise.py`), since a row
    of PyTorch's may depend on where it lies in a batch. Unless you say so, that is done if `only`
    is not given. The model can no longer be trained, so none of its
    parameters requires a gradient afterwards. At any time, one layer at most is in both forms.

    `gguf` is the file that the model was loaded from. Layers that it stores as Q8_0, Q4_0 or Q4_1
    keep these very numbers, as int8 and int4; `weights` is for the others.
    """
    stored_as(weights)
    if isinstance(model, nn.Linear):
        raise ArgumentError(
            "model must have linear layers, but is one itself. Use PackedLinear.from_linear."
        )
    model.requires_grad_(False)
    given = {} if gguf is None else integer_weights(gguf, model)
    is_wanted = functools.partial(is_chosen, only)
    if fused:
        families.fuse(model, weights, is_wanted, given)
    pack_experts(model, weights, is_wanted)
    chosen = [
        (name, layer) for name, layer in model.named_modules()
        if (type(layer) is nn.Linear or _is_conv1d(layer)) and is_wanted(name, layer)
    ]  # fmt: skip
    known: dict[int, PackedLinear] = {}  # by the weight of a layer that was packed
    for count, (name, layer) in enumerate(chosen):
        if progress:
            _show(count, len(chosen), name)
        _exchange(model, name, _packed(layer, weights, given.get(name), known))
    if progress:
        _show(len(chosen), len(chosen), "")
    if rowwise if rowwise is not None else only is None:
        exchange_rows(model)
    return model


def _is_conv1d(layer: nn.Module) -> bool:
    """Return whether a layer is the linear layer of GPT-2, whose weight is [K, N]."""
    home = type(layer).__module__
    return type(layer).__name__ == "Conv1D" and home == "transformers.pytorch_utils"


def _packed(
    layer: Any, weights: Weights, given: IntegerWeight | None, known: dict[int, PackedLinear]
) -> PackedLinear:
    """Pack one layer; layers without a bias that share a weight are one packed layer."""
    packed = known.get(id(layer.weight))
    if packed is None or layer.bias is not None or packed.bias is not None:
        conv1d = _is_conv1d(layer)
        own = layer.weight.T if conv1d else layer.weight
        weight = own if given is None else given
        packed = PackedLinear.from_weight(weight, layer.bias, weights=weights)
        packed.shape = packed.shape._replace(conv1d=conv1d)
    known[id(layer.weight)] = packed
    return packed


def _exchange(model: nn.Module, name: str, packed: PackedLinear) -> None:
    """Put a packed layer in the place of a layer, and of what is tied to it."""
    layer = model.get_submodule(name)
    for other, module in list(model.named_modules()):
        if _is_plain(module) and module.weight is layer.weight:
            set_module(model, other, PackedEmbedding(packed, module.padding_idx))
    set_module(model, name, packed)
    layer.weight = nn.Parameter(torch.empty(0), requires_grad=False)  # frees the old weights


def _is_plain(module: nn.Module) -> bool:
    """Return whether a module is an embedding that only looks rows up.

    Some models scale what they find, in a class of their own. Such an embedding keeps its weights.
    """
    return type(module) is nn.Embedding and module.max_norm is None


def unpack(model: nn.Module) -> nn.Module:
    """Exchange packed layers for linear layers, in place, and return the model.

    Weights are those that the packed layers multiplied by, in the dtype that they had before.
    """
    put_rows_back(model)
    put_experts_back(model, lambda layer: _linear(layer, "", fused=True))
    families.unfuse(model, lambda layer: _linear(layer, "", fused=True))
    made: dict[int, Any] = {}
    for name, layer in list(model.named_modules(remove_duplicate=False)):
        if isinstance(layer, PackedLinear):
            again = _conv1d if layer.shape.conv1d else _linear
            made[id(layer)] = made.get(id(layer)) or again(layer, name)
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


def _linear(layer: PackedLinear, name: str, *, fused: bool = False) -> nn.Linear:
    shape = layer.shape
    if not fused and (shape.norm != "none" or layer.epilogue is not None):
        raise ArgumentError(
            f"{name} must be a plain layer to be unpacked, but has a norm or an epilogue. Keep the "
            f"layer that it was made of."
        )
    dtype: torch.dtype = getattr(torch, shape.dtype)
    with torch.device("meta"):
        linear = nn.Linear(shape.in_features, shape.out_features, layer.bias is not None)
    linear.weight = nn.Parameter(layer.weight.to(dtype), requires_grad=False)
    if layer.bias is not None:
        linear.bias = nn.Parameter(layer.bias.to(dtype), requires_grad=False)
    return linear


def _conv1d(layer: PackedLinear, name: str) -> nn.Module:
    kind = importlib.import_module("transformers.pytorch_utils").Conv1D
    linear = _linear(layer, name)
    with torch.device("meta"):
        conv: nn.Module = kind(linear.out_features, linear.in_features)
    conv.weight = nn.Parameter(linear.weight.T.contiguous(), requires_grad=False)
    conv.bias = linear.bias
    return conv


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
