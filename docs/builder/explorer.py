"""The masks of the explorer: graphs, captured tensors and bounds, as JSON for a page.

A number of a mask that a reader may move is a captured tensor without dimensions. So the graph
stays the same, and the page puts another number there.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire import mods
from quire.block_mask.classify import Rectangles
from quire.ir.portable import portable
from quire.ir.trace import trace
from quire.mods import Mask

LONGEST = 1024


class Slider(NamedTuple):
    """A number that a reader may move."""

    least: int
    most: int
    start: int


class Shown(NamedTuple):
    """A mask of the explorer: what a reader would write, what it means, and its numbers."""

    title: str
    code: str
    mod: Callable[..., Any]
    sliders: Mapping[str, Slider]
    note: str = ""


def movable(mask: Mask, sliders: Mapping[str, Slider]) -> tuple[Mask, dict[str, Tensor]]:
    """Return a mask of the library with its numbers as captured tensors, and these tensors."""
    numbers = {name: torch.tensor(slider.start) for name, slider in sliders.items()}
    return Mask(mask.function, mask.__name__, **{**mask.fields, **numbers}), numbers


def documents(b: Any, h: Any, q_idx: Any, kv_idx: Any, size: Any) -> Any:
    """Let a query see its own document, up to itself; all documents have one size."""
    return (kv_idx <= q_idx) & (q_idx // size == kv_idx // size)


def sinks(b: Any, h: Any, q_idx: Any, kv_idx: Any, first: Any, window: Any) -> Any:
    """Let a query see the first tokens, and a window."""
    return (kv_idx <= q_idx) & ((kv_idx < first) | (q_idx - kv_idx <= window))


def stripes(b: Any, h: Any, q_idx: Any, kv_idx: Any, window: Any, every: Any) -> Any:
    """Let a query see a window, and every n-th token before it."""
    return (kv_idx <= q_idx) & ((q_idx - kv_idx <= window) | (kv_idx % every == 0))


def by_head(b: Any, h: Any, q_idx: Any, kv_idx: Any, least: Any) -> Any:
    """Let head h see h + 1 times as far as head 0."""
    return (kv_idx <= q_idx) & (q_idx - kv_idx < least * (h + 1))


DIVISOR = (
    "Here the divisor is a captured tensor, so that you can move it, and bounds know little of "
    "it. Written as a Python number it has sharper bounds."
)


def shown() -> list[Shown]:
    """Return the masks of the explorer in order."""
    window, length = Slider(0, 512, 96), Slider(1, LONGEST, 300)
    lengths = "[300, 120, 400, 204]"
    return [
        Shown("Causal", "causal", mods.causal, {}),
        Shown(
            "Sliding window",
            "sliding_window({window_size})",
            mods.sliding_window(96),
            {"window_size": window},
        ),
        Shown(
            "Dilated window",
            "dilated_sliding_window({window_size}, {dilation})",
            mods.dilated_sliding_window(256, 64),
            {"window_size": Slider(0, 512, 256), "dilation": Slider(1, 128, 64)},
        ),
        Shown(
            "Prefix",
            "prefix_lm({prefix_length})",
            mods.prefix_lm(300),
            {"prefix_length": length},
        ),
        Shown(
            "Packed documents",
            f"causal & document(lengths={lengths})",
            mods.causal & mods.document(lengths=json.loads(lengths)),
            {},
        ),
        Shown(
            "Documents of one size",
            "(kv_idx <= q_idx) & (q_idx // {size} == kv_idx // {size})",
            Mask(documents, size=300),
            {"size": Slider(1, LONGEST, 300)},
            DIVISOR,
        ),
        Shown(
            "First tokens and a window",
            "(kv_idx <= q_idx) & ((kv_idx < {first}) | (q_idx - kv_idx <= {window}))",
            Mask(sinks, first=32, window=96),
            {"first": Slider(0, 256, 32), "window": window},
        ),
        Shown(
            "A window and every n-th token",
            "(kv_idx <= q_idx) & ((q_idx - kv_idx <= {window}) | (kv_idx % {every} == 0))",
            Mask(stripes, window=96, every=200),
            {"window": window, "every": Slider(1, 512, 200)},
            DIVISOR,
        ),
        Shown(
            "A window that grows with the head",
            "(kv_idx <= q_idx) & (q_idx - kv_idx < {least} * (h + 1))",
            Mask(by_head, least=64),
            {"least": Slider(1, 256, 64)},
        ),
        Shown(
            "Neighbourhood in a picture",
            "neighbourhood(canvas=(32, 32), kernel=(7, 7))",
            mods.neighbourhood((32, 32), (7, 7)),
            {},
        ),
        Shown(
            "Tree of drafts",
            "tree(parents)  # each node has two children",
            mods.tree([-1, *((n - 1) // 2 for n in range(1, LONGEST))]),
            {},
        ),
    ]


def tensor(value: Tensor) -> dict[str, Any]:
    """Return a captured tensor for JSON."""
    return {"shape": list(value.shape), "data": value.flatten().tolist()}


def exported(one: Shown) -> dict[str, Any]:
    """Return a mask as the page takes it."""
    mod, numbers = one.mod, dict[str, Tensor]()
    if one.sliders:
        assert isinstance(mod, Mask)
        mod, numbers = movable(mod, one.sliders)
    traced = trace(mod, "mask")
    ends = {"b": (0, 0), "h": (0, 7), "q_idx": (0, LONGEST - 1), "kv_idx": (0, LONGEST - 1)}
    boxes = Rectangles(traced, ends, levels=0)
    moved = {id(value): name for name, value in numbers.items()}
    return {
        "title": one.title,
        "code": one.code,
        "note": one.note,
        "sliders": {name: slider._asdict() for name, slider in one.sliders.items()},
        "mask": portable(traced.output),
        "kind": portable(boxes.kind),
        "captures": [
            {"slider": moved[id(each)]} if id(each) in moved else tensor(each)
            for each in boxes.captures
        ],
    }


def data() -> str:
    """Return the script that gives the page all masks."""
    return f"const MASKS = {json.dumps([exported(one) for one in shown()])};\n"
