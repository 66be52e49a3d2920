"""One sequence over 1, 2, 3 and 4 real processes of a gloo group, against one process."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import replace

import pytest
import rank_cases
import torch
from rank_cases import DTYPES, MASKS, SCORES, Example
from ranks import Ranks

from quire.distributed.layouts import LAYOUTS

SIZES = (1, 2, 3, 4)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as running:
        yield running


LENGTHS = (5, 37, 128, 200, 333, 517, 1000, 1399, 2300)


def random_examples(count: int, seed: int, lengths: tuple[int, ...] = LENGTHS) -> list[Example]:
    """Return calls of every temper."""
    draw = random.Random(seed)
    return [
        Example(
            mask=draw.choice([*MASKS]),
            length=draw.choice(lengths),
            layout=draw.choice(["auto", *LAYOUTS]),
            block_size=draw.choice([None, None, 16, 32, 64, 128]),
            dtype=draw.choice([*DTYPES]),
            heads=draw.choice([(4, 4), (4, 2), (4, 1)]),
            width=draw.choice([(16, 16), (24, 8), (64, 64)]),
            batch=draw.choice([1, 2]),
            score=draw.choice([*SCORES]),
            sink=draw.random() < 0.3,
            dropout_p=draw.choice([0.0, 0.0, 0.3]),
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("size", SIZES)
def test_results_have_the_bits_of_one_process(ranks: Ranks, size: int) -> None:
    ranks.run(rank_cases.same_results, size, random_examples(6, seed=size))


def test_every_mask_and_layout(ranks: Ranks) -> None:
    every = [Example(mask, 700, layout, batch=1) for mask in MASKS for layout in LAYOUTS]
    ranks.run(rank_cases.same_results, 4, every)


def test_ranks_with_nothing_to_do(ranks: Ranks) -> None:
    few = [Example(length=length, layout=x) for length in (5, 16, 40) for x in ("auto", *LAYOUTS)]
    ranks.run(rank_cases.same_results, 4, few)
    ranks.run(rank_cases.gradients, 4, few[:2])


@pytest.mark.parametrize("size", SIZES)
def test_gradients(ranks: Ranks, size: int) -> None:
    ranks.run(rank_cases.gradients, size, random_examples(4, seed=10 + size))


@pytest.mark.parametrize("size", SIZES)
def test_gradients_have_the_bits_of_one_process(ranks: Ranks, size: int) -> None:
    lengths = (513, 1100, 1399, 2049)
    examples = random_examples(12, seed=20 + size, lengths=lengths)
    ranks.run(rank_cases.gradients, size, [replace(x, same_bits=True) for x in examples])


@pytest.mark.parametrize("size", SIZES)
def test_heads_have_the_bits_of_one_process(ranks: Ranks, size: int) -> None:
    examples = [
        replace(x, method="heads", heads=(2 * size, size), score="" if size > 2 else x.score)
        for x in random_examples(8, seed=30 + size)
        if x.mask != "by head" or size == 2
    ]
    ranks.run(rank_cases.same_results, size, examples)
    ranks.run(rank_cases.gradients, size, [replace(x, same_bits=True) for x in examples])


@pytest.mark.parametrize("size", SIZES)
def test_a_ring_is_as_good_as_one_process(ranks: Ranks, size: int) -> None:
    examples = [replace(x, method="ring") for x in random_examples(6, seed=40 + size)]
    ranks.run(rank_cases.in_a_ring, size, examples)


def test_long_sequences_have_the_gradients_of_one_process(ranks: Ranks) -> None:
    long = Example("causal documents", 8000, heads=(2, 1), batch=1)
    assert ranks.run(rank_cases.gradients, 2, [long]) and long.plan(None).same_bits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [2, 3])
def test_gradients_of_captured_tensors(ranks: Ranks, size: int, dtype: str) -> None:
    for same_bits in (True, False):
        ranks.run(rank_cases.captured_gradients, size, same_bits, dtype)


def test_a_second_derivative(ranks: Ranks) -> None:
    ranks.run(rank_cases.second_derivative, 2)


@pytest.mark.parametrize("mask", ["causal documents", "window", "by batch", "random"])
def test_what_is_not_sent_is_not_read(ranks: Ranks, mask: str) -> None:
    for layout in ("contiguous", "paired"):
        example = Example(mask, 1000, layout, block_size=64)
        ranks.run(rank_cases.unsent_is_unread, 3, example)


@pytest.mark.parametrize("mask", ["causal", "causal documents", "window"])
def test_bytes_on_the_wire_are_those_of_the_plan(ranks: Ranks, mask: str) -> None:
    example = Example(mask, 1399, width=(24, 8), dtype="bfloat16")
    for layout in LAYOUTS:
        found = ranks.run(rank_cases.bytes_on_the_wire, 4, replace(example, layout=layout))
        assert all(counted == planned for counted, planned in found)
        assert any(counted > 0 for counted, _ in found)


def test_gradients_on_the_wire_are_those_of_the_plan(ranks: Ranks) -> None:
    example = Example("causal", 1399, width=(24, 8), dtype="bfloat16", method="pages")
    for same_bits in (True, False):
        chosen = replace(example, same_bits=same_bits)
        found = ranks.run(rank_cases.gradients_on_the_wire, 3, chosen)
        assert all(counted == planned for counted, planned in found)
        assert any(counted > 0 for counted, _ in found)


def test_a_dimension_of_a_mesh(ranks: Ranks) -> None:
    ranks.run(rank_cases.on_a_mesh, 4)


def test_operands_that_are_sharded_tensors(ranks: Ranks) -> None:
    ranks.run(rank_cases.sharded_operands, 4)


@pytest.mark.parametrize("size", [2, 3])
def test_models_of_transformers(ranks: Ranks, size: int) -> None:
    ranks.run(rank_cases.models, size)


def test_fsdp_beside_it(ranks: Ranks) -> None:
    ranks.run(rank_cases.with_fsdp, 4)


def test_code_that_knows_nothing_of_ranks(ranks: Ranks) -> None:
    ranks.run(rank_cases.in_a_context, 3)


@pytest.mark.parametrize("size", SIZES)
def test_decoding_with_a_cache_over_ranks(ranks: Ranks, size: int) -> None:
    (out, lse), *others = ranks.run(rank_cases.decoding, size)
    assert all(torch.equal(x, out) and torch.equal(y, lse) for x, y in others)


@pytest.mark.parametrize("size", SIZES)
def test_caches_over_ranks_have_the_bits_of_one_process(ranks: Ranks, size: int) -> None:
    ranks.run(rank_cases.decoding_with_caches, size, "bfloat16" if size == 3 else "float32")


@pytest.mark.parametrize("size", [2, 4])
def test_the_example_trains_as_one_process_does(ranks: Ranks, size: int) -> None:
    pytest.importorskip("matplotlib")  # of the example that has the model
    for together, alone in ranks.run(rank_cases.training, size, True):
        assert together[-1] < together[0]
        assert together == alone  # every bit
    for together, alone in ranks.run(rank_cases.training, size, False):
        assert max(abs(x - y) for x, y in zip(together, alone, strict=True)) < 1e-4


@pytest.mark.parametrize("length", [33, 34, 36])
def test_a_chunk_of_few_rows_has_the_bits_of_one_process(ranks: Ranks, length: int) -> None:
    few = Example(length=length, layout="contiguous", block_size=16, width=(64, 64))
    ranks.run(rank_cases.same_results, 3, [few])


# Ranks that differ

DIFFERENT = {
    "length": r"the plan must be the same on all ranks, but is \w+ of 300 tokens",
    "mask": r"the plan must be the same on all ranks",
    "score_mod": r"the score_mod must be the same on all ranks",
    "dtype": r"the dtype must be the same on all ranks, but is \['torch.float32'",
    "bad input": r"must be able to compute this call, but rank 1 is not: ShapeError",
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_differ_all_raise(ranks: Ranks, what: str) -> None:
    outcomes = ranks.outcomes(rank_cases.disagree, 3, what)
    assert not any(ok for ok, _ in outcomes)
    for rank, (_, text) in enumerate(outcomes):
        if what == "bad input" and rank == 1:
            assert text.startswith("ShapeError")
        else:
            assert text.startswith("DistributedError")
            assert re.search(DIFFERENT[what], text), text
    ranks.run(rank_cases.same_results, 3, [Example()])  # the group still works


@pytest.mark.parametrize("how", ["never calls", "ends"])
def test_a_rank_that_is_gone_ends_the_others(how: str) -> None:
    with Ranks(2) as pair:
        (ok, text), _ = pair.outcomes(rank_cases.patience, 2, how)
    assert not ok and text.startswith("DistributedError: all 2 ranks must take part")
