"""What a cache does and refuses, case by case; `test_state_machine.py` mixes everything."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import quire
from quire.errors import (
    ArgumentError,
    DtypeError,
    KVCacheError,
    OutOfPages,
    PageError,
    QuireError,
    ReleasedRowsError,
    SequenceError,
    ShapeError,
    TensorKindError,
    UnwrittenRowsError,
)
from quire.kv import Group, PagedKVCache, SequenceHandle
from quire.kv.handles import Rows
from quire.mods import causal, sliding_window
from quire.runtime.append import dequantise, quantise

SIZES: dict[str, Any] = {"heads": 2, "head_dim": 4, "page_size": 4, "n_pages": 12}


def made(layers: int = 2, **options: Any) -> PagedKVCache:
    return PagedKVCache(layers, **{**SIZES, **options})


def append(
    cache: PagedKVCache, sequence: SequenceHandle, count: int, value_dim: int | None = None
) -> torch.Tensor:
    """Random keys, [layers, tokens, heads, width]; the values are twice as large."""
    key = torch.randn(cache.num_layers, count, cache.shape.heads, cache.shape.head_dim)
    cache.append([sequence], key, 2 * key[..., :value_dim])
    return key


def keys(cache: PagedKVCache, sequence: SequenceHandle, layer: int = 0) -> torch.Tensor:
    return cache.dense(layer, sequence).key[0].transpose(0, 1)


def test_tokens_of_many_sequences_are_written_at_once() -> None:
    cache = made()
    a, b, c = (cache.sequence() for _ in range(3))
    rows = cache.extend([a, b, c], [5, 0, 2])
    key, value = torch.randn(2, 2, 7, 2, 4)
    for layer in range(2):
        cache.write(layer, rows, key[layer], value[layer])
    assert [cache.length(each) for each in (a, b, c)] == [5, 0, 2]
    for layer in range(2):
        for sequence, part in ((a, slice(0, 5)), (b, slice(5, 5)), (c, slice(5, 7))):
            held = cache.dense(layer, sequence)
            assert torch.equal(held.key[0].transpose(0, 1), key[layer, part])
            assert torch.equal(held.value[0].transpose(0, 1), value[layer, part])


def test_memory_reads_as_dense_does() -> None:
    cache = made(head_dim=8)
    sequences = [cache.sequence() for _ in range(2)]
    append(cache, sequences[0], 9)
    append(cache, sequences[1], 3)
    memory = cache.memory(1, sequences)
    assert memory.lengths.tolist() == [9, 3] and memory.page_table.shape == (2, 3)
    for place, sequence in enumerate(sequences):
        pages = memory.page_table[place, : -(-cache.length(sequence) // 4)].long()
        rows = memory.key[pages].transpose(1, 2).flatten(0, 1)[: cache.length(sequence)]
        assert torch.equal(rows, keys(cache, sequence, 1))
    assert cache.memory(1, sequences).page_table is memory.page_table  # until something changes
    append(cache, sequences[0], 1)
    assert cache.memory(1, sequences).lengths.tolist() == [10, 3]
    assert memory.lengths.tolist() == [9, 3]


def test_a_held_sequence_can_be_attended_to() -> None:
    cache = made(head_dim=8)
    sequence = cache.sequence()
    key = append(cache, sequence, 6)
    query = torch.randn(1, 2, 1, 8)
    held = cache.dense(0, sequence)
    out = quire.attention(query, held)
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key[0].transpose(0, 1)[None], 2 * key[0].transpose(0, 1)[None]
    )
    torch.testing.assert_close(out, expected)


def test_memory_is_attended_to_as_dense_is() -> None:
    """To the bit, also where a window has let pages go."""
    cache = PagedKVCache(
        groups=[Group([0]), Group([1], window=6)], heads=2, head_dim=16, page_size=4, n_pages=40
    )
    sequences = [cache.sequence() for _ in range(3)]
    for count in (13, 1, 5, 1, 1):
        new = torch.randn(2, 2, 3 * count, 2, 16)
        cache.append(sequences, *new)
    cache.truncate(sequences[1], 19)
    assert cache.start(1, sequences[0]) > 0
    query = torch.randn(3, 4, 1, 16)
    masks = [causal, sliding_window(6)]
    for layer, mask in enumerate(masks):
        out = quire.attention(query, cache.memory(layer, sequences), mask=mask)
        for place, sequence in enumerate(sequences):
            held = cache.dense(layer, sequence)
            alone = quire.attention(query[place : place + 1], held, mask=mask)
            assert torch.equal(out[place], alone[0])


def test_a_fork_takes_nothing_until_it_is_extended() -> None:
    cache = made()
    parent = cache.sequence()
    first = append(cache, parent, 6)
    used = cache.statistics().pages - cache.statistics().free
    child = cache.fork(parent)
    now = cache.statistics()
    assert (now.pages - now.free, now.shared, now.tokens) == (used, 2, 12)
    second = append(cache, child, 1)
    third = append(cache, parent, 1)  # the last page is its own again: nothing is copied
    now = cache.statistics()
    assert (now.pages - now.free, now.shared) == (used + 1, 1)
    assert torch.equal(keys(cache, parent), torch.cat([first[0], third[0]]))
    assert torch.equal(keys(cache, child), torch.cat([first[0], second[0]]))


def test_forks_that_are_extended_together_copy_one_page_less() -> None:
    cache = made()
    parent = cache.sequence()
    first = append(cache, parent, 2)
    family = [parent, cache.fork(parent), cache.fork(parent)]
    new = torch.randn(2, 3, 2, 4)
    cache.append(family, new, new)
    now = cache.statistics()
    assert now.pages - now.free == 3
    for place, each in enumerate(family):
        assert torch.equal(keys(cache, each), torch.cat([first[0], new[0, place : place + 1]]))
    cache.check_integrity()


def test_waste_counts_rows_without_a_token() -> None:
    cache = made()
    assert cache.statistics().waste == 0
    sequence = cache.sequence()
    append(cache, sequence, 5)
    assert cache.statistics().waste == pytest.approx(3 / 8)
    cache.fork(sequence)
    assert cache.statistics().waste == pytest.approx(3 / 8)


def test_memory_grows_as_it_is_needed_and_not_beyond_the_limit() -> None:
    page_bytes = 2 * 2 * 4 * (4 + 4) * 4  # layers, heads, rows, widths, bytes
    cache = made(n_pages=None, max_bytes=40 * page_bytes + 1)
    sequence = cache.sequence()
    sizes = {cache.statistics().num_bytes}
    for _ in range(40):
        append(cache, sequence, 4)
        sizes.add(cache.statistics().num_bytes)
    with pytest.raises(OutOfPages, match="20,481 bytes"):
        append(cache, sequence, 1)
    assert sorted(sizes) == [0, 16 * page_bytes, 32 * page_bytes, 40 * page_bytes]
    assert cache.length(sequence) == 160


def test_groups_share_the_limit() -> None:
    cache = PagedKVCache(
        groups=[Group([0]), Group([1, 2])], heads=1, head_dim=1, page_size=1, max_bytes=100 * 8
    )
    sequence = cache.sequence()
    for _ in range(33):
        append(cache, sequence, 1)
    with pytest.raises(OutOfPages):
        append(cache, sequence, 1)
    assert cache.statistics().num_bytes <= 800 and cache.length(sequence) == 33
    cache.check_integrity()


@pytest.mark.parametrize("there", [16, 8, 0])
def test_large_memory_keeps_its_rows_as_it_grows(
    there: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 2 MB of keys to 16 in place; or by copies, where addresses of fewer MB are left."""
    mapped, real = [], mmap.mmap

    def tried(number: int, size: int, **options: Any) -> mmap.mmap:
        if size > there << 20:
            raise OSError("no memory")
        mapped.append(real(number, size, **options))
        return mapped[-1]

    monkeypatch.setattr(mmap, "mmap", tried)
    cache = PagedKVCache(1, heads=1, head_dim=2048, value_dim=1, page_size=16, n_pages=128)
    sequence = cache.sequence()
    key, places = [], []
    for _ in range(80):
        key.append(append(cache, sequence, 16, 1)[0])
        places.append(cache.memory(0, [sequence]).key.data_ptr())
    assert cache.memory(0, [sequence]).key.nbytes == 128 * 16 * 2048 * 4
    assert torch.equal(keys(cache, sequence), torch.cat(key))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        assert len(mapped) == {16: 1, 8: 1, 0: 0}[there]
        assert len(set(places[:8])) == 1 and (len(set(places)) == 1) == (there == 16)


def test_running_out_names_what_was_asked_and_leaves_everything() -> None:
    cache = made(prefix=True)
    a, b = cache.sequence(), cache.sequence()
    key = append(cache, a, 30)
    cache.keep(a, range(30))
    before = cache.statistics()
    message = r"be 5 free pages, but only 4 of 12 are free, 7 are kept .* the limit is 12 pages"
    with pytest.raises(OutOfPages, match=message):
        cache.extend([a, b], [3, 16])
    assert cache.statistics() == before and cache.length(b) == 0
    assert torch.equal(keys(cache, a), key[0])
    cache.free(a)  # now what is kept can go
    cache.extend([b], 48)
    assert cache.statistics().kept == 0


@pytest.mark.parametrize("fails_at", range(4))
def test_memory_that_ends_while_layers_grow_loses_nothing(
    fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two layers, keys and values each: some have grown already."""
    cache = made(prefix=True, n_pages=24)
    a, b = cache.sequence(), cache.sequence()
    first = append(cache, a, 30)
    cache.keep(a, range(30))
    append(cache, b, 20)
    cache.keep(b, range(100, 120))
    cache.free(b)
    before, real, calls = cache.statistics(), torch.empty, iter(range(100))

    def failing(*arguments: Any, **options: Any) -> torch.Tensor:
        if next(calls) == fails_at:
            raise RuntimeError("can't allocate memory")
        return real(*arguments, **options)

    c = cache.sequence()
    monkeypatch.setattr(torch, "empty", failing)
    with pytest.raises(OutOfPages, match="8 more pages, 4,096 bytes, but has not"):
        cache.extend([c], 15 * 4)
    monkeypatch.undo()
    cache.free(c)
    assert cache.statistics() == before
    second = append(cache, a, 2)
    for layer in range(2):
        assert torch.equal(keys(cache, a, layer), torch.cat([first[layer], second[layer]]))
    third = append(cache, a, 15 * 4)
    for layer in range(2):
        parts = [each[layer] for each in (first, second, third)]
        assert torch.equal(keys(cache, a, layer), torch.cat(parts))
    cache.check_integrity()


def test_a_window_lets_pages_go() -> None:
    cache = PagedKVCache(groups=[Group([0], window=6), Group([1])], **SIZES)
    sequence = cache.sequence()
    whole = torch.cat([append(cache, sequence, 1) for _ in range(30)], dim=1)
    # The query at 29 saw 23 to 29; those before page 5 are gone.
    assert cache.start(0, sequence) == 20 and cache.start(1, sequence) == 0
    assert torch.equal(keys(cache, sequence, 0), whole[0, 20:])
    assert torch.equal(keys(cache, sequence, 1), whole[1])
    assert cache.dense(0, sequence).start == 20
    table = cache.memory(0, [sequence]).page_table[0]
    assert (table[:5] == table[5]).all()  # never another sequence's
    cache.truncate(sequence, 26)
    with pytest.raises(ReleasedRowsError, match=r"window of 6 .* position 20, .* but is 25"):
        cache.truncate(sequence, 25)
    assert cache.length(sequence) == 26
    cache.check_integrity()


def test_drafts_can_be_rejected_behind_a_window() -> None:
    cache = PagedKVCache(groups=[Group([0], window=5)], **SIZES)
    sequence = cache.sequence()
    kept = append(cache, sequence, 10)
    for _ in range(20):
        append(cache, sequence, 7)
        cache.truncate(sequence, 10)
    start = cache.start(0, sequence)
    assert torch.equal(keys(cache, sequence), kept[0, start:]) and start <= 5


def test_kept_pages_are_found_by_the_next_sequence() -> None:
    cache = made(prefix=True)
    a = cache.sequence(range(10))
    assert cache.length(a) == 0
    key = append(cache, a, 10)
    assert cache.keep(a, range(10)) == 2 and cache.keep(a, range(10)) == 0
    cache.free(a)
    b = cache.sequence(range(10))
    assert cache.length(b) == 8 and torch.equal(keys(cache, b), key[0, :8])
    assert cache.length(cache.sequence(range(10), salt=b"tenant")) == 0
    append(cache, b, 1)
    cache.truncate(b, 6)
    append(cache, b, 1)  # into a copy: the kept page is as it was
    c = cache.sequence(range(8))
    assert torch.equal(keys(cache, c), key[0, :8])
    assert cache.evict(5) == 0
    cache.free(b, c)
    assert cache.evict(5) == 2
    cache.check_integrity()


def test_pages_of_int8_hold_a_scale_for_each_row() -> None:
    cache = made(1, dtype=torch.int8, value_dim=6)
    assert cache.shape.num_bytes == 2 * 4 * (4 + 6 + 2 * 4)
    sequence = cache.sequence()
    key, value = torch.randn(1, 5, 2, 4), torch.randn(1, 5, 2, 6).bfloat16()
    cache.append([sequence], key, value.float())
    held = cache.dense(0, sequence)
    for rows, expected in ((held.key, key), (held.value, value.float())):
        again = dequantise(*quantise(expected[0]))
        assert torch.equal(rows[0].transpose(0, 1), again)
        assert (again - expected[0]).abs().max() < expected.abs().max() / 127
    child = cache.fork(sequence)
    cache.append([child], key[:, :1], value[:, :1].float())
    assert torch.equal(cache.dense(0, child).key[:, :, :5], held.key)
    assert torch.equal(cache.dense(0, sequence).key, held.key)


def test_other_dtypes_are_converted() -> None:
    cache = made(1, dtype=torch.bfloat16)
    sequence = cache.sequence()
    key = torch.randn(1, 3, 2, 4, requires_grad=True)
    cache.append([sequence], key, key)
    assert torch.equal(keys(cache, sequence), key[0].detach().bfloat16())
    assert not cache.memory(0, [sequence]).key.requires_grad


def test_layers_of_a_step_may_differ_in_all_but_their_shape() -> None:
    """Dtypes and strides; those of the step before are of no consequence either."""
    cache = made(4)
    sequence = cache.sequence()
    whole: list[list[torch.Tensor]] = [[] for _ in range(4)]
    for step in range(3):
        new = cache.extend([sequence], 2)
        for layer in range(4):
            key = torch.randn(2, 2, 4)
            given = {
                0: key,
                1: key.transpose(0, 1).contiguous().transpose(0, 1),
                2: key.double(),
                3: torch.stack([key, key], dim=-1)[..., 0],
            }[(layer + step) % 4]
            cache.write(layer, new, given, 2 * given)
            whole[layer].append(key)
    for layer in range(4):
        assert torch.equal(keys(cache, sequence, layer), torch.cat(whole[layer]))
        held = cache.dense(layer, sequence)
        assert torch.equal(held.value, 2 * held.key)


def test_steps_of_two_batches_may_be_mixed() -> None:
    """One has more tokens than the other, and memory grows while the first waits."""
    cache = made(n_pages=400)
    a, b = cache.sequence(), cache.sequence()
    append(cache, a, 1)
    key = {a: torch.randn(2, 1, 2, 4), b: torch.randn(2, 300, 2, 4)}
    new = {}
    for sequence in (a, b):
        new[sequence] = cache.extend([sequence], key[sequence].shape[1])
    for layer in range(2):
        for sequence in (a, b):
            rows = key[sequence][layer]
            cache.write(layer, new[sequence], rows, rows)
    for layer in range(2):
        assert torch.equal(keys(cache, a, layer)[1:], key[a][layer])
        assert torch.equal(keys(cache, b, layer), key[b][layer])


def test_a_layer_that_is_refused_may_be_written_after_all() -> None:
    """This holds even if the layer before was written with rows of another form."""
    cache = made(3)
    sequence = cache.sequence()
    for _ in range(2):
        new = cache.extend([sequence], 2)
        key = torch.randn(3, 2, 2, 4)
        cache.write(0, new, key[0], key[0])
        for wrong in (key[1, :1], key[:1], key[1][..., :3], key[1].long()):
            with pytest.raises((ShapeError, DtypeError)):
                cache.write(1, new, wrong, wrong)
        with pytest.raises(ShapeError, match="value"):
            cache.write(1, new, key[1], key[1, :1])
        with pytest.raises(ArgumentError, match="from 0 to 2"):
            cache.write(3, new, key[1], key[1])
        cache.write(1, new, key[1], key[1])
        with pytest.raises(UnwrittenRowsError, match="every layer"):
            cache.fork(sequence)
        cache.write(2, new, key[2], key[2])
        for layer in range(3):
            assert torch.equal(keys(cache, sequence, layer)[-2:], key[layer])
    cache.fork(sequence)


# What is refused


def waiting(cache: PagedKVCache) -> SequenceHandle:
    sequence = cache.sequence()
    cache.extend([sequence], 2)
    return sequence


def freed(cache: PagedKVCache) -> SequenceHandle:
    sequence = cache.sequence()
    cache.free(sequence)
    cache.sequence()  # has its row now
    return sequence


def elsewhere() -> Rows:
    """Return rows of another, larger cache, in a page that smaller caches do not have."""
    large = made(n_pages=100)
    append(large, large.sequence(), 90 * 4)
    return large.extend([large.sequence()], 1)


def rows(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def fake() -> list[torch.Tensor]:
    with FakeTensorMode():
        return [torch.zeros(2, 1, 2, 4)] * 2


Refused = Callable[[PagedKVCache], object]
REFUSED: dict[str, tuple[type[QuireError], str, Refused]] = {
    "freed": (SequenceError, "freed", lambda c: c.length(freed(c))),
    "freed twice": (SequenceError, "freed", lambda c: c.free(freed(c))),
    "foreign": (SequenceError, "another cache", lambda c: c.fork(made().sequence())),
    "no handle": (SequenceError, "this cache holds, but 3", lambda c: c.extend([3], 1)),  # type: ignore[list-item]
    "twice": (SequenceError, "once", lambda c: c.extend([c.sequence()] * 2, 1)),
    "counts": (ShapeError, "each of 1 seq", lambda c: c.extend([c.sequence()], [1, 2])),
    "too many": (
        ArgumentError,
        "counts must be at most",
        lambda c: c.extend([c.sequence() for _ in range(64)], 2**62),  # their sum is 0 in 64 bits
    ),
    "a fraction": (ArgumentError, "but is 1.5", lambda c: c.extend([c.sequence()], 1.5)),  # type: ignore[arg-type]
    "foreign rows": (
        SequenceError,
        "rows must come from extend of this cache",
        lambda c: c.write(0, elsewhere(), rows(1, 2, 4), rows(1, 2, 4)),
    ),
    "salt": (ArgumentError, "salt must be bytes", lambda c: c.sequence([1], salt="a")),  # type: ignore[arg-type]
    "negative": (ArgumentError, "counts must", lambda c: c.extend([c.sequence()], -1)),
    "extend early": (UnwrittenRowsError, "position 0", lambda c: c.extend([waiting(c)], 1)),
    "fork early": (UnwrittenRowsError, "every layer", lambda c: c.fork(waiting(c))),
    "keep early": (UnwrittenRowsError, "every layer", lambda c: c.keep(waiting(c), [1])),
    "save early": (UnwrittenRowsError, "every layer", lambda c: c.save(waiting(c), "x")),
    "truncate early": (UnwrittenRowsError, "to 0", lambda c: c.truncate(waiting(c), 1)),
    "truncate beyond": (ArgumentError, "at most 0", lambda c: c.truncate(c.sequence(), 1)),
    "layer": (ArgumentError, "from 0 to 1, but is 2", lambda c: c.memory(2, [c.sequence()])),
    "keep beyond": (ArgumentError, "at most 0", lambda c: c.keep(c.sequence(), [1])),
    "key shape": (
        ShapeError,
        r"key must be \[tokens, Hkv, width\] of \[1, 2, 4\], but is \[1, 2, 5\]",
        lambda c: c.write(0, c.extend([c.sequence()], 1), rows(1, 2, 5), rows(1, 2, 4)),
    ),
    "value dtype": (
        DtypeError,
        "value must hold floats, but is int64",
        lambda c: c.write(
            0, c.extend([c.sequence()], 1), rows(1, 2, 4), rows(1, 2, 4, dtype=torch.int64)
        ),
    ),
    "fake": (
        TensorKindError,
        "key must be a plain tensor, but is a FakeTensor",
        lambda c: c.append([c.sequence()], *fake()),
    ),
    "sparse": (
        TensorKindError,
        "key must be a strided tensor",
        lambda c: c.append([c.sequence()], *[rows(2, 1, 2, 4).to_sparse()] * 2),
    ),
    "a sparse layer": (
        TensorKindError,
        "value must be a strided tensor",
        lambda c: c.write(0, c.extend([c.sequence()], 1), rows(1, 2, 4), rows(1, 2, 4).to_sparse()),
    ),
    "layers": (
        ShapeError,
        "of 2 layers",
        lambda c: c.append([c.sequence()], rows(1, 1, 2, 4), rows(1, 1, 2, 4)),
    ),
    "uneven": (
        ShapeError,
        "must have 2 tokens, as the counts of 2 sequences add up to, but has 3",
        lambda c: c.append([c.sequence(), c.sequence()], rows(2, 3, 2, 4), rows(2, 3, 2, 4)),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(case: str) -> None:
    error, message, call = REFUSED[case]
    cache = made(prefix=True)
    with pytest.raises(error, match=message):
        call(cache)
    cache.check_integrity()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_pages": None}, "n_pages or max_bytes"),
        ({"growth": 1.0}, "growth must be above 1 and at most 2, but is 1.0"),
        ({"n_pages": 0}, "n_pages must be"),
        ({"heads": 0}, "heads must be"),
        ({"groups": [Group([0])]}, "layers or groups"),
        ({"layers": None}, "layers or groups"),
        ({"layers": None, "groups": [Group([0]), Group([2])]}, "every layer from 0 on once"),
        ({"layers": None, "groups": [Group([0], window=0)]}, "window must be"),
        ({"layers": None, "groups": [Group([0], window=4)], "prefix": True}, "without a window"),
        ({"dtype": torch.int32}, "dtype must be one of float32"),
    ],
)
def test_what_no_cache_is_made_of(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError if "dtype" not in options else DtypeError, match=message):
        PagedKVCache(**{"layers": 2, **SIZES, **options})


def test_prefixes_have_to_be_asked_for() -> None:
    with pytest.raises(ArgumentError, match="prefix=True"):
        made().sequence([1, 2])


def test_rows_are_written_once_in_each_layer() -> None:
    cache = made()
    a, b = cache.sequence(), cache.sequence()
    new = cache.extend([a, b], 1)
    cache.write(0, new, rows(2, 2, 4), rows(2, 2, 4))
    with pytest.raises(UnwrittenRowsError, match="it has written them"):
        cache.write(0, new, rows(2, 2, 4), rows(2, 2, 4))
    cache.free(a)
    with pytest.raises(UnwrittenRowsError, match="truncated or freed"):
        cache.write(1, new, rows(2, 2, 4), rows(2, 2, 4))
    with pytest.raises(UnwrittenRowsError, match="truncate the sequence to 0"):
        cache.extend([b], 1)
    cache.truncate(b, 0)
    append(cache, b, 1)


def test_a_batch_is_refused_once_one_of_it_is_freed() -> None:
    cache = made()
    batch = [cache.sequence(), cache.sequence()]
    append(cache, batch[0], 1)
    new = rows(2, 2, 2, 4)
    cache.append(batch, new, new)
    cache.free(batch[1])
    cache.sequence()  # has its row now
    for call in (lambda: cache.append(batch, new, new), lambda: cache.memory(0, batch)):
        with pytest.raises(SequenceError, match="freed"):
            call()
    assert cache.length(batch[0]) == 2


def test_lost_pages_are_noticed() -> None:
    cache = made()
    sequence = cache.sequence()
    append(cache, sequence, 9)
    cache._groups[0].table.end[0] = 2
    with pytest.raises(PageError, match="this bug"):
        cache.check_integrity()


def test_one_class_catches_every_refusal_of_a_cache() -> None:
    kinds = (OutOfPages, SequenceError, UnwrittenRowsError, ReleasedRowsError, PageError)
    assert all(issubclass(kind, KVCacheError) for kind in kinds)
    assert issubclass(KVCacheError, RuntimeError)


def test_memory_grows_by_as_much_as_it_is_told() -> None:
    taken = {}
    for growth in (2.0, 1.125):
        cache = made(n_pages=10_000, growth=growth)
        sequence = cache.sequence()
        sizes = []
        for _ in range(300):
            append(cache, sequence, 4)
            sizes.append(cache.statistics().pages)
        taken[growth] = list(dict.fromkeys(sizes))
    assert taken[2.0] == [16, 32, 64, 128, 256, 512]
    assert taken[1.125][:3] == [16, 32, 48]
    assert 300 <= taken[1.125][-1] < 300 * 1.125


def test_it_says_what_it_holds() -> None:
    cache = made()
    append(cache, cache.sequence(), 9)
    assert repr(cache) == "PagedKVCache(2 layers, 1 sequences, 9 tokens, 9 of 12 pages free)"


@pytest.mark.parametrize("window", [None, 5])
def test_memory_may_begin_where_that_of_others_ends(window: int | None) -> None:
    cache = made(None, groups=[Group([0], window)])
    sequence = cache.sequence()
    key = torch.cat([append(cache, sequence, count) for count in (9, 2)], 1)
    assert int(torch.as_tensor(cache.memory(0, [sequence]).lengths)) == 11
    moved = cache.memory(0, [sequence], first_page=2)
    begin = 0 if window is None else 4  # the window has released a page
    assert torch.equal(moved.lengths, torch.tensor([19]))
    assert moved.first_page is not None
    assert int(torch.as_tensor(moved.first_page)[0]) == 2 + begin // 4
    query = torch.randn(1, 2, 1, 4)
    rows = key[0, begin:].transpose(0, 1)[None]
    wanted = quire.attention(query, quire.Dense(rows, 2 * rows, start=8 + begin), q_start=18)
    torch.testing.assert_close(quire.attention(query, moved, q_start=18), wanted)
    with pytest.raises(ArgumentError, match="first_page must be a whole number of at least 0"):
        cache.memory(0, [sequence], first_page=-1)
