"""What packed layers take: formats, norms, epilogues, weights and rows; all else is refused."""

from __future__ import annotations

import inspect
from typing import Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor, nn

from quire.checks.arguments import dtype_name
from quire.codegen.phases.norm import Norm
from quire.errors import ArgumentError, DeviceError, DtypeError, ShapeError, TensorKindError
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


def norm_of(norm: nn.Module | None, depth: int) -> tuple[Norm, float, dict[str, Tensor]]:
    """Return the kind of a norm, its epsilon and its tensors."""
    if norm is None:
        return "none", 0.0, {}
    layer = isinstance(norm, nn.LayerNorm)
    epsilon = getattr(norm, "eps", getattr(norm, "variance_epsilon", None))
    weight, bias = getattr(norm, "weight", None), getattr(norm, "bias", None)
    if not layer and "RMSNorm" not in type(norm).__name__:
        raise ArgumentError(
            f"norm must be an RMSNorm or a LayerNorm, but is {type(norm).__name__}. Leave it out, "
            f"and call it before the layer."
        )
    for tensor in (weight, bias):
        if tensor is not None and tensor.shape != (depth,):
            raise ShapeError(
                f"norm must be of {depth} numbers, as the rows of x are, but is of "
                f"{list(tensor.shape)}. Give the norm of this layer."
            )
    if epsilon is None:  # torch.nn.RMSNorm takes that of the dtype
        epsilon = torch.finfo(torch.float32).eps
    found = {"norm_weight": weight, "norm_bias": bias}
    tensors = {
        name: each.detach().float().clone() for name, each in found.items() if each is not None
    }
    return "layer" if layer else "rms", float(epsilon), tensors


def given_tensors(epilogue: EpilogueMod | None) -> tuple[str, ...]:
    """Return the names of the tensors that a call gives to an epilogue."""
    if epilogue is None:
        return ()
    parameters = inspect.signature(epilogue).parameters.values()
    return tuple(each.name for each in parameters if each.kind is each.KEYWORD_ONLY)


def as_floats(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor as contiguous float32; None if there is none."""
    return None if tensor is None else tensor.detach().float().contiguous()


def check_weight(weight: Tensor, weights: str, half: int) -> None:
    """Raise unless a weight can be packed."""
    stored_as(weights)
    if weight.dim() != 2 or (half and weight.shape[0] % (2 * half)):
        raise ShapeError(
            f"the weight must be [N, K], and N a multiple of two halves, but has the shape "
            f"{list(weight.shape)} and half is {half}. Give the weight of a linear layer."
        )
    if not weight.is_cpu:
        raise DeviceError(
            f"the weight must be on the CPU, but is on {weight.device}. Move the model there."
        )
    if weight.dtype not in (*ACTIVATIONS, torch.float64):
        raise DtypeError(
            f"the weight must be of floats, but is {dtype_name(weight.dtype)}. Convert it."
        )


def refuse(x: Tensor, depth: int) -> None:
    """Raise for rows that a layer cannot multiply."""
    if type(x) not in (Tensor, nn.Parameter):
        raise TensorKindError(
            f"x must be a plain tensor, but is a {type(x).__name__}. Unpack the layer."
        )
    if not x.is_cpu:
        raise DeviceError(
            f"x must be on the CPU where a layer has packed weights, but is on {x.device}. Move it."
        )
    if x.dtype not in ACTIVATIONS:
        raise DtypeError(
            f"x must be float32, bfloat16 or float16, but is {dtype_name(x.dtype)}. Convert it."
        )
    raise ShapeError(
        f"x must end with {depth} numbers in a row, but has the shape {list(x.shape)}. Give the "
        f"rows that the layer was made for."
    )
