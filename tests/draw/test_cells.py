"""The cells of a drawing are what the elements say, and few questions find out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import quire
from quire import mods
from quire.block_mask.blocks import EMPTY, FULL, PARTIAL
from quire.block_mask.classify import Rectangles
from quire.draw import survey
from quire.draw.subject import Cells

LENGTHS = (300, 420)
IDS = torch.sort(torch.randint(0, 9, (420,), generator=torch.Generator().manual_seed(0))).values
TABLE = torch.rand(10, 14, generator=torch.Generator().manual_seed(0)) < 0.3


def fractal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx & kv_idx) == 0  # nothing that bounds know


def blocks_of_a_table(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return TABLE[q_idx // 32, kv_idx // 32]


def scattered(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return (q_idx * 2654435761 + kv_idx * 40503) % 997 == 0


def without_graph(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
    return torch.atan((q_idx - kv_idx).float()) >= h


MASKS: dict[str, Callable[..., Tensor]] = {
    "everything": mods.noop_mask,
    "nothing": mods.not_mask(mods.noop_mask),
    "causal": mods.causal,
    "window": mods.sliding_window(50),
    "dilated": mods.dilated_sliding_window(100, 3),
    "document": mods.and_masks(mods.causal, mods.document(IDS)),
    "prefix": mods.prefix_lm(70),
    "fractal": fractal,
    "table": blocks_of_a_table,
    "scattered": scattered,
    "without graph": without_graph,
}


def truth(mask: Callable[..., Tensor], block: tuple[int, int], fold: tuple[int, int]) -> Cells:
    """The cells by every element of the mask."""
    held = quire.create_mask(mask, 1, 1, *LENGTHS, device="cpu")[0, 0].numpy()
    kinds, empty = [], 0
    step = block[0] * fold[0], block[1] * fold[1]
    for top in range(0, LENGTHS[0], step[0]):
        parts = [
            held[top : top + step[0], left : left + step[1]]
            for left in range(0, LENGTHS[1], step[1])
        ]
        kinds.append([FULL if p.all() else PARTIAL if p.any() else EMPTY for p in parts])
    for top in range(0, LENGTHS[0], block[0]):
        for left in range(0, LENGTHS[1], block[1]):
            part = held[top : top + block[0], left : left + block[1]]
            empty += part.size * (not part.any())
    return Cells(np.array(kinds, np.uint8), step, empty / held.size, True)


def assert_same(found: Cells, expected: Cells) -> None:
    assert found.kinds.tolist() == expected.kinds.tolist()
    assert (found.step, found.proven) == (expected.step, expected.proven)
    assert found.empty == pytest.approx(expected.empty, abs=1e-12)


@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    ("block", "fold"),
    [((32, 64), (1, 1)), ((32, 32), (3, 2)), ((7, 5), (11, 30)), ((1, 1), (9, 9))],
)
def test_cells_are_what_their_elements_say(
    name: str, block: tuple[int, int], fold: tuple[int, int]
) -> None:
    drawing = quire.draw(MASKS[name], *LENGTHS, block_size=block)
    assert_same(drawing.subject._folded(fold), truth(MASKS[name], block, fold))


@pytest.mark.parametrize("name", ["causal", "document", "table", "without graph"])
@pytest.mark.parametrize("fold", [(1, 1), (3, 2)])
def test_so_are_those_of_a_block_mask(name: str, fold: tuple[int, int]) -> None:
    lengths = LENGTHS[0] // 32 * 32, LENGTHS[1] // 32 * 32  # where it calls full what is
    block_mask = quire.create_block_mask(MASKS[name], None, None, *lengths, "cpu", 32)
    of_mod = quire.draw(MASKS[name], *lengths, block_size=32).subject._folded(fold)
    assert_same(quire.draw(block_mask).subject._folded(fold), of_mod)
    assert 100 * of_mod.empty == pytest.approx(block_mask.sparsity())


@pytest.mark.parametrize("name", MASKS)
def test_samples_never_take_something_for_its_opposite(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survey, "MOST_PARTS", 40)
    monkeypatch.setattr(survey, "MOST_ELEMENTS", 100)
    block, fold = (4, 4), (20, 20)
    found = quire.draw(MASKS[name], *LENGTHS, block_size=block).subject._folded(fold)
    expected = truth(MASKS[name], block, fold)
    wrong = found.kinds != expected.kinds
    assert (expected.kinds[wrong] == PARTIAL).all()
    exact = name in ("everything", "nothing", "without graph")
    assert found.proven is exact
    if exact:
        assert_same(found, expected)
    elif name in ("causal", "window", "prefix"):
        assert found.empty == pytest.approx(expected.empty, abs=0.2)


class Questions:
    """How many rectangles and elements were asked about, in all and at most together."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rectangles, self.elements, self.together = 0, 0, 0
        for name in ("kinds", "holds"):
            self._count(monkeypatch, name, getattr(Rectangles, name))

    def _count(self, monkeypatch: pytest.MonkeyPatch, name: str, ask: Any) -> None:
        def counted(rectangles: Rectangles, env: dict[str, Tensor]) -> Tensor:
            number = torch.broadcast_shapes(*(value.shape for value in env.values())).numel()
            self.rectangles += number * (name == "kinds")
            self.elements += number * (name == "holds")
            self.together = max(self.together, number)
            return ask(rectangles, env)  # type: ignore[no-any-return]

        monkeypatch.setattr(Rectangles, name, counted)


def test_a_million_tokens_take_few_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Questions(monkeypatch)
    cells = quire.draw(mods.causal, 1_000_000).subject.cells((512, 512))
    assert cells.kinds.shape == (489, 489)
    assert cells.kinds.tolist() == (np.tri(489) + np.tri(489, k=-1)).astype(int).tolist()
    blocks = np.minimum(np.arange(128, 1_000_128, 128), 1_000_000)  # keys that each row reaches
    heights = np.diff(blocks, prepend=0)
    assert cells.empty == pytest.approx(1 - (blocks * heights).sum() / 1e12)
    assert cells.proven
    assert asked.rectangles < 489 * 489 + 200_000
    assert asked.elements == 4 * 7813  # the corners of the blocks on the diagonal
    assert asked.together <= survey.AT_ONCE


def test_questions_are_bounded_where_bounds_know_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "MOST_ELEMENTS", 1 << 20)  # as it is, but faster
    monkeypatch.setattr(survey, "MOST_PARTS", 1 << 16)
    asked = Questions(monkeypatch)
    cells = quire.draw(fractal, 1 << 17).subject.cells((64, 64))
    expected = [[(row & column) == 0 for column in range(64)] for row in range(64)]
    assert ((cells.kinds != EMPTY) == np.array(expected)).all()
    assert not cells.proven
    assert asked.rectangles <= 64 * 64 + 4 * survey.MOST_PARTS
    assert asked.elements <= 5 * survey.MOST_PARTS + survey.MOST_ELEMENTS
    assert asked.together <= survey.AT_ONCE
    assert "sparsity at most" in str(quire.draw(fractal, 1 << 17))


def test_drawing_leaves_random_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(survey, "MOST_ELEMENTS", 1 << 16)
    before = torch.get_rng_state()
    assert "sampled" in str(quire.draw(scattered, 1 << 13, width=24))
    assert torch.equal(torch.get_rng_state(), before)
