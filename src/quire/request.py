"""From the user's arguments to the call that a backend computes.

    Request    the arguments of `attention`, unchanged
    Problem    scale, mods, block mask and dropout, ready to be evaluated or compiled
    Call       both, and where the rows of query, key and value are

`check` raises an error for a request that cannot be computed. `call_of` turns a request into a
call: it finds the rows of the operands and traces each mod once. It does not need `check` if an
equal request has passed it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from operator import is_
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from quire import checks
from quire.aux_outputs import NO_AUX, AuxRequest
from quire.block_mask import BlockMask, check_fits
from quire.config import Backend as BackendName
from quire.errors import ArgumentError, OptionError, QuireError, UnsupportedOpError
from quire.ir.terms import hidden_where
from quire.ir.trace import Kind, Mod, Traced, call_name, mod_name, trace
from quire.ir.vectorise import Opaque
from quire.memory import Memory, One, Placed, Queries
from quire.memory.tables import Holes, Sequences
from quire.mods.compose import and_masks, shift, where_there
from quire.mods.dropout import Dropout, check_dropout
from quire.mods.weights import Weighting
from quire.results import working_dtype
from quire.support.torch_private import is_transformed
from quire.support.warn import warn

Mask: TypeAlias = Mod | torch_flex.BlockMask
ReadyMod: TypeAlias = Traced | Opaque
"""A mod that was traced, or that torch.vmap evaluates; its captured tensors are known."""


class EagerModWarning(UserWarning):
    """A mod cannot be traced, so the slower eager backend runs it."""


class Request(NamedTuple):
    """The arguments of `attention`, unchanged. `masks` has at most one function and one BlockMask.

    query [B, Hq, L, D] or [total, Hq, D], sink [Hq]. Unless `weighting` is "softmax", the score_mod
    returns weights and not scores; a weight function is the last part of it. `learns` says
    whether a backward pass will follow, if autograd does not know; `seed` is the seed of dropout,
    if it is drawn already. `prob_mod` is one that is a multiple of the probability.
    """

    query: Tensor
    memory: Memory
    queries: Queries = Queries()
    score_mod: Mod | None = None
    masks: tuple[Mask, ...] = ()
    scale: float | None = None
    dropout_p: float = 0.0
    sink: Tensor | None = None
    aux: AuxRequest = NO_AUX
    kernel_options: Mapping[str, object] | None = None
    backend: BackendName = "auto"
    generator: torch.Generator | None = None
    weighting: Weighting = "softmax"
    learns: bool | None = None
    seed: tuple[int, int] | None = None
    prob_mod: Traced | None = None

    @property
    def mask_mod(self) -> Mod | None:
        """Return the mask that is a function, or None."""
        functions = (mask for mask in self.masks if not isinstance(mask, torch_flex.BlockMask))
        return next(functions, None)

    @property
    def name(self) -> str:
        """Return a name for profiles, from the names of its mods: 'attention(alibi, causal)'."""
        blocks = (mask.mask_mod for mask in self.masks if isinstance(mask, torch_flex.BlockMask))
        return call_name(self.score_mod, self.mask_mod, *blocks)


class Problem(NamedTuple):
    """Attention without its query, keys and values.

    `mask_mod` applies to all blocks. `block_mask` lists the blocks to compute; `partial_mod` is its
    mask_mod and applies to its partial blocks. Mods take absolute positions. If sequences have
    holes, `mask_mod` hides these, and `open_mask` is the mask without that. `prob_mod` multiplies
    probabilities that are not 0, before dropout.
    """

    scale: float
    score_mod: ReadyMod | None = None
    mask_mod: ReadyMod | None = None
    block_mask: BlockMask | None = None
    partial_mod: ReadyMod | None = None
    dropout: Dropout | None = None
    weighting: Weighting = "softmax"
    open_mask: Traced | None = None
    has_holes: bool = False
    prob_mod: Traced | None = None

    def masks(self, full: bool) -> tuple[ReadyMod, ...]:
        """Return the masks that apply to a full block, or to a partial one."""
        candidates = (self.mask_mod, None if full else self.partial_mod)
        return tuple(mod for mod in candidates if mod is not None)

    @property
    def mods(self) -> dict[str, ReadyMod]:
        """Return the mods that are not None, by field name."""
        names = ("score_mod", "mask_mod", "prob_mod", "partial_mod")
        mods = (self.score_mod, self.mask_mod, self.prob_mod, self.partial_mod)
        return {name: mod for name, mod in zip(names, mods, strict=True) if mod is not None}

    @property
    def captures(self) -> tuple[Tensor, ...]:
        """Return the captured tensors of all mods, in the order of `mods`."""
        score, mask, partial = self.score_mod, self.mask_mod, self.partial_mod
        found = () if score is None else score.captures
        if mask is not None:
            found += mask.captures
        if self.prob_mod is not None:
            found += self.prob_mod.captures
        return found if partial is None else found + partial.captures

    def with_captures(self, captures: tuple[Tensor, ...]) -> Problem:
        """Return the problem with other captured tensors, in the order of `self.captures`."""
        changed, remaining = self, captures
        for name, mod in self.mods.items() if captures else ():
            count = len(mod.captures)
            own, remaining = remaining[:count], remaining[count:]
            changed = changed._replace(**{name: replace(mod, captures=own)})  # type: ignore[arg-type]
        return changed

    def open_captures(self, captures: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Return `captures`, those of this problem, without the tensor that hides holes."""
        score, mask = self.score_mod, self.mask_mod
        before = -1 if mask is None else len(mask.captures) - 1
        before += 0 if score is None else len(score.captures)
        return captures[:before] + captures[before + 1 :]

    def opened(self) -> Problem:
        """Return the problem whose mask does not hide holes, for kernels that leave them out."""
        mask, opened = self.mask_mod, self.open_mask
        if opened is not None and mask is not None:
            opened = replace(opened, captures=mask.captures[:-1])
        return self._replace(mask_mod=opened, open_mask=None, has_holes=False)

    def without_captures(self) -> Problem:
        """Return the problem with empty tensors as captures, so that it keeps no memory alive."""
        return self.with_captures((_EMPTY,) * len(self.captures))


_EMPTY = torch.empty(0, device="cpu")


class Call(NamedTuple):
    """A request that is ready to be computed: it is known where rows are, and mods are traced."""

    request: Request
    placed: Placed
    problem: Problem
    captures: tuple[Tensor, ...]  # of all mods
    learns: bool = False  # whether autograd records it

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Return query, key, value, the sink if there is one, and all captured tensors."""
        (query, key, value, *_), sink = self.placed, self.request.sink
        return (query, key, value, *(() if sink is None else (sink,)), *self.captures)

    def on(
        self,
        operands: tuple[Tensor, Tensor, Tensor],
        sink: Tensor | None,
        captures: tuple[Tensor, ...],
    ) -> Call:
        """Return the call on other tensors, which transforms of torch.func pass in."""
        query, key, value, *_ = self.placed
        current = (query, key, value, self.request.sink, *self.captures)
        if all(map(is_, (*operands, sink, *captures), current)):
            return self
        return Call(
            self.request._replace(sink=sink),
            self.placed.on(*operands),
            self.problem.with_captures(captures),
            captures,
            learns=self.learns,
        )

    def seeded(self) -> Call:
        """Return the call with a seed for its dropout, if it has dropout that has none."""
        dropout = self.problem.dropout
        if dropout is None or dropout.mask is not None:
            return self
        generator, seed = self.request.generator, self.request.seed
        seeded = dropout.seeded(generator) if seed is None else Dropout(dropout.p, seed)
        return self._replace(problem=self.problem._replace(dropout=seeded))


# --- checks --------------------------------------------------------------------------------------


def check(request: Request) -> None:
    """Raise if the tensors and numbers of a request do not fit together."""
    query, memory = request.query, request.memory
    if type(request.dropout_p) is not float or request.dropout_p != 0.0:
        check_dropout(request.dropout_p)
    if not isinstance(memory, Memory):
        raise ArgumentError(
            f"memory must be a Dense, a Ragged or a Paged, but is a {type(memory).__name__}. Wrap "
            f"keys and values: Dense(key, value)."
        )
    memory.check(query, request.queries)
    checks.check_scale(request.scale, query.shape[-1])
    checks.check_sink(request.sink, query)
    checks.check_generator(request.generator)
    if request.weighting != "softmax" and request.aux.entropy:
        raise OptionError(
            "entropy must be that of a softmax, but weight= gives other weights. Leave it out of "
            "the AuxRequest."
        )


def check_mods(call: Call) -> None:
    """Raise if a captured tensor cannot be read, or a block mask does not fit the operands."""
    mask, placed = call.problem.block_mask, call.placed
    device = placed.query.device
    for tensor in call.problem.captures:
        checks.check_captured(tensor, device)
    if mask is not None:
        batch, heads, *_ = placed.query.shape
        q_len, kv_len = placed.lengths
        if not placed.is_dense:  # the mask may reach further than all sequences
            batch = placed.sequences.num
            q_len, kv_len = map(max, placed.lengths, mask.seq_lengths)
        check_fits(mask, B=batch, H=heads, q_len=q_len, kv_len=kv_len, device=device)


# --- from a request to a call --------------------------------------------------------------------


def call_of(request: Request, *, plain: bool = False) -> Call:
    """Return the call of a request: find the rows of its operands, and trace each mod once.

    `plain` says that no operand is a lazy negation, and neither autocast nor torch.func is active.
    """
    query, memory, queries, score_mod, masks, scale, dropout_p, *_ = request
    placed = memory.place(query, queries)
    if not plain:
        placed = _resolved(placed)
    if type(scale) is not float:
        head_dim = query.shape[-1]
        known = scale is None and head_dim > 0
        scale = 1.0 / math.sqrt(head_dim) if known else checks.check_scale(scale, head_dim)
    dropout = None if type(dropout_p) is float and dropout_p == 0.0 else check_dropout(dropout_p)
    prob_mod = request.prob_mod
    if score_mod is None and not masks and prob_mod is None:
        problem = Problem(scale, dropout=dropout)
        if placed.holes is not None:
            hidden, _, has_holes = _without_holes(None, placed)
            problem = Problem(scale, None, hidden, dropout=dropout, has_holes=has_holes)
        captures = problem.captures
        learns = _learns(request, placed, captures, plain=plain)
        return Call(request, placed, problem, captures, learns=learns)
    score_mod, mask_mod, block_mask, partial_mod = _ready_mods(request, placed)
    open_mask, has_holes = None, False
    if placed.holes is not None:
        mask_mod, open_mask, has_holes = _without_holes(mask_mod, placed)
    problem = Problem(
        scale,
        score_mod,
        mask_mod,
        block_mask,
        partial_mod,
        dropout=dropout,
        weighting=request.weighting,
        open_mask=open_mask,
        has_holes=has_holes,
        prob_mod=prob_mod,
    )
    captures = problem.captures
    if captures and any(map(Tensor.is_neg, captures)):
        captures = tuple(tensor.resolve_neg() for tensor in captures)
        problem = problem.with_captures(captures)
    learns = _learns(request, placed, captures, plain=plain)
    return Call(request, placed, problem, captures, learns=learns)


def _learns(request: Request, placed: Placed, captures: tuple[Tensor, ...], *, plain: bool) -> bool:
    """Return whether autograd must record a call: a tensor requires grad, or torch.func."""
    if request.learns is not None:
        return request.learns
    if not torch.is_grad_enabled():
        return not plain and is_transformed()
    query, key, value, *_ = placed
    sink = request.sink
    return (
        query.requires_grad
        or key.requires_grad
        or value.requires_grad
        or (sink is not None and sink.requires_grad)
        or (len(captures) > 0 and any(tensor.requires_grad for tensor in captures))
        or (not plain and is_transformed())
    )


def _ready_mods(
    request: Request, placed: Placed
) -> tuple[ReadyMod | None, ReadyMod | None, BlockMask | None, ReadyMod | None]:
    """Trace the score_mod, the mask that is a function, and the mask_mod of the block mask."""
    score_mod, query = request.score_mod, placed.query
    score = None if score_mod is None else ready(score_mod, "score", query)
    mask_mod = block_mask = partial_mod = None
    for mask in request.masks:
        if not isinstance(mask, torch_flex.BlockMask):
            mask_mod = ready(mask, "mask", query)
        else:
            block_mask = mask if isinstance(mask, BlockMask) else BlockMask.from_torch(mask)
            mod = _from_origin(block_mask.mask_mod, placed.rows)
            partial_mod = ready(mod, "mask", query)
    return score, mask_mod, block_mask, partial_mod


def _without_holes(mask: ReadyMod | None, placed: Placed) -> tuple[ReadyMod, Traced | None, bool]:
    """Return a mask that hides the holes of sequences, too, and the open mask if it is known."""
    holes, page = placed.holes, placed.key.shape[2]
    assert holes is not None, "there are holes"
    if isinstance(mask, Opaque):
        hides = where_there(holes.there, page)
        return ready(and_masks(mask, hides), "mask", placed.query), None, False
    if mask is None:
        return _only_holes(holes, page), None, True
    graph = _hidden(mask.output, page, len(mask.captures))
    both = Traced(graph, (*mask.captures, holes.there), "mask", mask.name)
    return both, Traced(mask.output, (), "mask", mask.name), True


_hidden = functools.lru_cache(maxsize=256)(hidden_where)


@functools.lru_cache(maxsize=16)
def _only_holes(holes: Holes, page: int) -> Traced:
    return Traced(_hidden(None, page, 0), (holes.there,), "mask", "holes")


def checked_call(request: Request) -> Call:
    """Return the call of a request, and check everything."""
    check(request)
    call = call_of(request)
    check_mods(call)
    return call


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors in the dtype of torch.autocast, if it is on; float64 stays float64."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    # Numbers of 8 bits may have scales, and become no more exact.
    kept = (torch.float64, *checks.SCALED_DTYPES)
    return tuple(t if t.dtype in kept else t.to(dtype) for t in tensors)


def _resolved(placed: Placed) -> Placed:
    """Cast the operands as torch.autocast says, and resolve lazy negation (`Tensor.is_neg`)."""
    query, key, value, *_ = placed
    cast = torch.is_autocast_enabled(query.device.type)
    if not cast and not (query.is_neg() or key.is_neg() or value.is_neg()):
        return placed
    query, key, value = (tensor.resolve_neg() for tensor in autocast(query, key, value))
    return placed.on(query, key, value)


def _from_origin(mod: Mod, rows: One | Sequences) -> Mod:
    """Return the mod of a block mask, which counts from the first query of each sequence."""
    if isinstance(rows, One):
        there = rows.q_start == rows.kv_origin == 0
        return mod if there else shift(mod, "mask", -rows.q_start, -rows.kv_origin)
    return shift(mod, "mask", torch.from_numpy(-rows.q_start))


_warned: set[str] = set()


def ready(mod: Mod, kind: Kind, query: Tensor) -> ReadyMod:
    """Trace a mod. If that is impossible, warn once and return it for torch.vmap to evaluate."""
    device = query.device
    dtype = torch.float32 if query.dtype == torch.float32 else working_dtype(query.dtype)
    if type(mod) is Traced and mod.kind == kind and mod.output.dtype in (dtype, torch.bool):
        return mod
    try:
        return trace(mod, kind, score_dtype=dtype, device=device)
    except UnsupportedOpError as error:
        reason = str(error)
    except QuireError:
        raise
    except Exception as error:  # raised by the user's code on symbols; it may work on tensors
        reason = (
            f"{kind}_mod {mod_name(mod)!r} cannot be traced, so it runs on the slower eager path: "
            f"{type(error).__name__}: {error}"
        )
    opaque = Opaque.of(mod, kind, dtype, device)
    if reason not in _warned:
        _warned.add(reason)
        warn(reason, EagerModWarning)
    return opaque
