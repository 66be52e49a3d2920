"""Kernels that are generated for exactly this problem."""

from __future__ import annotations

import torch

from quire.block_mask import BlockRows
from quire.bounded import BoundedDict
from quire.checks import DTYPES
from quire.codegen.lower import check_lowerable
from quire.errors import UnsupportedOpError
from quire.ir.terms import TRUE
from quire.ir.trace import Traced, mod_name
from quire.memory.placed import Placed
from quire.request import Call, Problem, ReadyMod
from quire.results import Above, Gradients, Result, Wanted
from quire.runtime import processor
from quire.runtime.backward import BackwardPlan
from quire.runtime.forward import ForwardPlan, has_memory
from quire.runtime.mod_graphs import bounds_of
from quire.runtime.pyramids import is_worth
from quire.runtime.records import by_form, num_products

LARGEST_HEAD_DIM = 1024


def obstacle(call: Call) -> str | None:
    """Why no kernel can be generated for `call`; None where one can."""
    problem, (query, key, value) = call.problem, call.placed.operands
    if query.device.type != "cpu":
        return f"the tensors are on {query.device}, and kernels are generated for the CPU"
    for name, mod in problem.mods.items():
        reason = _mod_obstacle(name, mod)
        if reason is not None:
            return reason
    for tensor in call.tensors:
        if not has_memory(tensor):
            return f"a {type(tensor).__name__} on {tensor.device} has no memory that it could read"
    head_dim = max(query.shape[-1], value.shape[-1])
    if head_dim > LARGEST_HEAD_DIM:
        return f"its head dim is {head_dim}, and kernels go up to {LARGEST_HEAD_DIM}"
    for name, dtype in (("keys", key.dtype), ("values", value.dtype)):
        if dtype not in (*DTYPES, torch.int8):
            return f"{name} are {str(dtype).removeprefix('torch.')}, which kernels do not read"
    if query.dtype != torch.float64 and torch.float64 in (key.dtype, value.dtype):
        return "keys or values are float64 and queries are not"
    return processor.obstacle()


def _mod_obstacle(name: str, mod: ReadyMod) -> str | None:
    if not isinstance(mod, Traced):
        kind = "score_mod" if name == "score_mod" else "mask_mod"
        return f"the {kind} {mod_name(mod.mod)!r} cannot be traced"
    try:
        check_lowerable(mod.output)
    except UnsupportedOpError as error:
        return str(error).partition(". ")[0]
    return None


def computed_unread(call: Call) -> str | None:
    """Which tiles are computed though perhaps no query reads them; None where there are none."""
    problem, placed = call.problem, call.placed
    mask = problem.mask_mod
    if problem.block_mask is not None or not isinstance(mask, Traced):
        return None
    bounds = bounds_of(mask, placed.end)
    products = min((num_products(placed, part) for _, part in by_form(placed.rows)), default=0)
    reasons = [f"nothing bounds {node.op!r}{mask.where(node)}" for node in bounds.unknown]
    for pyramid in bounds.pyramids:
        table = mask.captures[pyramid.slot]
        if pyramid.largest and not is_worth(table, pyramid, products):
            reasons.append(f"a table of shape {list(table.shape)} is too large for so few scores")
    if not reasons:
        return None
    tiles = "every tile" if bounds.can is TRUE else "tiles that nothing else rules out"
    return (
        f"{tiles}: in the mask_mod {mask.name!r} {' and '.join(reasons)}. A block_mask, made once "
        f"with create_block_mask, says which tiles no query reads"
    )


class Kernels:
    """The kernels of calls that are alike. Each pass is planned when it is first asked for."""

    __slots__ = ("_backward", "_forward", "_learns")

    def __init__(self, learns: bool) -> None:
        self._learns = learns
        self._forward: ForwardPlan | None = None
        self._backward: BoundedDict[object, BackwardPlan] = BoundedDict(16)

    def forward(self, call: Call) -> Result | None:
        """The results; None where an index into a captured tensor is out of range."""
        plan = self._forward
        if plan is None:
            plan = self._forward = ForwardPlan.of(call, self._learns)
        return plan.run(call)

    def backward(
        self,
        problem: Problem,
        placed: Placed,
        blocks: BlockRows | None,
        wanted: Wanted,
        above: Above,
    ) -> Gradients | None:
        """The gradients; None where they are to be recorded, or a number is not finite."""
        out, lse, *given = above
        grads = [None if x is None else x.resolve_neg() for x in given]
        query, key, value = (x.resolve_neg() for x in placed.operands)
        captures = tuple(x.resolve_neg() for x in wanted.captures)
        tensors = (query, key, value, *captures, *(x for x in grads if x is not None))
        if torch.is_grad_enabled() or not all(map(has_memory, tensors)):
            return None
        placed = placed.on(query, key, value)
        # Whoever keeps tensors for autograd may give them back in other strides.
        kept = (query, key, value, out, lse, *captures)
        layout = (wanted.learned, *(tensor.stride() for tensor in kept))
        plan = self._backward.get(layout)
        if plan is None:
            problem = problem.with_captures(captures)
            made = BackwardPlan.of(problem, placed, blocks, wanted.learned, Result(out, lse))
            plan = self._backward.keep(layout, made)
        return plan.run(placed, captures, wanted, Above(out, lse, *grads))
