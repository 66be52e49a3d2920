"""`PackedLinear`, whose rows do not know each other, and an embedding that is tied to one."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from quire.checks.arguments import dtype_name
from quire.codegen.phases.weights import FORMATS
from quire.config import config
from quire.errors import ArgumentError, CapturedIndexError, DtypeError
from quire.ir.trace import trace
from quire.linear.arguments import (
    Weights,
    as_floats,
    check_gradient,
    check_on_cpu,
    check_rows,
    check_weight,
    given_tensors,
    kept_as,
    norm_of,
    stored_as,
)
from quire.linear.epilogues import EpilogueMod
from quire.linear.packing import (
    IntegerWeight,
    pack_weights,
    panels_of,
    unpack_weights,
)
from quire.linear.shape import TENSORS, Shape
from quire.runtime.linear import Epilogue, LinearLaunch, PackedWeights, Prologue
from quire.support.dynamo import never_traced
from quire.support.torch_private import buffers_of, version_of


class PackedLinear(nn.Module):
    """A linear layer for inference, whose weights are packed for the processor.

        layer = PackedLinear.from_linear(linear, weights="int8")
        y = layer(x)                     # x [..., K], y [..., N]

    A row of the result depends on its own row of x alone, to the last bit: not on the other rows,
    the number of threads, or how a prompt is cut. `norm` is computed before, and `epilogue` after
    the product, in the same pass over memory.

        layer = PackedLinear.from_linear(linear, norm=rms_norm, epilogue=add)

        def add(value, row, column, *, residual):     # residual is given by the call
            return value + residual[row, column]

        y = layer(x, residual=x)
    """

    packed: Tensor
    bias: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None

    def __init__(
        self,
        shape: Shape,
        tensors: Mapping[str, Tensor],
        epilogue: EpilogueMod | None = None,
    ) -> None:
        super().__init__()
        shape.check(tensors)
        self.shape, self.epilogue = shape, epilogue
        self.in_features, self.out_features = shape.in_features, shape.width
        self.given = given_tensors(epilogue)
        for name in TENSORS:
            self.register_buffer(name, tensors.get(name))
        self._own = buffers_of(self)
        self._ready: dict[tuple[object, ...], _Ready] = {}

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        weights: Weights = "float32",
        *,
        norm: nn.Module | None = None,
        epilogue: EpilogueMod | None = None,
    ) -> PackedLinear:
        """Return a layer that computes what `linear` does."""
        return cls.from_weight(
            linear.weight, linear.bias, weights=weights, norm=norm, epilogue=epilogue
        )

    @classmethod
    def from_weight(
        cls,
        weight: Tensor | IntegerWeight,
        bias: Tensor | None = None,
        *,
        weights: Weights = "float32",
        norm: nn.Module | None = None,
        epilogue: EpilogueMod | None = None,
        half: int = 0,
        merges: bool = False,
    ) -> PackedLinear:
        """Return a layer of `weight` [N, K] and `bias` [N].

        With `half`, columns i and i + half are partners, in blocks of 2 * half, and the epilogue is
        a function of (value, other, row, block, column). If it `merges`, each pair has one result.
        """
        if isinstance(weight, IntegerWeight):
            weights = kept_as(weight, weights)
        else:
            check_weight(weight, weights, half, merges=merges)
        before = norm_of(norm, weight.shape[1])
        out_features, in_features = weight.shape
        shape = Shape(
            weights=weights,
            in_features=in_features,
            out_features=out_features,
            half=half,
            merges=merges,
            norm=before.kind,
            epsilon=before.epsilon,
            dtype=dtype_name(weight.dtype),
        )
        name, integers = stored_as(weights)
        packed = pack_weights(weight, name, integers=integers, half=half, merges=merges)
        tensors = {"packed": packed.data, **before.tensors}
        if bias is not None:
            tensors["bias"] = bias.detach().float().clone()
        return cls(shape, tensors, epilogue)

    # --- what it holds

    @property
    def packed_weights(self) -> PackedWeights:
        """Return the weights as the kernel takes them."""
        shape, tensors = self.shape, {name: getattr(self, name) for name in TENSORS}
        shape.check(tensors)
        name, integers = stored_as(shape.weights)
        columns = panels_of(shape.out_features, shape.half, merges=shape.merges).columns
        return PackedWeights(
            data=self.packed,
            columns=columns,
            format=FORMATS[name],
            depth=shape.in_features,
            width=shape.out_features,
            half=shape.half,
            integers=integers,
        )

    def weights_for(self, dtype: torch.dtype) -> PackedWeights:
        """Return the weights as the kernel for rows of a dtype takes them; they are kept."""
        return self._ready_for(dtype).launch.weights

    @property
    def weight(self) -> Tensor:
        """Return the float32 weights [N, K] that the layer multiplies by, unpacked anew."""
        return unpack_weights(self.packed_weights)

    def extra_repr(self) -> str:
        """Return what is shown of the layer."""
        shape = self.shape
        parts = [f"{shape.in_features}, {shape.width}, weights={shape.weights!r}"]
        parts += [f"bias={self.bias is not None}"]
        parts += [f"norm={shape.norm!r}"] if shape.norm != "none" else []
        return ", ".join(parts)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_ready": {}, "_plain": None}

    def with_epilogue(self, epilogue: EpilogueMod) -> PackedLinear:
        """Return a layer with the same weights, and an epilogue."""
        tensors = {name: getattr(self, name) for name in TENSORS}
        given = {name: each for name, each in tensors.items() if each is not None}
        return PackedLinear(self.shape, given, epilogue)

    def with_norm(self, norm: nn.Module) -> PackedLinear:
        """Return a layer with the same weights, and a norm before it."""
        before = norm_of(norm, self.in_features)
        tensors = {"packed": self.packed, **before.tensors}
        if self.bias is not None:
            tensors["bias"] = self.bias
        shape = self.shape._replace(norm=before.kind, epsilon=before.epsilon)
        return PackedLinear(shape, tensors, self.epilogue)

    # --- the call

    def launch_on(
        self, x: Tensor, given: Mapping[str, Tensor]
    ) -> tuple[LinearLaunch, list[Tensor]]:
        """Return the launch for rows like x, and the tensors of its epilogue, some of `given`."""
        ready = self._ready_for(x.dtype)
        named = {name: given[name] for name in self.given}
        return ready.launch, self._with_given(ready, named)

    def forward(self, x: Tensor, **given: Tensor) -> Tensor:
        """Return the results [..., N] of `x` [..., K]; `given` are tensors of the epilogue."""
        return self._multiply(x, given)

    @never_traced
    def _multiply(self, x: Tensor, given: Mapping[str, Tensor]) -> Tensor:
        depth = self.shape.in_features
        check_rows(x, depth)
        ready = self._ready_for(x.dtype)
        if x.is_neg():
            x = x.resolve_neg()
        rows = x if x.dim() == 2 else x.reshape(-1, depth)
        width = self.out_features
        y = torch.empty((rows.shape[0], width), dtype=x.dtype, device="cpu")
        captures: Sequence[Tensor] = ready.captures
        if given or ready.given:
            captures = self._with_given(ready, given)
        if rows.shape[0] and width and ready.launch.run(rows, y, captures):
            raise CapturedIndexError(
                "indices of an epilogue must be inside of its tensors, but one is not. Compare "
                "their shapes with the rows and columns of the result."
            )
        return y if x.dim() == 2 else y.view(*x.shape[:-1], width)

    def _with_given(self, ready: _Ready, given: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the captured tensors, with those of this call in their places."""
        if given.keys() != set(self.given):
            raise ArgumentError(
                f"the call must give the tensors of the epilogue, {sorted(self.given)}, but gives "
                f"{sorted(given)}. Name each of them."
            )
        captures = list(ready.captures)
        for name, place in ready.given.items():
            tensor, kind = given[name], ready.captures[place]
            if tensor.dtype != kind.dtype or not tensor.is_cpu:
                raise DtypeError(
                    f"{name} must be {dtype_name(kind.dtype)} on the CPU as x is, but is "
                    f"{dtype_name(tensor.dtype)} on {tensor.device}. Convert it."
                )
            check_gradient(name, tensor)
            flat = torch.atleast_2d(tensor.resolve_neg()).flatten(0, -2)
            captures[place] = flat if flat.stride(-1) == 1 else flat.contiguous()
        return captures

    def _ready_for(self, dtype: torch.dtype) -> _Ready:
        key = (dtype, config().target)
        ready = self._ready.get(key)
        if ready is None or not self._is_made_of(ready):
            ready = self._ready[key] = self._prepare(dtype)
        for tensor in ready.floats:
            if tensor.requires_grad:
                check_gradient("a tensor of the layer", tensor)
        return ready

    def _is_made_of(self, ready: _Ready) -> bool:
        """Return whether the buffers of the layer, and their numbers, are those of `ready`."""
        own, (packed, bias, gain, shift) = self._own, ready.buffers
        if own.get("packed", self) is not packed or own.get("bias", self) is not bias:
            return False
        if own.get("norm_weight", self) is not gain or own.get("norm_bias", self) is not shift:
            return False
        return not ready.copied or all(version_of(each) == old for each, old in ready.copied)

    def _prepare(self, dtype: torch.dtype) -> _Ready:
        """Return what a call needs for rows of a dtype."""
        for name in TENSORS:
            tensor = getattr(self, name)
            if isinstance(tensor, nn.Parameter):  # that somebody has put in the buffer's place
                check_gradient(name, tensor)
                delattr(self, name)
                self.register_buffer(name, tensor.detach())
        buffers = {name: self._own[name] for name in TENSORS}
        check_on_cpu(buffers)
        weights = self.packed_weights
        placeholders = {name: torch.zeros(2, 2, dtype=dtype, device="cpu") for name in self.given}
        mod = self._whole_mod(placeholders)
        epilogue = Epilogue(merges=self.shape.merges)
        if mod is not None:
            traced = trace(mod, "pair" if self.shape.half else "epilogue")
            epilogue = epilogue._replace(graph=traced.output, captures=traced.captures)
        known = {id(tensor): place for place, tensor in enumerate(epilogue.captures)}
        given = {name: known[id(each)] for name, each in placeholders.items() if id(each) in known}
        gain, bias = (as_floats(each) for each in (self.norm_weight, self.norm_bias))
        prologue = Prologue(self.shape.norm, gain, bias, self.shape.epsilon)
        launch = LinearLaunch(weights, prologue, epilogue, dtype)
        captures = tuple(each.resolve_neg() for each in epilogue.captures)
        floats = tuple(
            each for name, each in buffers.items() if each is not None and name != "packed"
        )
        copied = [(each, version_of(each)) for each in floats if self._is_copied(each)]
        wanted = (*floats, *epilogue.captures)
        return _Ready(
            launch,
            captures,
            given,
            buffers=tuple(buffers.values()),
            floats=wanted,
            copied=copied,
        )

    def _is_copied(self, tensor: Tensor) -> bool:
        """Return whether a launch has a copy of a bias or of a norm's weight, or of a part."""
        floats = as_floats(tensor)
        assert floats is not None
        return floats.data_ptr() != tensor.data_ptr() or self.shape.half > 0

    def _whole_mod(self, placeholders: Mapping[str, Tensor]) -> EpilogueMod | None:
        """Return the epilogue with the bias before it."""
        bias, half = as_floats(self.bias), self.shape.half
        epilogue = self.epilogue
        if epilogue is not None and placeholders:
            epilogue = functools.partial(epilogue, **placeholders)
        if bias is None:
            return epilogue
        if not half:

            def with_bias(value: Any, row: Any, column: Any) -> Any:
                value = value + bias[column]
                return value if epilogue is None else epilogue(value, row, column)

            return with_bias

        blocks = bias.unflatten(0, (-1, 2 * half))
        partners = blocks.unflatten(1, (2, half)).flip(1).flatten(1).contiguous()

        def pair_with_bias(value: Any, other: Any, row: Any, block: Any, column: Any) -> Any:
            value, other = value + blocks[block, column], other + partners[block, column]
            return value if epilogue is None else epilogue(value, other, row, block, column)

        return pair_with_bias


class _Ready(NamedTuple):
    """A launch, the tensors of its epilogue, which of them a call gives, and what it is made of."""

    launch: LinearLaunch
    captures: tuple[Tensor, ...]
    given: dict[str, int]
    buffers: tuple[Tensor | None, ...]  # in the order of TENSORS
    floats: tuple[Tensor, ...]  # all that may require a gradient
    copied: list[tuple[Tensor, int]]  # buffers that are not read where they are, and versions


class PackedEmbedding(nn.Module):
    """An embedding whose rows are those of a packed layer, to which it is tied."""

    def __init__(self, layer: PackedLinear, padding_idx: int | None = None) -> None:
        super().__init__()
        self._tied = (layer,)  # a tuple, so that its weights are saved once
        self.padding_idx = padding_idx
        self.num_embeddings, self.embedding_dim = layer.out_features, layer.in_features

    @property
    def layer(self) -> PackedLinear:
        """Return the layer that holds the weights."""
        return self._tied[0]

    @property
    def weight(self) -> Tensor:
        """Return the float32 weights [N, K], unpacked anew."""
        return self.layer.weight

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows [..., K] of `ids` [...]."""
        return self._rows(ids).view(*ids.shape, self.embedding_dim)

    @never_traced
    def _rows(self, ids: Tensor) -> Tensor:
        """Return the rows [n, K] of n ids."""
        places = ids.flatten()
        numbers = places.numpy()
        if numbers.size and not (numbers.min() >= 0 and numbers.max() < self.num_embeddings):
            raise ArgumentError(
                f"ids must be from 0 to {self.num_embeddings - 1}, but are from {numbers.min()} to "
                f"{numbers.max()}. Give the tokens of this model."
            )
        dtype: torch.dtype = getattr(torch, self.layer.shape.dtype)
        weights = self.layer.weights_for(dtype)
        return unpack_weights(weights, places).to(dtype)

    def extra_repr(self) -> str:
        """Return what is shown of the embedding."""
        weights = self.layer.shape.weights
        return f"{self.num_embeddings}, {self.embedding_dim}, weights={weights!r}, tied"


def matmul(x: Tensor, packed: PackedLinear) -> Tensor:
    """Return x @ packed.weight.T of `x` [..., K], with neither norm, bias nor epilogue."""
    if packed.shape.half:
        raise ArgumentError("packed must have plain columns, but they are in pairs. Pack it anew.")
    plain: PackedLinear | None = packed.__dict__.get("_plain")
    if plain is None or plain.packed is not packed.packed:
        shape = packed.shape._replace(norm="none", epsilon=0.0)
        plain = packed.__dict__["_plain"] = PackedLinear(shape, {"packed": packed.packed})
    return plain.forward(x)
