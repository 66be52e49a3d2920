"""PyTorch's names with quire behind them, for CPU tensors.

    quire.patch_torch()        # until quire.unpatch_torch()
    with quire.patch_torch():  # or for a while
        model(tokens)

The functions of PyTorch stay the objects that they are; what is exchanged is their code. So whoever
has imported one before, keeps it in a table or has compiled it gets ours too, and `unpatch_torch`
puts back every bit. On other devices PyTorch's own code runs, and so it does in a graph that
torch.compile may not break.

PyTorch's `BlockMask` is left alone: ours is a subclass, and either kind is taken everywhere. So are
`and_masks`, `or_masks` and `noop_mask`, which mean the same. Of `PagedAttention` the methods are
exchanged: an instance that was made before has the tables that ours use.
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


class Row(NamedTuple):
    """A function of PyTorch's, ours, and the place of the parameter that tells the device.

    Where that is an object of some kind, `attribute` of it tells.
    """

    module: str
    name: str
    ours: Callable[..., Any]
    device: int
    attribute: str | None = None


FLEX = "torch.nn.attention.flex_attention"
PAGED_METHODS = (
    *("reserve", "erase", "assign"),
    *("convert_logical_block_mask", "get_mask_mod", "get_score_mod"),
)
ROWS = (
    Row(FLEX, "flex_attention", flex_attention, device=0),
    Row(FLEX, "create_block_mask", create_block_mask, device=5),
    Row(FLEX, "create_mask", create_mask, device=5),
    # What F.scaled_dot_product_attention calls for nested tensors.
    Row(JAGGED, jagged.__name__, jagged, device=0),
    *(
        Row(PAGED, f"PagedAttention.{name}", getattr(PagedAttention, name), 0, "page_table")
        for name in PAGED_METHODS
    ),
)

STAND_INS: dict[str, Callable[..., Any]] = {}
"""What the exchanged code calls, by module and name. Kept, for calls that are under way."""

_lock = lock()
_depth = 0
_undo = ExitStack()


class Patch:
    """What `patch_torch` returns: leaving it as a context undoes that one call."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        unpatch_torch()


def patch_torch() -> Patch:
    """Put quire behind PyTorch's `flex_attention`, block masks and `PagedAttention`.

    with patch_torch():
        out = torch.nn.attention.flex_attention.flex_attention(query, key, value)

    And behind `F.scaled_dot_product_attention` where it is given nested tensors.

    For CPU tensors alone. Without `with` it holds until `unpatch_torch()`; calls may be nested.
    """
    global _depth
    with _lock:
        if _depth == 0:
            with ExitStack() as stack:  # a row that fails undoes those before it
                for row in ROWS:
                    _exchange(row, stack)
                _undo.push(stack.pop_all())
        _depth += 1
    return Patch()


def unpatch_torch() -> None:
    """Undo one `patch_torch()`; the last one restores PyTorch. Without any, do nothing."""
    global _depth
    with _lock:
        _depth = max(0, _depth - 1)
        if _depth == 0:
            _undo.close()


def _exchange(row: Row, stack: ExitStack) -> None:
    """Give PyTorch's function our code, and have `stack` put its own back."""
    theirs = named(row.module, row.name)
    assert isinstance(theirs, types.FunctionType) and not theirs.__closure__, "code needs a place"
    key = f"{row.module}.{row.name}"
    STAND_INS[key] = _stand_in(row, own(theirs))
    stack.callback(setattr, theirs, "__code__", theirs.__code__)
    theirs.__code__ = _code(theirs, key)


def _code(theirs: Callable[..., Any], key: str) -> types.CodeType:
    """Code with the parameters of `theirs`, whose defaults it goes on using.

    It runs as part of PyTorch's module, whose globals have no name of ours. Dynamo enters only
    code that names torch.
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


def _stand_in(row: Row, theirs: Callable[..., Any]) -> Callable[..., Any]:
    """The function that takes calls to PyTorch's: ours for the CPU, `theirs` for the rest."""

    @never_entered
    def stand_in(*args: Any, **kwargs: Any) -> Any:
        where = args[row.device]
        if row.attribute is not None:
            where = getattr(where, row.attribute)
        return (row.ours if _is_cpu(where) else theirs)(*args, **kwargs)

    return stand_in


def _is_cpu(where: Any) -> bool:
    """Whether a tensor is on the CPU, or a device is the CPU. None is the accelerator, if any.

    Anything else is a mistake, and it is for ours to say so.
    """
    if where is None:
        where = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    device = getattr(where, "device", where)
    if isinstance(device, str | int):
        device = torch.device(device)
    return not isinstance(device, torch.device) or device.type == "cpu"
