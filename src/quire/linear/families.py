"""Fused layers of the model families that are known: Llama, Qwen2, Mistral, and MLPs of Qwen3.

A decoder layer of transformers has two norms, an attention and an MLP. Packed, it reads

    self_attn.qkv   norm, then q, k and v as one product, then the rotary embedding of q and k
    mlp.gate_up     norm, then gate and up as one product, then activation(gate) * up

and its norms do nothing. The attention stays the object it was, with another forward function, so
that whatever looks for it by its class finds it. Layers of other families stay as they are, and so
does whatever is in a known one but is not what its family has there.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from quire.linear.arguments import Weights, check_weight, known_norm
from quire.linear.epilogues import EpilogueMod, Rotary
from quire.linear.module import PackedLinear
from quire.linear.packing import IntegerWeight
from quire.linear.rowwise import gated, has_own_forward, is_changed

_PROJECTIONS = ("q_proj", "k_proj", "v_proj")
_GATED = ("gate_proj", "up_proj")


class FusedPart(NamedTuple):
    """What is fused in decoder layers that compute x + part(norm(x))."""

    home: str
    kind: str  # what its class is called in every family
    families: tuple[str, ...]
    layers: tuple[str, ...]  # that become one
    after: str
    norm: str
    fused: str


PARTS = (
    FusedPart(
        "self_attn",
        "Attention",
        ("Llama", "Qwen2", "Mistral"),  # others do more between q, k and the rotary embedding
        layers=_PROJECTIONS,
        after="o_proj",
        norm="input_layernorm",
        fused="qkv",
    ),
    FusedPart(
        "mlp",
        "MLP",
        ("Llama", "Qwen2", "Mistral", "Qwen3"),
        layers=_GATED,
        after="down_proj",
        norm="post_attention_layernorm",
        fused="gate_up",
    ),
)

Chosen = Callable[[str, nn.Module], bool]
Given = Callable[[str], IntegerWeight | None]
"""given(name) are the weights of a layer that are integers already."""
Begin = Callable[[str, int], None]
"""begin(name, count) hears what is packed next, and of how many layers it is made."""
Several = Sequence[IntegerWeight | None]


class FusedNorm(nn.Module):
    """A norm that the layer after it computes; here, rows pass through."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self._norm = (norm,)  # a tuple, so that its weights are saved once

    @property
    def norm(self) -> nn.Module:
        """Return the norm itself."""
        return self._norm[0]

    def forward(self, x: Tensor) -> Tensor:
        """Return x."""
        return x


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x)), of two packed layers."""

    def __init__(self, gate_up: PackedLinear, before: nn.Module) -> None:
        super().__init__()
        self.gate_up, self.down_proj = gate_up, cast(nn.Module, before.down_proj)
        self._before = (before,)  # a tuple, so that it is no part of this module

    @property
    def before(self) -> Any:
        """Return the MLP that this one has replaced; its weights are gone."""
        return self._before[0]

    def forward(self, x: Tensor) -> Tensor:
        """Return the rows after the MLP."""
        result: Tensor = self.down_proj(self.gate_up(x))
        return result


def fuse(model: nn.Module, weights: Weights, chosen: Chosen, given: Given, begin: Begin) -> None:
    """Fuse the decoder layers that are known, where all layers of a pattern are chosen."""
    uses = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    for name, layer in list(model.named_modules()):
        for part in PARTS:
            if not _has(layer, part):
                continue
            names = [f"{name}.{part.home}.{each}" for each in part.layers]
            layers = [model.get_submodule(each) for each in names]
            alone = all(uses[id(each)] == 1 for each in (*layers, getattr(layer, part.norm)))
            if alone and all(map(chosen, names, layers)):
                _fuse(layer, part, weights, names, given=given, begin=begin)


def _fuse(
    layer: Any,
    part: FusedPart,
    weights: Weights,
    names: list[str],
    *,
    given: Given,
    begin: Begin,
) -> None:
    """Make one packed layer of several, unless a file has them in different formats."""
    integers = [given(name) for name in names]
    if len({each.format if each else None for each in integers}) > 1:
        return
    begin(f"{names[0].rpartition('.')[0]}.{part.fused}", len(names))
    way = _fuse_attention if part.home == "self_attn" else _fuse_mlp
    way(layer, weights, integers)


def _has(layer: Any, part: FusedPart) -> bool:
    """Return whether a decoder layer is of a known family, and has a part as the family has it."""
    kind = type(layer)
    family = kind.__name__.removesuffix("DecoderLayer")
    if family not in part.families or not kind.__module__.startswith("transformers.models."):
        return False
    module: Any = getattr(layer, part.home, None)
    usual = (f"{family}{part.kind}", kind.__module__)
    if (type(module).__name__, type(module).__module__) != usual:
        return False
    layers: list[Any] = [getattr(module, name, None) for name in (*part.layers, part.after)]
    if not all(type(each) is nn.Linear for each in layers):
        return False
    if part.home == "mlp" and gated(module.act_fn) is None:
        return False
    norm = getattr(layer, part.norm)
    if has_own_forward(layer) or any(map(is_changed, (module, norm, *layers[:-1]))):
        return False
    return known_norm(norm, layers[0].in_features) is not None


def _fuse_attention(layer: Any, weights: Weights, given: Several) -> None:
    """Make one packed layer of a decoder layer's norm, q, k, v and rotary embedding."""
    attention = layer.self_attn
    half = attention.head_dim // 2
    parts = [getattr(attention, name) for name in _PROJECTIONS]
    heads = [part.out_features // (2 * half) for part in parts]
    rotary = Rotary(heads[0] + heads[1], half)
    weight = _joined(parts, given)
    attention.qkv = _packed(parts, weight, weights, norm=layer.input_layernorm, epilogue=rotary)
    for name in _PROJECTIONS:
        delattr(attention, name)
    place_attention(layer, heads)


def place_attention(layer: Any, heads: list[int]) -> None:
    """Give an attention that has `qkv` its forward function, and take its norm away."""
    attention = layer.self_attn
    attention.packed_heads = heads
    attention.forward = functools.partial(attend, attention)
    layer.input_layernorm = FusedNorm(layer.input_layernorm)


def _fuse_mlp(layer: Any, weights: Weights, given: Several) -> None:
    """Make one packed layer of a decoder layer's second norm, gate and up."""
    mlp = layer.mlp
    parts = [getattr(mlp, name) for name in _GATED]
    epilogue = gated(mlp.act_fn)
    norm = layer.post_attention_layernorm
    gate_up = _packed(parts, _joined(parts, given), weights, norm=norm, epilogue=epilogue)
    place_mlp(layer, GatedMLP(gate_up, mlp))


def place_mlp(layer: Any, mlp: GatedMLP) -> None:
    """Exchange the MLP of a decoder layer, and take its norm away."""
    layer.mlp = mlp
    layer.post_attention_layernorm = FusedNorm(layer.post_attention_layernorm)


def _joined(parts: Sequence[nn.Linear], given: Several) -> Tensor | IntegerWeight:
    """Return the weights of several layers as one: integers, if they are given so."""
    integers = [each for each in given if each is not None]
    if integers:
        return IntegerWeight.joined(integers)
    return torch.cat([part.weight.detach() for part in parts])


def _packed(
    parts: Sequence[nn.Linear],
    weight: Tensor | IntegerWeight,
    weights: Weights,
    *,
    norm: nn.Module,
    epilogue: EpilogueMod | None,
) -> PackedLinear:
    """Return one layer of several, with pairs of columns: within a head, or of two layers."""
    rotary = isinstance(epilogue, Rotary)
    half = epilogue.half if isinstance(epilogue, Rotary) else parts[0].out_features
    bias = None
    if any(part.bias is not None for part in parts):
        zeros = [part.weight.new_zeros(part.out_features) for part in parts]
        both = zip(parts, zeros, strict=True)
        bias = torch.cat([zero if part.bias is None else part.bias for part, zero in both])
    if isinstance(weight, Tensor):
        check_weight(weight, weights, half)  # while nothing is lost
    for part in parts:
        none = torch.empty(0, device="cpu")
        part.weight = nn.Parameter(none, requires_grad=False)  # frees the old weights
    return PackedLinear.from_weight(
        weight, bias, weights=weights, norm=norm, epilogue=epilogue, half=half, merges=not rotary
    )


def attend(
    attention: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Return what the attention of a known family returns, from rows before the norm."""
    batch, length, _ = hidden_states.shape
    width = attention.head_dim
    cos, sin = (_for_each_row(each, batch) for each in position_embeddings)
    rows = attention.qkv(hidden_states, cos=cos, sin=sin).view(batch, length, -1, width)
    query, key, value = rows.transpose(1, 2).split_with_sizes(attention.packed_heads, 1)
    if past_key_values is not None:
        key, value = past_key_values.update(key, value, attention.layer_idx)
    home, name = sys.modules[type(attention).__module__], "_attn_implementation"
    interface = home.ALL_ATTENTION_FUNCTIONS.get_interface(
        getattr(attention.config, name), home.eager_attention_forward
    )
    if "sliding_window" not in kwargs and type(attention).__name__ != "LlamaAttention":
        window = getattr(attention.config, "sliding_window", None)
        kwargs["sliding_window"] = getattr(attention, "sliding_window", window)
    out, weights = interface(
        attention,
        query,
        key,
        value,
        attention_mask,
        dropout=0.0,
        scaling=attention.scaling,
        **kwargs,
    )
    return attention.o_proj(out.reshape(batch, length, -1)), weights


def _for_each_row(angles: Tensor, batch: int) -> Tensor:
    """Return cos or sin [1 or batch, length, width] as one row for each row of x."""
    if angles.shape[0] == batch:
        return angles
    return angles.expand(batch, -1, -1).reshape(-1, angles.shape[-1])


def fused_layers(model: nn.Module) -> Iterator[PackedLinear]:
    """Yield the packed layers that `unfuse` takes apart."""
    for module in model.modules():
        if isinstance(module, GatedMLP):
            yield module.gate_up
        elif hasattr(module, "packed_heads"):
            yield cast(Any, module).qkv


def unfuse(model: nn.Module, plain: Callable[[PackedLinear], nn.Linear]) -> None:
    """Put back what `fuse` has exchanged; `plain` makes a linear layer of a packed one."""
    for layer in [each for each in model.modules() if hasattr(each, "self_attn")]:
        _unfuse_attention(layer, plain)
        _unfuse_mlp(layer, plain)


def _unfuse_attention(layer: Any, plain: Callable[[PackedLinear], nn.Linear]) -> None:
    attention = layer.self_attn
    if isinstance(getattr(attention, "qkv", None), PackedLinear):
        _put_back(attention, _PROJECTIONS, plain(attention.qkv))
        _put_norm_back(layer, "input_layernorm", attention.qkv)
        del attention.qkv, attention.forward, attention.packed_heads


def _unfuse_mlp(layer: Any, plain: Callable[[PackedLinear], nn.Linear]) -> None:
    mlp = getattr(layer, "mlp", None)
    if isinstance(mlp, GatedMLP):
        before = mlp.before
        _put_back(before, _GATED, plain(mlp.gate_up))
        before.down_proj = mlp.down_proj
        layer.mlp = before
        _put_norm_back(layer, "post_attention_layernorm", mlp.gate_up)


def _put_norm_back(layer: nn.Module, name: str, packed: PackedLinear) -> None:
    """Put a norm back, with the weights that were in use."""
    norm = cast(FusedNorm, getattr(layer, name)).norm
    if packed.norm_weight is not None:
        dtype: torch.dtype = getattr(torch, packed.shape.dtype)
        norm.weight = nn.Parameter(packed.norm_weight.to(dtype), requires_grad=False)
    setattr(layer, name, norm)


def _put_back(module: Any, names: tuple[str, ...], whole: nn.Linear) -> None:
    """Cut a linear layer into those that it was made of."""
    width = whole.in_features
    sizes = module.packed_heads if names == _PROJECTIONS else [1] * len(names)
    unit = whole.out_features // sum(sizes)
    first = 0
    for name, size in zip(names, sizes, strict=True):
        last = first + size * unit
        with torch.device("meta"):
            part = nn.Linear(width, last - first, bias=whole.bias is not None)
        part.weight = nn.Parameter(whole.weight[first:last].clone(), requires_grad=False)
        if whole.bias is not None:
            part.bias = nn.Parameter(whole.bias[first:last].clone(), requires_grad=False)
        setattr(module, name, part)
        first = last
