"""The living definition of every op: a graph evaluated on torch tensors.

Comes in: a graph, tensors for its inputs (any shapes that broadcast, also 0-d ones under
`torch.vmap`), the captured tensors. Goes out: a tensor of the node's dtype, differentiable by
autograd. Each node is computed at its own broadcast shape, so what depends on `h` alone is
computed once per head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from quire.errors import CapturedIndexError
from quire.ir.graph import Node, walk

MEANING: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "floordiv": torch.floor_divide,
    "mod": torch.remainder,
    "pow": torch.pow,
    "min": torch.minimum,
    "max": torch.maximum,
    "neg": torch.neg,
    "abs": torch.abs,
    "sign": torch.sign,
    "floor": torch.floor,
    "ceil": torch.ceil,
    "round": torch.round,
    "trunc": torch.trunc,
    "lt": torch.lt,
    "le": torch.le,
    "eq": torch.eq,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "not": torch.bitwise_not,
    "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
    "where": torch.where,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "log": torch.log,
    "log2": torch.log2,
    "sqrt": torch.sqrt,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "erf": torch.erf,
    "sin": torch.sin,
    "cos": torch.cos,
}


def interpret(
    root: Node,
    env: Mapping[str, Tensor],
    captures: Sequence[Tensor] = (),
    *,
    live: Tensor | None = None,
    where: Callable[[Node], str] = lambda node: "",
) -> Tensor:
    """The value of `root`.

    Indices into captured tensors must be in range wherever `live` holds (everywhere without it);
    elsewhere the value does not matter and they are clamped. `where` names a node's source line.
    """
    nodes = list(walk(root))
    last_user = {arg: node for node in nodes for arg in node.args}
    value: dict[Node, Tensor] = {}
    for node in nodes:
        args = [value[arg] for arg in node.args]
        for arg in set(node.args):
            if last_user[arg] is node:  # a tile's worth of memory each: let go at the last use
                del value[arg]
        match node.op:
            case "input":
                value[node] = env[str(node.payload)].to(node.dtype)
            case "const":
                value[node] = torch.tensor(node.payload, dtype=node.dtype)
            case "cast":
                value[node] = args[0].to(node.dtype)
            case "load":
                assert isinstance(node.payload, int)
                value[node] = _load(captures[node.payload], args, live, lambda n=node: where(n))
            case op:
                value[node] = MEANING[op](*args)
    return value[root]


LEAVES = frozenset({"input", "const", "cast", "load"})
"""The ops that `interpret` handles itself, since they need more than their operands."""


def _load(
    tensor: Tensor, indices: list[Tensor], live: Tensor | None, where: Callable[[], str]
) -> Tensor:
    if not indices:
        return tensor
    if torch._C._functorch.maybe_current_level() is not None:
        # Under vmap no value can be looked at: torch's own index checks the range.
        return torch.ops.aten.index(tensor, [index.long() for index in indices])  # type: ignore[no-any-return]
    safe = []
    for dim, (index, size) in enumerate(zip(indices, tensor.shape, strict=True)):
        wrong = (index < -size) | (index >= size)
        if bool(wrong.any()):
            checked = wrong if live is None else wrong & live
            if bool(checked.any()):
                _refuse(index, wrong, checked, dim, tensor, where())
            index = torch.where(wrong, 0, index)
        safe.append(index.long())
    if tensor.numel() == 0:
        shape = torch.broadcast_shapes(*(index.shape for index in safe))
        return tensor.new_zeros(shape)
    return tensor[tuple(safe)]


def _refuse(
    index: Tensor, wrong: Tensor, checked: Tensor, dim: int, tensor: Tensor, where: str
) -> None:
    first = index.broadcast_to(checked.shape)[checked][0].item()
    raise CapturedIndexError(
        f"index {first} is out of bounds for dimension {dim} with size {tensor.shape[dim]} of a "
        f"captured tensor of shape {list(tensor.shape)}{where}. Clamp the index, or mask these "
        f"positions away with a mask_mod: a score_mod is read only where the mask holds."
    )
