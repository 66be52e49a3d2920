"""ContextPlan: one sequence over many ranks. Which tokens each has, and which keys it receives."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from quire.block_mask.blocks import ceil_div
from quire.distributed.group import RankGroup
from quire.distributed.layouts import Division
from quire.distributed.reads import Flags, Numbers
from quire.distributed.routes import Route, SliceRoute
from quire.errors import ArgumentError, ShapeError
from quire.ir.portable import portable
from quire.ir.trace import Mod, Traced, mod_name

MethodName: TypeAlias = Literal["auto", "pages", "heads", "ring"]
METHODS: tuple[MethodName, ...] = get_args(MethodName)

MEBI = 2**20


@dataclass(frozen=True, eq=False, repr=False)
class ContextPlan:
    """One sequence of `length` tokens over the ranks of a group, as `plan` makes it.

    Each rank has blocks of `block` tokens, and receives the blocks of keys that its queries read.
    `compared` are the layouts that were compared, the one that is used first. `sizes` are the
    batch entries and heads of the mask, 1 for any number. `bytes_per_key` are the bytes of a key
    and its value in all heads, if they are known.

    If gradients have the bits of one process, ranks have whole slices of `slice_size` tokens, and
    `slice_needs` [slices, entries, blocks] are the blocks of keys that each reads.
    """

    mask: Mod
    length: int
    block: int
    compared: tuple[Division, ...]
    group: RankGroup
    sizes: tuple[int, int] = (1, 1)
    bytes_per_key: int | None = None
    given: object = None  # the mask as it was given
    method: MethodName = "auto"
    slice_size: int = 0
    slice_needs: Flags | None = None

    @property
    def division(self) -> Division:
        """Return the blocks of each rank, and what each computes and receives."""
        return self.compared[0]

    @property
    def layout(self) -> str:
        """Return the name of the layout."""
        return self.division.layout

    @property
    def rank(self) -> int:
        """Return the rank of this process."""
        return self.group.rank

    @property
    def num_ranks(self) -> int:
        """Return the number of ranks."""
        return self.group.size

    @property
    def num_blocks(self) -> int:
        """Return the number of blocks of the sequence."""
        return ceil_div(self.length, self.block)

    def for_rank(self, rank: int) -> ContextPlan:
        """Return the same plan as another rank sees it."""
        if not 0 <= rank < self.num_ranks:
            raise ArgumentError(
                f"rank must be from 0 to {self.num_ranks - 1}, but is {rank}. Choose one of the "
                f"ranks of the plan."
            )
        return replace(self, group=self.group._replace(rank=rank))

    # --- tokens

    @functools.cached_property
    def chunks(self) -> tuple[tuple[int, int], ...]:
        """Return the ranges of positions of this rank, [start, stop), ascending."""
        return self.chunks_of(self.rank)

    @functools.cached_property
    def positions(self) -> Tensor:
        """Return the positions of the tokens of this rank, in their order: int64 [tokens]."""
        return self.positions_of(self.rank)

    @functools.cached_property
    def num_tokens(self) -> Numbers:
        """Return the number of tokens of each rank."""
        counts = np.bincount(self.division.owner, minlength=self.num_ranks) * self.block
        counts[self.division.owner[-1]] -= self.num_blocks * self.block - self.length
        return counts

    def shard(self, *tensors: Tensor, dim: int) -> tuple[Tensor, ...]:
        """Return the part of each tensor that this rank has: its tokens along `dim`."""
        for tensor in tensors:
            if tensor.shape[dim] != self.length:
                raise ShapeError(
                    f"a tensor must have {self.length} tokens along dim {dim} to be cut, but has "
                    f"shape {list(tensor.shape)}. Give the whole tensor, or another dim."
                )
        return tuple(x.index_select(dim, self.positions.to(x.device)) for x in tensors)

    def gather(self, shard: Tensor, *, dim: int) -> Tensor:
        """Return the whole tensor on every rank from the shards of all. It has no gradient."""
        mine = shard.detach().movedim(dim, 0)
        if len(mine) != len(self.positions):
            raise ShapeError(
                f"a shard must have the {len(self.positions)} tokens of rank {self.rank} along dim "
                f"{dim}, but has shape {list(shard.shape)}. Give what shard or attention returned."
            )
        counts = self.num_tokens.tolist()
        padded = mine.new_zeros((max(counts), *mine.shape[1:]))
        padded[: len(mine)] = mine
        whole = mine.new_empty((self.length, *mine.shape[1:]))
        for rank, rows in enumerate(self.group.gather(padded)):
            whole[self.positions_of(rank).to(whole.device)] = rows[: counts[rank]]
        return whole.movedim(0, dim)

    def chunks_of(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return the ranges of positions of a rank, [start, stop), ascending."""
        blocks = (self.division.owner == rank).nonzero()[0]
        pieces = np.split(blocks, (np.diff(blocks) != 1).nonzero()[0] + 1)
        return tuple(
            (int(piece[0]) * self.block, min((int(piece[-1]) + 1) * self.block, self.length))
            for piece in pieces
            if len(piece)
        )

    def positions_of(self, rank: int) -> Tensor:
        """Return the positions of the tokens of a rank, in their order."""
        ranges = [torch.arange(start, stop) for start, stop in self.chunks_of(rank)]
        return torch.cat(ranges) if ranges else torch.arange(0)

    # --- keys

    def route(self, batch: int) -> Route:
        """Return the pages that this rank sends and receives for a batch of `batch` entries."""
        return _route(self, batch)

    def slice_route(self, batch: int) -> SliceRoute | None:
        """Return the sums of slices that this rank sends and receives in a backward pass, if any.

        None if gradients of keys are sums of what ranks have added up.
        """
        return None if self.slice_needs is None else _slice_route(self, batch)

    @property
    def same_bits(self) -> bool:
        """Return whether gradients of keys and captured tensors have the bits of one process."""
        return self.slice_needs is not None

    @property
    def of_slices(self) -> Numbers:
        """Return the rank of each slice of queries, if ranks have whole slices."""
        slices: Numbers = self.division.owner[:: max(1, self.slice_size // self.block)]
        return slices

    @property
    def returned(self) -> Numbers:
        """Return how many gradients of keys [ranks] each rank receives, per batch entry."""
        if self.slice_needs is None:
            leaves = self.division.arrives.sum((0, 1))
        else:
            foreign = self.of_slices[:, None] != self.division.owner
            leaves = (self.slice_needs & foreign[:, None]).sum((0, 1))
        entries = self.division.needs.shape[1]
        blocks = np.bincount(self.division.owner, leaves, self.num_ranks)
        keys: Numbers = -(-blocks.astype(np.int64) // entries) * self.block
        return keys

    @property
    def balance(self) -> float:
        """Return the largest work of a rank over the mean."""
        return self.division.balance

    @property
    def received(self) -> Numbers:
        """Return how many keys [ranks] each rank receives per batch entry. Blocks are whole."""
        keys: Numbers = self.division.received * self.block
        return keys

    @functools.cached_property
    def digest(self) -> str:
        """Return a number that is the same for equal plans: of layout, mask and all it captures."""
        found = hashlib.sha256()
        sizes = (self.length, self.block, self.slice_size, self.sizes)
        facts = (*sizes, self.num_ranks, self.layout, self.method)
        found.update(repr(facts).encode())
        found.update(self.division.owner.tobytes())
        found.update(self.division.needs.tobytes())
        found.update(digest_of(self.mask).encode())
        return found.hexdigest()[:16]

    # --- what it is like

    def __str__(self) -> str:
        return "\n".join(self._lines())

    __repr__ = __str__

    def _lines(self) -> Iterator[str]:
        received, tokens = self.received, len(self.positions)
        every = (self.num_blocks - self.num_blocks // self.num_ranks) * self.block
        yield (
            f"{mod_name(self.mask)}: {self.length:,} tokens over {self.num_ranks} ranks, layout "
            f"{self.layout}, blocks of {self.block}, balance {self.balance:.2f}"
        )
        yield (
            f"a rank receives at most {self._amount(int(received.max()), every)}, "
            f"{self._amount(int(received.mean()))} on average"
        )
        yield (
            f"rank {self.rank}: {tokens:,} tokens in {len(self.chunks)} "
            f"chunk{'s' * (len(self.chunks) != 1)}, receives "
            f"{self._amount(int(received[self.rank]))}"
        )
        how = "have the bits of one process" if self.same_bits else "agree up to rounding"
        yield (
            f"gradients of keys {how}; a rank receives those of {int(self.returned.max()):,} keys "
            f"at most"
        )
        most = [self._amount(int(each.received.max()) * self.block) for each in self.compared]
        others = [
            f"{each.layout} {each.balance:.2f} and {amount}"
            for each, amount in zip(self.compared[1:], most[1:], strict=True)
        ]
        if others:
            yield f"compared with {'; '.join(others)}"

    def _amount(self, keys: int, of: int | None = None) -> str:
        """Return a number of keys in words, in MiB if the size of a key is known."""
        size, unit = (
            (1.0, "keys") if self.bytes_per_key is None else (self.bytes_per_key / MEBI, "MiB")
        )
        whole = "" if of is None else f" of {of * size:,.0f}"
        return f"{keys * size:,.0f}{whole} {unit}"


@functools.lru_cache(maxsize=64)
def _route(plan: ContextPlan, batch: int) -> Route:
    return Route.of(plan.division, plan.rank, batch)


@functools.lru_cache(maxsize=64)
def _slice_route(plan: ContextPlan, batch: int) -> SliceRoute:
    assert plan.slice_needs is not None
    return SliceRoute.of(plan.division, plan.of_slices, plan.slice_needs, plan.rank, batch)


def digest_of(mod: Mod | None) -> str:
    """Return a number that is the same for mods with the same graph and equal captured tensors.

    A mod without a graph is known by its name alone. The digest of None is empty.
    """
    if mod is None:
        return ""
    if not isinstance(mod, Traced):
        return hashlib.sha256(mod_name(mod).encode()).hexdigest()[:16]
    found = hashlib.sha256(json.dumps(portable(mod.output)).encode())
    for tensor in mod.captures:
        plain = tensor.detach().cpu().contiguous()
        found.update(repr((plain.shape, plain.dtype)).encode())
        found.update(plain.view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]
