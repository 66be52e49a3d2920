"""attention(): check, plan, launch. The one page."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeAlias, overload

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from quire import checks, compiled
from quire.aux_outputs import AuxOutput, AuxRequest, checked_request
from quire.backends import choose
from quire.block_mask import BlockMask, check_fits, element_mod
from quire.config import Backend as BackendName
from quire.config import config
from quire.dropout import check_dropout
from quire.dynamo import never_traced
from quire.eager import Result, working_dtype
from quire.errors import ArgumentError, BlockMaskError, QuireError, UnsupportedOpError
from quire.ir.trace import Kind, Mod, mod_name, trace
from quire.kernel_options import FlexKernelOptions
from quire.memory import Integers, Memory, Queries
from quire.problem import Call, Problem, ReadyMod
from quire.recall import familiar
from quire.runtime.plan import Rows
from quire.sequences import Packed
from quire.vectorise import Opaque
from quire.warn import warn

Mask: TypeAlias = Mod | torch_flex.BlockMask


class EagerModWarning(UserWarning):
    """A mod cannot be traced and runs on the eager path."""


@overload
def attention(
    query: Tensor,
    memory: Memory,
    *,
    score_mod: Mod | None = ...,
    mask: Mask | None = ...,
    scale: float | None = ...,
    return_aux: None = ...,
    dropout_p: float = ...,
    generator: torch.Generator | None = ...,
    sink: Tensor | None = ...,
    q_start: int | Integers | None = ...,
    q_offsets: Integers | None = ...,
    q_lengths: Integers | None = ...,
    backend: BackendName = ...,
) -> Tensor: ...


@overload
def attention(
    query: Tensor,
    memory: Memory,
    *,
    score_mod: Mod | None = ...,
    mask: Mask | None = ...,
    scale: float | None = ...,
    return_aux: AuxRequest,
    dropout_p: float = ...,
    generator: torch.Generator | None = ...,
    sink: Tensor | None = ...,
    q_start: int | Integers | None = ...,
    q_offsets: Integers | None = ...,
    q_lengths: Integers | None = ...,
    backend: BackendName = ...,
) -> tuple[Tensor, AuxOutput]: ...


@overload
def attention(
    query: Tensor,
    memory: Memory,
    *,
    score_mod: Mod | None = ...,
    mask: Mask | None = ...,
    scale: float | None = ...,
    return_aux: torch_flex.AuxRequest,
    dropout_p: float = ...,
    generator: torch.Generator | None = ...,
    sink: Tensor | None = ...,
    q_start: int | Integers | None = ...,
    q_offsets: Integers | None = ...,
    q_lengths: Integers | None = ...,
    backend: BackendName = ...,
) -> tuple[Tensor, torch_flex.AuxOutput]: ...


@never_traced
def attention(
    query: Tensor,
    memory: Memory,
    *,
    score_mod: Mod | None = None,
    mask: Mask | None = None,
    scale: float | None = None,
    return_aux: AuxRequest | torch_flex.AuxRequest | None = None,
    dropout_p: float = 0.0,
    generator: torch.Generator | None = None,
    sink: Tensor | None = None,
    q_start: int | Integers | None = None,
    q_offsets: Integers | None = None,
    q_lengths: Integers | None = None,
    backend: BackendName = "auto",
) -> Tensor | tuple[Tensor, AuxOutput | torch_flex.AuxOutput]:
    """Softmax attention of `query` over the keys and values in `memory`.

        attention(query, Dense(key, value), mask=causal)              # query [B, Hq, L, D]
        attention(query, Ragged(key, value, offsets), mask=causal)    # query [total, Hq, D]
        attention(query, Paged(key, value, page_table, lengths), mask=causal)    # either

    `score_mod(score, b, h, q_idx, kv_idx)` rewrites each scaled score and `mask(b, h, q_idx,
    kv_idx)` says which are used; both are plain Python, and positions are absolute. The last query
    sits at the last key, unless `q_start` gives the position of the first. A `BlockMask` counts
    from its own first row and column. `sink` [Hq] is a logit per head that takes part in the
    softmax without a value. A row that may attend nowhere is 0.

    In `Ragged` memory `b` is the sequence and positions are within it. The queries lie in the
    sequences of the keys, or in those that `q_offsets` and `q_lengths` give; `q_start` may be one
    number for each. A row that belongs to no sequence is 0.

    In `Paged` memory it is the same: query [B, Hq, L, D] are the newest L positions of B sequences,
    and query [total, Hq, D] with `q_offsets` as many of each as there are. Columns of a `BlockMask`
    are positions.

    Returns what the query is with Dv in place of D, and an `AuxOutput` as well where `return_aux`
    asks for one.
    """
    aux = checked_request(return_aux)
    result = compute(
        query,
        memory,
        score_mod,
        () if mask is None else (mask,),
        scale,
        dropout_p,
        sink,
        Queries(q_start, q_offsets, q_lengths),
        aux,
        None,
        backend,
        generator,
    )
    return result.out if return_aux is None else (result.out, aux_output(result, return_aux))


def compute(
    query: Tensor,
    memory: Memory,
    score_mod: Mod | None,
    masks: tuple[Mask, ...],
    scale: float | None,
    dropout_p: float,
    sink: Tensor | None,
    queries: Queries,
    aux: AuxRequest | None,
    kernel_options: FlexKernelOptions | None,
    backend: BackendName,
    generator: torch.Generator | None,
) -> Result:
    """Check, plan and launch; at once where a call like it was checked and planned before."""
    known = None
    if (
        backend == config().backend == "auto"
        and check_dropout(dropout_p) is None
        and sink is None
        and aux is None
        and kernel_options is None
        and generator is None
    ):
        known = familiar(query, memory, score_mod, masks, scale, queries)
        out = None if known is None else known.again()
        if out is not None:
            return Result(*Rows(out))
    call = prepare(
        query, memory, score_mod, masks, scale, dropout_p, sink, queries, aux, kernel_options
    )
    result = launch(call, backend, generator)
    if known is not None and compiled.obstacle(call) is None:
        known.remember(call)
    return _as_given(query, memory, result)


def prepare(
    query: Tensor,
    memory: Memory,
    score_mod: Mod | None,
    masks: tuple[Mask, ...],
    scale: float | None,
    dropout_p: float,
    sink: Tensor | None,
    queries: Queries,
    aux: AuxRequest | None = None,
    kernel_options: FlexKernelOptions | None = None,
) -> Call:
    """Check everything and put it into the form that backends take."""
    if not isinstance(memory, Memory):
        raise ArgumentError(
            f"memory must be a Dense, a Ragged or a Paged, but got {type(memory).__name__}. Wrap "
            f"keys and values: Dense(key, value)."
        )
    placed = memory.place(query, queries)
    query, key, value = autocast(placed.query, placed.key, placed.value)
    problem = Problem(
        scale=checks.check_scale(scale, query.shape[-1]),
        kv_start=placed.kv_start,
        q_start=placed.q_start,
        dropout=check_dropout(dropout_p),
    )
    sink = checks.check_sink(sink, query)
    if score_mod is not None:
        problem = replace(problem, score_mod=ready(score_mod, "score", query))
    for mask in masks:
        problem = _with_mask(problem, mask, query, key, placed.packed)
    for tensor in problem.captures:
        checks.check_held("a captured tensor", tensor)
    mask_mods = [mask for mask in masks if not isinstance(mask, torch_flex.BlockMask)]
    return Call(
        *(problem, query, key, value, sink, score_mod),
        *(mask_mods[0] if mask_mods else None, aux, kernel_options, placed.packed),
    )


def _as_given(query: Tensor, memory: Memory, result: Result) -> Result:
    out, lse, max_scores, argmax, entropy = (memory.as_given(query, x) for x in result[:-1])
    return Result(out, lse, max_scores, argmax, entropy, memory.keys_as_given(result.key_mass))


def launch(call: Call, backend: BackendName, generator: torch.Generator | None) -> Result:
    """Choose who computes `call`, and compute. Not before now is a random number drawn."""
    checks.check_generator(generator)
    chosen = choose(backend, call)
    return chosen.run(replace(call, problem=call.problem.seeded(generator)))


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The operands in the dtype that an enclosing autocast asks for; float64 is left alone."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    kept = (torch.float64, torch.int8)  # int8 has factors of its own
    return tuple(t if t.dtype in kept else t.to(dtype) for t in tensors)


def aux_output(
    result: Result, request: AuxRequest | torch_flex.AuxRequest
) -> AuxOutput | torch_flex.AuxOutput:
    """What was asked for; None for the rest."""
    kind = AuxOutput if isinstance(request, AuxRequest) else torch_flex.AuxOutput
    wanted = request._asdict().items()
    return kind(**{name: getattr(result, name) for name, asked in wanted if asked})


def _with_mask(
    problem: Problem, mask: Mask, query: Tensor, key: Tensor, packed: Packed | None
) -> Problem:
    if not isinstance(mask, torch_flex.BlockMask):
        return replace(problem, mask_mod=ready(mask, "mask", query))
    if packed is not None and packed.page_table is not None:
        return replace(problem, mask_mod=ready(_in_pages(mask, query, packed), "mask", query))
    if packed is not None:
        raise BlockMaskError(
            "mask must be a function of (b, h, q_idx, kv_idx) for Ragged memory, but got a "
            "BlockMask, whose blocks are those of one length. Give its mask_mod: what no query "
            "reads is skipped all the same."
        )
    block_mask = BlockMask.from_torch(mask)
    batch, heads, q_len, _ = query.shape
    check_fits(block_mask, batch, heads, q_len, key.shape[2], query.device)
    partial_mod = _counted_from(problem.q_start, problem.kv_start, block_mask.mask_mod)
    return replace(problem, block_mask=block_mask, partial_mod=ready(partial_mod, "mask", query))


def _in_pages(mask: torch_flex.BlockMask, query: Tensor, packed: Packed) -> Mod:
    """What a block mask says of queries counted from each sequence's first, and of positions."""
    block_mask, sequences = BlockMask.from_torch(mask), packed.sequences
    q_len = int(sequences.q_len.max(initial=0))
    q_len, kv_len = (
        max(least, given)
        for least, given in zip((q_len, packed.longest), block_mask.seq_lengths, strict=True)
    )
    check_fits(block_mask, sequences.num, query.shape[1], q_len, kv_len, query.device)
    return _counted_from(torch.from_numpy(sequences.q_start), 0, element_mod(block_mask))


def _counted_from(q_start: int | Tensor, kv_start: int, mask_mod: Mod) -> Mod:
    """`mask_mod` for absolute positions, where it counts from the first query and key."""
    if not isinstance(q_start, Tensor) and q_start == kv_start == 0:
        return mask_mod

    def moved(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        first = q_start[b] if isinstance(q_start, Tensor) else q_start
        return mask_mod(b, h, q_idx - first, kv_idx - kv_start)  # type: ignore[no-any-return]

    moved.__name__ = mod_name(mask_mod)
    return moved


_warned: set[str] = set()


def ready(mod: Mod, kind: Kind, query: Tensor) -> ReadyMod:
    """`mod` as a graph; as an opaque function, with one warning, where it cannot become one."""
    dtype, device = working_dtype(query.dtype), query.device
    try:
        return trace(mod, kind, score_dtype=dtype, device=device)
    except UnsupportedOpError as error:
        reason = str(error)
    except QuireError:
        raise
    except Exception as error:  # the user's own code on symbols: torch may still be able to run it
        reason = (
            f"{kind}_mod {mod_name(mod)!r} cannot be traced, so it runs on the slower eager path: "
            f"{type(error).__name__}: {error}"
        )
    opaque = Opaque.of(mod, kind, dtype, device)
    if reason not in _warned:
        _warned.add(reason)
        warn(reason, EagerModWarning)
    return opaque
