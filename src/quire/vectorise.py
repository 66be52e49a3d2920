"""A mod evaluated on a whole tile of indices, by torch.

A traced mod goes through the interpreter. Any other function goes through `torch.vmap`, so that
whatever torch can vectorise has a value, gradients included.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from quire.errors import CapturedIndexError, ModResultError
from quire.ir.interpret import interpret
from quire.ir.trace import Kind, Mod, Traced, mod_name


def evaluate(
    mod: Mod,
    kind: Kind,
    b: Tensor,
    h: Tensor,
    q_idx: Tensor,
    kv_idx: Tensor,
    score: Tensor | None = None,
    *,
    live: Tensor | None = None,
) -> Tensor:
    """`mod` over index vectors b [B], h [H], q_idx [L], kv_idx [S]: a tensor [B, H, L, S].

    A score_mod takes its `score` [B, H, L, S]. Where `live` (broadcastable) does not hold, indices
    into captured tensors need not be in range. A traced mask is returned at the shape it depends
    on, broadcastable to [B, H, L, S].
    """
    if isinstance(mod, Traced):
        env = {
            "b": b.view(-1, 1, 1, 1),
            "h": h.view(1, -1, 1, 1),
            "q_idx": q_idx.view(1, 1, -1, 1),
            "kv_idx": kv_idx.view(1, 1, 1, -1),
        }
        if score is not None:
            env["score"] = score
        return interpret(mod.output, env, mod.captures, live=live, where=mod.where)
    return _checked(_vmapped(mod, kind, (b, h, q_idx, kv_idx), score), mod, kind)


def _vmapped(
    mod: Mod, kind: Kind, indices: tuple[Tensor, ...], score: Tensor | None
) -> Tensor:
    prefix = () if kind == "mask" else (0,)
    scores = () if kind == "mask" else (score,)
    function: Callable[..., Any] = _returning_tensors(mod, kind)
    for level in reversed(range(4)):
        dims = tuple(0 if position == level else None for position in range(4))
        function = torch.vmap(function, in_dims=(*prefix, *dims))
    if any(index.numel() == 0 for index in indices):  # torch.vmap refuses empty dimensions
        shape = [index.numel() for index in indices]
        return torch.empty(shape, dtype=torch.bool) if score is None else score
    try:
        with IndexByTensors():
            result: Tensor = function(*scores, *indices)
    except IndexError as error:
        raise CapturedIndexError(
            f"{kind}_mod {mod_name(mod)!r} reads outside of a captured tensor: {error}. Clamp the "
            f"index to the tensor's size."
        ) from error
    return result


def _returning_tensors(mod: Mod, kind: Kind) -> Callable[..., Tensor]:
    def function(*args: Tensor) -> Tensor:
        result = mod(*args)
        if isinstance(result, bool | int | float):
            return torch.tensor(result, device=args[0].device)
        if not isinstance(result, Tensor):
            raise ModResultError(
                f"{kind}_mod {mod_name(mod)!r} must return one scalar, but returned "
                f"{type(result).__name__}. Return a single value for each element."
            )
        return result

    return function


def _checked(result: Tensor, mod: Mod, kind: Kind) -> Tensor:
    if result.dim() != 4:
        raise ModResultError(
            f"{kind}_mod {mod_name(mod)!r} must return one scalar for each element, but returned "
            f"a tensor of shape {list(result.shape[4:])}. Reduce or index it."
        )
    if kind == "mask" and result.dtype != torch.bool:
        raise ModResultError(
            f"mask_mod {mod_name(mod)!r} must return a truth value, but returned {result.dtype}. "
            f"Compare, as in q_idx >= kv_idx, or convert with .bool()."
        )
    return result


class IndexByTensors(TorchFunctionMode):
    """Makes `tensor[i, j]` with 0-d index tensors an indexing op, which vmap can batch."""

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.__getitem__:
            items = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(item, Tensor) for item in items) and all(map(_plain, items)):
                return torch.ops.aten.index(args[0], [_index_tensor(item) for item in items])
        return func(*args, **(kwargs or {}))


def _plain(item: object) -> bool:
    full = isinstance(item, slice) and item == slice(None)
    return full or (isinstance(item, int | Tensor) and not isinstance(item, bool))


def _index_tensor(item: int | slice | Tensor) -> Tensor | None:
    match item:
        case slice():
            return None
        case Tensor():
            return item if item.dtype in (torch.bool, torch.uint8) else item.long()
    return torch.tensor(item)


class CaptureRecorder(TorchFunctionMode):
    """Collects the tensors that require grad and enter a function from outside."""

    def __init__(self) -> None:
        super().__init__()
        self.captures: list[Tensor] = []
        self._made: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        known = [*self.captures, *self._made]
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, Tensor) and value.requires_grad:
                if not any(value is other for other in known):
                    self.captures.append(value)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self._made.append(result)
        return result


def captures_of(mod: Mod, kind: Kind, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The tensors a mod captures: all of a traced mod, those that require grad of any other."""
    if isinstance(mod, Traced):
        return mod.captures
    zero = torch.zeros(1, dtype=torch.int64)
    score = torch.zeros(1, 1, 1, 1, dtype=dtype) if kind == "score" else None
    with torch.enable_grad(), CaptureRecorder() as recorder:
        _vmapped(mod, kind, (zero,) * 4, score)
    return tuple(recorder.captures)
