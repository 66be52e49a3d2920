"""Paged memory: each sequence is attention of its own, to the bit, wherever its pages lie."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from compare import assert_as_good_as
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import quire
from quire import (
    AuxRequest,
    Dense,
    Paged,
    Ragged,
    attention,
    attention_gradients,
    create_block_mask,
    reference,
)
from quire.aux_outputs import OF_KERNELS
from quire.config import Backend
from quire.errors import (
    ArgumentError,
    BackendError,
    BlockMaskError,
    DtypeError,
    HeadsError,
    RankError,
    ShapeError,
)
from quire.memory import Queries
from quire.memory.tables import Sequences
from quire.runtime.prepare import _table
from quire.runtime.shared_prefix import shared_pieces

EVERYTHING = AuxRequest(*[True] * len(OF_KERNELS))
BACKENDS: tuple[Backend, ...] = ("jit", "eager")
FACTORS = torch.linspace(0.5, 1.5, 16)


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def slanted(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A score_mod to which sequence, head and both positions matter."""
    return score * FACTORS[b % 16] - 0.01 * (h + 1) * (q_idx - kv_idx)


@dataclass(frozen=True)
class Batch:
    """Sequences as (queries, keys, pages that were released), and what else there is."""

    sequences: list[tuple[int, int, int]]
    page: int = 16
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 24
    value_dim: int = 20
    dtype: torch.dtype = torch.float32
    heads_outside: bool = False
    table_dtype: torch.dtype = torch.int32
    seed: int = 0

    @property
    def q_lengths(self) -> list[int]:
        return [q_len for q_len, _, _ in self.sequences]

    @property
    def lengths(self) -> list[int]:
        return [length for _, length, _ in self.sequences]

    @property
    def offsets(self) -> Tensor:
        return torch.tensor([0, *self.q_lengths]).cumsum(0)

    @property
    def released(self) -> list[int]:
        return [released for _, _, released in self.sequences]

    def begin(self, b: int) -> int:
        """The first position of which a sequence has a key."""
        _, length, released = self.sequences[b]
        return min(length, released * self.page)

    def made(self) -> tuple[Tensor, list[tuple[Tensor, Tensor]], Paged]:
        """Queries [total, Hq, D]; keys and values of each sequence; and all of them in pages.

        Every row that belongs to nobody is NaN, and every entry of the table that is not used
        names no page.
        """
        generator = torch.Generator().manual_seed(self.seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype)

        query = random(sum(self.q_lengths), self.kv_heads * self.group, self.head_dim)
        counts = [-(-length // self.page) for length in self.lengths]
        free = torch.randperm(sum(counts) + 2, generator=generator).tolist()
        shapes = [(len(free), self.kv_heads, self.page, width) for width in self.widths]
        pages = [torch.full(shape, math.nan, dtype=self.dtype) for shape in shapes]
        if self.heads_outside:
            pages = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in pages]
        table = torch.full((len(counts), max(counts, default=0) + 1), -7, dtype=self.table_dtype)
        parts = []
        for b, (_, length, released) in enumerate(self.sequences):
            rows = [random(self.kv_heads, length, width) for width in self.widths]
            for place in range(released, counts[b]):
                table[b, place] = number = free.pop()
                first, last = place * self.page, min(length, (place + 1) * self.page)
                for into, mine in zip(pages, rows, strict=True):
                    into[number, :, : last - first] = mine[:, first:last]
            parts.append((rows[0][None], rows[1][None]))
        numbers = [torch.tensor(x, dtype=torch.int64) for x in (self.lengths, self.released)]
        memory = Paged(*pages, table, *numbers)
        return query, parts, memory

    @property
    def widths(self) -> tuple[int, int]:
        return self.head_dim, self.value_dim

    def alone(self, b: int, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Dense]:
        """The query [1, Hq, L, D] and the memory of one sequence."""
        rows = slice(*self.offsets[b : b + 2].tolist())
        begin = self.begin(b)
        dense = Dense(key[:, :, begin:], value[:, :, begin:], start=begin)
        return query[rows].transpose(0, 1)[None], dense


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    page = draw(st.sampled_from([1, 5, 8, 16, 64, 256]))
    sequences = []
    for _ in range(draw(st.integers(0, 5))):
        length = draw(st.sampled_from([0, 1, 7, 16, 63, 129, 300]))
        q_len = draw(st.sampled_from([0, 1, 2, 5, 40]))
        released = draw(st.integers(0, length // page))
        sequences.append((min(q_len, length), length, released))
    return Batch(
        sequences,
        page,
        kv_heads=draw(st.sampled_from([1, 3])),
        group=draw(st.sampled_from([1, 2, 3, 5, 8])),
        head_dim=draw(st.sampled_from([8, 20, 64])),
        value_dim=draw(st.sampled_from([8, 13, 64])),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])),
        heads_outside=draw(st.booleans()),
        table_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        seed=draw(st.integers(0, 2**31)),
    )


def same(a: Tensor | None, b: Tensor | None) -> bool:
    assert a is not None and b is not None
    return torch.equal(a, b)


@given(batches(), st.sampled_from(BACKENDS))
def test_the_same_bits_as_each_sequence_alone(batch: Batch, backend: Backend) -> None:
    query, parts, memory = batch.made()
    options: dict[str, Any] = {"score_mod": slanted, "mask": causal, "backend": backend}
    out, aux = attention(query, memory, q_offsets=batch.offsets, return_aux=EVERYTHING, **options)
    for b, part in enumerate(parts):
        own, dense = batch.alone(b, query, *part)

        def mod(score: Any, _: Any, h: Any, q: Any, k: Any, b: int = b) -> Any:
            return slanted(score, torch.tensor(b), h, q, k)

        start = max(0, batch.lengths[b] - batch.q_lengths[b])
        expected, numbers = attention(
            own, dense, q_start=start, return_aux=EVERYTHING, **options | {"score_mod": mod}
        )
        rows = slice(*batch.offsets[b : b + 2].tolist())
        assert torch.equal(out[rows].transpose(0, 1)[None], expected)
        for name in ("lse", "max_scores", "argmax", "entropy"):
            mine, its = getattr(aux, name), getattr(numbers, name)
            assert torch.equal(mine[rows].transpose(0, 1)[None], its), name
        if batch.q_lengths[b]:
            assert aux.key_mass is not None
            keys = slice(batch.begin(b), batch.lengths[b])
            assert same(aux.key_mass[b : b + 1, :, keys], numbers.key_mass)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_reference(dtype: torch.dtype) -> None:
    batch = Batch([(1, 300, 0), (40, 41, 0), (5, 129, 3), (0, 16, 0)], dtype=dtype)
    query, parts, memory = batch.made()
    out = attention(query, memory, q_offsets=batch.offsets, mask=causal)
    for b, part in enumerate(parts):
        own, dense = batch.alone(b, query, *part)
        begin, start = batch.begin(b), batch.lengths[b] - batch.q_lengths[b]

        rows = slice(*batch.offsets[b : b + 2].tolist())
        mine = out[rows].transpose(0, 1)[None]
        expected = [
            reference.attention(
                *(x.to(wide) for x in (own, dense.key, dense.value)),
                mask_mod=causal,
                q_start=start,
                kv_start=begin,
            ).out
            for wide in (dtype, torch.float64)
        ]
        assert_as_good_as(mine, *expected)


@pytest.mark.parametrize("q_len", [1, 3, 40])
@pytest.mark.parametrize("page", [8, 64])
def test_as_many_queries_of_each_sequence(q_len: int, page: int) -> None:
    batch = Batch([(q_len, length, 0) for length in (40, 300, 129)], page)
    query, _, memory = batch.made()
    packed = attention(query, memory, q_offsets=batch.offsets, mask=causal)
    rows = query.unflatten(0, (3, q_len)).transpose(1, 2)
    for layout in (rows, rows.contiguous()):
        out, aux = attention(layout, memory, mask=causal, return_aux=EVERYTHING)
        assert out.shape == (3, 4, q_len, 20)
        assert torch.equal(out.transpose(1, 2).flatten(0, 1), packed)
        assert aux.lse is not None and aux.lse.shape == (3, 4, q_len)
        assert aux.key_mass is not None and aux.key_mass.shape == (3, 4, 300)


def test_ragged_memory_gives_the_same_bits() -> None:
    batch = Batch([(1, 300, 0), (300, 300, 0), (5, 129, 0)], page=50)
    query, parts, memory = batch.made()
    key, value = (torch.cat([part[i][0].transpose(0, 1) for part in parts]) for i in (0, 1))
    ragged = Ragged(key, value, torch.tensor([0, *batch.lengths]).cumsum(0))
    out, expected = (
        attention(query, each, q_offsets=batch.offsets, mask=causal, score_mod=slanted)
        for each in (memory, ragged)
    )
    assert torch.equal(out, expected)


def test_some_queries_of_each_sequence() -> None:
    batch = Batch([(5, 40, 0), (5, 129, 0)])
    query, _, memory = batch.made()
    four = query.unflatten(0, (2, 5)).transpose(1, 2)
    out = attention(four, memory, q_lengths=[2, 5], mask=causal)
    assert not out[0, :, 2:].any()
    ends = torch.tensor([0, 5, 10])
    same = attention(query, memory, q_offsets=ends, q_lengths=[2, 5], mask=causal)
    assert torch.equal(out.transpose(1, 2).flatten(0, 1), same)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("infinite", [False, True])
def test_gradients_of_shared_pages(backend: Backend, infinite: bool) -> None:
    batch = Batch([(40, 40, 0), (1, 300, 2), (33, 129, 0)])
    query, _, memory = batch.made()
    pages = memory.page_table.clone()
    pages[2, 1] = pages[0, 1]  # two sequences read one page
    keys, values = (torch.where(x.isnan(), 0.0, x) for x in (memory.key, memory.value))
    if infinite:
        values[int(pages[1, 18]), 0, 3] = math.inf
    leaves = [x.detach().requires_grad_() for x in (query, keys, values)]
    mine = Paged(leaves[1], leaves[2], pages, memory.lengths, memory.first_page)
    options: dict[str, Any] = {"mask": causal, "score_mod": slanted, "backend": backend}
    out = attention(leaves[0], mine, q_offsets=batch.offsets, **options)
    above = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    grads = torch.autograd.grad(out, leaves, above)

    places = [torch.arange(batch.begin(b), length) for b, length in enumerate(batch.lengths)]
    rows = [(pages[b, at // 16].long(), at % 16) for b, at in enumerate(places)]
    key, value = (torch.cat([leaf[numbers, :, at] for numbers, at in rows]) for leaf in leaves[1:])
    ends = torch.tensor([0, *map(len, places)]).cumsum(0)
    starts = [length - q_len for q_len, length, _ in batch.sequences]
    begins = torch.tensor([batch.begin(b) for b in range(3)])

    def moved(mod: Any) -> Any:
        """The keys of ragged memory count from 0."""
        return lambda *args: mod(*args[:-1], args[-1] + begins[args[-4]])

    ragged = attention(
        *(leaves[0], Ragged(key, value, ends)),
        q_offsets=batch.offsets,
        q_start=starts,
        backend=backend,
        mask=moved(causal),
        score_mod=moved(slanted),
    )
    expected = torch.autograd.grad(ragged, leaves, above)
    torch.testing.assert_close(out, ragged, equal_nan=True)
    for grad, its in zip(grads, expected, strict=True):
        torch.testing.assert_close(grad, its, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_gradients_from_results() -> None:
    batch = Batch([(4, 40, 0), (4, 129, 0)])
    query, _, memory = batch.made()
    four = query.unflatten(0, (2, 4)).transpose(1, 2).contiguous()
    leaves = [torch.where(x.isnan(), 0.0, x).requires_grad_() for x in (four, *memory_of(memory))]
    mine = Paged(leaves[1], leaves[2], memory.page_table, memory.lengths)
    out, aux = attention(leaves[0], mine, mask=causal, return_aux=AuxRequest(lse=True))
    above = torch.randn_like(out)
    expected = torch.autograd.grad(out, leaves, above)
    assert aux.lse is not None
    found = attention_gradients(leaves[0], mine, out, aux.lse, above, mask=causal)
    for mine_, its in zip(found[:3], expected, strict=True):
        torch.testing.assert_close(mine_, its)
    with pytest.raises(ShapeError, match=r"lse must have the shape \[2, 4, 4\]"):
        attention_gradients(leaves[0], mine, out, aux.lse[:1], above, mask=causal)


def memory_of(memory: Paged) -> tuple[Tensor, Tensor]:
    return memory.key, memory.value


@pytest.mark.parametrize("q_len", [1, 40])
@pytest.mark.parametrize("backend", BACKENDS)
def test_block_masks_count_from_the_first_query(q_len: int, backend: Backend) -> None:
    batch = Batch([(q_len, length, 0) for length in (40, 300, 129)])
    query, parts, memory = batch.made()
    four = query.unflatten(0, (3, q_len)).transpose(1, 2)

    def chosen(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx + q_idx + b) % 3 != 0

    mask = create_block_mask(chosen, 3, None, q_len, 384, BLOCK_SIZE=(32, 64))
    mask.kv_num_blocks[1, 0, 0] -= 1  # and not what its mask_mod says alone
    out = attention(four, memory, mask=mask, backend=backend)
    for b, (key, value) in enumerate(parts):
        allowed = reference.block_mask_elements(mask, (3, 4, q_len, 384))[b : b + 1]
        scores = four[b : b + 1] @ key.repeat_interleave(2, 1).transpose(2, 3) / math.sqrt(24)
        scores = scores.masked_fill(~allowed[..., : key.shape[2]], -math.inf)
        expected = torch.softmax(scores, -1) @ value.repeat_interleave(2, 1)
        torch.testing.assert_close(out[b : b + 1], expected, rtol=1e-4, atol=1e-5)


def test_dropout_sinks_and_mixed_dtypes() -> None:
    batch = Batch([(1, 300, 0), (40, 129, 0)], dtype=torch.bfloat16)
    query, parts, memory = batch.made()
    query, sink = query.float(), torch.linspace(-1, 1, 4)
    generator = torch.Generator().manual_seed(3)
    out = attention(query, memory, q_offsets=batch.offsets, mask=causal, sink=sink)
    assert out.dtype == torch.float32
    for b, part in enumerate(parts):
        own, dense = batch.alone(b, query, *part)
        expected = attention(own, dense, mask=causal, sink=sink)
        rows = slice(*batch.offsets[b : b + 2].tolist())
        assert torch.equal(out[rows].transpose(0, 1)[None], expected)
    dropped = attention(query, memory, q_offsets=batch.offsets, dropout_p=0.5, generator=generator)
    assert not torch.equal(dropped, attention(query, memory, q_offsets=batch.offsets))


@pytest.mark.parametrize("q_len", [1, 3, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_latent_for_keys_and_values(q_len: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    latent = torch.randn(20, 1, 64, 576).to(dtype)
    table = torch.randperm(20)[:16].view(2, 8)
    memory = Paged(latent, latent[..., :512], table, [500, 300])
    query = torch.randn(2, 16, q_len, 576)
    out = attention(query, memory, mask=causal, scale=0.05, backend="jit")
    for b, length in enumerate((500, 300)):
        rows = latent[table[b], 0].flatten(0, 1)[None, None, :length]
        mine = query[b : b + 1]
        places = {"mask_mod": causal, "scale": 0.05, "q_start": length - q_len}
        expected = [
            reference.attention(mine.to(wide), rows.to(wide), rows[..., :512].to(wide), **places)
            for wide in (torch.float32, torch.float64)
        ]
        assert_as_good_as(out[b : b + 1], *(each.out for each in expected), size=4.0)


# --- pages that sequences share ---


def sharing(prefix: int, own: list[int], page: int, seed: int = 0) -> tuple[Paged, Paged]:
    """Sequences that begin with the same pages, and the same sequences in pages of their own."""
    torch.manual_seed(seed)
    count = prefix // page
    needed = [-(-length // page) for length in own]
    keys, values = (torch.randn(count + sum(needed), 2, page, width) for width in (24, 20))
    table = torch.full((len(own), count + max(needed)), -1)
    table[:, :count] = torch.randperm(count)
    numbers = iter(range(count, count + sum(needed)))
    for b, pages in enumerate(needed):
        table[b, count : count + pages] = torch.tensor([next(numbers) for _ in range(pages)])
    lengths = [prefix + length for length in own]
    alone = torch.where(table < 0, 0, table).flatten()
    apart = torch.arange(table.numel()).view(table.shape)
    copies = Paged(keys[alone], values[alone], apart, lengths)
    return Paged(keys, values, table, lengths), copies


@pytest.mark.parametrize("q_len", [1, 3])
@pytest.mark.parametrize("page", [16, 64, 2048])
@pytest.mark.parametrize(
    ("prefix", "own"),
    [
        (2048, [1, 30, 64]),
        (2048, [5] * 20),  # more than are computed together
        (4096, [0, 700, 1500]),
        (4112, [3, 4]),
    ],
)
def test_sharing_changes_no_bit(prefix: int, own: list[int], page: int, q_len: int) -> None:
    prefix -= prefix % page
    own = [max(1, length) for length in own]
    shared, apart = sharing(prefix, own, page)
    query = torch.randn(len(own), 6, q_len, 24)
    window = torch.tensor([900 + 100 * (b % 3) for b in range(len(own))])

    def own_window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        """A mask under which some of the sequences skip what others read."""
        return (kv_idx % 3 != b % 3) & (kv_idx > window[b]) & (q_idx >= kv_idx)

    for mask in (causal, own_window):
        options: dict[str, Any] = {"mask": mask, "score_mod": slanted, "return_aux": EVERYTHING}
        out, aux = attention(query, shared, **options)
        expected, numbers = attention(query, apart, **options)
        assert torch.equal(out, expected)
        for mine, its in zip(aux[:-1], numbers[:-1], strict=True):  # no weights
            assert same(mine, its)


@pytest.mark.parametrize("length", [1024, 2048])
def test_sequences_that_have_nothing_of_their_own(length: int) -> None:
    torch.manual_seed(0)
    keys, values = torch.randn(length // 64, 2, 64, 24), torch.randn(length // 64, 2, 64, 20)
    row = torch.randperm(length // 64)
    query = torch.randn(5, 6, 1, 24)
    out = attention(query, Paged(keys, values, row.expand(5, -1), [length] * 5), mask=causal)
    for b in range(5):
        alone = attention(query[b : b + 1], Paged(keys, values, row[None], [length]), mask=causal)
        assert torch.equal(out[b : b + 1], alone)
    placed = Paged(keys, values, row.expand(5, -1), [length] * 5).place(query, Queries())
    launcher: Any = SimpleNamespace(kernel=SimpleNamespace(form="row"), heads=2, block_q=1)
    records = _table(placed, placed.sequences, launcher)
    assert records.members == 5 and records.slots == 5 * 2 * (length // 1024)


def test_who_begins_with_the_same_pages() -> None:
    table = torch.tensor([[1, 2, 3], [1, 2, 4], [5, 6, 7], [1, 9, 9], [1, 2, 3]], dtype=torch.int32)
    ends = torch.tensor([2500, 2048, 3000, 1500, 1023]).numpy()
    zeros = ends * 0
    sequences = Sequences(zeros + range(5), zeros + 1, ends - 1, zeros, ends, zeros, zeros)
    order, shared, members = shared_pieces(sequences, table, 1024, zeros + range(5))
    assert order.tolist() == [0, 1, 3, 4, 2]
    assert shared is not None and shared.tolist() == [1, 1, 1, 0, 0]
    assert members is not None and members.tolist() == [3, 0, 0, 1, 1]


# --- int8 ---


def quantised(pages: Tensor) -> tuple[Tensor, Tensor]:
    scale = pages.abs().amax(-1) / 127
    return (pages / scale.unsqueeze(-1)).round().to(torch.int8), scale


def small(memory: Paged, dtype: torch.dtype = torch.float32) -> tuple[Paged, Paged]:
    """The pages as int8, and what these mean."""
    numbers = [quantised(torch.where(x.isnan(), 0.25, x.float())) for x in memory_of(memory)]
    wide = [whole * scale.to(dtype).unsqueeze(-1) for whole, scale in numbers]
    rest = (memory.page_table, memory.lengths, memory.first_page)
    (key, key_scale), (value, value_scale) = numbers
    return Paged(key, value, *rest, key_scale, value_scale), Paged(*wide, *rest)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("widths", [(64, 64), (24, 20), (128, 40)])
def test_int8_is_what_it_means(
    backend: Backend, dtype: torch.dtype, widths: tuple[int, int]
) -> None:
    sizes = {"head_dim": widths[0], "value_dim": widths[1], "group": 3}
    batch = Batch([(1, 300, 2), (40, 129, 0), (4, 16, 0), (1, 0, 0)], page=32, **sizes)
    query, _, memory = batch.made()
    query = query.to(dtype)
    mine, wide = small(memory, torch.float64 if dtype == torch.float64 else torch.float32)
    options: dict[str, Any] = {"mask": causal, "score_mod": slanted, "backend": backend}
    out, expected = (attention(query, x, q_offsets=batch.offsets, **options) for x in (mine, wide))
    _, truth = small(memory, torch.float64)
    exact = attention(
        query.double(), truth, q_offsets=batch.offsets, **options | {"backend": "eager"}
    )
    assert out.dtype == dtype
    assert_as_good_as(out, expected, exact, size=4.0)
    outside = mine.key.transpose(0, 3).contiguous().transpose(0, 3)  # columns far from each other
    strided = Paged(outside, *list(vars(mine).values())[1:])
    assert_as_good_as(
        attention(query, strided, q_offsets=batch.offsets, **options), expected, exact, size=4.0
    )


def test_int8_keys_with_other_values() -> None:
    batch = Batch([(1, 300, 0), (40, 129, 0)], head_dim=64, value_dim=64)
    query, _, memory = batch.made()
    mine, wide = small(memory)
    for keys, values in ((mine, wide), (wide, mine)):
        mixed = Paged(
            *(keys.key, values.value, memory.page_table, memory.lengths),
            key_scale=keys.key_scale,
            value_scale=values.value_scale,
        )
        out = attention(query, mixed, q_offsets=batch.offsets, mask=causal)
        expected = attention(query, wide, q_offsets=batch.offsets, mask=causal)
        torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_scale_that_is_not_finite_reaches_who_reads_it(backend: Backend) -> None:
    batch = Batch([(1, 40, 0), (2, 33, 0)], head_dim=64, value_dim=64)
    query, _, memory = batch.made()
    mine, _ = small(memory)
    assert mine.value_scale is not None
    mine.value_scale[memory.page_table[0, 1], 1, 3] = math.nan  # position 19 of sequence 0
    every = attention(query, mine, q_offsets=batch.offsets, backend=backend)
    assert every[0, 2:].isnan().all() and not every[0, :2].isnan().any()
    assert not every[1:].isnan().any()
    options: dict[str, Any] = {"q_offsets": batch.offsets, "backend": backend}
    assert not attention(query, mine, mask=lambda b, h, q, kv: kv != 19, **options).isnan().any()


def test_queries_learn_over_int8() -> None:
    batch = Batch([(2, 40, 0), (40, 129, 0)], head_dim=64, value_dim=64)
    query, _, memory = batch.made()
    query.requires_grad_()
    outs = [attention(query, x, q_offsets=batch.offsets, mask=causal) for x in small(memory)]
    above = torch.randn_like(outs[0])
    grads = [torch.autograd.grad(out, query, above)[0] for out in outs]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    mine, out = small(memory)[0], outs[0].detach()
    with pytest.raises(DtypeError) as caught:
        attention_gradients(
            *(query, mine, out, out[..., 0], out), q_offsets=batch.offsets, mask=causal
        )
    assert str(caught.value) == (
        "key must hold floats, which have a gradient, but is torch.int8. Give float pages, or let "
        "autograd compute the gradient of the query."
    )


def test_scales_that_do_not_fit() -> None:
    whole, scale = quantised(PAGES)
    refused(
        ArgumentError,
        "key pages of int8 must come with key_scale, those of float8 may, and others must not, but "
        "they are torch.int8 and key_scale is None. Give one float32 scale for each row of each "
        "head, [6, 2, 16], or pages of another dtype.",
        Paged(whole, PAGES, TABLE, [20, 16]),
    )
    refused(
        ArgumentError,
        "value pages of int8 must come with value_scale, those of float8 may, and others must not, "
        "but they are torch.float32 and value_scale is given. Give one float32 scale for each row "
        "of each head, [6, 2, 16], or pages of another dtype.",
        Paged(PAGES, PAGES, TABLE, [20, 16], value_scale=scale),
    )
    refused(
        ShapeError,
        "key_scale must be float32 [6, 2, 16], a scale for each row of each head, but is float32 "
        "[6, 2]. Divide the largest absolute value of each row by the largest number of the dtype.",
        Paged(whole, whole, TABLE, [20, 16], key_scale=scale[..., 0], value_scale=scale),
    )


# --- refusals ------------------------------------------------------------------------------------

PAGES = torch.randn(6, 2, 16, 8)
QUERY = torch.randn(2, 4, 1, 8)
TABLE = torch.tensor([[0, 3], [5, -1]])


def refused(kind: type[Exception], message: str, memory: Paged, **options: Any) -> None:
    with pytest.raises(kind) as caught:
        attention(options.pop("query", QUERY), memory, **options)
    assert str(caught.value) == message


def test_pages_that_do_not_exist() -> None:
    advice = "A row holds the pages of one sequence, in the order of its positions."
    for number in (6, -2, 2**40):
        wrong = TABLE.clone()
        wrong[0, 1] = number
        shown = min(number, 2**31 - 1)
        refused(
            ArgumentError,
            f"page_table[0, 1] must be one of the 6 pages, or -1 for a hole, but is {shown}. "
            f"{advice}",
            Paged(PAGES, PAGES, wrong, [20, 16]),
        )
        attention(QUERY, Paged(PAGES, PAGES, wrong, [16, 16]))  # the second page is not used
    refused(
        DtypeError,
        f"page_table must hold integers, but is float32. {advice}",
        Paged(PAGES, PAGES, TABLE.float(), [20, 16]),
    )
    refused(
        ShapeError,
        f"page_table must be 2-D, but has shape [4]. {advice}",
        Paged(PAGES, PAGES, TABLE.flatten(), [20, 16]),
    )


def test_lengths_and_released_pages() -> None:
    advice = "Give one for each of 2 sequences."
    refused(
        ArgumentError,
        f"lengths[1] must be from 0 to 32, 2 pages of 16 rows, but is 33. {advice}",
        Paged(PAGES, PAGES, TABLE, [20, 33]),
    )
    refused(
        ArgumentError,
        f"lengths must hold a number for each of 2 sequences, but hold 1. {advice}",
        Paged(PAGES, PAGES, TABLE, [20]),
    )
    refused(
        ArgumentError,
        f"first_page[0] must be from 0 to 2, as many as it has pages, but is 3. {advice}",
        Paged(PAGES, PAGES, TABLE, [20, 16], first_page=[3, 0]),
    )
    out = attention(QUERY, Paged(PAGES, PAGES, TABLE, [20, 0], first_page=[2, 0]))
    assert not out.any()  # nobody has a key


def test_queries_that_do_not_fit() -> None:
    memory, packed = Paged(PAGES, PAGES, TABLE, [20, 16]), QUERY[:, :, 0]
    refused(
        ArgumentError,
        "query [total, Hq, D] must come with q_offsets, but they are missing. Give the first row "
        "of each of 2 sequences and the end of the last; or, if each has as many queries, give "
        "query [B, Hq, L, D].",
        memory,
        query=packed,
    )
    refused(
        ArgumentError,
        "q_offsets must come with query [total, Hq, D], but query has 4 dimensions. Leave them "
        "out, or pack the rows of all sequences.",
        memory,
        q_offsets=[0, 1, 2],
    )
    refused(
        ArgumentError,
        "query must be for the 2 sequences of the page table, but is for 3. Give each a row of the "
        "table, also where it has no query.",
        memory,
        query=torch.cat([QUERY, QUERY[:1]]),
    )
    with pytest.raises(RankError, match="query must have 4 dimensions"):
        attention(packed[0], memory)
    with pytest.raises(RankError, match="key must have 4 dimensions"):
        attention(QUERY, Paged(PAGES[0], PAGES, TABLE, [20, 16]))
    with pytest.raises(ShapeError, match="key and value must agree in pages, heads and rows"):
        attention(QUERY, Paged(PAGES, PAGES[:4], TABLE, [20, 16]))
    with pytest.raises(ShapeError, match="pages must have at least one row"):
        attention(QUERY, Paged(PAGES[:, :, :0], PAGES[:, :, :0], TABLE, [0, 0]))
    with pytest.raises(HeadsError):
        attention(QUERY[:, :3], memory)
    with pytest.raises(BackendError, match="packed into one tensor"):
        attention(QUERY, memory, backend="inductor")
    with pytest.raises(ArgumentError, match="the memory of a plan must be Dense, but is Paged"):
        quire.plan(QUERY, memory)  # type: ignore[arg-type]


def test_block_masks_that_do_not_fit() -> None:
    memory = Paged(PAGES, PAGES, TABLE, [20, 16])
    for lengths in ((1, 16), (0, 32)):
        mask = create_block_mask(causal, None, None, *lengths, BLOCK_SIZE=16)
        with pytest.raises(BlockMaskError):
            attention(QUERY, memory, mask=mask)
