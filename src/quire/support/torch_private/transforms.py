"""Private names of PyTorch for torch.func, forward-mode AD and torch.jit.trace."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from quire.support.torch_private import (
    in_transform,
    is_dual,
    is_wrapped,
    named,
    outside_transforms,
    unwrapped,
)


def innermost(tensor: Tensor) -> Tensor:
    """Return the tensor inside all wrappers of torch.func; torch.vmap adds dimensions to it."""
    while is_wrapped(tensor):
        tensor = unwrapped(tensor)
    return tensor


class Duals(NamedTuple):
    """Plain tensors, and the tangent of each; None if there is none."""

    tensors: tuple[Tensor | None, ...]
    tangents: tuple[Tensor | None, ...]


def only_duals(tensors: Sequence[Tensor | None]) -> Duals | None:
    """Return tensors without their wrappers, if all that is active is one level of forward mode.

    Return None if another transform is active, if autograd records one of the tensors, or if none
    has a tangent.
    """
    if not is_dual() or not _jvp_alone():
        return None
    pairs = [(None, None) if x is None else forward_ad.unpack_dual(x) for x in tensors]
    plain, tangents = zip(*(map(_plain, pair) for pair in pairs), strict=True)
    records = torch.is_grad_enabled()
    recorded = records and any(x is not None and x.requires_grad for x in (*plain, *tangents))
    moves = any(x is not None for x in tangents)
    return Duals(plain, tangents) if moves and not recorded else None


def _jvp_alone() -> bool:
    """Return whether no transform of torch.func is active, or only torch.func.jvp, once."""
    if not in_transform():
        return True
    every = named("torch", "_C._functorch.get_interpreter_stack")()
    return len(every) == 1 and every[0].key() == named("torch", "_C._functorch.TransformType.Jvp")


def _plain(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else innermost(tensor)


@contextmanager
def on_plain_tensors() -> Iterator[None]:
    """Compute on plain tensors: no transform, no forward mode and no autograd is active."""
    forward_mode = named("torch.autograd.forward_ad", "_set_fwd_grad_enabled")
    with outside_transforms(), forward_mode(False), torch.no_grad():
        yield


@contextmanager
def forward_mode() -> Iterator[None]:
    """Let tensors have tangents, also inside a Function, where PyTorch forbids it."""
    with named("torch.autograd.forward_ad", "_set_fwd_grad_enabled")(True):
        if is_dual():  # there is one level for all, and each tensor has one tangent at most
            yield
        else:
            with forward_ad.dual_level():
                yield


@contextmanager
def saved_tensor_hooks() -> Iterator[None]:
    """Allow hooks on saved tensors, which torch.func forbids, for what it does not transform.

    Checkpoints need them. Safe if a name is gone: then there are no checkpoints.
    """
    functions = getattr(torch._C, "_autograd", None)
    message = getattr(functions, "_saved_tensors_hooks_get_disabled_error_message", lambda: None)()
    if message is None:
        yield
        return
    named("torch", "_C._autograd._saved_tensors_hooks_enable")()
    try:
        yield
    finally:
        named("torch", "_C._autograd._saved_tensors_hooks_disable")(message)


make_dual: Callable[[Tensor, Tensor], Tensor] = forward_ad.make_dual
"""Return a view of a tensor that has a tangent."""


def tangent_of(tensor: Tensor) -> Tensor:
    """Return the tangent of a tensor; zeros if it has none."""
    tangent = forward_ad.unpack_dual(tensor).tangent
    return torch.zeros_like(tensor) if tangent is None else tangent


@contextmanager
def unrecorded() -> Iterator[None]:
    """Stop torch.jit.trace from recording. Where it records, the sizes of tensors are tensors."""
    state = named("torch", "_C._get_tracing_state")()
    pause = named("torch", "_C._set_tracing_state")
    pause(None)
    try:
        yield
    finally:
        pause(state)
