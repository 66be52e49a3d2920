"""Layers that cache latents (MLA), as those of DeepSeek do: each token is stored once.

    latent [B, 1, L, R], rotated [B, 1, L, D']     what the layer gives to its cache
    key    [latent @ K_h, rotated]                 its `expand_kv`, for each head h
    value   latent @ V_h

Pages hold [latent, rotated] for one key head; values are the first R numbers of it. The matrices
move to the other side of the products, so nothing is expanded. Where the layer is packed, they are
packed as well, a product for each head, so that a row does not depend on the others:

    query . key    =  [query @ K_h^T, rotated query] . [latent, rotated]
    out            =  (weights @ latent) @ V_h
"""

from __future__ import annotations

import functools
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from quire.errors import ArgumentError
from quire.integrations.transformers.cache import LayerStates
from quire.linear import PackedLinear

EXPAND = "expand_kv"  # the method of a layer that makes keys and values of its latents


def prepare(model: nn.Module) -> None:
    """Let the layers of a model that have latents leave them as they are, if pages hold them."""
    for kind in {type(module) for module in model.modules()}:
        made = getattr(kind, EXPAND, None)
        if made is not None and not hasattr(made, "__wrapped__"):
            setattr(kind, EXPAND, _unless_in_pages(made))


def _unless_in_pages(made: Any) -> Any:
    @functools.wraps(made)
    def expand_kv(self: nn.Module, latent: Any, rotated: Any, *more: Any, **options: Any) -> Any:
        if isinstance(latent, LayerStates):
            return (latent.joined(),) * 2
        return made(self, latent, rotated, *more, **options)

    return expand_kv


class Absorbed:
    """The matrices of a layer: what `expand_kv` multiplies latents [..., R] by, for each head.

    keys [H, D'', R] make the part of keys that is not rotated, values [H, Dv, R] the values.
    """

    def __init__(self, module: Any, query: Tensor, rank: int, rotated: int) -> None:
        heads, width = query.shape[1], query.shape[3]
        whole = _weight(module.kv_b_proj, rank).view(heads, -1, rank)
        self.keys, self.values = whole[:, : width - rotated], whole[:, width - rotated :]
        self.scale = width**-0.5
        self._packed = _packed(module.kv_b_proj, self.keys, self.values)
        if module not in _checked:
            self._check(module, rank, rotated)
            _checked[module] = None

    def query(self, query: Tensor) -> Tensor:
        """Return queries [B, H, L, D] for latents: [B, H, L, R + D']."""
        plain = query[..., : self.keys.shape[1]]
        return torch.cat((self._by_head(plain, "keys"), query[..., plain.shape[3] :]), -1)

    def out(self, out: Tensor) -> Tensor:
        """Return results [B, L, H, R] as the values would have given them: [B, L, H, Dv]."""
        return self._by_head(out.transpose(1, 2), "values").transpose(1, 2)

    def _by_head(self, rows: Tensor, what: Side) -> Tensor:
        """Return rows [B, H, L, n] times the matrix [n, m] of each head: [B, H, L, m]."""
        if self._packed is not None:
            products = zip(self._packed[what], rows.unbind(1), strict=True)
            return torch.stack([product(each) for product, each in products], 1)
        matrices = self.keys if what == "keys" else self.values.transpose(1, 2)
        batch, heads, count, _ = rows.shape
        found = torch.bmm(rows.transpose(0, 1).flatten(1, 2), matrices)
        return found.view(heads, batch, count, -1).transpose(0, 1)

    def _check(self, module: Any, rank: int, rotated: int) -> None:
        """Compare with what the layer itself makes of two latents."""
        seed = torch.Generator().manual_seed(0)
        latent, turned = (torch.randn(1, 1, 2, n, generator=seed) for n in (rank, rotated))
        latent, turned = latent.to(self.keys.dtype), turned.to(self.keys.dtype)
        with torch.no_grad():
            key, value = module.expand_kv(latent, turned)
            mine = torch.cat(
                (latent @ self.keys.transpose(1, 2), turned.expand(-1, key.shape[1], -1, -1)), -1
            )
            ours = (mine, latent @ self.values.transpose(1, 2))
        for found, wanted in zip(ours, (key, value), strict=True):
            if found.shape != wanted.shape or not torch.allclose(found, wanted, 0.05, 0.05):
                raise ArgumentError(
                    f"{EXPAND} of a layer whose latents are in pages must multiply them by the "
                    f"weights of kv_b_proj, but that of {type(module).__name__} does something "
                    f"else. Use transformers' own cache for this model."
                )


Side = Literal["keys", "values"]

_checked: WeakKeyDictionary[nn.Module, None] = WeakKeyDictionary()
_weights: WeakKeyDictionary[nn.Module, Tensor] = WeakKeyDictionary()
_products: WeakKeyDictionary[nn.Module, dict[Side, list[PackedLinear]]] = WeakKeyDictionary()


def _weight(layer: Any, rank: int) -> Tensor:
    """Return the weight [H * (D'' + Dv), R] of a linear layer, however the layer stores it."""
    if type(layer) is nn.Linear and layer.bias is None:
        return layer.weight
    if layer not in _weights:
        with torch.no_grad():
            dtype = next((x.dtype for x in layer.parameters() if x.is_floating_point()), None)
            _weights[layer] = layer(torch.eye(rank, dtype=dtype)).T.contiguous()
    return _weights[layer]


def _packed(
    layer: nn.Module, keys: Tensor, values: Tensor
) -> dict[Side, list[PackedLinear]] | None:
    """Return a packed layer for each head, if the layer itself is packed.

    The rows of other products depend on how many there are.
    """
    if not isinstance(layer, PackedLinear):
        return None
    if layer not in _products:
        _products[layer] = {
            "keys": [PackedLinear.from_weight(each.T.contiguous()) for each in keys],
            "values": [PackedLinear.from_weight(each.contiguous()) for each in values],
        }
    return _products[layer]
