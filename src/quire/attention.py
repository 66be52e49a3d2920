"""attention(): check, plan, launch. The one page."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import NamedTuple, TypeAlias, overload

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from quire import checks
from quire.backends import choose
from quire.block_mask import BlockMask, check_fits
from quire.config import Backend as BackendName
from quire.dropout import dropout
from quire.eager import working_dtype
from quire.errors import ArgumentError, QuireError, UnsupportedOpError
from quire.ir.trace import Kind, Mod, check_signature, mod_name, trace
from quire.memory import Dense
from quire.problem import Call, Problem

Mask: TypeAlias = Mod | torch_flex.BlockMask


class AuxRequest(NamedTuple):
    """Which further outputs to return."""

    lse: bool = False
    max_scores: bool = False


class AuxOutput(NamedTuple):
    """The further outputs that were asked for, each [B, Hq, L]; None for the others."""

    lse: Tensor | None = None
    max_scores: Tensor | None = None


class EagerModWarning(UserWarning):
    """A mod cannot be traced and runs on the eager path."""


@overload
def attention(
    query: Tensor,
    memory: Dense,
    *,
    score_mod: Mod | None = ...,
    mask: Mask | None = ...,
    scale: float | None = ...,
    return_aux: None = ...,
    dropout_p: float = ...,
    generator: torch.Generator | None = ...,
    sink: Tensor | None = ...,
    q_start: int | None = ...,
    backend: BackendName = ...,
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    memory: Dense,
    *,
    score_mod: Mod | None = ...,
    mask: Mask | None = ...,
    scale: float | None = ...,
    return_aux: AuxRequest,
    dropout_p: float = ...,
    generator: torch.Generator | None = ...,
    sink: Tensor | None = ...,
    q_start: int | None = ...,
    backend: BackendName = ...,
) -> tuple[Tensor, AuxOutput]: ...


def attention(
    query: Tensor,
    memory: Dense,
    *,
    score_mod: Mod | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    return_aux: AuxRequest | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    sink: Tensor | None = None,
    q_start: int | None = None,
    backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, AuxOutput]:
    """Softmax attention of `query` [B, Hq, L, D] over the keys and values in `memory`.

        attention(query, Dense(key, value), mask=causal)

    `score_mod(score, b, h, q_idx, kv_idx)` rewrites each scaled score and `mask(b, h, q_idx,
    kv_idx)` says which are used; both are plain Python, and positions are absolute. The last query
    sits at the last key, unless `q_start` gives the position of the first. `sink` [Hq] is a logit
    per head that takes part in the softmax without a value. A row that may attend nowhere is 0.

    Returns [B, Hq, L, Dv], and an `AuxOutput` as well where `return_aux` asks for one.
    """
    call = prepare(
        query,
        memory,
        score_mod=score_mod,
        masks=() if mask is None else (mask,),
        scale=scale,
        dropout_p=dropout_p,
        generator=generator,
        sink=sink,
        q_start=q_start,
    )
    result = choose(backend, call).run(call)
    if return_aux is None:
        return result.out
    return result.out, AuxOutput(
        lse=result.lse if return_aux.lse else None,
        max_scores=result.max_scores if return_aux.max_scores else None,
    )


def prepare(
    query: Tensor,
    memory: Dense,
    *,
    score_mod: Mod | None,
    masks: tuple[Mask, ...],
    scale: float | None,
    dropout_p: float,
    generator: torch.Generator | None,
    sink: Tensor | None,
    q_start: int | None,
) -> Call:
    """Check everything and put it into the form that backends take."""
    if not isinstance(memory, Dense):
        raise ArgumentError(
            f"memory must be a Dense, but got {type(memory).__name__}. Wrap keys and values: "
            f"Dense(key, value)."
        )
    key, value = memory.key, memory.value
    checks.check_operands(query, key, value)
    query, key, value = autocast(query, key, value)
    problem = Problem(
        scale=checks.check_scale(scale, query.shape[-1]),
        kv_start=checks.check_position("Dense.start", memory.start),
        q_start=_first_position(q_start, query, memory),
        dropout=dropout(dropout_p, generator),
    )
    if score_mod is not None:
        problem = replace(problem, score_mod=traced(score_mod, "score", query))
    for mask in masks:
        problem = _with_mask(problem, mask, query, key)
    mask_mods = [mask for mask in masks if not isinstance(mask, torch_flex.BlockMask)]
    return Call(
        problem,
        query,
        key,
        value,
        sink=checks.check_sink(sink, query),
        score_mod=score_mod,
        mask_mod=mask_mods[0] if mask_mods else None,
    )


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The operands in the dtype that an enclosing autocast asks for; float64 is left alone."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)


def _first_position(q_start: int | None, query: Tensor, memory: Dense) -> int:
    if q_start is None:
        return memory.start + max(0, memory.key.shape[2] - query.shape[2])
    return checks.check_position("q_start", q_start)


def _with_mask(problem: Problem, mask: Mask, query: Tensor, key: Tensor) -> Problem:
    if not isinstance(mask, torch_flex.BlockMask):
        return replace(problem, mask_mod=traced(mask, "mask", query))
    block_mask = BlockMask.from_torch(mask)
    batch, heads, q_len, _ = query.shape
    check_fits(block_mask, batch, heads, q_len, key.shape[2], query.device)
    partial_mod = traced(block_mask.mask_mod, "mask", query)
    return replace(problem, block_mask=block_mask, partial_mod=partial_mod)


_warned: set[str] = set()


def traced(mod: Mod, kind: Kind, query: Tensor) -> Mod:
    """`mod` as a graph; itself, with one warning, where it cannot become one."""
    try:
        return trace(
            mod, kind, score_dtype=working_dtype(query.dtype), device=query.device
        )
    except UnsupportedOpError as error:
        reason = str(error)
    except QuireError:
        raise
    except Exception as error:  # the user's own code on symbols: torch may still be able to run it
        check_signature(mod, kind)
        reason = f"{kind}_mod {mod_name(mod)!r} cannot be traced: {error}"
    if reason not in _warned:
        _warned.add(reason)
        warnings.warn(reason, EagerModWarning, stacklevel=4)
    return mod
