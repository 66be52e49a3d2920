"""Block masks by bounds, against PyTorch's own function, which looks at every element."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention import flex_attention as torch_flex

from quire import create_block_mask, mods
from quire.block_mask import classify
from quire.block_mask.blocks import Runs

N = 257
LENGTHS = [60, 7, 100, 1, 89]
PER_HEAD = torch.tensor([[30, 200], [257, 0]])
TABLE = torch.eye(17, dtype=torch.bool)
TABLES = torch.arange(2 * 2 * 5 * 7).view(2, 2, 5, 7) % 3 == 0
ELEMENTS = torch.ones(N, N).tril().triu(-50).bool()
MASKS: dict[str, Callable[..., Any]] = {
    "causal": mods.causal,
    "sliding_window": mods.sliding_window(40),
    "dilated_sliding_window": mods.dilated_sliding_window(5, 3),
    "global_sliding_window": mods.global_sliding_window(20, torch.arange(N) % 97 == 0),
    "prefix_lm": mods.prefix_lm(77),
    "padding": mods.padding([200, 0]),
    "neighbourhood": mods.neighbourhood((16, 17), (3, 5)),
    "block_diffusion": mods.block_diffusion(160, 16),
    "document": mods.document(lengths=LENGTHS),
    "shared_prefix": mods.shared_prefix([0, 100, 150, N], [0, 0, 0]),
    "tree": mods.tree([-1, *(i // 2 for i in range(N - 21))], prefix_length=20),
    "causal in documents": mods.and_masks(mods.document(lengths=LENGTHS), mods.causal),
    "not": mods.not_mask(mods.sliding_window(40)),
    "or": mods.or_masks(mods.sliding_window(30), mods.prefix_lm(60)),
    "noop": mods.noop_mask,
    "nothing": lambda b, h, q_idx, kv_idx: q_idx < 0,
    "per head": lambda b, h, q_idx, kv_idx: kv_idx < PER_HEAD[b, h],
    "table": lambda b, h, q_idx, kv_idx: TABLE[q_idx // 16, kv_idx // 16],
    "table of heads": lambda b, h, q_idx, kv_idx: TABLES[b, h, q_idx // 60, -1 - kv_idx // 40],
    "table of elements": lambda b, h, q_idx, kv_idx: ELEMENTS[q_idx, kv_idx],
    "float": lambda b, h, q_idx, kv_idx: torch.sin((q_idx - kv_idx) / 9.0) > 0.3,
}
FIELDS = ("kv_num_blocks", "full_kv_num_blocks")


@pytest.mark.parametrize("name", MASKS)
@settings(max_examples=6)
@given(
    st.tuples(st.integers(1, N), st.integers(1, N)),
    st.tuples(st.integers(1, 130), st.integers(1, 130)),
)
def test_the_blocks_are_pytorchs(
    name: str, lengths: tuple[int, int], block_size: tuple[int, int]
) -> None:
    sizes = (2, 2, *lengths)
    ours = create_block_mask(MASKS[name], *sizes, BLOCK_SIZE=block_size)
    theirs = torch_flex.create_block_mask(MASKS[name], *sizes, device="cpu", BLOCK_SIZE=block_size)
    for part in ("kv", "full_kv"):
        counts = getattr(theirs, f"{part}_num_blocks")
        assert torch.equal(getattr(ours, f"{part}_num_blocks"), counts)
        listed = torch.arange(theirs.kv_indices.shape[-1]) < counts.unsqueeze(-1)
        mine, other = (getattr(mask, f"{part}_indices") for mask in (ours, theirs))
        assert torch.equal(mine[listed], other[listed])


@pytest.mark.parametrize("span", [2, 3, 64])
@pytest.mark.parametrize("name", MASKS)
def test_spans_and_tries_change_nothing(
    name: str, span: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = create_block_mask(MASKS[name], 2, 2, N, N, BLOCK_SIZE=(16, 8)).rows().runs
    monkeypatch.setattr(classify, "SPAN", span)
    monkeypatch.setattr(classify, "TRIED", 1)
    monkeypatch.setattr(classify, "ASKED", 100)
    found = create_block_mask(MASKS[name], 2, 2, N, N, BLOCK_SIZE=(16, 8)).rows().runs
    assert found.content() == expected.content()


@given(st.integers(0, 2**32 - 1), st.tuples(*[st.integers(0, 4)] * 3, st.integers(0, 9)))
def test_runs_are_the_cells(seed: int, shape: tuple[int, int, int, int]) -> None:
    cells = np.random.default_rng(seed).integers(0, 3, shape, np.int32)
    runs = Runs.of_cells(cells)
    assert np.array_equal(runs.cells(), cells)
    assert np.array_equal(runs.all_partial().cells(), (cells != 0).astype(np.int32))
    assert (runs.starts < runs.stops).all()


def test_a_long_mask_has_no_tensors_until_one_is_asked_for() -> None:
    n = 128 * 300
    mask = create_block_mask(mods.causal, None, None, n, n)
    assert mask.nbytes < 100_000
    assert mask.shape == (1, 1, n, n)
    assert mask.sparsity() == pytest.approx(49.83, abs=0.01)
    assert mask.nbytes < 100_000, "asking for its sparsity made no tensor"
    assert mask.kv_num_blocks.tolist() == [[[1] * 300]]
    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_num_blocks[0, 0].tolist() == list(range(300))
    assert mask.nbytes > 300 * 300 * 4


def test_an_edited_tensor_counts() -> None:
    n = 128 * 300
    mask = create_block_mask(mods.causal, None, None, n, n)
    mask.full_kv_num_blocks.zero_()  # type: ignore[union-attr]
    assert mask.rows().spans(0, 0, 299) == [(299 * 128, n, False)]


def test_a_million_tokens() -> None:
    n = 1 << 20
    mask = create_block_mask(mods.sliding_window(4096), None, None, n, n)
    spans = mask.rows().spans(0, 0, 5000)
    first = 5000 * 128
    assert [(span.start, span.stop, span.full) for span in spans] == [
        (first - 4096, first - 3968, False),
        (first - 3968, first, True),
        (first, first + 128, False),
    ]
