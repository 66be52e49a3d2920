"""Norms and activations whose rows do not know each other, in the place of PyTorch's.

PyTorch promises no order of sums in a norm, and computes the end of an array by other instructions
than the rest. So `F.silu` of a row depends on where in a batch the row lies, if its width is not a
multiple of the vectors. Here a row is computed by itself (`codegen/kernels/rows.py`).

A module stays the object that it was, with its weights, and gets another forward function.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from quire.codegen.phases.norm import Norm
from quire.config import config
from quire.ir.trace import trace
from quire.linear.arguments import as_floats, check_gradient, check_on_cpu, check_rows, known_norm
from quire.linear.epilogues import ELEMENTWISE, GATED, EpilogueMod
from quire.linear.packing import panels_of
from quire.runtime.linear import Epilogue, Prologue, RowLaunch
from quire.support.dynamo import never_traced
from quire.support.torch_private import hooks_of, version_of

_CLASSES = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "GELUActivation": "gelu",
    "GELUTanh": "gelu_tanh",
    "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh",
    "FastGELUActivation": "gelu_tanh",
    "QuickGELUActivation": "quick_gelu",
    "Sigmoid": "sigmoid",
}
_HOMES = ("torch.nn.", "transformers.activations")


class RowKind(NamedTuple):
    """What a row-wise module computes; all of it is written to files."""

    norm: Norm = "none"
    epsilon: float = 0.0
    offset: float = 0.0  # what is added to the weight of a norm
    activation: str = ""  # of ELEMENTWISE (`linear/epilogues.py`)


def has_own_forward(module: nn.Module) -> bool:
    """Return whether somebody has exchanged the forward function of this module alone."""
    return "forward" in vars(module) and not is_row_wise(module)


def is_changed(module: nn.Module) -> bool:
    """Return whether a module does more than its class says: another one cannot replace it."""
    return has_own_forward(module) or any(hooks_of(module))


def gated(activation: nn.Module) -> EpilogueMod | None:
    """Return activation(gate) * up; None if the activation is not known, or is changed."""
    known = GATED.get(type(activation).__name__)
    return None if known is None or is_changed(activation) else known


def kind_of(module: nn.Module) -> RowKind | None:
    """Return what a norm or an activation computes; None if it is neither, or not known."""
    if has_own_forward(module):
        return None
    if type(module).__module__.startswith(_HOMES):
        if type(module) is nn.GELU:
            return RowKind(activation="gelu" if module.approximate == "none" else "gelu_tanh")
        activation = _CLASSES.get(type(module).__name__)
        if activation is not None:
            return RowKind(activation=activation)
    own = dict(module.named_parameters(recurse=False))  # a packed layer would unpack its weight
    weight = own.get("weight")
    if weight is None or weight.dim() != 1:
        return None
    found = known_norm(module, len(weight))
    return None if found is None else RowKind(found.kind, found.epsilon, found.offset)


def exchange_rows(model: nn.Module) -> None:
    """Give the norms and activations of a model row-wise forward functions."""
    for module in list(model.modules()):
        kind = kind_of(module)
        if kind is not None:
            place_rows(module, kind)


def place_rows(module: Any, kind: RowKind) -> None:
    """Give a norm or an activation its row-wise forward function."""
    module.forward = RowWise(module, kind)


def row_wise(model: nn.Module) -> Iterator[tuple[str, RowWise]]:
    """Yield the row-wise forward functions of a model by the name of their module."""
    for name, module in model.named_modules():
        if is_row_wise(module):
            yield name, cast(RowWise, module.forward)


def is_row_wise(module: nn.Module) -> bool:
    """Return whether a norm or an activation has its row-wise forward function."""
    return isinstance(module.__dict__.get("forward"), RowWise)


def first_not_packed(model: nn.Module) -> str | None:
    """Return the name of a module whose rows depend on how many there are; None if there is none.

    Such a module has a matrix that is not packed, and is no embedding; or it is a norm or an
    activation of PyTorch's.
    """
    for name, module in model.named_modules():
        if _has_own_matrix(module) or (kind_of(module) is not None and not is_row_wise(module)):
            return str(name)
    return None


def _has_own_matrix(module: nn.Module) -> bool:
    if isinstance(module, nn.Embedding) or "packed" in dir(module):
        return False
    return any(each.dim() > 1 for each in module.parameters(recurse=False))


def put_rows_back(model: nn.Module) -> None:
    """Give norms and activations their own forward functions."""
    for name, _ in list(row_wise(model)):
        del model.get_submodule(name).__dict__["forward"]


class RowWise:
    """The forward function of a norm or an activation, in which a row depends on itself alone."""

    def __init__(self, module: nn.Module, kind: RowKind) -> None:
        self.module, self.kind = module, kind
        self._ready: dict[tuple[object, ...], _Ready] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ready": {}}

    def __call__(self, x: Tensor) -> Tensor:
        """Return the rows [..., K] after the norm or the activation."""
        return self._compute(x)

    @never_traced
    def _compute(self, x: Tensor) -> Tensor:
        width = x.shape[-1] if x.dim() else 1
        tensors = self._tensors()
        depth = len(next(iter(tensors.values()), x.new_empty(width)))
        check_rows(x, depth)
        for name, tensor in tensors.items():
            if tensor.requires_grad:
                check_gradient(name, tensor)
        versions = [(each.data_ptr(), version_of(each)) for each in tensors.values()]
        key = (width, x.dtype, config().target, *versions)
        ready = self._ready.get(key)
        if ready is None:
            if len(self._ready) > _MOST_READY:
                self._ready.clear()
            ready = self._ready[key] = self._prepare(width, x.dtype, tensors)
        rows = (x.resolve_neg() if x.is_neg() else x).reshape(-1, width)
        y = torch.empty(rows.shape, dtype=x.dtype, device="cpu")
        if y.numel():
            ready.launch.run(rows, y, ready.captures)
        return y.view(x.shape)

    def _tensors(self) -> dict[str, Tensor]:
        if self.kind.norm == "none":
            return {}
        found = {name: getattr(self.module, name, None) for name in ("weight", "bias")}
        return {name: each for name, each in found.items() if each is not None}

    def _prepare(self, width: int, dtype: torch.dtype, tensors: Mapping[str, Tensor]) -> _Ready:
        kind = self.kind
        check_on_cpu(tensors)
        gain, bias = (as_floats(tensors.get(name)) for name in ("weight", "bias"))
        if gain is not None and kind.offset:
            gain = gain + kind.offset
        epilogue = Epilogue()
        if kind.activation:
            traced = trace(ELEMENTWISE[kind.activation], "epilogue")
            epilogue = Epilogue(traced.output, traced.captures)
        prologue = Prologue(kind.norm, gain, bias, kind.epsilon)
        columns = panels_of(width).columns
        launch = RowLaunch(columns, width, prologue, epilogue, dtype)
        return _Ready(launch, epilogue.captures, [each.detach() for each in tensors.values()])


_MOST_READY = 16


class _Ready(NamedTuple):
    """A launch, the tensors of its epilogue, and the weights that it was made of.

    These are kept, so that no other tensor comes to lie in their place.
    """

    launch: RowLaunch
    captures: tuple[Tensor, ...]
    weights: list[Tensor]
