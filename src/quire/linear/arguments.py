"""What packed layers take: formats, norms, epilogues, weights and rows; all else is refused."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, TypeAlias, cast, get_args

import torch
from torch import Tensor, nn

from quire.checks.arguments import dtype_name
from quire.codegen.phases.norm import Norm
from quire.errors import (
    ArgumentError,
    DeviceError,
    DtypeError,
    PackedTrainingError,
    ShapeError,
    TensorKindError,
)
from quire.linear.epilogues import EpilogueMod
from quire.linear.packing import IntegerWeight

Weights: TypeAlias = Literal["float32", "bfloat16", "float16", "int8", "int4", "w8a8", "w4a8"]
"""How weights are stored; "w8a8" and "w4a8" are int8 and int4 whose activations are int8, too."""

ACTIVATIONS = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes of rows."""


def stored_as(weights: str) -> tuple[str, bool]:
    """Return the format of weights, and whether activations are integers, too."""
    if weights not in get_args(Weights):
        raise ArgumentError(
            f"weights must be one of {', '.join(get_args(Weights))}, but is {weights!r}. Take "
            f"float32 for the numbers of the layer as they are."
        )
    return {"w8a8": ("int8", True), "w4a8": ("int4", True)}.get(weights, (weights, False))


def kept_as(weight: IntegerWeight, weights: Weights) -> Weights:
    """Return how integers are stored that were given; `weights` says if activations are, too."""
    own = cast(Weights, weight.format.name)
    quantised: dict[Weights, Weights] = {"int8": "w8a8", "int4": "w4a8"}
    return quantised[own] if stored_as(weights)[1] else own


class FoundNorm(NamedTuple):
    """What a norm computes, and its tensors as floats, by the names that packed layers use."""

    kind: Norm = "none"
    epsilon: float = 0.0
    offset: float = 0.0  # is part of the norm's weight in `tensors`
    tensors: Mapping[str, Tensor] = {}


def norm_of(norm: nn.Module | None, depth: int) -> FoundNorm:
    """Return what a norm computes for rows of `depth` numbers."""
    if norm is None:
        return FoundNorm()
    layer = isinstance(norm, nn.LayerNorm)
    epsilon = getattr(norm, "eps", getattr(norm, "variance_epsilon", None))
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    if not layer and "RMSNorm" not in type(norm).__name__:
        raise ArgumentError(
            f"norm must be an RMSNorm or a LayerNorm, but is {type(norm).__name__}. Leave it out, "
            f"and call it before the layer."
        )
    shapes = [tuple(each.shape) for each in (weight, bias) if each is not None]
    shapes += [tuple(norm.normalized_shape)] if isinstance(norm, nn.LayerNorm | nn.RMSNorm) else []
    for shape in shapes:
        if shape != (depth,):
            raise ShapeError(
                f"norm must be of {depth} numbers, as the rows of x are, but is of "
                f"{list(shape)}. Give the norm of this layer."
            )
    if epsilon is None:  # torch.nn.RMSNorm takes that of the dtype
        epsilon = torch.finfo(torch.float32).eps
    named = {"norm_weight": weight, "norm_bias": bias}
    given = {name: each for name, each in named.items() if each is not None}
    check_on_cpu(given)
    tensors = {name: each.detach().float().clone() for name, each in given.items()}
    found = FoundNorm("layer" if layer else "rms", float(epsilon), 0.0, tensors)
    if depth and _offset(norm, found, depth):
        tensors["norm_weight"] += 1
        found = found._replace(offset=1.0)
    return found


def known_norm(norm: nn.Module, depth: int) -> FoundNorm | None:
    """Return what a norm computes, and None if it is no norm that is known."""
    try:
        return norm_of(norm, depth)
    except (ArgumentError, DeviceError, ShapeError):
        return None


def check_on_cpu(tensors: Mapping[str, Tensor | None]) -> None:
    """Raise unless the tensors of a layer are on the CPU."""
    for name, tensor in tensors.items():
        if tensor is not None and not tensor.is_cpu:
            raise DeviceError(
                f"{name} must be on the CPU, as x is, but is on {tensor.device}. Move the layer."
            )


def _offset(norm: nn.Module, found: FoundNorm, depth: int) -> int:
    """Return what a norm adds to its weight: 0, or 1 in models like Gemma. Raise if neither fits.

    A class says little about what it computes: many are called RMSNorm, and one that inherits from
    LayerNorm may do more. So each is tried on two rows, of which one is so small that epsilon
    matters.
    """
    own = getattr(norm, "weight", None)
    dtype = torch.float32 if own is None else own.dtype
    row = torch.linspace(-1.0, 1.5, depth, device="cpu").to(dtype)
    rows = torch.stack((row, row * found.epsilon**0.5))
    result, wide = _tried(norm, rows), rows.float()
    if found.kind == "layer":
        wide = wide - wide.mean(-1, keepdim=True)
    plain = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + found.epsilon)
    gain, bias = found.tensors.get("norm_weight"), found.tensors.get("norm_bias", 0.0)
    guesses = [plain + bias] if gain is None else [plain * (gain + add) + bias for add in (0, 1)]
    errors = [float((result - guess).abs().nan_to_num().max()) for guess in guesses]
    offset = errors.index(min(errors))  # if weights are large, both may be near
    near = 8 * max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps)
    largest = max(1.0, float(guesses[offset].abs().nan_to_num().max()))
    options: dict[str, Any] = {"rtol": near, "atol": near * largest, "equal_nan": True}
    if torch.allclose(result, guesses[offset], **options):
        return offset
    raise ArgumentError(
        f"norm must be an RMSNorm or a LayerNorm that multiplies by its weight, or 1 + its weight, "
        f"but {type(norm).__name__} computes something else. Call it before the layer."
    )


def _tried(norm: nn.Module, rows: Tensor) -> Tensor:
    """Return some rows after a norm that takes one tensor and gives one; refuse any other."""
    reason = ""
    try:
        parameters = inspect.signature(norm.forward).parameters
        with torch.no_grad():
            result = norm(rows)
        if len(parameters) != 1:
            reason = f"takes {', '.join(parameters)}"
        elif not isinstance(result, Tensor) or result.shape != rows.shape:
            reason = "returns something else"
    except Exception as error:  # whatever the code of somebody else raises
        reason = f"raises {error!r}"
    if reason:
        raise ArgumentError(
            f"norm must take rows and return rows, but {type(norm).__name__} {reason}. Call it "
            f"before the layer."
        )
    return cast(Tensor, result).float()


def given_tensors(epilogue: EpilogueMod | None) -> tuple[str, ...]:
    """Return the names of the tensors that a call gives to an epilogue."""
    if epilogue is None:
        return ()
    parameters = inspect.signature(epilogue).parameters.values()
    return tuple(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)


def as_floats(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor as contiguous float32; None if there is none."""
    return None if tensor is None else tensor.detach().float().contiguous().resolve_neg()


def check_pairs(columns: int, half: int, *, merges: bool) -> None:
    """Raise unless columns come in blocks of two halves, where they come in pairs."""
    if half < 0 or (half and columns % (2 * half)) or (merges and not half):
        raise ShapeError(
            f"columns in pairs must be a multiple of two halves, but are {columns} and half is "
            f"{half}. Give the number of columns between the two of a pair."
        )


def check_weight(weight: Tensor, weights: str, half: int, *, merges: bool = False) -> None:
    """Raise unless a weight can be packed."""
    stored_as(weights)
    if weight.dim() != 2:
        raise ShapeError(
            f"the weight must be [N, K], but has the shape {list(weight.shape)}. Give the weight "
            f"of a linear layer."
        )
    check_pairs(weight.shape[0], half, merges=merges)
    if not weight.shape[1]:
        raise ShapeError(
            f"the weight must have a column for each number of a row, but has the shape "
            f"{list(weight.shape)}. Leave the layer as it is."
        )
    if not weight.is_cpu:
        raise DeviceError(
            f"the weight must be on the CPU, but is on {weight.device}. Move the model there."
        )
    check_dtype("the weight", weight)


def check_dtype(name: str, tensor: Tensor) -> None:
    """Raise unless a tensor has a dtype of rows, since a model gives its layers rows of its own."""
    if tensor.dtype not in ACTIVATIONS:
        raise DtypeError(
            f"{name} must be float32, bfloat16 or float16, but is {dtype_name(tensor.dtype)}. "
            f"Convert it."
        )


def check_rows(x: Tensor, depth: int) -> None:
    """Raise for rows that cannot be computed, or only without their gradient."""
    plain = type(x) in (Tensor, nn.Parameter)
    if not (plain and x.dtype in ACTIVATIONS and x.is_cpu and x.shape[-1:] == (depth,)):
        _refuse(x, depth)
    if x.requires_grad:
        check_gradient("x", x)


def check_gradient(name: str, tensor: Tensor) -> None:
    """Raise if a tensor wants a gradient, which nothing here computes."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise PackedTrainingError(
            f"{name} must not require a gradient where a layer has packed weights, but it does. "
            f"Run inference under torch.no_grad(), or train the model before it is packed."
        )


def _refuse(x: Tensor, depth: int) -> None:
    """Raise for rows that a layer cannot multiply."""
    if type(x) not in (Tensor, nn.Parameter):
        raise TensorKindError(
            f"x must be a plain tensor, but is a {type(x).__name__}. Unpack the layer."
        )
    if not x.is_cpu:
        raise DeviceError(
            f"x must be on the CPU where a layer has packed weights, but is on {x.device}. Move it."
        )
    check_dtype("x", x)
    raise ShapeError(
        f"x must end with {depth} numbers in a row, but has the shape {list(x.shape)}. Give the "
        f"rows that the layer was made for."
    )
