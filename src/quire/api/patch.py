"""patch_torch(): let PyTorch's functions call quire for CPU tensors.

    quire.patch_torch()        # until quire.unpatch_torch()
    with quire.patch_torch():  # or inside the block only
        model(tokens)

PyTorch's function objects stay; only their code is exchanged. So code that imported, stored or
compiled one of them earlier calls quire too, and `unpatch_torch` restores all of it. PyTorch's own
code still runs on other devices, and in a graph that torch.compile must not break.

PyTorch's `BlockMask` is not changed: ours is a subclass, and all functions take both. `and_masks`,
`or_masks` and `noop_mask` are not changed either, since ours do the same. The methods of
`PagedAttention` are exchanged, and also work on instances that were made before.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch

from quire.api.flex import flex_attention
from quire.api.nested import jagged_scaled_dot_product_attention as jagged
from quire.api.paged import PagedAttention
from quire.block_mask import create_block_mask, create_mask
from quire.support.dynamo import never_entered, own
from quire.support.locks import lock
from quire.support.torch_private import JAGGED, PAGED, named


class Exchange(NamedTuple):
    """A function of PyTorch, and ours. Argument number `device` decides which one runs.

    That argument is a tensor or a device, or an object with a tensor in `attribute`.
    """

    module: str
    name: str
    ours: Callable[..., Any]
    device: int
    attribute: str | None = None


FLEX = "torch.nn.attention.flex_attention"
PAGED_METHODS = (
    "reserve",
    "erase",
    "assign",
    "convert_logical_block_mask",
    "get_mask_mod",
    "get_score_mod",
)
ROWS = (
    Exchange(FLEX, "flex_attention", flex_attention, device=0),
    Exchange(FLEX, "create_block_mask", create_block_mask, device=5),
    Exchange(FLEX, "create_mask", create_mask, device=5),
    # F.scaled_dot_product_attention calls this for nested tensors.
    Exchange(JAGGED, jagged.__name__, jagged, device=0),
    *(
        Exchange(PAGED, f"PagedAttention.{name}", getattr(PagedAttention, name), 0, "page_table")
        for name in PAGED_METHODS
    ),
)

STAND_INS: dict[str, Callable[..., Any]] = {}
"""What the exchanged code calls, by module and name.

Entries stay after `unpatch_torch`, for calls that are still running.
"""

_lock = lock()
_depth = 0
_undo = ExitStack()


class Patch:
    """The result of `patch_torch`, a context manager: its end undoes that one call."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        unpatch_torch()


def patch_torch() -> Patch:
    """Let PyTorch's `flex_attention`, block masks and `PagedAttention` call quire.

    with patch_torch():
        out = torch.nn.attention.flex_attention.flex_attention(query, key, value)

    `F.scaled_dot_product_attention` calls quire for nested tensors too. Only calls with CPU tensors
    are changed. Without `with`, the patch stays until `unpatch_torch()`. Calls may be nested.
    """
    global _depth
    with _lock:
        if _depth == 0:
            with ExitStack() as stack:  # if a row fails, the rows before it are undone
                for row in ROWS:
                    _exchange(row, stack)
                _undo.push(stack.pop_all())
        _depth += 1
    return Patch()


def unpatch_torch() -> None:
    """Undo one `patch_torch()`. When all are undone, PyTorch is as before."""
    global _depth
    with _lock:
        _depth = max(0, _depth - 1)
        if _depth == 0:
            _undo.close()


def _exchange(row: Exchange, stack: ExitStack) -> None:
    """Give a function of PyTorch our code. `stack` restores its own code later."""
    theirs = named(row.module, row.name)
    assert isinstance(theirs, types.FunctionType) and not theirs.__closure__, (
        "it has code to replace"
    )
    key = f"{row.module}.{row.name}"
    STAND_INS[key] = _stand_in(row, own(theirs))
    stack.callback(setattr, theirs, "__code__", theirs.__code__)
    theirs.__code__ = _code(theirs, key)


def _code(theirs: Callable[..., Any], key: str) -> types.CodeType:
    """Return code that has the parameters of `theirs` and calls the stand-in under `key`.

    The function object keeps its defaults. The code runs with the globals of PyTorch's module, so
    it imports what it needs. It imports torch since Dynamo only enters code that names torch.
    """
    signature = inspect.signature(theirs)
    bare = [p.replace(default=p.empty, annotation=p.empty) for p in signature.parameters.values()]
    given = [f"{p.name}={p.name}" if p.kind is p.KEYWORD_ONLY else str(p) for p in bare]
    source = f"""def {theirs.__name__}{inspect.Signature(bare)}:
        import torch
        from quire.api.patch import STAND_INS
        return STAND_INS[{key!r}]({", ".join(given)})"""
    made: dict[str, Any] = {}
    exec(compile(source, __file__, "exec"), made)
    code: types.CodeType = made[theirs.__name__].__code__
    return code


def _stand_in(row: Exchange, theirs: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that is called in place of PyTorch's: ours on the CPU, else `theirs`."""

    @never_entered
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        where = args[row.device]
        if row.attribute is not None:
            where = getattr(where, row.attribute)
        return (row.ours if _is_cpu(where) else theirs)(*args, **kwargs)

    return stand_in


def _is_cpu(where: Any) -> bool:
    """Return whether a tensor is on the CPU, or a device is the CPU.

    None is the accelerator if there is one, else the CPU. For any other object the result is True,
    so that our function raises the error.
    """
    if where is None:
        where = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    device = getattr(where, "device", where)
    if isinstance(device, str | int):
        device = torch.device(device)
    return not isinstance(device, torch.device) or device.type == "cpu"
