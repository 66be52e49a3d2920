"""One sequence over 1, 2, 3 and 4 real processes of a gloo group, against one process."""

from __future__ import annotations

import os
import random
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from rank_cases import decoding, errors, meshes, models, results, rings, sequences, traffic
from rank_cases.examples import DTYPES, MASKS, SCORES, Example
from ranks import Ranks

from quire.distributed import exchange, plan
from quire.distributed.layouts import LAYOUTS
from quire.distributed.local import Lookups, SideBySide
from quire.distributed.ring import PARTS
from quire.mods import causal

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
    ranks.run(results.same_results, size, random_examples(6, seed=size))


def test_every_mask_and_layout(ranks: Ranks) -> None:
    every = [Example(mask, 700, layout, batch=1) for mask in MASKS for layout in LAYOUTS]
    ranks.run(results.same_results, 4, every)


def test_ranks_with_nothing_to_do(ranks: Ranks) -> None:
    few = [Example(length=length, layout=x) for length in (5, 16, 40) for x in ("auto", *LAYOUTS)]
    ranks.run(results.same_results, 4, few)
    ranks.run(results.gradients, 4, few[:2])


@pytest.mark.parametrize("size", SIZES)
def test_gradients(ranks: Ranks, size: int) -> None:
    ranks.run(results.gradients, size, random_examples(4, seed=10 + size))


@pytest.mark.parametrize("size", SIZES)
def test_gradients_have_the_bits_of_one_process(ranks: Ranks, size: int) -> None:
    lengths = (513, 1100, 1399, 2049)
    examples = random_examples(12, seed=20 + size, lengths=lengths)
    ranks.run(results.gradients, size, [replace(x, same_bits=True) for x in examples])


def test_gradients_head_by_head(ranks: Ranks) -> None:
    examples = random_examples(6, seed=60, lengths=(1399, 2049))
    many = [replace(x, same_bits=True, heads=(4, 2), batch=2) for x in examples]
    ranks.run(results.gradients_head_by_head, 3, many)


@pytest.mark.parametrize("size", SIZES)
def test_heads_have_the_bits_of_one_process(ranks: Ranks, size: int) -> None:
    examples = [
        replace(x, method="heads", heads=(2 * size, size), score="" if size > 2 else x.score)
        for x in random_examples(8, seed=30 + size)
        if x.mask != "by head" or size == 2
    ]
    ranks.run(results.same_results, size, examples)
    ranks.run(results.gradients, size, [replace(x, same_bits=True) for x in examples])


@pytest.mark.parametrize("size", SIZES)
def test_a_ring_is_as_good_as_one_process(ranks: Ranks, size: int) -> None:
    examples = [replace(x, method="ring") for x in random_examples(6, seed=40 + size)]
    ranks.run(rings.in_a_ring, size, examples)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_a_ring_computes_while_keys_arrive(ranks: Ranks, size: int) -> None:
    forward = [*["send", "compute", "wait"] * (size - 1), "compute"] * PARTS
    assert ranks.run(rings.order_in_a_ring, size, False) == [forward] * size


@pytest.mark.parametrize("size", [2, 4])
def test_a_ring_computes_gradients_while_sums_arrive(ranks: Ranks, size: int) -> None:
    first, last = ["send", "compute", "send", "wait"], ["compute", "wait", "send", "wait"]
    between = ["send", "compute", "wait", "send", "wait"]
    backward = [*first, *between * (size - 2), *last] * PARTS
    assert ranks.run(rings.order_in_a_ring, size, True) == [backward] * size


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc")
def test_a_rank_of_a_ring_holds_two_shards(ranks: Ranks) -> None:
    thirds = {False: 2, True: 2 + 3 + 2}  # keys; gradients, and sums that leave and that arrive
    for learns, most in thirds.items():
        for taken, shard in ranks.run(rings.memory_of_a_ring, 3, learns):
            assert taken < (most + 0.6) / 3 * shard


def test_long_sequences_have_the_gradients_of_one_process(ranks: Ranks) -> None:
    long = Example("causal documents", 8000, heads=(2, 1), batch=1)
    assert ranks.run(results.gradients, 2, [long]) and long.plan(None).same_bits


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("size", [2, 3])
def test_gradients_of_captured_tensors(ranks: Ranks, size: int, dtype: str) -> None:
    for same_bits in (True, False):
        ranks.run(results.captured_gradients, size, same_bits, dtype)


OTHER_CAPTURES = {
    1: ("float16", "window", 0.3),
    2: ("float64", "by head", 0.0),
    3: ("float32", "random", 0.3),
    4: ("bfloat16", "causal", 0.3),
}


@pytest.mark.parametrize("size", SIZES)
def test_gradients_of_captured_tensors_with_dropout(ranks: Ranks, size: int) -> None:
    for same_bits in (True, False):
        ranks.run(results.captured_gradients, size, same_bits, *OTHER_CAPTURES[size])


@pytest.mark.parametrize("same_bits", [True, False])
def test_gradients_through_lse_with_all_weights(ranks: Ranks, same_bits: bool) -> None:
    ranks.run(results.gradients_through_lse, 3, same_bits)


def test_a_second_derivative(ranks: Ranks) -> None:
    ranks.run(results.second_derivative, 2)


@pytest.mark.parametrize("mask", ["causal documents", "window", "by batch", "random"])
def test_what_is_not_sent_is_not_read(ranks: Ranks, mask: str) -> None:
    for layout in ("contiguous", "paired"):
        example = Example(mask, 1000, layout, block_size=64)
        ranks.run(results.unsent_is_unread, 3, example)


@pytest.mark.parametrize("mask", ["causal", "causal documents", "window"])
def test_bytes_on_the_wire_are_those_of_the_plan(ranks: Ranks, mask: str) -> None:
    example = Example(mask, 1399, width=(24, 8), dtype="bfloat16")
    for layout in LAYOUTS:
        found = ranks.run(traffic.bytes_on_the_wire, 4, replace(example, layout=layout))
        assert all(counted == planned for counted, planned in found)
        assert any(counted > 0 for counted, _ in found)


def test_own_queries_are_computed_while_keys_arrive(ranks: Ranks) -> None:
    names = ("causal", "causal documents", "window", "random")
    examples = [Example(name, 1399, layout="contiguous", batch=1) for name in names]
    early = ranks.run(traffic.while_keys_arrive, 3, examples)
    assert all(count > 0 for count in early)


@pytest.mark.skipif(not os.access("/proc/self/clear_refs", os.W_OK), reason="needs Linux's /proc")
@pytest.mark.parametrize("learns", [False, True])
def test_memory_is_what_the_plan_says(ranks: Ranks, learns: bool) -> None:
    for taken, planned in ranks.run(traffic.memory, 4, learns):
        assert taken < (4.5 if learns else 1.5) * planned  # all keys are 2 times what is planned


def test_gradients_on_the_wire_are_those_of_the_plan(ranks: Ranks) -> None:
    example = Example("causal", 1399, width=(24, 8), dtype="bfloat16", method="pages")
    for same_bits in (True, False):
        chosen = replace(example, same_bits=same_bits)
        found = ranks.run(traffic.gradients_on_the_wire, 3, chosen)
        assert all(counted == planned for counted, planned in found)
        assert any(counted > 0 for counted, _ in found)


def test_a_dimension_of_a_mesh(ranks: Ranks) -> None:
    ranks.run(meshes.on_a_mesh, 4)


def test_operands_that_are_sharded_tensors(ranks: Ranks) -> None:
    ranks.run(meshes.sharded_operands, 4)


def test_operands_that_are_sharded_by_heads(ranks: Ranks) -> None:
    ranks.run(meshes.sharded_heads, 4)


@pytest.mark.parametrize("size", [2, 3])
def test_models_of_transformers(ranks: Ranks, size: int) -> None:
    ranks.run(models.models, size)


def test_fsdp_beside_it(ranks: Ranks) -> None:
    ranks.run(meshes.with_fsdp, 4)


def test_code_that_knows_nothing_of_ranks(ranks: Ranks) -> None:
    ranks.run(models.in_a_context, 3)


@pytest.mark.parametrize("size", [1, 2])
def test_lists_of_blocks_must_say_what_their_mod_says(ranks: Ranks, size: int) -> None:
    ranks.run(models.lists_of_blocks, size)


@pytest.mark.parametrize("size", SIZES)
def test_decoding_with_a_cache_over_ranks(ranks: Ranks, size: int) -> None:
    (out, lse), *others = ranks.run(decoding.decoding, size)
    assert all(torch.equal(x, out) and torch.equal(y, lse) for x, y in others)


@pytest.mark.parametrize("size", SIZES)
def test_caches_over_ranks_have_the_bits_of_one_process(ranks: Ranks, size: int) -> None:
    ranks.run(decoding.decoding_with_caches, size, "bfloat16" if size == 3 else "float32")


def test_a_rank_may_have_the_keys_of_many_pieces(ranks: Ranks) -> None:
    ranks.run(decoding.long_cache, 2, 1024 * 900)


def test_a_ring_merges_no_other_weights(ranks: Ranks) -> None:
    ranks.run(rings.weights_in_a_ring, 2)


@pytest.mark.parametrize("size", [2, 4])
def test_the_example_trains_as_one_process_does(ranks: Ranks, size: int) -> None:
    pytest.importorskip("matplotlib")  # of the example that has the model
    for together, alone in ranks.run(models.training, size, True):
        assert together[-1] < together[0]
        assert together == alone  # every bit
    for together, alone in ranks.run(models.training, size, False):
        assert max(abs(x - y) for x, y in zip(together, alone, strict=True)) < 1e-4


@pytest.mark.parametrize("length", [33, 34, 36])
def test_a_chunk_of_few_rows_has_the_bits_of_one_process(ranks: Ranks, length: int) -> None:
    few = Example(length=length, layout="contiguous", block_size=16, width=(64, 64))
    ranks.run(results.same_results, 3, [few])


@pytest.mark.parametrize("size", SIZES)
def test_several_sequences_have_the_bits_of_one_process(ranks: Ranks, size: int) -> None:
    ranks.run(sequences.several_sequences, size, "bfloat16" if size == 2 else "float32")


def test_several_sequences_are_never_computed_as_one(ranks: Ranks) -> None:
    ranks.run(sequences.long_and_short_sequences, 4)


def test_offsets_must_be_those_of_the_plan(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(errors.refused_sequences, 3)
    assert [text.split(":")[0] for _, text in outcomes] == [
        "ArgumentError",
        "DistributedError",
        "DistributedError",
    ]
    assert all("offsets must be those of the plan" in text for _, text in outcomes)


@pytest.mark.parametrize("size", [1, 3])
def test_dense_blocks_as_on_other_devices(ranks: Ranks, size: int) -> None:
    examples = [replace(x, dropout_p=0.0) for x in random_examples(5, seed=70 + size)]
    ranks.run(results.in_blocks, size, [replace(x, method="pages") for x in examples])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_kernels_of_pytorch_compute_blocks(ranks: Ranks) -> None:
    ranks.run(results.with_kernels_of_pytorch, 2)


@pytest.mark.parametrize("lengths", [[1000], [300, 20, 680]])
def test_what_is_sent_and_gathered_stays_on_its_device(lengths: list[int]) -> None:
    alone = plan(causal, lengths=lengths) if len(lengths) > 1 else plan(causal, length=1000)
    rows = torch.empty(1, 2, 1000, 8, device="meta", requires_grad=True)
    (pages,) = exchange.spread(alone, rows)
    side = SideBySide.of(alone, 1)
    gathered = side.gathered(pages)
    assert gathered.shape == rows.shape and gathered.device == rows.device
    (grad,) = torch.autograd.grad(gathered.sum(), rows)
    assert grad.shape == rows.shape and grad.device == rows.device
    assert side.scattered(gathered).shape == pages.shape
    assert all(
        x.device == rows.device for x in Lookups(keys=side.rows).to(rows.device) if x is not None
    )


# Ranks that differ

DIFFERENT = {
    "length": r"the plan must be the same on all ranks, but is \w+ of 300 tokens",
    "mask": r"the plan must be the same on all ranks",
    "score_mod": r"the score_mod must be the same on all ranks",
    "dtype": r"the dtype must be the same on all ranks, but is \['torch.float32'",
    "sink": r"the sink must be the same on all ranks, but is None on rank 0",
    "return_aux": r"the return_aux must be the same on all .*, but is \[\] on rank 0 and \['lse'\]",
    "backend": r"the backend must be the same on all ranks, .* and \['cpu', 'eager'\] on rank 1",
    "what learns": r"the choice of tensors that learn must be the same on all ranks",
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_differ_all_raise(ranks: Ranks, what: str) -> None:
    all_raise(ranks, f"DistributedError: .*{DIFFERENT[what]}", errors.disagree, what)


def test_bad_input_of_one_rank_raises_on_all(ranks: Ranks) -> None:
    one_raises(ranks, "ShapeError", errors.disagree, "bad input")


DECODED = {
    "mask": "DistributedError: the mask must be the same on all ranks",
    "score_mod": "DistributedError: the score_mod must be the same on all ranks",
    "q_start": "DistributedError: the q_start must be the same on all .* 3000 on rank 0 and 5 on",
    "scale": "DistributedError: the scale must be the same on all ranks, but is 0.1 on rank 0",
    "sink": "DistributedError: the sink must be the same on all ranks",
    "width": r"ShapeError: the values of all ranks must have the same width, but have \[8, 16\]",
}


@pytest.mark.parametrize("what", DECODED)
def test_ranks_that_decode_differently_all_raise(ranks: Ranks, what: str) -> None:
    all_raise(ranks, DECODED[what], errors.decodes_differently, what)


def test_an_error_of_one_rank_that_decodes_raises_on_all(ranks: Ranks) -> None:
    words = "ShapeError: sink must hold one number per query head"
    one_raises(ranks, words, errors.decodes_differently, "shape of the sink")


def test_shards_that_do_not_fit_together_raise_on_all(ranks: Ranks) -> None:
    one_raises(ranks, "ShapeError: a shard must have the", errors.gathers, "tokens")
    all_raise(ranks, "the dtype must be the same on all ranks", errors.gathers, "dtype")
    all_raise(ranks, "the size of a token must be the same on all", errors.gathers, "size")


TOO_MUCH = {
    "mask": "ArgumentError: the mask of a call must be None or the mask of the plan",
    "q_start": "ArgumentError: q_start must be None over ranks, since the plan has the positions",
    "weights": "OptionError: AuxRequest.weights must be None over ranks",
    "score": "TypeError: ",
}


@pytest.mark.parametrize("what", TOO_MUCH)
def test_what_one_rank_must_not_ask_for_raises_on_all(ranks: Ranks, what: str) -> None:
    one_raises(ranks, TOO_MUCH[what], errors.asks_for_too_much, what)


@pytest.mark.parametrize("which", ["forward", "backward"])
@pytest.mark.parametrize("method", ["pages", "heads", "ring"])
def test_an_error_in_a_pass_of_one_rank_raises_on_all(
    ranks: Ranks, method: str, which: str
) -> None:
    one_raises(ranks, "ValueError: this is broken", errors.fails, method, which)


@pytest.mark.parametrize("learns", [False, True])
def test_a_rank_without_memory_for_pages_raises_on_all(ranks: Ranks, learns: bool) -> None:
    one_raises(ranks, "MemoryError: there is none", errors.has_no_memory, learns)


@pytest.mark.parametrize("rounds", [0, 2])
def test_an_error_while_sums_of_slices_travel_raises_on_all(ranks: Ranks, rounds: int) -> None:
    one_raises(ranks, "ValueError: this is broken", errors.fails_in_slices, rounds)


def all_raise(ranks: Ranks, words: str, *call: Any) -> None:
    """Run a function with the same error on all ranks; the group works afterwards."""
    function, *args = call
    for ok, text in ranks.outcomes(function, 3, *args):
        assert not ok and re.search(words, text), text
    ranks.run(results.same_results, 3, [Example()])


def one_raises(ranks: Ranks, words: str, *call: Any) -> None:
    """Run a function whose error on rank 1 all others name; the group works afterwards."""
    function, *args = call
    outcomes = ranks.outcomes(function, 3, *args)
    for rank, (ok, text) in enumerate(outcomes):
        theirs = (
            "DistributedError: all ranks must be able to compute this call, but rank 1 is not: "
        )
        assert not ok and text.startswith(words if rank == 1 else theirs + words), text
    ranks.run(results.same_results, 3, [Example()])


GONE = {
    "never calls": False,
    "is killed": False,
    "is killed later": True,
    "has no backward pass": False,
}


@pytest.mark.parametrize("how", GONE)
def test_a_rank_that_is_gone_ends_the_others_and_is_named(how: str) -> None:
    with Ranks(3) as three:
        outcomes = three.outcomes(errors.patience, 3, how, GONE[how])
    for rank in (0, 2):
        ok, text = outcomes[rank]
        assert not ok and text.startswith("DistributedError: all 3 ranks must take part")
        assert f"but rank {rank} has no message from rank 1: " in text
