"""Private names of PyTorch for torch.func and forward-mode AD."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.autograd import forward_ad

from quire.support.torch_private import is_dual, is_wrapped, named, unwrapped


def innermost(tensor: Tensor) -> Tensor:
    """Return the tensor inside all wrappers of torch.func; torch.vmap adds dimensions to it."""
    while is_wrapped(tensor):
        tensor = unwrapped(tensor)
    return tensor


@contextmanager
def forward_mode() -> Iterator[None]:
    """Let tensors have tangents, also in the middle of a Function, where PyTorch says no."""
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
