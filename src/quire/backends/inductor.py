"""PyTorch's own flex_attention, compiled by PyTorch: for devices other than the CPU.

On the CPU, backend="inductor" chooses it. There it needs a C++ compiler and some seconds for each
new mod, and has neither a backward pass nor a log-sum-exp.

PyTorch compiles the user's mods as they are. A mask_mod becomes part of the score_mod (give a block
mask as well to have blocks skipped), mods shift positions, and a sink is added with the
log-sum-exp. PyTorch reads the block mask: a block that it lists twice counts twice.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from quire.aux_outputs import AuxRequest
from quire.checks.arguments import dtype_name
from quire.errors import BackendError
from quire.ir.trace import Mod
from quire.memory import Dense
from quire.mods.compose import shift
from quire.request import Call, Request
from quire.results import Result
from quire.support.dynamo import own
from quire.support.torch_private import compile_errors, has_avx2, no_compiler_error

DEVICES = ("cpu", "cuda", "xpu", "hpu", "mps")
FORWARD_ONLY = ("cpu", "mps")
CPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RECOMPILE_LIMIT = 256
"""The most kernels that PyTorch keeps. Each mod, each dtype and some shapes need their own."""

torch_attention: Callable[..., Any] = own(torch_flex.flex_attention)


# --- what it cannot do ---------------------------------------------------------------------------


def obstacle(call: Call) -> str | None:
    """Return why PyTorch cannot run `call`; None if no reason is known before compilation."""
    device = call.placed.query.device.type
    if device not in DEVICES:
        return f"PyTorch's flex_attention does not run on {device}"
    if not call.placed.is_dense:
        return "PyTorch's flex_attention takes no sequences that are packed into one tensor"
    if call.problem.dropout is not None:
        return "PyTorch's flex_attention has no dropout, and dropout_p is not 0"
    if call.problem.prob_mod is not None:
        return "PyTorch's flex_attention has no prob_mod"
    if call.problem.weighting != "softmax":
        return "PyTorch's flex_attention has no weights but those of a softmax"
    if call.placed.query.shape[2] == 0 or call.placed.key.shape[2] == 0:
        return "PyTorch's flex_attention takes no sequences of length 0"
    for output in _unknown(call.request.aux):
        return f"PyTorch's flex_attention does not return {output}"
    reason = _backward_obstacle(call) if device in FORWARD_ONLY else None
    if reason is None and device == "cpu":
        reason = _cpu_obstacle(call)
    return reason


def _backward_obstacle(call: Call) -> str | None:
    """Return why PyTorch cannot run `call` on a device without backward pass and log-sum-exp."""
    here = f"PyTorch's flex_attention on {call.placed.query.device.type}"
    named = zip(("query", "key", "value"), call.placed.operands, strict=True)
    learned = [name for name, tensor in named if tensor.requires_grad]
    if any(tensor.requires_grad for tensor in call.problem.captures):
        learned.append("a captured tensor")
    if torch.is_grad_enabled() and learned:
        return f"{here} has no backward pass, and these require grad: {', '.join(learned)}"
    for output, wanted in call.request.aux._asdict().items():
        if wanted:
            return f"{here} does not return {output}"
    if call.request.sink is not None:
        return f"{here} does not return lse, which a sink needs"
    return None


def _cpu_obstacle(call: Call) -> str | None:
    dtypes = [dtype_name(x.dtype) for x in call.placed.operands]
    if call.placed.query.dtype not in CPU_DTYPES:
        return f"PyTorch's flex_attention on cpu does not take {dtypes[0]}"
    if len(set(dtypes)) > 1:
        return f"PyTorch's flex_attention on cpu takes one dtype, and these are {', '.join(dtypes)}"
    if not has_avx2():
        return "PyTorch's flex_attention on cpu needs AVX2, which this CPU does not have"
    return None


# --- what it does --------------------------------------------------------------------------------


def attention(call: Call) -> Result:
    """Compute `call` with PyTorch."""
    query, batch = call.placed.query, call.placed.query.shape[0]
    key, value = (x.expand(batch, -1, -1, -1) for x in call.placed.operands[1:])
    if not torch.is_grad_enabled():  # PyTorch checks requires_grad only
        query, key, value = query.detach(), key.detach(), value.detach()
    request, mask = call.request, call.problem.block_mask
    aux, sink, (_, q_start, kv_start, *_) = request.aux, request.sink, call.placed.one
    if mask is not None:
        _ = mask.kv_indices  # Dynamo cannot trace how a long mask makes its tensors
    score_mod = shift(request.score_mod, "score", q_start, kv_start)
    mask_mod = shift(request.mask_mod, "mask", q_start, kv_start)
    with _torch_errors():
        out, (lse, max_scores) = _compiled()(
            query,
            key,
            value,
            score_mod=with_mask(score_mod, mask_mod),
            block_mask=mask,
            scale=call.problem.scale,
            enable_gqa=query.shape[1] != key.shape[1],
            kernel_options=request.kernel_options,
            return_aux=torch_flex.AuxRequest(aux.lse or sink is not None, aux.max_scores),
        )
    if sink is not None and lse is not None:
        out, lse = with_sink(out, lse, sink)
    return Result(out, lse, max_scores)


def _unknown(aux: AuxRequest) -> list[str]:
    """Return the names of the requested outputs that PyTorch does not have."""
    known = torch_flex.AuxRequest._fields
    return [name for name, wanted in aux._asdict().items() if wanted and name not in known]


def _operator(*args: Any, **kwargs: Any) -> tuple[Tensor, torch_flex.AuxOutput]:
    """Call PyTorch from a function of quire, so that its recompile limit is not the user's."""
    result: tuple[Tensor, torch_flex.AuxOutput] = torch_attention(*args, **kwargs)
    return result


@functools.cache
def _compiled() -> Callable[..., tuple[Tensor, torch_flex.AuxOutput]]:
    options: dict[str, Any] = {"recompile_limit": RECOMPILE_LIMIT}  # not in torch's annotations
    return torch.compile(_operator, fullgraph=True, **options)


def with_mask(score_mod: Mod | None, mask_mod: Mod | None) -> Mod | None:
    """Return a score_mod that returns -inf where `mask_mod` is false."""
    if mask_mod is None:
        return score_mod

    def masked(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        changed = score if score_mod is None else score_mod(score, b, h, q_idx, kv_idx)
        allowed = mask_mod(b, h, q_idx, kv_idx) & (b >= 0)  # a tensor, even if the mod returns True
        return torch.where(allowed, changed, -math.inf)

    return masked


def with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Add `sink` [Hq] to the softmax whose results are out [B, Hq, L, Dv] and lse [B, Hq, L]."""
    total = torch.logaddexp(lse, sink.to(lse.dtype).view(1, -1, 1))
    kept = torch.exp(lse - total.masked_fill(total == -math.inf, 0.0))
    return out * kept.unsqueeze(-1).to(out.dtype), total


# --- errors of the compilation -------------------------------------------------------------------


@contextmanager
def _torch_errors() -> Iterator[None]:
    """Turn errors that PyTorch raises while it compiles into a BackendError."""
    try:
        yield
    except compile_errors() as error:
        for cause in _causes(error):
            if isinstance(cause, no_compiler_error()):
                raise BackendError(
                    f"backend='inductor' needs a C++ compiler on the CPU, but PyTorch says: "
                    f"{_first_line(cause)}. Install one, name it in the variable CXX, or use "
                    f"backend='eager'."
                ) from error
        raise BackendError(
            f"backend='inductor' needs mods that PyTorch can compile, but it raised "
            f"{type(error).__name__}: {_first_line(error)}. Change the mod, or use "
            f"backend='eager' on the CPU."
        ) from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0].rstrip(".")


# --- in a graph of torch.compile -----------------------------------------------------------------


def in_graph(request: Request) -> Result:
    """Compute a request over dense memory with PyTorch's operator, where Dynamo traces."""
    lacking = [name for name, wanted in _lacking(request) if wanted]
    if lacking:
        raise BackendError(
            f"PyTorch's operator, which computes inside torch.compile for this device or backend, "
            f"must be able to do what is asked, but it has no {lacking[0]}. Compile without "
            f"fullgraph=True."
        )
    assert isinstance(request.memory, Dense), "_lacking has checked it"
    block_mask = mask_mod = None
    for mask in request.masks:
        if isinstance(mask, torch_flex.BlockMask):
            block_mask = mask
        else:
            mask_mod = mask
    query, memory, aux = request.query, request.memory, request.aux
    out, (lse, max_scores) = torch_attention(
        query,
        memory.key,
        memory.value,
        score_mod=with_mask(request.score_mod, mask_mod),
        block_mask=block_mask,
        scale=request.scale,
        enable_gqa=query.shape[1] != memory.key.shape[1],
        kernel_options=request.kernel_options,
        return_aux=torch_flex.AuxRequest(aux.lse, aux.max_scores),
    )
    return Result(out, lse, max_scores)


def _lacking(request: Request) -> list[tuple[str, bool]]:
    """Return what PyTorch's operator does not have, and whether a request needs it."""
    memory, queries, aux = request.memory, request.queries, request.aux
    return [
        ("ragged or paged memory", not isinstance(memory, Dense) or memory.start != 0),
        ("positions of queries", type(queries.start) is not int or queries.start != 0),
        ("dropout", request.dropout_p != 0.0),
        ("sink", request.sink is not None),
        ("argmax", aux.argmax),
        ("entropy", aux.entropy),
        ("key_mass", aux.key_mass),
    ]
