"""Mixtures of experts on packed layers: an expert is two layers, and a router one.

transformers keeps the experts of a layer in two tensors, gate_up_proj and down_proj [expert, ...],
and multiplies the rows of each expert. How many rows an expert gets depends on the whole batch, so
these products must not depend on their number of rows. Packed, the module has

    gate_up[expert]      one product, then activation(gate) * up
    down[expert]

The products of a row are multiplied by its weights, and added in the order in which its router
chose its experts. A router keeps its weight, and multiplies by a packed copy of it, in float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from quire.linear.arguments import Weights, check_weight
from quire.linear.epilogues import ClampedSwiglu, EpilogueMod
from quire.linear.module import PackedLinear
from quire.linear.rowwise import RowKind, RowWise, gated, has_own_forward

_TENSORS = ("gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias")
_MARKS = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "num_experts")


def gate_of(module: Any) -> EpilogueMod | None:
    """Return how experts combine gate and up; None if the module has no experts that are known."""
    if has_own_forward(module):
        return None
    if type(module).__name__ == "Llama4TextExperts":  # it has no marks: all experts read all rows
        return gated(module.act_fn)
    if not all(hasattr(module, name) for name in (*_MARKS, *_TENSORS[:2])):
        return None
    if not module.has_gate or getattr(module, "has_post_expert_norm", False):
        return None
    if type(module).__name__ == "GptOssExperts":
        return ClampedSwiglu(float(module.alpha), float(module.limit))
    usual = getattr(type(module), "_apply_gate", None)
    if getattr(usual, "__name__", "") != "_default_apply_gate":
        return None
    return gated(getattr(module, "act_fn", module))


def pack_experts(
    model: nn.Module,
    weights: Weights,
    chosen: Callable[[str, nn.Module], bool],
    begin: Callable[[str, int], None],
) -> None:
    """Pack the experts and the routers of a model, where they are known."""
    for name, module in list(model.named_modules()):
        if is_router(module) and chosen(name, module):
            begin(name, 1)
            _pack_router(module)
        gate = gate_of(module)
        if gate is not None and chosen(name, module):
            begin(name, 1)
            _pack_one(module, weights, gate)


def _mark(module: Any) -> None:
    """Give experts the marks that others of transformers have."""
    if type(module).__name__ == "Llama4TextExperts":
        module.has_bias, module.is_transposed, module.is_concatenated = False, True, True


def _pack_one(module: Any, weights: Weights, gate: EpilogueMod) -> None:
    _mark(module)
    for name in ("gate_up", "down"):
        check_weight(getattr(module, f"{name}_proj")[0], weights, 0)  # while nothing is lost
    layers = {name: _packed(module, name, weights, gate) for name in ("gate_up", "down")}
    place_experts(module, layers)


def _packed(module: Any, name: str, weights: Weights, gate: EpilogueMod) -> nn.ModuleList:
    """Pack a tensor of all experts, which then goes."""
    layers = nn.ModuleList()
    for expert in range(module.num_experts):
        weight = getattr(module, f"{name}_proj")[expert].detach()
        weight = weight.T if module.is_transposed else weight
        bias = getattr(module, f"{name}_proj_bias")[expert] if module.has_bias else None
        options: dict[str, Any] = {}
        if name == "gate_up":
            half = len(weight) // 2
            weight, bias = (_in_halves(module, each) for each in (weight, bias))
            options = {"epilogue": gate, "half": half, "merges": True}
        layers.append(PackedLinear.from_weight(weight, bias, weights=weights, **options))
    delattr(module, f"{name}_proj")
    return layers


def _in_halves(module: Any, columns: Any) -> Any:
    """Return gate after gate, then up after up, if they alternate."""
    if columns is None or module.is_concatenated:
        return columns
    return torch.cat((columns[::2], columns[1::2]))


def place_experts(module: Any, layers: dict[str, nn.ModuleList]) -> None:
    """Give experts their packed layers and their forward function; their tensors go."""
    _mark(module)
    for name in _TENSORS:
        if hasattr(module, name):
            delattr(module, name)
    module.gate_up, module.down = layers["gate_up"], layers["down"]
    module.forward = functools.partial(mix, module)


def packed_experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the modules whose experts are packed, by name."""
    for name, module in model.named_modules():
        if getattr(module.__dict__.get("forward"), "func", None) is mix:
            yield name, module


def mix(
    experts: Any, hidden: Tensor, indices: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """Return the rows [T, K] after their experts: indices and weights are [T, experts of a row].

    Without them, as in Llama 4, `hidden` has the same number of rows for each expert in turn.
    """
    if indices is None or weights is None:
        parts = zip(experts.gate_up, experts.down, hidden.chunk(experts.num_experts), strict=True)
        return torch.cat([down(gate_up(rows)) for gate_up, down, rows in parts])
    count = indices.shape[1]
    owner = indices.flatten()
    order = owner.argsort(stable=True)
    sizes = torch.bincount(owner, minlength=experts.num_experts).tolist()
    # A place for an expert that does not exist stays 0: another process may have it.
    results = hidden.new_zeros(len(order), experts.down[0].out_features)
    first = 0
    for expert, size in enumerate(sizes[: experts.num_experts]):
        if size:
            places = order[first : first + size]
            gated = experts.gate_up[expert](hidden[places // count])
            results[places] = experts.down[expert](gated)
        first += size
    each = results.unflatten(0, (-1, count)) * weights.unsqueeze(-1)
    total: Tensor = each[:, 0]
    for slot in range(1, count):
        total = total + each[:, slot]
    return total.to(hidden.dtype)


def put_experts_back(model: nn.Module, plain: Callable[[PackedLinear], nn.Linear]) -> None:
    """Put the tensors of experts and routers back; `plain` makes a linear layer of a packed one."""
    for _, module in list(packed_routers(model)):  # first: they lie between experts in memory
        del module.forward, module.packed
    for _, module in list(packed_experts(model)):
        for name in ("gate_up", "down"):
            _put_tensor_back(module, name, plain)
        del module.forward


def _put_tensor_back(module: Any, name: str, plain: Callable[[PackedLinear], nn.Linear]) -> None:
    """Put a tensor of all experts in the place of their packed layers."""
    layers, gated = getattr(module, name), name == "gate_up"
    shape, step = layers[0].shape, -1 if module.is_transposed else 1
    sizes = (shape.out_features, shape.in_features)[::step]
    whole = torch.empty(len(layers), *sizes, dtype=getattr(torch, shape.dtype), device="cpu")
    biases = []
    for into, layer in zip(whole, layers, strict=True):
        linear = plain(layer)
        weight = _as_before(module, linear.weight, gated=gated)
        into.copy_(weight.T if module.is_transposed else weight)
        biases.append(linear.bias)
    setattr(module, f"{name}_proj", nn.Parameter(whole, requires_grad=False))
    if module.has_bias:
        joined = torch.stack([_as_before(module, bias, gated=gated) for bias in biases])
        setattr(module, f"{name}_proj_bias", nn.Parameter(joined, requires_grad=False))
    delattr(module, name)


def _as_before(module: Any, columns: Tensor, *, gated: bool) -> Tensor:
    if not gated or module.is_concatenated:
        return columns
    return torch.stack(columns.chunk(2), 1).flatten(0, 1)


# --- routers


def is_router(module: Any) -> bool:
    """Return whether a module multiplies by its own weight to choose experts."""
    if not type(module).__name__.endswith("Router") or has_own_forward(module):
        return False  # its weight may be made when it is asked for
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.dim() == 2


def _pack_router(router: Any) -> None:
    place_router(router, PackedLinear.from_weight(router.weight.detach()))


def place_router(router: Any, packed: PackedLinear) -> None:
    """Give a router its packed weight and its forward function."""
    router.packed = packed
    router.forward = functools.partial(route, router)


def packed_routers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the routers that are packed, by name."""
    for name, module in model.named_modules():
        if getattr(module.__dict__.get("forward"), "func", None) is route:
            yield name, module


def route(router: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what a router returns, with its product by packed weights, and sigmoids by rows."""
    with _Exchanged(router.packed):
        return type(router).forward(router, *args, **kwargs)


_sigmoid = RowWise(nn.Sigmoid(), RowKind(activation="sigmoid"))


class _Exchanged(TorchFunctionMode):
    """F.linear by a weight of the shape of `packed` is a product with `packed`.

    A row of torch.sigmoid may depend on where it lies (`linear/rowwise.py`), so it is exchanged.
    """

    def __init__(self, packed: PackedLinear) -> None:
        super().__init__()
        self.packed = packed
        self.shape = (packed.shape.out_features, packed.shape.in_features)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.linear and tuple(args[1].shape) == self.shape:
            return self._product(*args, **(kwargs or {}))
        if func in (torch.sigmoid, Tensor.sigmoid) and not kwargs:
            return _sigmoid(*args)
        return func(*args, **(kwargs or {}))

    def _product(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y: Tensor = self.packed(input)
        return y if bias is None else y + bias
