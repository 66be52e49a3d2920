"""Block masks over ragged and paged memory: only what is listed is read, with the same bits."""

from __future__ import annotations

import math
import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from quire import AuxRequest, BlockMask, Paged, Ragged, attention, reference
from quire.config import Backend
from quire.errors import BlockMaskShapeError
from quire.memory import Memory
from quire.runtime import backward, chosen
from quire.runtime import forward as division

HQ, HKV, D, PAGE = 4, 2, 24, 16
BACKENDS: tuple[Backend, ...] = ("jit", "eager")


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx + 40 >= kv_idx


def odd(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx * 7 + kv_idx * 3 + h + b) % 5 != 0


def slanted(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return score + 0.1 * b - 0.01 * (h + 1) * (q_idx - kv_idx)


class Case(NamedTuple):
    """A block mask over sequences, which are in pages and one after the other."""

    mask: BlockMask
    query: Tensor
    offsets: list[int]
    pages: Paged
    ragged: Ragged | None  # None if sequences do not begin with position 0
    starts: Tensor
    score: Any

    def run(self, memory: Memory, mask: Any, backend: Backend = "auto", **wanted: bool) -> Any:
        """Return out, lse and max_scores, and what else is wanted."""
        aux = AuxRequest(lse=True, max_scores=True, **wanted)
        out, found = attention(
            self.query,
            memory,
            mask=mask,
            score_mod=self.score,
            q_offsets=self.offsets,
            q_start=self.starts,
            return_aux=aux,
            backend=backend,
        )
        return [out, *(x for x in found if x is not None)]

    def elements(self) -> Any:
        """Return the same mask as a table of all elements."""
        rows, columns = self.mask.seq_lengths
        table = reference.block_mask_elements(
            self.mask, (len(self.starts), HQ, rows, columns)
        ).expand(len(self.starts), HQ, rows, columns)
        table, starts = table.contiguous(), self.starts

        def holds(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return table[b, h, q_idx - starts[b], kv_idx]

        return holds


def random_case(seed: int) -> Case:
    """Sizes of blocks, sequences, holes and positions are drawn. What nobody reads is NaN."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    size = draw.choice([1, 1, 2, 3, 8, 20, 64, 128]), draw.choice([16, 16, 24, 64, 128])
    count = draw.choice([1, 3])
    q_lens = [draw.choice([0, 1, 1, 3, 17, 70]) for _ in range(count)]
    kv_lens = [draw.choice([0, 50, 130, 300, 1100]) for _ in range(count)]
    longest = max(*q_lens, 1) + draw.choice([0, 5]), max(*kv_lens, 1) + draw.choice([0, 30])
    heads = draw.choice([1, HKV, HQ])
    shape = (
        draw.choice([1, count]),
        heads,
        *(-(-x // y) for x, y in zip(longest, size, strict=True)),
    )
    cells = (torch.rand(shape) < draw.choice([0.05, 0.2, 0.8])) * torch.randint(1, 3, shape)
    if heads == HKV:
        cells = cells.repeat_interleave(HQ // HKV, 1)
    mask = BlockMask._from_cells(
        cells.int(),
        True,
        BLOCK_SIZE=size,
        mask_mod=draw.choice([causal, odd]),
        seq_lengths=longest,
    )
    offsets = [sum(q_lens[:b]) for b in range(count + 1)]
    most = -(-max(*kv_lens, 1) // PAGE)
    table = torch.randperm(count * most + 3)[: count * most].view(count, most).int()
    keys = torch.randn(2, count * most + 3, HKV, PAGE, D)
    first = None
    if draw.random() < 0.3:
        table[torch.rand(count, most) < 0.3] = -1
    elif draw.random() < 0.3:
        first = torch.tensor([draw.randint(0, x // PAGE // 2) for x in kv_lens])
    there = table >= 0
    if first is not None:
        there &= torch.arange(most) >= first[:, None]
    ragged = None
    if bool((table >= 0).all()) and first is None:
        rows = [
            keys[:, table[b].long()].transpose(1, 2).flatten(2, 3)[:, :, :length]
            for b, length in enumerate(kv_lens)
        ]
        packed = torch.cat(rows, 2).transpose(1, 2)
        ragged = Ragged(packed[0], packed[1], [sum(kv_lens[:b]) for b in range(count + 1)])
    unread = torch.ones(keys.shape[1], dtype=torch.bool)
    for b, length in enumerate(kv_lens):
        used = table[b, : -(-length // PAGE)][there[b, : -(-length // PAGE)]]
        unread[used.long()] = False
    keys[:, unread] = math.nan
    return Case(
        mask,
        torch.randn(offsets[-1], HQ, D),
        offsets,
        Paged(keys[0], keys[1], table, kv_lens, first_page=first),
        ragged,
        torch.tensor(
            [draw.choice([0, max(0, x - y), 33]) for x, y in zip(kv_lens, q_lens, strict=True)]
        ),
        draw.choice([None, slanted]),
    )


@pytest.mark.parametrize("seed", range(24))
def test_the_bits_of_a_mask_without_blocks(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = random_case(seed)
    wanted = case.run(case.pages, case.elements())
    for memory in (case.pages, case.ragged):
        if memory is None:
            continue
        for small in (False, True):
            monkeypatch.setattr(division, "_is_worth", lambda *_, small=small: small)
            found = case.run(memory, case.mask)
            assert all(map(torch.equal, found, wanted)), small
        observed = case.run(memory, case.mask, argmax=True, entropy=True)
        assert all(map(torch.equal, observed[:3], wanted))
        in_torch = case.run(memory, case.mask, "eager", argmax=True, entropy=True)
        torch.testing.assert_close(in_torch, observed, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("seed", range(50, 58))
@pytest.mark.parametrize("turns", [False, True])
def test_gradients(seed: int, turns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a table of all elements, in each memory: by tiles, by turned lists, by torch ops."""
    case = random_case(seed)
    for_all = np.full(case.mask.shape[0], turns)
    monkeypatch.setattr(chosen, "turned", lambda *_, learns: for_all)
    monkeypatch.setattr(backward, "cut_tiles", lambda _: turns)
    monkeypatch.setattr(chosen, "MOST_BYTES", 2**13)  # a few blocks of keys at a time
    turned, compute = [], chosen.gradients
    monkeypatch.setattr(chosen, "gradients", lambda *args: turned.append(1) or compute(*args))
    query, dropout_p = case.query.requires_grad_(), 0.3 * (seed % 2)
    for memory in (case.pages, case.ragged):
        if memory is None:
            continue
        tensors = (query, memory.key.requires_grad_(), memory.value.requires_grad_())

        def gradients(mask: Any, backend: Backend, memory: Any = memory, wrt: Any = tensors) -> Any:
            out = attention(
                query,
                memory,
                mask=mask,
                score_mod=case.score,
                q_offsets=case.offsets,
                q_start=case.starts,
                dropout_p=dropout_p,
                generator=torch.Generator().manual_seed(seed),
                backend=backend,
            )
            return torch.autograd.grad(out.square().sum(), wrt)

        wanted = gradients(case.elements(), "auto")
        for backend in ("jit",) if turns else BACKENDS:
            found = gradients(case.mask, backend)
            torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4, equal_nan=True)
        assert bool(turned) == turns


def test_a_mask_for_other_sequences() -> None:
    query, key = torch.randn(5, 2, 8), torch.randn(7, 1, 8)
    memory = Ragged(key, key, [0, 3, 7])
    for batch, lengths in ((3, (4, 4)), (1, (2, 4)), (1, (4, 3))):
        mask = BlockMask._from_cells(
            torch.ones(batch, 1, 1, 1, dtype=torch.int32), True, seq_lengths=lengths
        )
        with pytest.raises(BlockMaskShapeError):
            attention(query, memory, mask=mask, q_offsets=[0, 1, 5])
