"""`pack` and `unpack`: all linear layers of a model."""

from __future__ import annotations

import fnmatch
import functools
import importlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import nn

from quire.errors import ArgumentError
from quire.linear import families
from quire.linear.arguments import Weights, check_dtype, stored_as
from quire.linear.experts import (
    gate_of,
    is_router,
    pack_experts,
    packed_experts,
    put_experts_back,
)
from quire.linear.gguf import FileWeights
from quire.linear.module import PackedEmbedding, PackedLinear
from quire.linear.packing import IntegerWeight
from quire.linear.rowwise import exchange_rows, is_changed, put_rows_back
from quire.support.memory import give_back

Choice = str | Sequence[str] | Callable[[str, nn.Module], bool]


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

    `only` is a name, in which * stands for anything, or several, or a function of (name, layer). A
    name that no layer has is refused. An embedding that is tied to a layer stays tied, and its
    weights are stored once. In the families that are known (`linear/families.py`), norms, rotary
    embeddings and activations are fused with the layers beside them, unless `fused` is False.
    Experts and their routers are packed, too.

    With `rowwise`, norms and activations are computed row by row (`linear/rowwise.py`), since a row
    of PyTorch's may depend on where it lies in a batch. Unless you say so, that is done if `only`
    is not given. The model can no longer be trained, so none of its
    parameters requires a gradient afterwards. At any time, one layer at most is in both forms, or
    one tensor of all experts of a decoder layer.

    `gguf` is the file that the model was loaded from. Layers that it stores as Q8_0, Q4_0 or Q4_1
    keep these very numbers, as int8 and int4; `weights` is for the others.
    """
    stored_as(weights)
    if isinstance(model, nn.Linear):
        raise ArgumentError(
            "model must have linear layers, but is one itself. Use PackedLinear.from_linear."
        )
    only = [only] if isinstance(only, str) else only
    wanted = {name: layer for name, layer in _layers(model) if is_chosen(only, name, layer)}
    _check_choice(only, list(wanted), model)
    for name, layer in wanted.items():
        for own, tensor in layer.named_parameters(name, recurse=False):
            check_dtype(own, tensor)
    model.requires_grad_(False)
    given = (lambda name: None) if gguf is None else FileWeights(gguf, model).get
    is_wanted = functools.partial(is_chosen, only)
    bar = _Bar(progress, len(wanted))
    if fused:
        families.fuse(model, weights, is_wanted, given, bar.begin)
    pack_experts(model, weights, is_wanted, bar.begin)
    chosen = [
        (name, layer)
        for name, layer in model.named_modules()
        if _is_linear(layer) and is_wanted(name, layer)
    ]
    known: dict[int, PackedLinear] = {}  # by the weight of a layer that was packed
    for name, layer in chosen:
        bar.begin(name, 1)
        _exchange(model, name, _packed(layer, weights, given(name), known))
    give_back()
    bar.end()
    if rowwise if rowwise is not None else only is None:
        exchange_rows(model)
    return model


def _is_linear(layer: Any) -> bool:
    """Return whether a layer can be packed: it has weights, and does what its class says alone."""
    usual = type(layer) is nn.Linear or _is_conv1d(layer)
    return usual and layer.weight.numel() > 0 and not is_changed(layer)


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
    new: dict[int, nn.Module] = {id(layer): packed}
    for module in model.modules():
        if _is_plain(module) and module.weight is layer.weight:
            new[id(module)] = PackedEmbedding(packed, module.padding_idx)
    _put(model, new)
    layer.weight = nn.Parameter(
        torch.empty(0, device="cpu"), requires_grad=False
    )  # frees the old weights


def _put(model: nn.Module, new: dict[int, nn.Module]) -> None:
    """Put modules in the places of others, by their ids; some may be registered several times."""
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if id(module) in new:
            set_module(model, name, new[id(module)])


def _is_plain(module: nn.Module) -> TypeGuard[nn.Embedding]:
    """Return whether a module is an embedding that only looks rows up.

    Some models scale what they find, in a class of their own. Such an embedding keeps its weights.
    """
    return type(module) is nn.Embedding and module.max_norm is None and not is_changed(module)


def unpack(model: nn.Module) -> nn.Module:
    """Exchange packed layers for linear layers, in place, and return the model.

    Weights are those that the packed layers multiplied by, in the dtype that they had before.
    """
    _check_plain(model)
    put_experts_back(model, _linear)
    families.unfuse(model, _linear)
    put_rows_back(model)  # also those of norms that were fused
    while (layer := _next_packed(model)) is not None:
        _put_linear(model, layer)
    return model


def _next_packed(model: nn.Module) -> PackedLinear | None:
    """Return a packed layer of a model, or one that an embedding is tied to."""
    for module in model.modules():
        if isinstance(module, PackedLinear):
            return module
        if isinstance(module, PackedEmbedding):
            return module.layer
    return None


def _put_linear(model: nn.Module, packed: PackedLinear) -> None:
    """Put a linear layer in the places of a packed one, and embeddings of its weights."""
    linear: Any = (_conv1d if packed.shape.conv1d else _linear)(packed)
    new: dict[int, nn.Module] = {id(packed): linear}
    for module in model.modules():
        if isinstance(module, PackedEmbedding) and module.layer is packed:
            with torch.device("meta"):
                sizes = module.num_embeddings, module.embedding_dim
                embedding = nn.Embedding(*sizes, module.padding_idx)
            embedding.weight = linear.weight
            new[id(module)] = embedding
    _put(model, new)


def _check_plain(model: nn.Module) -> None:
    """Raise, while nothing is exchanged, if a layer does more than those of `pack`."""
    known = {id(layer) for layer in families.fused_layers(model)}
    for _, experts in packed_experts(model):
        known |= {id(layer) for layer in (*experts.gate_up, *experts.down)}
    layers = dict(packed_layers(model))
    for name, module in model.named_modules():
        if isinstance(module, PackedEmbedding):
            layers[name] = module.layer
    for name, layer in layers.items():
        does_more = layer.shape.norm != "none" or layer.epilogue is not None
        if does_more and id(layer) not in known:
            raise ArgumentError(
                f"{name} must be a plain layer to be unpacked, but has a norm or an epilogue. Keep "
                f"the layer that it was made of."
            )


def _linear(layer: PackedLinear) -> nn.Linear:
    give_back()  # what the layer before was made of
    shape = layer.shape
    dtype: torch.dtype = getattr(torch, shape.dtype)
    with torch.device("meta"):
        linear = nn.Linear(shape.in_features, shape.out_features, layer.bias is not None)
    linear.weight = nn.Parameter(layer.weight.to(dtype), requires_grad=False)
    if layer.bias is not None:
        linear.bias = nn.Parameter(layer.bias.to(dtype), requires_grad=False)
    return linear


def _conv1d(layer: PackedLinear) -> nn.Module:
    kind = importlib.import_module("transformers.pytorch_utils").Conv1D
    linear = _linear(layer)
    with torch.device("meta"):
        conv: nn.Module = kind(linear.out_features, linear.in_features)
    conv.weight = nn.Parameter(linear.weight.T.contiguous(), requires_grad=False)
    conv.bias = linear.bias
    return conv


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield what can be packed by name; the experts of a decoder layer are one."""
    for name, module in model.named_modules():
        if _is_linear(module) or is_router(module) or gate_of(module) is not None:
            yield name, module


def _check_choice(only: Choice | None, chosen: Sequence[str], model: nn.Module) -> None:
    """Raise if a name of `only` is that of no layer."""
    for pattern in () if only is None or callable(only) else only:
        if not any(fnmatch.fnmatchcase(name, pattern) for name in chosen):
            first = ", ".join(name for name, _ in itertools.islice(_layers(model), 3))
            raise ArgumentError(
                f"only must be names of layers that can be packed, but {pattern!r} is the name of "
                f"none. Choose among {first} and those after them; * stands for anything."
            )


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


class _Bar:
    """A progress bar on standard error, if it is shown."""

    width = 30

    def __init__(self, shown: bool, total: int) -> None:
        self._shown, self._total, self._done = shown, total, 0

    def begin(self, name: str, count: int) -> None:
        """Show what is packed next; `count` layers are done when it is."""
        self._draw(name)
        self._done += count

    def end(self) -> None:
        """Show that all is done."""
        self._done = self._total
        self._draw("\n")

    def _draw(self, name: str) -> None:
        if self._shown:
            done = self.width * self._done // max(1, self._total)
            bar = "█" * done + "░" * (self.width - done)
            text = f"\r\x1b[2Kpacking {bar} {self._done}/{self._total} {name}"
            print(text, end="", file=sys.stderr, flush=True)
