"""Evaluates a graph on torch tensors: this defines what every op means.

What goes in: a graph, tensors for its inputs (of any shapes that broadcast, also 0-d under
`torch.vmap`), and the captured tensors. What comes out: a tensor of the root's dtype. Autograd
can differentiate it. Each node is computed at its own broadcast shape: what depends on `h` alone is
computed once for each head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from quire.errors import CapturedIndexError, DivisionByZeroError, ModError
from quire.ir.graph import Node, walk
from quire.support.torch_private import in_transform


def _bits(x: Tensor) -> Tensor:
    """x.bit_length(); 0 if x < 1."""
    half = torch.bitwise_right_shift(x, x.dtype.itemsize * 4)  # a double is exact only up to 2**53
    low = x - torch.bitwise_left_shift(half, x.dtype.itemsize * 4)
    high, low = (torch.frexp(part.double()).exponent.to(x.dtype) for part in (half, low))
    return torch.where(x < 1, 0, torch.where(half > 0, high + x.dtype.itemsize * 4, low))


_AS_IN_TORCH = """
    add sub mul div pow neg abs sign floor ceil round trunc lt le eq where
    exp exp2 log log2 sqrt tanh sigmoid erf sin cos
"""
MEANING: dict[str, Callable[..., Tensor]] = {
    **{name: getattr(torch, name) for name in _AS_IN_TORCH.split()},
    "floordiv": functools.partial(torch.div, rounding_mode="floor"),  # autograd: 0
    "mod": torch.remainder,
    "min": torch.minimum,
    "max": torch.maximum,
    "and": torch.bitwise_and,
    "or": torch.bitwise_or,
    "xor": torch.bitwise_xor,
    "not": torch.bitwise_not,
    "shl": torch.bitwise_left_shift,
    "shr": torch.bitwise_right_shift,
    "bits": _bits,
}
"""What each op means: one function of torch."""


LEAVES = frozenset({"input", "const", "cast", "load"})
"""Ops that need more than their operands; `interpret` handles them itself."""


def interpret(
    root: Node,
    env: Mapping[str, Tensor],
    captures: Sequence[Tensor] = (),
    *,
    live: Tensor | None = None,
    where: Callable[[Node], str] = lambda node: "",
) -> Tensor:
    """The value of `root`, at the broadcast shape of the inputs that it depends on.

    Indices into captured tensors must be in range, and divisors of integers not 0, where `live` is
    true, or everywhere without it. Elsewhere the result is not used. `where` gives the source line
    of a node, for errors.
    """
    nodes = list(walk(root))
    last_user = {arg: node for node in nodes for arg in node.args}
    value: dict[Node, Tensor] = {}
    for node in nodes:
        args = [value[arg] for arg in node.args]
        for arg in set(node.args):
            if last_user[arg] is node:  # frees the memory of a tile at its last use
                del value[arg]
        match node.op:
            case "input":
                value[node] = env[str(node.payload)].to(node.dtype)
            case "const":
                value[node] = torch.tensor(node.payload, dtype=node.dtype, device="cpu")
            case "cast":
                value[node] = args[0].to(node.dtype)
            case "load":
                value[node] = _load(node, captures, args, live, where)
            case "floordiv" | "mod" as op if not node.dtype.is_floating_point:
                value[node] = MEANING[op](args[0], _divisor(node, args[1], live, where))
            case op:
                value[node] = MEANING[op](*args)
    return value[root]


def _load(
    node: Node,
    captures: Sequence[Tensor],
    indices: list[Tensor],
    live: Tensor | None,
    where: Callable[[Node], str],
) -> Tensor:
    assert isinstance(node.payload, int)
    tensor = captures[node.payload]
    if not indices:
        return tensor
    if in_transform():  # under vmap torch checks indices
        try:
            found: Tensor = torch.ops.aten.index(tensor, [index.long() for index in indices])
        except IndexError as error:
            raise CapturedIndexError(f"{error}{where(node)}. Clamp the index.") from error
        return found
    safe = [
        _checked(
            index.long(),
            (index < -size) | (index >= size),
            live,
            instead=0,
            complain=functools.partial(_index_error, tensor, dim, index, lambda: where(node)),
        )
        for dim, (index, size) in enumerate(zip(indices, tensor.shape, strict=True))
    ]
    if tensor.numel() == 0:
        return tensor.new_zeros(torch.broadcast_shapes(*(index.shape for index in safe)))
    return tensor[tuple(safe)]


def _divisor(
    node: Node, divisor: Tensor, live: Tensor | None, where: Callable[[Node], str]
) -> Tensor:
    if in_transform():  # under vmap values cannot be checked
        return divisor

    def complain(wrong: Tensor) -> DivisionByZeroError:
        return DivisionByZeroError(
            f"the divisor of integers must not be 0, but is{where(node)}. Clamp it with "
            f".clamp(min=1){_OR_MASK}"
        )

    return _checked(divisor, divisor == 0, live, instead=1, complain=complain)


def _checked(
    value: Tensor,
    bad: Tensor,
    live: Tensor | None,
    instead: int,
    complain: Callable[[Tensor], ModError],
) -> Tensor:
    """`value` with `instead` where it is bad; raises if it is bad where `live` is true."""
    if not bool(bad.any()):
        return value
    wrong = bad if live is None else bad & live
    if bool(wrong.any()):
        raise complain(wrong)
    return torch.where(bad, instead, value)


def _index_error(
    tensor: Tensor, dim: int, index: Tensor, line: Callable[[], str], wrong: Tensor
) -> CapturedIndexError:
    first = index.broadcast_to(wrong.shape)[wrong][0].item()
    return CapturedIndexError(
        f"index {first} is out of bounds for dimension {dim} with size {tensor.shape[dim]} of a "
        f"captured tensor of shape {list(tensor.shape)}{line()}. Clamp the index{_OR_MASK}"
    )


_OR_MASK = (
    ", or mask these positions away with a mask_mod: a score_mod is read only where the mask holds."
)
