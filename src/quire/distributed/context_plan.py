"""ContextPlan: one sequence over many ranks. Which tokens each has, and which keys it receives."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from quire.distributed.group import RankGroup
from quire.distributed.layouts import Division
from quire.distributed.reads import Flags, Numbers
from quire.distributed.routes import Route, SliceRoute, SliceRuns
from quire.distributed.token_blocks import TokenBlocks
from quire.errors import ArgumentError, ShapeError
from quire.ir.portable import portable
from quire.ir.trace import Mod, Traced, mod_name
from quire.plans import CallPlan
from quire.request import Call
from quire.runtime.slices import KeptMemory
from quire.support.bounded import BoundedDict

MethodName: TypeAlias = Literal["auto", "pages", "heads", "ring"]
METHODS: tuple[MethodName, ...] = get_args(MethodName)

MEBI = 2**20


@dataclass(frozen=True, eq=False, repr=False)
class ContextPlan:
    """One sequence of `length` tokens, or several, over the ranks of a group, as `plan` makes it.

    Each rank has some `blocks` of at most `block` tokens, and receives the blocks of keys that its
    queries read. `compared` are the layouts that were compared, the one that is used first. `sizes`
    are the batch entries and heads of the mask, 1 for any number. `bytes_per_key` are the bytes of
    a key and its value in all heads, if they are known.

    If gradients have the bits of one process, ranks have whole slices of `slice_size` tokens, and
    `slice_needs` [slices, entries, blocks] are the blocks of keys that each reads. `at_home`
    [blocks] are the blocks of queries that read only keys of their own rank.
    """

    mask: Mod
    blocks: TokenBlocks
    compared: tuple[Division, ...]
    group: RankGroup
    sizes: tuple[int, int] = (1, 1)
    bytes_per_key: int | None = None
    given: object = None  # the mask as it was given
    method: MethodName = "auto"
    slice_size: int = 0
    slice_needs: Flags | None = None
    at_home: Flags | None = None
    is_ragged: bool = False  # several sequences, in one tensor

    def __getstate__(self) -> dict[str, object]:
        """Return the fields alone: a copy plans its own calls and takes its own memory."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def length(self) -> int:
        """Return the number of tokens of all sequences."""
        return int(self.blocks.lengths.sum())

    @property
    def block(self) -> int:
        """Return the most tokens of a block."""
        return self.blocks.size

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
        return self.blocks.num

    @functools.cached_property
    def kept(self) -> KeptMemory:
        """Return the memory for sums of slices, which all backward passes of the plan use."""
        return KeptMemory()

    @functools.cached_property
    def kept_pages(self) -> KeptMemory:
        """Return the memory for pages of keys, which all calls use that nothing learns from."""
        return KeptMemory()

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
        """Return the ranges of rows of this rank, [start, stop), ascending."""
        return self.blocks.ranges(self.blocks_of(self.rank))

    @functools.cached_property
    def rows(self) -> Tensor:
        """Return the rows of whole tensors that this rank has, in their order: int64 [tokens]."""
        return self.rows_of(self.rank)

    @functools.cached_property
    def positions(self) -> Tensor:
        """Return the positions of this rank's tokens in their sequences: int64 [tokens]."""
        return self.blocks.positions(self.rows) if self.is_ragged else self.rows

    @functools.cached_property
    def offsets(self) -> list[int]:
        """Return the first of this rank's tokens of each sequence, and the end of the last."""
        return [0, *np.cumsum(self.blocks.tokens_of(self.blocks_of(self.rank))).tolist()]

    @functools.cached_property
    def lines(self) -> Tensor | None:
        """Return where this rank's tokens lie in its pages; None if that is one after the other."""
        return self.blocks.lines(self.blocks_of(self.rank)) if self.is_ragged else None

    @functools.cached_property
    def num_tokens(self) -> Numbers:
        """Return the number of tokens of each rank."""
        sums = np.bincount(self.division.owner, self.blocks.tokens, minlength=self.num_ranks)
        return sums.astype(np.int64)

    def shard(self, *tensors: Tensor, dim: int) -> tuple[Tensor, ...]:
        """Return of `tensors` [..., length, ...] what this rank has: its tokens along `dim`."""
        for tensor in tensors:
            if tensor.shape[dim] != self.length:
                raise ShapeError(
                    f"a tensor must have {self.length} tokens along dim {dim} to be cut, but has "
                    f"shape {list(tensor.shape)}. Give the whole tensor, or another dim."
                )
        return tuple(x.index_select(dim, self.rows.to(x.device)) for x in tensors)

    def gather(self, shard: Tensor, *, dim: int) -> Tensor:
        """Return on every rank the whole tensor, of which `shard` [..., tokens, ...] is a part.

        It has no gradient. All ranks of the plan call it together.
        """
        facts: dict[str, object] = {"plan": self.title}
        with self.group.agreeing(facts):
            mine = shard.detach().movedim(dim, 0)
            if len(mine) != len(self.rows):
                raise ShapeError(
                    f"a shard must have the {len(self.rows)} tokens of rank {self.rank} along dim "
                    f"{dim}, but has shape {list(shard.shape)}. Give what shard or attention "
                    f"returned."
                )
            facts |= {"size of a token": [*mine.shape[1:]], "dtype": str(mine.dtype)}
        counts = self.num_tokens.tolist()
        padded = mine.new_zeros((max(counts), *mine.shape[1:]))
        padded[: len(mine)] = mine
        whole = mine.new_empty((self.length, *mine.shape[1:]))
        for rank, rows in enumerate(self.group.gather(padded)):
            whole[self.rows_of(rank).to(whole.device)] = rows[: counts[rank]]
        return whole.movedim(0, dim)

    @functools.cached_property
    def chunks_at_home(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """Return the ranges of this rank that read only its own keys, and all its others."""
        mine, home = self.division.owner == self.rank, self.at_home
        assert home is not None, "`plan` made this"
        return tuple(self.blocks.ranges(x.nonzero()[0]) for x in (mine & home, mine & ~home))

    def places(self, chunks: tuple[tuple[int, int], ...]) -> Numbers:
        """Return where chunks of this rank begin and end among its own rows: [chunks, 2]."""
        starts, stops = np.array(chunks, np.int64).reshape(len(chunks), 2).T
        first = np.searchsorted(self.rows.numpy(), starts)
        return np.stack([first, first + stops - starts], 1)

    @functools.cached_property
    def calls(self) -> BoundedDict[object, tuple[CallPlan, Call]]:
        """Return the calls over pages that were planned last; their operands are left out."""
        return BoundedDict(8)

    def blocks_of(self, rank: int) -> Numbers:
        """Return the blocks of a rank, ascending."""
        blocks: Numbers = (self.division.owner == rank).nonzero()[0]
        return blocks

    def rows_of(self, rank: int) -> Tensor:
        """Return the rows of whole tensors that a rank has, in their order."""
        return self.blocks.rows(self.blocks_of(rank))

    # --- keys

    def route(self, batch: int) -> Route:
        """Return the pages that this rank sends and receives for a batch of `batch` entries."""
        if batch not in self._routes:
            self._routes[batch] = Route.of(self.division, self.rank, batch)
        return self._routes[batch]

    def slice_route(self, first: int, end: int) -> SliceRoute:
        """Return how the sums of slices go from rank to rank, for batch entries [first, end)."""
        if self.sizes[0] == 1:
            first, end = 0, end - first
        if (first, end) not in self._slice_routes:
            needs = self.slice_needs
            assert needs is not None, "ranks have whole slices"
            needs = needs if len(needs[0]) == 1 else needs[:, first:end]
            made = SliceRoute.of(self.division, self.of_slices, needs, self.rank, end - first)
            self._slice_routes[first, end] = made
        return self._slice_routes[first, end]

    @functools.cached_property
    def _routes(self) -> dict[int, Route]:
        return {}

    @functools.cached_property
    def _slice_routes(self) -> dict[tuple[int, int], SliceRoute]:
        return {}

    def sequences_of(self, starts: Numbers, pages: Numbers) -> tuple[Numbers, Numbers]:
        """Return the batch entry of each chunk, or its sequence, and the pages of its keys.

        Chunks start at these rows; `pages` [B, blocks] are those of all blocks, or -1.
        """
        if not self.is_ragged:
            entries = np.repeat(np.arange(len(pages)), len(starts))
            return entries, pages[entries]
        sequences = self.blocks.sequence_of(starts)
        counts = np.bincount(self.blocks.sequence, minlength=len(self.blocks.lengths))
        place = np.arange(counts[sequences].max(initial=0))
        table = (np.cumsum(counts) - counts)[sequences][:, None] + place
        there = place < counts[sequences][:, None]
        return sequences, np.where(there, pages[0][np.where(there, table, 0)], -1)

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
        owner, entries = self.division.owner, self.division.needs.shape[1]
        if self.slice_needs is None:
            leaves = self.division.arrives.sum((0, 1))
            blocks = np.bincount(owner, leaves, self.num_ranks).astype(np.int64)
        else:
            runs = SliceRuns.of(self.of_slices, self.slice_needs, entries)
            blocks = runs.arrivals(owner, self.num_ranks)
        keys: Numbers = -(-blocks // entries) * self.block
        return keys

    @property
    def balance(self) -> float:
        """Return the largest work of a rank over the mean."""
        return self.division.balance

    @property
    def received(self) -> Numbers:
        """Return how many keys [ranks] each rank receives per batch entry by the method `pages`.

        Blocks are whole.
        """
        keys: Numbers = self.division.received * self.block
        return keys

    @functools.cached_property
    def digest(self) -> str:
        """Return a number that is the same for equal plans: of layout, mask and all it captures."""
        found = hashlib.sha256()
        sizes = (self.length, self.block, self.slice_size, self.sizes)
        facts = (*sizes, self.num_ranks, self.layout, self.method, self.is_ragged)
        found.update(repr(facts).encode())
        found.update(self.blocks.lengths.tobytes())
        found.update(self.division.owner.tobytes())
        found.update(self.division.needs.tobytes())
        found.update(digest_of(self.mask).encode())
        return found.hexdigest()[:16]

    @property
    def title(self) -> str:
        """Return a line that is the same for equal plans, and says what they are."""
        return f"{self.digest} of {self.length} tokens, {self.layout}, for {self.num_ranks} ranks"

    # --- what it is like

    def __str__(self) -> str:
        return "\n".join(self._lines())

    __repr__ = __str__

    def _lines(self) -> Iterator[str]:
        received, tokens = self.received, len(self.rows)
        every = (self.num_blocks - self.num_blocks // self.num_ranks) * self.block
        of = f" of {len(self.blocks.lengths):,} sequences" if self.is_ragged else ""
        yield (
            f"{mod_name(self.mask)}: {self.length:,} tokens{of} over {self.num_ranks} ranks, "
            f"layout {self.layout}, blocks of {self.block}, balance {self.balance:.2f}"
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
        if self.method in ("heads", "ring"):
            yield f"the method is {self.method}; what is received is that of the method pages"
        if others:
            yield f"compared with {'; '.join(others)}"

    def _amount(self, keys: int, of: int | None = None) -> str:
        """Return a number of keys in words, in MiB if the size of a key is known."""
        size, unit = (
            (1.0, "keys") if self.bytes_per_key is None else (self.bytes_per_key / MEBI, "MiB")
        )
        whole = "" if of is None else f" of {of * size:,.0f}"
        return f"{keys * size:,.0f}{whole} {unit}"


def digest_of(mod: Mod | None) -> str:
    """Return a number that is the same for mods with the same graph and equal captured tensors.

    A mod without a graph is known by its name alone. The digest of None is empty.
    """
    if mod is None:
        return ""
    if not isinstance(mod, Traced):
        return hashlib.sha256(mod_name(mod).encode()).hexdigest()[:16]
    return digest_of_tensors(mod.captures, json.dumps(portable(mod.output)))


def digest_of_tensors(tensors: Iterable[Tensor], words: str = "") -> str:
    """Return a number that is the same for equal tensors, and the same words before them."""
    found = hashlib.sha256(words.encode())
    for tensor in tensors:
        plain = tensor.detach().cpu().contiguous()
        found.update(repr((plain.shape, plain.dtype)).encode())
        found.update(plain.view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]
