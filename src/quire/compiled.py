"""Attention on kernels that are generated for exactly this problem."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from quire import eager
from quire.aux_outputs import NO_AUX, AuxRequest
from quire.block_mask import BlockRows
from quire.checks import DTYPES
from quire.codegen.mods.lower import check_lowerable
from quire.config import config
from quire.eager import Above, Gradients, Operands, Result, Wanted, output_layout
from quire.errors import TensorKindError, UnsupportedOpError
from quire.ir.terms import TRUE
from quire.ir.trace import Traced, mod_name
from quire.memory import Dense
from quire.one_by_one import each, fill_holes, gradients_one_by_one, in_rows, one_by_one
from quire.problem import Call, Problem, ReadyMod
from quire.recheck import recheck
from quire.runtime import processor
from quire.runtime.addressing import Addressing, dense
from quire.runtime.backward import backward, key_mass
from quire.runtime.forward import forward
from quire.runtime.pyramids import is_worth
from quire.runtime.roots import bounds_of
from quire.sequences import Packed
from quire.torch_private import is_transformed, is_zero_tensor

LARGEST_HEAD_DIM = 1024


def obstacle(call: Call) -> str | None:
    """Why no kernel can be generated for `call`; None where one can."""
    if call.query.device.type != "cpu":
        return f"the tensors are on {call.query.device}, and kernels are generated for the CPU"
    problem = call.problem
    for kind, mod in (
        ("score_mod", problem.score_mod),
        ("mask_mod", problem.mask_mod),
        ("mask_mod", problem.partial_mod),
    ):
        reason = None if mod is None else _mod_obstacle(kind, mod)
        if reason is not None:
            return reason
    for tensor in (*_operands(call), *problem.captures):
        if not has_memory(tensor):
            return f"a {type(tensor).__name__} on {tensor.device} has no memory that it could read"
    head_dim = max(call.query.shape[-1], call.value.shape[-1])
    if head_dim > LARGEST_HEAD_DIM:
        return f"its head dim is {head_dim}, and kernels go up to {LARGEST_HEAD_DIM}"
    for name, dtype in (("keys", call.key.dtype), ("values", call.value.dtype)):
        if dtype not in (*DTYPES, torch.int8):
            return f"{name} are {str(dtype).removeprefix('torch.')}, which kernels do not read"
    if call.query.dtype != torch.float64 and torch.float64 in (call.key.dtype, call.value.dtype):
        return "keys or values are float64 and queries are not"
    return processor.obstacle()


def has_memory(tensor: Tensor) -> bool:
    """Whether a tensor, perhaps within a transform of torch.func, is in memory of the CPU."""
    plain = type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    return plain and tensor.is_cpu and not is_zero_tensor(tensor)


def _operands(call: Call) -> tuple[Tensor, ...]:
    return (call.query, call.key, call.value, *(() if call.sink is None else (call.sink,)))


def _mod_obstacle(kind: str, mod: ReadyMod) -> str | None:
    if not isinstance(mod, Traced):
        return f"the {kind} {mod_name(mod.mod)!r} cannot be traced"
    try:
        check_lowerable(mod.output)
    except UnsupportedOpError as error:
        return str(error).partition(". ")[0]
    return None


def computed_unread(call: Call) -> str | None:
    """Which tiles are computed though perhaps no query reads them; None where there are none."""
    problem, operands = call.problem, Operands(call.query, call.key, call.value)
    mask = problem.mask_mod
    if problem.block_mask is not None or not isinstance(mask, Traced):
        return None
    memory = _memory(problem, operands, call.packed)
    bounds = bounds_of(mask, memory.longest)
    work = min((memory.work(part) for _, part in memory.by_form()), default=0)
    reasons = [f"nothing bounds {node.op!r}{mask.where(node)}" for node in bounds.unknown]
    for pyramid in bounds.pyramids:
        table = mask.captures[pyramid.slot]
        if pyramid.largest and not is_worth(table, pyramid, work):
            reasons.append(f"a table of shape {list(table.shape)} is too large for so few scores")
    if not reasons:
        return None
    tiles = "every tile" if bounds.can is TRUE else "tiles that nothing else rules out"
    return (
        f"{tiles}: in the mask_mod {mask.name!r} {' and '.join(reasons)}. A block_mask, made once "
        f"with create_block_mask, says which tiles no query reads"
    )


def attention(call: Call) -> Result:
    """Compute on generated kernels, forward and backward."""
    problem, operands = call.problem, Operands(call.query, call.key, call.value)
    if is_transformed() or (
        torch.is_grad_enabled()
        and any(tensor.requires_grad for tensor in (*_operands(call), *problem.captures))
    ):
        return eager.attention(
            problem,
            *operands,
            call.sink,
            wanted=call.aux,
            run=functools.partial(run, packed=call.packed),
            run_backward=functools.partial(run_backward, call.packed),
        )
    wanted = call.aux or NO_AUX
    return run(problem, operands, call.sink, call.query.dtype, call.packed, wanted=wanted)


def run(
    problem: Problem,
    operands: Operands,
    sink: Tensor | None,
    dtype: torch.dtype | None = None,
    packed: Packed | None = None,
    *,
    wanted: AuxRequest,
) -> Result:
    """The forward pass, without a record for autograd; `out` in `dtype` or the working dtype."""
    shape, strides = output_layout(operands.query, operands.value.shape[-1])
    out = torch.empty_strided(shape, strides, dtype=dtype or operands.dtype, device="cpu")
    if not has_memory(out):
        raise TensorKindError(
            f"expected to compute into a plain tensor, but a mode that is active makes a "
            f"{type(out).__name__} of every new one. Call attention outside of it."
        )
    memory = _memory(problem, operands, packed)
    if config().check:
        wanted = wanted._replace(lse=True, max_scores=True)
    by_row = wanted._replace(lse=wanted.lse or wanted.key_mass, key_mass=False)
    rows, out_of_range = forward(problem, memory, sink, out, by_row)
    if out_of_range:
        # Where every index is looked at, the error says which it was; if there is none after all,
        # as a mod was asked in a block that does not exist, that is the result.
        found = one_by_one(
            problem,
            operands,
            packed,
            lambda problem, operands: eager.forward(problem, operands, sink, wanted),
        )
        return found._replace(out=found.out.to(out.dtype))
    result = Result(*rows)
    fill_holes(result, packed)
    if config().check:
        for alone in each(problem, *in_rows(operands, packed)):
            recheck(alone.problem, alone.operands, sink, _part(result, alone.rows))
    if wanted.key_mass:
        return result._replace(key_mass=key_mass(problem, memory, rows))
    return result


def _part(result: Result, rows: slice) -> Result:
    return Result(*(x[:, :, rows] if x.dim() > 1 else x for x in result[:-1]))


def run_backward(
    packed: Packed | None,
    problem: Problem,
    operands: Operands,
    blocks: BlockRows | None,
    wanted: Wanted,
    above: Above,
) -> Gradients:
    """The backward pass; in tiles of torch ops where it is recorded, or a number is not finite."""
    found = None
    given = [None if x is None else x.resolve_neg() for x in (above.grad_out, above.grad_lse)]
    tensors = (*operands, *problem.captures, *(x for x in given if x is not None))
    if not torch.is_grad_enabled() and all(map(has_memory, tensors)):
        memory, above = _memory(problem, operands, packed), Above(above.out, above.lse, *given)
        found = backward(problem, memory, blocks, wanted, above)
    if found is not None:
        return found
    return run_eagerly(packed, problem, operands, blocks, wanted, above)


def run_eagerly(
    packed: Packed | None,
    problem: Problem,
    operands: Operands,
    blocks: BlockRows | None,
    wanted: Wanted,
    above: Above,
) -> Gradients:
    """The backward pass in tiles of torch ops."""
    if packed is not None:
        return gradients_one_by_one(problem, operands, packed, wanted, above)
    return eager.backward(problem, operands, blocks, wanted, above)


def _memory(problem: Problem, operands: Operands, packed: Packed | None) -> Addressing:
    query, key, value = (tensor.resolve_neg() for tensor in operands)
    if packed is not None:
        return Addressing(query, key, value, packed.sequences, None, *packed[1:])
    dense_memory = Dense(key, value, problem.kv_start)
    return dense(query, dense_memory, problem.q_start, problem.b_start)
