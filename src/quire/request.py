"""What is to be computed: a request in the user's words, and as the call that backends take.

    Request    what the user gave, unchanged
    Problem    scale, mods, block mask and dropout, ready to be evaluated or compiled
    Call       both, and where the rows of query, keys and values live

`call_of` makes a call of a request: it places the operands, and traces each mod once. `check`
raises for what cannot be computed. A request that is like one that was checked need not be.
"""

from __future__ import annotations

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
from quire.block_mask import BlockMask, check_fits, element_mod
from quire.config import Backend as BackendName
from quire.errors import ArgumentError, BlockMaskError, QuireError, UnsupportedOpError
from quire.ir.trace import Kind, Mod, Traced, mod_name, trace
from quire.ir.vectorise import Opaque
from quire.memory import Memory, One, Placed, Queries, longest
from quire.mods.compose import shift
from quire.mods.dropout import Dropout, check_dropout
from quire.results import working_dtype
from quire.support.torch_private import is_transformed
from quire.support.warn import warn

Mask: TypeAlias = Mod | torch_flex.BlockMask
ReadyMod: TypeAlias = Traced | Opaque
"""A mod whose captured tensors are known."""


class EagerModWarning(UserWarning):
    """A mod cannot be traced and runs on the eager path."""


class Request(NamedTuple):
    """The arguments of `attention`, as they were given.

    `masks` are at most one function and one block mask.
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

    @property
    def mask_mod(self) -> Mod | None:
        """The mask that is a function."""
        functions = (mask for mask in self.masks if not isinstance(mask, torch_flex.BlockMask))
        return next(functions, None)


class Problem(NamedTuple):
    """Attention without its query, keys and values.

    `mask_mod` holds everywhere. `block_mask` says which blocks exist, and `partial_mod`, its
    mask_mod, holds in those that it does not call full. Mods are asked about absolute positions.
    """

    scale: float
    score_mod: ReadyMod | None = None
    mask_mod: ReadyMod | None = None
    block_mask: BlockMask | None = None
    partial_mod: ReadyMod | None = None
    dropout: Dropout | None = None

    def masks(self, full: bool) -> tuple[ReadyMod, ...]:
        """The masks that hold in a block."""
        candidates = (self.mask_mod, None if full else self.partial_mod)
        return tuple(mod for mod in candidates if mod is not None)

    @property
    def mods(self) -> dict[str, ReadyMod]:
        """The mods that there are, by field name."""
        named = ("score_mod", self.score_mod), ("mask_mod", self.mask_mod)
        found = (*named, ("partial_mod", self.partial_mod))
        return {name: mod for name, mod in found if mod is not None}

    @property
    def captures(self) -> tuple[Tensor, ...]:
        """Every tensor that the mods capture, mod by mod."""
        score, mask, partial = self.score_mod, self.mask_mod, self.partial_mod
        found = () if score is None else score.captures
        if mask is not None:
            found += mask.captures
        return found if partial is None else found + partial.captures

    def with_captures(self, captures: tuple[Tensor, ...]) -> Problem:
        """The same problem on other tensors, given in the order of `captures`."""
        changed, rest = self, captures
        for name, mod in self.mods.items() if captures else ():
            mine, rest = rest[: len(mod.captures)], rest[len(mod.captures) :]
            changed = changed._replace(**{name: replace(mod, captures=mine)})  # type: ignore[arg-type]
        return changed

    def without_captures(self) -> Problem:
        """The same problem, without holding on to the tensors that its mods capture."""
        return self.with_captures((_NOTHING,) * len(self.captures))


_NOTHING = torch.empty(0, device="cpu")


class Call(NamedTuple):
    """A request that is ready to be computed: its operands are placed, its mods are traced."""

    request: Request
    placed: Placed
    problem: Problem
    captures: tuple[Tensor, ...]  # of all mods

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Every tensor that takes part: operands, sink and captures."""
        (query, key, value, *_), sink = self.placed, self.request.sink
        return (query, key, value, *(() if sink is None else (sink,)), *self.captures)

    @property
    def learns(self) -> bool:
        """Whether somebody may ask for its gradients, or torch.func transforms it."""
        if torch.is_grad_enabled():
            for tensor in self.tensors:
                if tensor.requires_grad:
                    return True
        return is_transformed()

    def on(
        self,
        operands: tuple[Tensor, Tensor, Tensor],
        sink: Tensor | None,
        captures: tuple[Tensor, ...],
    ) -> Call:
        """The same call on other tensors, as a transform of torch.func gives them."""
        query, key, value, *_ = self.placed
        own = (query, key, value, self.request.sink, *self.captures)
        if all(map(is_, (*operands, sink, *captures), own)):
            return self
        return Call(
            self.request._replace(sink=sink),
            self.placed.on(*operands),
            self.problem.with_captures(captures),
            captures,
        )

    def seeded(self) -> Call:
        """The same call with a seed for its dropout, if there is any."""
        dropout = self.problem.dropout
        if dropout is None:
            return self
        seeded = dropout.seeded(self.request.generator)
        return self._replace(problem=self.problem._replace(dropout=seeded))


# --- checks --------------------------------------------------------------------------------------


def check(request: Request) -> None:
    """Raise for a request that has no answer, whatever its mods are."""
    query, memory = request.query, request.memory
    if type(request.dropout_p) is not float or request.dropout_p != 0.0:
        check_dropout(request.dropout_p)
    if not isinstance(memory, Memory):
        raise ArgumentError(
            f"memory must be a Dense, a Ragged or a Paged, but got {type(memory).__name__}. Wrap "
            f"keys and values: Dense(key, value)."
        )
    memory.check(query, request.queries)
    checks.check_scale(request.scale, query.shape[-1])
    checks.check_sink(request.sink, query)
    checks.check_generator(request.generator)


def check_mods(call: Call) -> None:
    """Raise where the mods of a call do not go with its operands."""
    for tensor in call.problem.captures:
        checks.check_held("a captured tensor", tensor)
    mask, placed = call.problem.block_mask, call.placed
    if mask is not None:
        batch, heads, q_len, _ = placed.query.shape
        check_fits(mask, batch, heads, q_len, placed.key.shape[2], placed.query.device)


# --- from a request to a call --------------------------------------------------------------------


def call_of(request: Request) -> Call:
    """Place the operands, and trace each mod once."""
    placed = _plain(request.memory.place(request.query, request.queries))
    query, p = placed.query, request.dropout_p
    block_mask = partial_mod = None
    score_mod = request.score_mod
    score = None if score_mod is None else ready(score_mod, "score", query)
    mask_mod = None
    for mask in request.masks:
        if not isinstance(mask, torch_flex.BlockMask):
            mask_mod = ready(mask, "mask", query)
        elif placed.page_table is not None:
            mask_mod = ready(_by_element(mask, placed), "mask", query)
        else:
            rows = _dense_rows(placed)
            block_mask = mask if isinstance(mask, BlockMask) else BlockMask.from_torch(mask)
            counted = block_mask.mask_mod  # from the first query and key
            if rows.q_start or rows.kv_begin:
                counted = shift(counted, "mask", -rows.q_start, -rows.kv_begin)
            partial_mod = ready(counted, "mask", query)
    problem = Problem(
        scale=_scale(request.scale, query.shape[-1]),
        score_mod=score,
        mask_mod=mask_mod,
        block_mask=block_mask,
        partial_mod=partial_mod,
        dropout=None if type(p) is float and p == 0.0 else check_dropout(p),
    )
    captures = problem.captures
    if any(map(Tensor.is_neg, captures)):
        captures = tuple(tensor.resolve_neg() for tensor in captures)
        problem = problem.with_captures(captures)
    return Call(request, placed, problem, captures)


def _scale(scale: float | None, head_dim: int) -> float:
    if scale is None and head_dim > 0:
        return 1.0 / math.sqrt(head_dim)
    return scale if type(scale) is float else checks.check_scale(scale, head_dim)


def checked_call(request: Request) -> Call:
    """The call of a request, with everything checked."""
    check(request)
    call = call_of(request)
    check_mods(call)
    return call


def autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The operands in the dtype that an enclosing autocast asks for; float64 is left alone."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    kept = (torch.float64, torch.int8)  # int8 has factors of its own
    return tuple(t if t.dtype in kept else t.to(dtype) for t in tensors)


def _plain(placed: Placed) -> Placed:
    """The operands in the dtype of autocast, and negated where torch has put that off."""
    query, key, value, *_ = placed
    cast = torch.is_autocast_enabled(query.device.type)
    if not cast and not (query.is_neg() or key.is_neg() or value.is_neg()):
        return placed
    query, key, value = (tensor.resolve_neg() for tensor in autocast(query, key, value))
    return placed.on(query, key, value)


def _dense_rows(placed: Placed) -> One:
    if not isinstance(placed.rows, One):
        raise BlockMaskError(
            "mask must be a function of (b, h, q_idx, kv_idx) for Ragged memory, but got a "
            "BlockMask, whose blocks are those of one length. Give its mask_mod: what no query "
            "reads is skipped all the same."
        )
    return placed.rows


def _by_element(mask: torch_flex.BlockMask, placed: Placed) -> Mod:
    """A block mask over pages as a mask_mod. It counts queries from each sequence's first."""
    block_mask, sequences = BlockMask.from_torch(mask), placed.sequences
    needed = longest(sequences.q_len), longest(sequences.kv_end)
    q_len, kv_len = map(max, needed, block_mask.seq_lengths)
    heads, device = placed.query.shape[1], placed.query.device
    check_fits(block_mask, sequences.num, heads, q_len, kv_len, device)
    return shift(element_mod(block_mask), "mask", -torch.from_numpy(sequences.q_start))


_warned: set[str] = set()


def ready(mod: Mod, kind: Kind, query: Tensor) -> ReadyMod:
    """`mod` as a graph; as an opaque function, with one warning, where it cannot become one."""
    device = query.device
    dtype = torch.float32 if query.dtype == torch.float32 else working_dtype(query.dtype)
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
