"""Which calls compiled kernels can run, and which tiles they cannot skip.

`runtime/` plans and launches the kernels.
"""

from __future__ import annotations

import torch

from quire.checks import PAGE_DTYPES
from quire.checks.arguments import dtype_name
from quire.codegen.mods.lower import check_lowerable
from quire.errors import UnsupportedOpError
from quire.ir.terms import TRUE
from quire.ir.trace import Traced, mod_name
from quire.request import Call, ReadyMod
from quire.runtime.cache import processor_obstacle
from quire.runtime.forward import by_form
from quire.runtime.launch import num_products
from quire.runtime.mods import bounds_of
from quire.runtime.pyramids import is_worth
from quire.support.torch_private import has_memory, is_jit_tracing

LARGEST_HEAD_DIM = 1024


def obstacle(call: Call) -> str | None:
    """Return why no kernel can be generated for `call`; None if one can."""
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
    if is_jit_tracing():
        return "torch.jit.trace records operations of torch, and sees no kernel"
    head_dim = max(query.shape[-1], value.shape[-1])
    if head_dim > LARGEST_HEAD_DIM:
        return f"its head dim is {head_dim}, and kernels go up to {LARGEST_HEAD_DIM}"
    for name, dtype in (("keys", key.dtype), ("values", value.dtype)):
        if dtype not in PAGE_DTYPES:
            return f"{name} are {dtype_name(dtype)}, which kernels do not read"
    if query.dtype != torch.float64 and torch.float64 in (key.dtype, value.dtype):
        return "keys or values are float64 and queries are not"
    return processor_obstacle()


def _mod_obstacle(name: str, mod: ReadyMod) -> str | None:
    if not isinstance(mod, Traced):
        kind = "mask_mod" if name == "partial_mod" else name
        return f"the {kind} {mod_name(mod.mod)!r} cannot be traced"
    try:
        check_lowerable(mod.output)
    except UnsupportedOpError as error:
        return str(error).partition(". ")[0]
    return None


def computed_unread(call: Call) -> str | None:
    """Return which tiles are computed though perhaps no query reads them; None if all are read."""
    problem, placed = call.problem, call.placed
    mask = problem.mask_mod
    if problem.block_mask is not None or call.request.mask_mod is None:
        return None
    if not isinstance(mask, Traced):
        return None
    bounds = bounds_of(mask, placed.end)
    parts = by_form(placed.rows, placed.key.dtype)
    products = min((num_products(placed, part) for _, part in parts), default=0)
    reasons = [f"nothing bounds {node.op!r}{mask.where(node)}" for node in bounds.unknown]
    for pyramid in bounds.pyramids:
        table = mask.captures[pyramid.slot]
        if pyramid.largest and not is_worth(table, pyramid, products):
            reasons.append(f"a table of shape {list(table.shape)} is too large for so few scores")
    if not reasons:
        return None
    whole = num_products(placed, placed.rows) // placed.query.shape[-1]
    scores = f"{whole:,} scores in all"
    tiles = f"tiles that nothing else rules out, of {scores}"
    if bounds.can is TRUE:
        tiles = f"every tile, {scores}"
    advice = "A block_mask, made once with create_block_mask, says which tiles no query reads"
    return f"{tiles}: in the mask_mod {mask.name!r} {' and '.join(reasons)}. {advice}"
