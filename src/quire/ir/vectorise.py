"""Mods evaluated by torch for a whole tile of positions at once.

A traced mod is evaluated by the interpreter of graphs (`ir/interpret.py`), any other function by
`torch.vmap`, gradients included. `Opaque` is such a function together with a tuple of the tensors
that it captures, as a trace has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from quire.errors import (
    CapturedIndexError,
    DivisionByZeroError,
    ModResultError,
    QuireError,
    TracedBranchError,
    UnsupportedOpError,
)
from quire.ir.interpret import interpret
from quire.ir.trace import MASK_INPUTS, Kind, Mod, Traced, mod_name
from quire.support.torch_private import tree_leaves, tree_map

Indices: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]
"""The vectors b [B], h [H], q_idx [L], kv_idx [S]."""


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
    """Evaluate `mod` for vectors b [B], h [H], q_idx [L], kv_idx [S]: a tensor [B, H, L, S].

    A score_mod also gets `score` [B, H, L, S]. Where `live`, which broadcasts to that shape, is
    False, an index into a captured tensor may be out of range. The result of a traced mask has size
    1 in each dimension that the mask does not depend on.
    """
    indices = (b, h, q_idx, kv_idx)
    if isinstance(mod, Traced):
        env = _environment(
            score, (index.view(at) for index, at in zip(indices, _AXES, strict=True))
        )
        return interpret(mod.output, env, mod.captures, live=live, where=mod.where)
    try:
        return _mapped_over_grid(mod, kind, indices, score)
    except (CapturedIndexError, DivisionByZeroError):
        if score is None or live is None:
            raise
    return evaluate_live(mod, kind, indices, score, live)


def evaluate_live(mod: Mod, kind: Kind, indices: Indices, score: Tensor, live: Tensor) -> Tensor:
    """Evaluate `mod` where `live` is True, and return 0 elsewhere: a tensor like `score`.

    This is slower than `evaluate`. Gradients need it: if the mod were called where `live` is False,
    an infinite derivative there times a gradient of 0 would be NaN.
    """
    at = live.broadcast_to(score.shape).nonzero(as_tuple=True)
    if at[0].numel() == 0:  # torch.vmap refuses to map over nothing
        return torch.zeros_like(score)
    picked = [index[where] for index, where in zip(indices, at, strict=True)]
    if isinstance(mod, Traced):
        env = _environment(score[at], picked)
        values = interpret(mod.output, env, mod.captures, where=mod.where).expand_as(at[0])
    else:
        values = _mapped(torch.vmap(_returning_tensors(mod, kind)), mod, kind, score[at], *picked)
    return torch.zeros_like(score).index_put(at, values.to(score.dtype))


def evaluate_tangent(
    mod: Opaque,
    indices: Indices,
    score: Tensor,
    tangents: tuple[Tensor | None, ...],
    *,
    live: Tensor | None = None,
) -> Tensor:
    """Return the tangent of a score_mod, given those of the score and of each captured tensor.

    The gradient u -> u J is linear in u, and its own gradient is J t: two reverse passes are one in
    forward mode. They work whatever else is recorded, and in the middle of forward mode.
    """
    given = [(x, t) for x, t in zip((score, *mod.captures), tangents, strict=True) if t is not None]
    with torch.enable_grad():
        leaves = {id(x): x.view_as(x).requires_grad_() for x, _ in given}
        raw, *captures = (leaves.get(id(x), x) for x in (score, *mod.captures))
        moved = replace(mod, captures=tuple(captures))
        found = evaluate(moved, "score", *indices, score=raw, live=live)
        factor = torch.zeros_like(found, requires_grad=True)
        pulled: tuple[Tensor | None, ...] = (None,)
        if found.requires_grad:
            sources = list(leaves.values())
            pulled = torch.autograd.grad(
                found, sources, factor, create_graph=True, allow_unused=True
            )
    pairs = [
        (x, t)
        for x, (_, t) in zip(pulled, given, strict=False)
        if x is not None and x.requires_grad
    ]
    if not pairs:
        return torch.zeros_like(score)
    (pushed,) = torch.autograd.grad(
        [x for x, _ in pairs],
        factor,
        [t.to(x.dtype) for x, t in pairs],
        create_graph=torch.is_grad_enabled(),
    )
    return pushed.to(score.dtype).broadcast_to(score.shape)


_AXES = ((-1, 1, 1, 1), (1, -1, 1, 1), (1, 1, -1, 1), (1, 1, 1, -1))


def _environment(
    score: Tensor | None, indices: Iterator[Tensor] | list[Tensor]
) -> dict[str, Tensor]:
    env = dict(zip(MASK_INPUTS, indices, strict=True))
    return env if score is None else {"score": score, **env}


def _mapped_over_grid(mod: Mod, kind: Kind, indices: Indices, score: Tensor | None) -> Tensor:
    scores = () if score is None else (score,)
    if any(index.numel() == 0 for index in indices):  # torch.vmap refuses empty dimensions
        shape = [index.numel() for index in indices]
        return indices[0].new_empty(shape, dtype=torch.bool) if score is None else score
    function: Callable[..., Any] = _returning_tensors(mod, kind)
    for level in reversed(range(4)):
        dims = tuple(0 if position == level else None for position in range(4))
        function = torch.vmap(function, in_dims=(*(0 for _ in scores), *dims))
    return _checked(_mapped(function, mod, kind, *scores, *indices), mod, kind)


def _mapped(function: Callable[..., Any], mod: Mod, kind: Kind, *args: Tensor) -> Tensor:
    """Call the vmapped function. Errors that torch raises about the mod become our own."""
    try:
        with AsOnTensors():
            result: Tensor = function(*args)
    except IndexError as error:
        raise CapturedIndexError(
            f"the indices in {kind}_mod {mod_name(mod)!r} must be inside of the captured tensor, "
            f"but {error}. Clamp the index to the tensor's size."
        ) from error
    except RuntimeError as error:
        if str(error) == "ZeroDivisionError":
            raise DivisionByZeroError(
                f"the divisor of integers must not be 0, but is 0 in {kind}_mod "
                f"{mod_name(mod)!r}. Clamp it with .clamp(min=1)."
            ) from error
        if isinstance(error, QuireError):
            raise
        if "data-dependent control flow" not in str(error) and ".item()" not in str(error):
            reason = str(error).partition("\n")[0]
            raise UnsupportedOpError(
                f"{kind}_mod {mod_name(mod)!r} must be made of operations that quire can trace or "
                f"torch.vmap can run, but neither can: {type(error).__name__}: {reason} Convert "
                f"the tensors that it reads to dense ones of an ordinary dtype, or write it with "
                f"other operations."
            ) from error
        raise TracedBranchError(
            f"{kind}_mod {mod_name(mod)!r} must be computed for all elements at once, but asks for "
            f"the value of a single element, as a Python branch does. Write torch.where(condition, "
            f"a, b)."
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
    if result.is_complex():
        raise ModResultError(
            f"{kind}_mod {mod_name(mod)!r} must return a real number, but returned {result.dtype}. "
            f"Return its real part or its absolute value."
        )
    if kind == "mask" and result.dtype != torch.bool:
        raise ModResultError(
            f"mask_mod {mod_name(mod)!r} must return a truth value, but returned {result.dtype}. "
            f"Compare, as in q_idx >= kv_idx, or convert with .bool()."
        )
    return result


class AsOnTensors(TorchFunctionMode):
    """Makes torch functions mean under torch.vmap what they mean on ordinary tensors.

    `tensor[i, j]` with 0-d index tensors becomes an indexing op, which vmap can batch. And vmap
    rounds the number in `x * 0.1` to the dtype of x, if that is a narrow float and x has no
    dimension of its own. Torch does not, so x is given one.
    """

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.__getitem__:
            items = _without_ellipsis(args[1], args[0].dim())
            if any(isinstance(item, Tensor) for item in items) and all(map(_plain, items)):
                return torch.ops.aten.index(args[0], [_index_tensor(item) for item in items])
        elif getattr(func, "__name__", "") in _WITH_EXACT_NUMBERS:
            tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            if len(tensors) == 1 and _is_narrow_scalar(tensors[0]):
                args, kwargs = tree_map(_with_dimension, (args, kwargs))
                return func(*args, **kwargs).squeeze(0)
        return func(*args, **kwargs)


_WITH_EXACT_NUMBERS = frozenset(
    (
        *("mul", "mul_", "multiply", "multiply_"),
        *("div", "div_", "divide", "divide_", "true_divide", "true_divide_", "__rdiv__"),
        *("floor_divide", "floor_divide_", "__floordiv__"),
    )
)
"""Torch's functions that compute with a Python number in float32, whatever the tensor is.

All others round it to the dtype of the tensor first, with vmap and without.
"""


def _is_narrow_scalar(x: Tensor) -> bool:
    return x.dtype in (torch.float16, torch.bfloat16) and x.dim() == 0


def _with_dimension(value: object) -> object:
    return value.unsqueeze(0) if isinstance(value, Tensor) else value


def _without_ellipsis(index: object, rank: int) -> tuple[object, ...]:
    """The items of an index, with full slices in place of `...`."""
    items = index if isinstance(index, tuple) else (index,)
    dots = [at for at, item in enumerate(items) if item is Ellipsis]
    if len(dots) != 1:
        return items
    return *items[: dots[0]], *[slice(None)] * (rank - len(items) + 1), *items[dots[0] + 1 :]


def _plain(item: object) -> bool:
    full = isinstance(item, slice) and item == slice(None)
    return full or (isinstance(item, int | Tensor) and not isinstance(item, bool))


def _index_tensor(item: Any) -> Tensor | None:
    match item:
        case slice():
            return None
        case Tensor():
            return item if item.dtype in (torch.bool, torch.uint8) else item.long()
    return torch.tensor(item, device="cpu")


# --- mods without a graph ------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Opaque:
    """A mod that cannot be traced, with the tensors that it captures.

    Calling it calls the user's function with each of `originals` replaced by the tensor at the same
    place in `captures`: `replace(mod, captures=others)` is the same function of other tensors.
    """

    mod: Mod
    originals: tuple[Tensor, ...]
    captures: tuple[Tensor, ...]

    @staticmethod
    def of(mod: Mod, kind: Kind, score_dtype: torch.dtype, device: torch.device) -> Opaque:
        """Call `mod` for one element, and record which tensors it reads."""
        first = torch.zeros(1, dtype=torch.int64, device=device)
        score = torch.zeros(1, 1, 1, 1, dtype=score_dtype, device=device)
        recorder = _CaptureRecorder()

        def recorded(*args: Tensor) -> Any:
            recorder.know(args)
            with recorder:
                return mod(*args)

        recorded.__name__ = mod_name(mod)
        with torch.no_grad():
            _mapped_over_grid(recorded, kind, (first,) * 4, score if kind == "score" else None)
        captures = tuple(recorder.captures)
        return Opaque(mod, captures, captures)

    def __call__(self, *args: Tensor) -> Any:
        """Call the user's function with the captures in place of the original tensors."""
        if self.captures is self.originals:
            return self.mod(*args)
        with _Substitution(self.originals, self.captures):
            return self.mod(*args)

    @property
    def __name__(self) -> str:
        return mod_name(self.mod)


class _CaptureRecorder(TorchFunctionMode):
    """Collect the tensors that torch functions read and that no torch function made."""

    def __init__(self) -> None:
        super().__init__()
        self.captures: list[Tensor] = []
        self._made: dict[int, Tensor] = {}  # keeps them alive, so that no id is used twice

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        for value in tree_leaves((args, kwargs)):
            if isinstance(value, Tensor) and id(value) not in self._made:
                self._made[id(value)] = value
                self.captures.append(value)
        result = func(*args, **(kwargs or {}))
        self.know(value for value in tree_leaves(result) if isinstance(value, Tensor))
        return result

    def know(self, tensors: Iterable[Tensor]) -> None:
        """Remember tensors that are not captured: arguments of the mod, and what it made."""
        self._made.update((id(tensor), tensor) for tensor in tensors)


class _Substitution(TorchFunctionMode):
    """Give torch functions `others` in place of `originals`."""

    def __init__(self, originals: tuple[Tensor, ...], others: tuple[Tensor, ...]) -> None:
        super().__init__()
        self._other = {id(old): new for old, new in zip(originals, others, strict=True)}

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        def swap(value: object) -> object:
            return self._other.get(id(value), value)

        args, kwargs = tree_map(swap, (args, kwargs or {}))
        return func(*args, **kwargs)
