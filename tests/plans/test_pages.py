"""Calls over pages like an earlier one: layers share a step, and no change of a table is missed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from threads import at_once
from torch import Tensor

from quire import AuxRequest, Paged, attention, create_block_mask, plans
from quire.errors import ArgumentError, CapturedIndexError, QuireError, ShapeError
from quire.kv import Group, PagedKVCache
from quire.memory import tables
from quire.mods import causal
from quire.runtime.forward import STEPS

COLUMNS, ROWS, NUM_PAGES = 3, 4, 12


@pytest.fixture
def placings(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry for each time that tables are checked."""
    taken: list[None] = []
    read = Paged._read
    tables.KNOWN.clear()

    def counted(*args: Any) -> Any:
        taken.append(None)
        return read(*args)

    monkeypatch.setattr(Paged, "_read", counted)
    return taken


def biased_by(table: Tensor) -> Callable[..., Tensor]:
    def biased(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + table[kv_idx]

    return biased


def queries(q_len: int = 1, heads: int = 4) -> Tensor:
    return torch.randn(2, q_len, heads, 8).transpose(1, 2)


def pages(seed: int = 0, first_page: Tensor | None = None) -> Paged:
    """Two sequences in pages of four rows; each layer of a model has pages of its own."""
    generator = torch.Generator().manual_seed(seed)
    key, value = (torch.randn(NUM_PAGES, 2, ROWS, n, generator=generator) for n in (8, 6))
    table = torch.tensor([[3, 1, 8], [5, 11, 0]], dtype=torch.int32)
    return Paged(key, value, table, torch.tensor([10, 7]), first_page)


def as_int8(memory: Paged) -> Paged:
    scale = torch.linspace(0.01, 0.02, NUM_PAGES * 2 * ROWS).view(NUM_PAGES, 2, ROWS)
    key, value = ((x * 40).to(torch.int8) for x in (memory.key, memory.value))
    return replace(memory, key=key, value=value, key_scale=scale, value_scale=scale * 2)


def assert_as_the_long_way(query: Tensor, memory: Paged, **options: Any) -> Tensor:
    """A call that names backend="jit" is never recalled; both must give the same bits."""
    actual = attention(query, memory, **options)
    expected = attention(query, memory, **options, backend="jit")
    assert torch.equal(actual, expected)
    assert actual.stride() == expected.stride()
    return actual


# --- what is recalled ----------------------------------------------------------------------------


@pytest.mark.parametrize("q_len", [1, 2, 4])
@pytest.mark.parametrize("make", [pages, lambda seed: as_int8(pages(seed))])
def test_the_second_layer_is_recalled_and_the_same(
    q_len: int, make: Callable[[int], Paged], long_ways: list[None]
) -> None:
    for contiguous in (False, True):
        query = queries(q_len).contiguous() if contiguous else queries(q_len)
        attention(query, make(0), score_mod=biased_by(torch.randn(12)), mask=causal)
        other = biased_by(torch.randn(12))  # an equal graph with another tensor
        del long_ways[:]
        actual = attention(query, make(1), score_mod=other, mask=causal)
        assert not long_ways
        expected = attention(query, make(1), score_mod=other, mask=causal, backend="jit")
        assert torch.equal(actual, expected)


def test_tables_are_checked_once_for_all_layers_of_a_step(
    long_ways: list[None], placings: list[None]
) -> None:
    layers = [replace(pages(seed), page_table=pages().page_table.clone()) for seed in range(6)]
    query = queries()
    for layer in layers:
        attention(query, layer)
    assert len(long_ways) == 1
    assert len(placings) == 1
    longer = [replace(layer, lengths=torch.tensor([11, 8])) for layer in layers]
    for layer in longer:
        attention(query, layer)
    assert len(long_ways) == 1
    assert len(placings) == 2
    for layer in (*layers, *longer):
        assert_as_the_long_way(query, layer)


def test_a_cache_that_grows_forks_and_shrinks() -> None:
    cache = PagedKVCache(
        groups=[Group([0, 2]), Group([1, 3], window=6)],
        heads=2,
        head_dim=8,
        page_size=4,
        n_pages=200,
    )
    sequences = [cache.sequence(), cache.sequence()]
    for step in range(30):
        if step == 9:
            sequences[1] = cache.fork(sequences[0])
        if step == 20:
            cache.truncate(sequences[0], 18)
        rows = cache.extend(sequences, 1)
        for layer in range(4):
            cache.write(layer, rows, torch.randn(2, 2, 8), torch.randn(2, 2, 8))
            assert_as_the_long_way(queries(), cache.memory(layer, sequences), mask=causal)


def test_few_tables_are_kept() -> None:
    query, memory = queries(), pages()
    for length in range(1, 12):
        assert_as_the_long_way(query, replace(memory, lengths=torch.tensor([length, 3])))
    ((_, plan),) = plans.known.items()
    assert len(plan._forward.steps) == STEPS
    assert len(tables.KNOWN) <= 16


# --- what changes between calls ------------------------------------------------------------------


def _in_place(numbers: Tensor) -> None:
    numbers[0] = numbers[1]


def _by_data(numbers: Tensor) -> None:
    numbers.data[0] = numbers[1]


def _by_numpy(numbers: Tensor) -> None:
    numbers.numpy()[0] = numbers[1]


@pytest.mark.parametrize("edit", [_in_place, _by_data, _by_numpy])
@pytest.mark.parametrize("name", ["page_table", "lengths", "first_page"])
def test_a_table_that_was_changed_in_place_is_seen(
    name: str, edit: Callable[[Tensor], None], long_ways: list[None]
) -> None:
    query, memory = queries(), pages(first_page=torch.tensor([1, 0]))
    before = attention(query, memory)
    del long_ways[:]
    for _ in range(2):
        assert torch.equal(attention(query, memory), before)
    edit(getattr(memory, name))
    after = attention(query, memory)
    assert not long_ways
    assert not torch.equal(after, before)
    assert torch.equal(after, attention(query, memory, backend="jit"))


def test_keys_are_read_at_every_call() -> None:
    query, memory = queries(), pages()
    before = [attention(query, memory) for _ in range(3)][-1]
    memory.key[3, 0, 0] += 1
    assert not torch.equal(assert_as_the_long_way(query, memory), before)


def test_mods_are_read_at_every_call() -> None:
    query, memory = queries(), pages()
    window = 3

    def near(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx - kv_idx < window

    for _ in range(2):
        before = assert_as_the_long_way(query, memory, mask=near)
    window = 5
    assert not torch.equal(assert_as_the_long_way(query, memory, mask=near), before)


def test_a_table_that_changes_while_it_is_checked_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    query, memory = queries(), pages()
    attention(query, memory)  # the plan is known, the tables are not
    tables.KNOWN.clear()
    read = Paged._read

    def meddled(self: Paged, *args: Any) -> Any:
        assert isinstance(self.lengths, Tensor)
        self.lengths[0] = 2
        return read(self, *args)

    with monkeypatch.context() as patched:
        patched.setattr(Paged, "_read", meddled)
        attention(query, memory)
    for length in (10, 2):
        memory.lengths[0] = length  # type: ignore[index]
        assert_as_the_long_way(query, memory)


# --- what is refused after a call that went well -------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"lengths": torch.tensor([13, 7])}, ArgumentError, r"lengths\[0\] must be from 0 to 12"),
        ({"lengths": torch.tensor([10, 7, 1])}, ArgumentError, "each of 2 sequences"),
        ({"lengths": torch.tensor([10.0, 7.0])}, QuireError, "lengths"),
        ({"first_page": torch.tensor([9, 0])}, ArgumentError, r"first_page\[0\] must be from 0"),
        ({"key": torch.randn(NUM_PAGES, 2, 5, 8)}, ShapeError, "agree in pages, heads and rows"),
        ({"key_scale": torch.rand(NUM_PAGES, 2, ROWS)}, ArgumentError, "key_scale is given"),
    ],
)
def test_a_wrong_memory(change: dict[str, Any], error: type[Exception], message: str) -> None:
    query, memory = queries(), pages()
    for _ in range(2):
        attention(query, memory)
    with pytest.raises(error, match=message):
        attention(query, replace(memory, **change))


def test_scales_of_the_wrong_side() -> None:
    query, memory = queries(), as_int8(pages())
    floats = replace(memory, value=pages().value, value_scale=None)
    for _ in range(2):
        attention(query, floats)
    with pytest.raises(ArgumentError, match="key pages of int8 must come with key_scale"):
        attention(query, replace(floats, key_scale=None, value_scale=memory.key_scale))


def test_a_page_that_does_not_exist_in_fewer_pages() -> None:
    query, memory = queries(), pages()
    for _ in range(2):
        attention(query, memory)
    fewer = replace(memory, key=memory.key[:11], value=memory.value[:11])
    with pytest.raises(ArgumentError, match=r"page_table\[1, 1\] must be one of the 11 pages"):
        attention(query, fewer)
    memory.page_table[0, 0] = NUM_PAGES
    with pytest.raises(ArgumentError, match=r"page_table\[0, 0\] must be one of the 12 pages"):
        attention(query, memory)


def test_queries_for_another_batch() -> None:
    query, memory = queries(), pages()
    for _ in range(2):
        attention(query, memory)
    with pytest.raises(ArgumentError, match="for the 2 sequences of the page table"):
        attention(query[:1], memory)


def test_an_index_that_is_out_of_range_after_more_tokens() -> None:
    query, memory = queries(), pages()
    mod = biased_by(torch.randn(10))
    for _ in range(2):
        attention(query, memory, score_mod=mod)
    memory.lengths[0] = 11  # type: ignore[index]
    with pytest.raises(CapturedIndexError, match="with size 10 of a captured tensor"):
        attention(query, memory, score_mod=mod)


# --- what takes the long way ---------------------------------------------------------------------


def test_whatever_is_out_of_the_ordinary_takes_the_long_way(long_ways: list[None]) -> None:
    query, memory = queries(), pages()
    for _ in range(2):
        plain = attention(query, memory)
    wide = torch.randint(NUM_PAGES, (2, 2 * COLUMNS), dtype=torch.int32)
    for other in (
        replace(memory, page_table=memory.page_table.long()),
        replace(memory, page_table=wide[:, ::2]),
        replace(memory, lengths=[10, 7]),
    ):
        for _ in range(2):
            before = len(long_ways)
            assert torch.equal(attention(query, other), attention(query, other, backend="jit"))
            assert len(long_ways) == before + 2
    for options in ({"q_start": 3}, {"q_lengths": [1, 0]}, {"scale": 1}):
        for _ in range(2):
            before = len(long_ways)
            assert_as_the_long_way(query, memory, **options)
            assert len(long_ways) == before + 2
    _, aux = attention(query, memory, return_aux=AuxRequest(lse=True))
    assert aux.lse is not None
    for _ in range(2):
        assert_as_the_long_way(queries(5), memory)
    assert torch.equal(attention(query, memory), plain)


def test_a_block_mask_is_read_at_every_call(long_ways: list[None]) -> None:
    query, memory = queries(), pages()
    mask = create_block_mask(causal, None, None, 1, 12, BLOCK_SIZE=4)
    before = assert_as_the_long_way(query, memory, mask=mask)
    del long_ways[:]
    assert torch.equal(attention(query, memory, mask=mask), before)
    assert not long_ways
    mask.kv_num_blocks[:] = 0
    assert not torch.equal(assert_as_the_long_way(query, memory, mask=mask), before)


def test_gradients_are_never_forgotten() -> None:
    query, memory = queries(), pages()
    for _ in range(2):
        attention(query, memory)
    learned = query.clone().requires_grad_()
    assert attention(learned, memory).requires_grad
    with torch.no_grad():
        assert not attention(learned, memory).requires_grad
    with torch.inference_mode():
        assert torch.equal(attention(query, memory), attention(learned, memory))


def test_nothing_to_do() -> None:
    memory = pages()
    for lengths in ([0, 0], [0, 7]):
        for _ in range(2):
            none = replace(memory, lengths=torch.tensor(lengths))
            assert torch.equal(attention(queries(), none)[0], torch.zeros(4, 1, 6))
    nobody = replace(memory, page_table=memory.page_table[:0], lengths=torch.zeros(0).long())
    columnless = replace(memory, page_table=memory.page_table[:, :0], lengths=torch.tensor([0, 0]))
    for _ in range(2):
        assert attention(queries()[:0], nobody).shape == (0, 4, 1, 6)
        assert torch.equal(attention(queries(), columnless), torch.zeros(2, 4, 1, 6))


# --- what surrounds a call -----------------------------------------------------------------------


def test_many_python_threads_at_once() -> None:
    """Each with a length of its own, so that they push each other's tables out."""
    query = queries()
    memories = [replace(pages(i), lengths=torch.tensor([i + 1, 7])) for i in range(8)]
    expected = [attention(query, memory, backend="jit") for memory in memories]
    wrong: list[int] = []

    def work(i: int) -> None:
        for _ in range(50):
            if not torch.equal(attention(query, memories[i]), expected[i]):
                wrong.append(i)

    at_once(work, 8)
    assert not wrong


def test_threads_of_torch_and_autocast_around_the_second_call() -> None:
    query, memory = queries(), pages()
    out = [attention(query, memory) for _ in range(2)][-1]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(attention(query, memory), out)
    finally:
        torch.set_num_threads(threads)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(query, memory).dtype == torch.bfloat16
    with torch.device("meta"):
        assert torch.equal(attention(query, memory), out)
