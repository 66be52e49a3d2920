"""Ragged memory: each sequence is attention of its own, to the bit."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from compare import assert_as_good_as
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import quire
from quire import AuxRequest, Dense, Ragged, attention, reference
from quire.api.explain import explain_call
from quire.aux_outputs import OF_KERNELS
from quire.config import Backend
from quire.errors import (
    ArgumentError,
    BackendError,
    DeviceError,
    DtypeError,
    HeadsError,
    QuireError,
    RankError,
    ShapeError,
    TensorKindError,
)
from quire.mods.dropout import Dropout
from quire.request import Request, checked_call

EVERYTHING = AuxRequest(*[True] * len(OF_KERNELS))
BACKENDS: tuple[Backend, ...] = ("jit", "eager")
FACTORS = torch.linspace(0.5, 1.5, 16)

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "heads outside": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "head dim outside": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    "with gaps": lambda x: torch.stack([x, torch.full_like(x, math.nan)], -1)[..., 0],
}


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def slanted(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    """A score_mod to which sequence, head and both positions matter."""
    return score * FACTORS[b % 16] - 0.01 * (h + 1) * (q_idx - kv_idx)


@dataclass(frozen=True)
class Batch:
    """Sequences as (queries, rows of no query, keys, rows of no key), and what else there is."""

    sequences: list[tuple[int, int, int, int]]
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 24
    value_dim: int = 20
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    offsets_dtype: torch.dtype = torch.int64
    seed: int = 0

    @property
    def q_rows(self) -> list[range]:
        return self._rows(0)

    @property
    def kv_rows(self) -> list[range]:
        return self._rows(2)

    def _rows(self, column: int) -> list[range]:
        rows, at = [], 0
        for sequence in self.sequences:
            length, hole = sequence[column : column + 2]
            rows.append(range(at, at + length))
            at += length + hole
        return rows

    def operands(self) -> tuple[Tensor, Tensor, Tensor]:
        """query, key and value, with NaN in every row that belongs to no sequence."""
        generator = torch.Generator().manual_seed(self.seed)
        q_heads = self.kv_heads * self.group
        found = []
        for column, rows, heads, dim in (
            (0, self.q_rows, q_heads, self.head_dim),
            (2, self.kv_rows, self.kv_heads, self.head_dim),
            (2, self.kv_rows, self.kv_heads, self.value_dim),
        ):
            total = sum(s[column] + s[column + 1] for s in self.sequences)
            tensor = torch.full((total, heads, dim), math.nan)
            for own in rows:
                shape = (len(own), heads, dim)
                tensor[own.start : own.stop] = torch.randn(shape, generator=generator)
            found.append(LAYOUTS[self.layout](tensor.to(self.dtype)))
        return found[0], found[1], found[2]

    def numbers(self, column: int) -> tuple[Tensor, Tensor]:
        """Offsets and lengths."""
        steps = [s[column] + s[column + 1] for s in self.sequences]
        offsets = torch.tensor([0, *steps]).cumsum(0).to(self.offsets_dtype)
        lengths = torch.tensor([s[column] for s in self.sequences], dtype=self.offsets_dtype)
        return offsets, lengths

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        memory = Ragged(key, value, *self.numbers(2))
        offsets, lengths = self.numbers(0)
        return attention(query, memory, q_offsets=offsets, q_lengths=lengths, **options)

    def expected(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
        return reference.ragged_attention(query, key, value, self.q_rows, self.kv_rows, **options)


LENGTHS = [
    (7, 0, 7, 0),
    (0, 2, 3, 0),
    (130, 1, 300, 5),
    (1, 0, 129, 1),
    (0, 0, 0, 0),
    (5, 0, 0, 3),
    (4, 3, 40, 0),
    (3, 0, 2, 0),
    (257, 0, 257, 2),
]


def alone(batch: Batch, b: int, operands: tuple[Tensor, ...], **options: Any) -> Any:
    """Sequence b as a dense batch of one, its mods told that it is sequence b."""
    rows = (batch.q_rows[b], batch.kv_rows[b], batch.kv_rows[b])
    query, key, value = (
        tensor[own.start : own.stop].transpose(0, 1)[None]
        for tensor, own in zip(operands, rows, strict=True)
    )

    def score_mod(score: Any, zero: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return slanted(score, zero + b, h, q_idx, kv_idx)

    return attention(
        query, Dense(key, value), score_mod=score_mod, return_aux=EVERYTHING, **options
    )


@pytest.mark.parametrize(
    ("dtype", "layout", "backend"),
    [
        *itertools.product((torch.float32, torch.bfloat16, torch.float64), LAYOUTS, ["jit"]),
        (torch.float32, "with gaps", "eager"),
    ],
    ids=str,
)
def test_the_bits_are_those_of_each_sequence_alone(
    dtype: torch.dtype, layout: str, backend: Backend
) -> None:
    batch = Batch(LENGTHS, dtype=dtype, layout=layout)
    operands = batch.operands()
    options: dict[str, Any] = {"mask": causal, "sink": torch.randn(4), "backend": backend}
    out, aux = batch.attend(*operands, score_mod=slanted, return_aux=EVERYTHING, **options)
    assert out.shape == (*operands[0].shape[:2], 20)
    for b, rows in enumerate(batch.q_rows):
        expected, expected_aux = alone(batch, b, operands, **options)
        assert torch.equal(out[rows.start : rows.stop].transpose(0, 1), expected[0]), b
        for name, found, wanted in zip(OF_KERNELS, aux[:-1], expected_aux[:-1], strict=True):
            own = batch.kv_rows[b] if name == "key_mass" else rows
            assert torch.equal(found[own.start : own.stop].transpose(0, 1), wanted[0]), (b, name)


@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_of_no_sequence_attend_nowhere(backend: Backend) -> None:
    batch = Batch(LENGTHS)
    out, aux = batch.attend(*batch.operands(), return_aux=EVERYTHING, backend=backend)
    own = torch.zeros(len(out), dtype=torch.bool)
    for rows in batch.q_rows:
        own[rows.start : rows.stop] = True
    assert 0 < int(own.sum()) < len(own)
    assert bool(torch.isfinite(out).all())
    assert bool((out[~own] == 0).all())
    assert bool((aux.lse[~own] == -math.inf).all())
    assert bool((aux.max_scores[~own] == -math.inf).all())
    assert bool((aux.argmax[~own] == -1).all())
    assert bool((aux.entropy[~own] == 0).all())
    read = torch.zeros(aux.key_mass.shape, dtype=torch.bool)
    for rows, keys in zip(batch.q_rows, batch.kv_rows, strict=True):
        read[keys.start : keys.stop] = len(rows) > 0
    assert torch.equal(aux.key_mass > 0, read)


# Random batches

lengths = st.one_of(st.integers(0, 6), st.integers(0, 40), st.integers(100, 150))
holes = st.sampled_from([0, 0, 1, 3])
batches = st.builds(
    Batch,
    sequences=st.lists(st.tuples(lengths, holes, lengths, holes), max_size=6),
    kv_heads=st.integers(1, 2),
    group=st.integers(1, 3),
    head_dim=st.sampled_from([1, 8, 13, 32]),
    value_dim=st.sampled_from([1, 8, 13]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    layout=st.sampled_from(sorted(LAYOUTS)),
    offsets_dtype=st.sampled_from([torch.int32, torch.int64]),
    seed=st.integers(0, 2**16),
)


@given(
    batch=batches,
    backend=st.sampled_from(BACKENDS),
    mask=st.sampled_from([None, causal]),
    score_mod=st.sampled_from([None, slanted]),
    at_the_end=st.booleans(),
)
def test_random_batches_are_as_the_reference_says(
    batch: Batch, backend: Backend, mask: Any, score_mod: Any, at_the_end: bool
) -> None:
    operands = batch.operands()
    starts = None if at_the_end else [7 * b for b in range(len(batch.sequences))]
    out, aux = batch.attend(
        *operands,
        mask=mask,
        score_mod=score_mod,
        q_start=starts,
        return_aux=EVERYTHING,
        backend=backend,
    )
    options = {"mask_mod": mask, "score_mod": score_mod, "q_starts": starts}
    peer = batch.expected(*operands, **options)
    truth = batch.expected(*(tensor.double() for tensor in operands), **options)
    assert_as_good_as(out, peer.out, truth.out)
    assert_as_good_as(aux.lse, peer.lse, truth.lse, "lse", size=10.0)
    assert_as_good_as(aux.max_scores, peer.max_scores, truth.max_scores, "max_scores", size=10.0)
    assert_as_good_as(aux.entropy, peer.entropy, truth.entropy, "entropy", size=10.0)
    assert_as_good_as(aux.key_mass, peer.key_mass, truth.key_mass, "key_mass", size=10.0)
    if batch.dtype == torch.float64:
        assert torch.equal(aux.argmax, truth.argmax)


@given(batch=batches, backend=st.sampled_from(BACKENDS))
def test_random_batches_have_the_gradients_of_the_reference(batch: Batch, backend: Backend) -> None:
    weights = {}

    def gradients(attend: Callable[..., Any], dtype: torch.dtype) -> list[Tensor]:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        leaves = [x.to(dtype).requires_grad_() for x in batch.operands()]
        slopes = torch.linspace(0.1, 0.5, 16, dtype=wide, requires_grad=True)
        sink = torch.linspace(-1, 1, batch.kv_heads * batch.group, dtype=wide, requires_grad=True)

        def steep(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score * slopes[b % 16]

        out = attend(*leaves, score_mod=steep, sink=sink)
        if "out" not in weights:
            weights["out"] = torch.randn(out.shape).to(batch.dtype)
        loss = (out * weights["out"].to(dtype)).sum()
        found = torch.autograd.grad(loss, [*leaves, slopes, sink], materialize_grads=True)
        return list(found)

    def ours(*args: Any, **options: Any) -> Tensor:
        out: Tensor = batch.attend(*args, mask=causal, backend=backend, **options)
        return out

    def theirs(*args: Any, **options: Any) -> Tensor:
        out: Tensor = batch.expected(*args, mask_mod=causal, **options).out
        return out + sum(x[:0].sum() for x in args)  # also where there is no sequence

    actual, peer = gradients(ours, batch.dtype), gradients(theirs, batch.dtype)
    truth = gradients(theirs, torch.float64)
    names = ("d query", "d key", "d value", "d slopes", "d sink")
    numbers_added = sum(s[0] * s[2] for s in batch.sequences) * batch.kv_heads * batch.group
    for name, *each in zip(names, actual, peer, truth, strict=True):
        assert_as_good_as(each[0], each[1], each[2], name, size=math.sqrt(1 + numbers_added))


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_knows_the_sequence(backend: Backend) -> None:
    batch = Batch([(9, 0, 9, 0), (9, 1, 9, 0), (2, 0, 30, 0)], dtype=torch.float64)
    query, key, value = batch.operands()
    generator = torch.Generator().manual_seed(3)
    out = batch.attend(
        *(query, key, value), dropout_p=0.4, generator=generator, mask=causal, backend=backend
    )
    dropout = Dropout(0.4).seeded(torch.Generator().manual_seed(3))
    for b, (rows, keys) in enumerate(zip(batch.q_rows, batch.kv_rows, strict=True)):
        start = max(0, len(keys) - len(rows))
        axes = [torch.tensor([b]), torch.arange(4)]
        axes += [torch.arange(start, start + len(rows)), torch.arange(len(keys))]
        keep = dropout.keep(*torch.meshgrid(*axes, indexing="ij"))
        parts = (query[rows.start : rows.stop], key[keys.start : keys.stop])
        dense = [x.transpose(0, 1)[None] for x in (*parts, value[keys.start : keys.stop])]
        expected = reference.attention(
            *dense, mask_mod=causal, keep=keep, dropout_p=0.4, q_start=start
        )
        found = out[rows.start : rows.stop].transpose(0, 1)[None]
        torch.testing.assert_close(found, expected.out)


# What a call may leave out


def test_queries_lie_in_the_sequences_of_the_keys() -> None:
    query, key, value = torch.randn(3, 12, 2, 8)
    offsets = [0, 5, 5, 12]
    found = attention(query, Ragged(key, value, offsets))
    assert torch.equal(found, attention(query, Ragged(key, value, offsets), q_offsets=offsets))
    holes = Ragged(key, value, offsets, [3, 0, 7])
    found = attention(query, holes)
    assert bool((found[3:5] == 0).all()) and bool((found[:3] != 0).all())
    fewer = attention(query, holes, q_lengths=[1, 0, 2])
    assert bool((fewer[1:5] == 0).all()) and bool((fewer[5:7] != 0).all())


def test_a_start_for_all_is_one_for_each() -> None:
    query, key, value = torch.randn(3, 12, 2, 8)
    memory = Ragged(key, value, torch.tensor([0, 5, 12], dtype=torch.int32))
    one = attention(query, memory, mask=causal, q_start=2)
    assert torch.equal(one, attention(query, memory, mask=causal, q_start=torch.tensor([2, 2])))
    assert not torch.equal(one, attention(query, memory, mask=causal))


def test_autocast_casts_the_operands() -> None:
    query, key, value = torch.randn(3, 12, 2, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention(query, Ragged(key, value, [0, 5, 12])).dtype == torch.bfloat16


def test_no_sequence_at_all() -> None:
    query, key, value = (torch.randn(0, 2, 8) for _ in range(3))
    assert attention(query, Ragged(key, value, [0])).shape == (0, 2, 8)
    query = torch.randn(3, 2, 8)
    found = attention(query, Ragged(key, value, [0]), q_offsets=[0], q_lengths=[])
    assert torch.equal(found, torch.zeros(3, 2, 8))


def test_an_untraceable_mod_runs_on_every_sequence() -> None:
    query, key, value = torch.randn(3, 12, 2, 8)

    def mod(score: Tensor, b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return score + torch.special.gammainc(b + 1.0, kv_idx + 1.0)

    with pytest.warns(quire.EagerModWarning):
        found = attention(query, Ragged(key, value, [0, 5, 12]), score_mod=mod)
    rows = [range(5), range(5, 12)]
    expected = reference.ragged_attention(query, key, value, rows, rows, score_mod=mod)
    torch.testing.assert_close(found, expected.out)


def test_an_index_out_of_range_is_found_in_its_sequence() -> None:
    query, key, value = torch.randn(3, 12, 2, 8)
    table = torch.zeros(6)

    def mod(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + table[kv_idx]

    attention(query, Ragged(key, value, [0, 6, 12]), score_mod=mod)
    with pytest.raises(IndexError, match="index 6 is out of bounds"):
        attention(query, Ragged(key, value, [0, 5, 12]), score_mod=mod)


def test_what_was_computed_is_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_CHECK", "1")
    quire.config.config.cache_clear()
    batch = Batch(LENGTHS)
    out = batch.attend(*batch.operands(), mask=causal, score_mod=slanted)
    assert bool(torch.isfinite(out).all())


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_one_long_sequence_among_short_ones(threads: int) -> None:
    torch.set_num_threads(threads)
    sizes = [*[(8, 0, 8, 0)] * 40, (700, 0, 700, 0), *[(16, 0, 16, 0)] * 40]
    batch = Batch(sizes, kv_heads=1)
    operands = batch.operands()
    out = batch.attend(*operands, mask=causal, score_mod=slanted)
    for b in (0, 39, 40, 41, 80):
        rows = batch.q_rows[b]
        expected, _ = alone(batch, b, operands, mask=causal)
        assert torch.equal(out[rows.start : rows.stop].transpose(0, 1), expected[0])


# What is refused


@dataclass(frozen=True)
class Bad:
    """A call that differs from a good one, and what is said to it."""

    error: type[QuireError]
    message: str
    query: Any = None
    key: Any = None
    value: Any = None
    offsets: Any = None
    lengths: Any = None
    options: dict[str, Any] | None = None


MUST_BE_FIRST_ROWS = "offsets are the first row of each sequence and the end of the last one."
ROWS_EACH = "lengths are how many rows each sequence has, at most up to the next of offsets."
ROWS = torch.randn(12, 2, 8)

BAD = {
    "a query of four dimensions": Bad(
        RankError,
        "query must have 3 dimensions [total, heads, head_dim], but has shape [1, 2, 12, 8]. Pack "
        "the rows of all sequences into the first.",
        query=torch.randn(1, 2, 12, 8),
    ),
    "keys and values of different rows": Bad(
        ShapeError,
        "key and value must agree in rows and heads, but have shapes [12, 2, 8] and [11, 2, 8]. "
        "Only their last dimension may differ.",
        value=torch.randn(11, 2, 8),
    ),
    "another head dim": Bad(
        ShapeError,
        "query and key must have the same embedding dimension, but have 7 and 8. Project one of "
        "them.",
        query=torch.randn(12, 2, 7),
    ),
    "heads without groups": Bad(
        HeadsError,
        "the number of query heads must be a multiple of the number of key heads, but Hq=3 and "
        "Hkv=2. Give a key head for each group of query heads.",
        query=torch.randn(12, 3, 8),
    ),
    "a dtype that nobody computes with": Bad(
        DtypeError,
        "query must be one of float32, bfloat16, float16, float64, but is int64. Convert it "
        "with .to(dtype).",
        query=torch.ones(12, 2, 8, dtype=torch.int64),
    ),
    "a list in place of a key": Bad(
        ArgumentError,
        "key must be a torch.Tensor, but is list. Convert it with torch.as_tensor.",
        key=[1.0],
    ),
    "another number of rows": Bad(
        ShapeError,
        "query must have 12 rows, as the keys whose offsets it shares, but has 9. Give q_offsets, "
        "the offsets of the queries.",
        query=torch.randn(9, 2, 8),
    ),
    "no offsets": Bad(
        ArgumentError,
        f"offsets must hold at least one number, but are empty. {MUST_BE_FIRST_ROWS}",
        offsets=[],
    ),
    "offsets that fall": Bad(
        ArgumentError,
        f"offsets must not fall, but 7 is followed by 5 at position 2. {MUST_BE_FIRST_ROWS}",
        offsets=[0, 7, 5, 12],
    ),
    "offsets past the end": Bad(
        ArgumentError,
        f"offsets must be from 0 to 12, the number of rows, but go from 0 to 13. "
        f"{MUST_BE_FIRST_ROWS}",
        offsets=[0, 13],
    ),
    "negative offsets": Bad(
        ArgumentError,
        f"offsets must be from 0 to 12, the number of rows, but go from -1 to 12. "
        f"{MUST_BE_FIRST_ROWS}",
        offsets=[-1, 12],
    ),
    "a forgotten sequence": Bad(
        ArgumentError,
        "offsets must go from 0 to 12, the number of rows, but go from 0 to 5. Give lengths as "
        "well where rows belong to no sequence.",
        offsets=[0, 5],
    ),
    "offsets in floats": Bad(
        DtypeError,
        f"offsets must hold integers, but is float32. {MUST_BE_FIRST_ROWS}",
        offsets=torch.tensor([0.0, 12.0]),
    ),
    "offsets of two dimensions": Bad(
        ShapeError,
        f"offsets must be 1-D, but has shape [1, 2]. {MUST_BE_FIRST_ROWS}",
        offsets=torch.tensor([[0, 12]]),
    ),
    "offsets without numbers": Bad(
        DeviceError,
        f"offsets must hold numbers, but are on the meta device, which holds none. "
        f"{MUST_BE_FIRST_ROWS}",
        offsets=torch.tensor([0, 12], device="meta"),
    ),
    "a length too many": Bad(
        ArgumentError,
        f"lengths must hold a number for each of 1 sequences, but hold 2. {ROWS_EACH}",
        offsets=[0, 12],
        lengths=[3, 4],
    ),
    "a length past the next sequence": Bad(
        ArgumentError,
        f"lengths[0] must be from 0 to 5, but is 6. {ROWS_EACH}",
        lengths=[6, 7],
    ),
    "a negative length": Bad(
        ArgumentError,
        f"lengths[1] must be from 0 to 7, but is -1. {ROWS_EACH}",
        lengths=[5, -1],
    ),
    "other sequences of queries": Bad(
        ArgumentError,
        "q_offsets and offsets must be for the same number of sequences, but are for 3 and 2. Both "
        "hold one number more than there are sequences.",
        options={"q_offsets": [0, 2, 4, 12]},
    ),
    "query offsets past the end": Bad(
        ArgumentError,
        "q_offsets must be from 0 to 12, the number of rows, but go from 0 to 20. q_offsets are "
        "the first row of each sequence and the end of the last one.",
        options={"q_offsets": [0, 5, 20]},
    ),
    "starts for other sequences": Bad(
        ArgumentError,
        "q_start must hold a position for each of 2 sequences, but holds 3. Give one position for "
        "all sequences, or one for each.",
        options={"q_start": [0, 0, 0]},
    ),
    "a negative start": Bad(
        ArgumentError,
        "q_start must be a position, an integer of at least 0 and below 2**61, but is -1. Count "
        "tokens from the first of the sequence.",
        options={"q_start": torch.tensor([0, -1])},
    ),
    "a start that is no number": Bad(
        DtypeError,
        "q_start must hold integers, but is float32. Give one position for all sequences, or one "
        "for each.",
        options={"q_start": 0.5},
    ),
    "a sink for other heads": Bad(
        ShapeError,
        "sink must hold one number per query head, shape [2], but has shape [3]. Use "
        "sink.expand(2) if all heads have one value.",
        options={"sink": torch.zeros(3)},
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_refusals(name: str) -> None:
    bad = BAD[name]
    query, key, value, offsets = (
        good if given is None else given
        for given, good in (
            (bad.query, ROWS),
            (bad.key, ROWS),
            (bad.value, ROWS),
            (bad.offsets, [0, 5, 12]),
        )
    )
    with pytest.raises(bad.error) as caught:
        attention(query, Ragged(key, value, offsets, bad.lengths), **(bad.options or {}))
    assert str(caught.value) == bad.message


def test_dense_memory_takes_no_offsets() -> None:
    dense = torch.randn(1, 2, 12, 8)
    message = (
        "q_offsets and q_lengths must be None for Dense memory, but one is given. Leave them out, "
        "or use Ragged(key, value, offsets) for sequences in one tensor."
    )
    for options in ({"q_offsets": [0, 12]}, {"q_lengths": [12]}):
        with pytest.raises(ArgumentError) as caught:
            attention(dense, Dense(dense, dense), **options)
        assert str(caught.value) == message
    with pytest.raises(ArgumentError, match="q_start must be a position, an integer"):
        attention(dense, Dense(dense, dense), q_start=torch.tensor([1, 2]))


def test_a_plan_takes_no_ragged_memory() -> None:
    dense = torch.randn(1, 2, 12, 8)
    step = quire.plan(dense, Dense(dense, dense))
    memory: Any = Ragged(ROWS, ROWS, [0, 5, 12])
    message = (
        "the memory of a plan must be Dense, but is Ragged. Call quire.attention, which takes "
        "every memory."
    )
    for make in (lambda: quire.plan(ROWS, memory), lambda: step(ROWS, memory)):
        with pytest.raises(ArgumentError) as caught:
            make()
        assert str(caught.value) == message


def test_pytorch_cannot_run_it() -> None:
    call = checked_call(Request(ROWS, Ragged(ROWS, ROWS, [0, 5, 12])))
    reason = "PyTorch's flex_attention takes no sequences that are packed into one tensor"
    assert f"inductor not used because {reason}." in explain_call(call)
    with pytest.raises(BackendError, match=reason):
        attention(ROWS, Ragged(ROWS, ROWS, [0, 5, 12]), backend="inductor")


def test_fake_offsets_are_refused() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        offsets = torch.tensor([0, 12])
    with pytest.raises(
        TensorKindError, match="offsets must be a plain tensor, but is a FakeTensor"
    ):
        attention(ROWS, Ragged(ROWS, ROWS, offsets))
