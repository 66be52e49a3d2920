"""The gallery shows every mod: a picture, code, sparsity, and a time that was measured."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from builder import gallery

import quire
from quire import mods, weights
from quire.mods import attention_gym

BASES = {"Mask", "MaskMod", "ScoreChange", "ScoreMod", "ScoreModule"}
"""What mods of `quire.mods` are made of, and no mods."""

SHOWN = {(kind, name) for kind, named in gallery.KINDS.items() for name in named}


def test_the_gallery_shows_every_mod_of_the_library() -> None:
    names = {name for _, name in SHOWN}
    assert set(mods.__all__) - BASES <= names
    assert set(weights.__all__) <= names
    assert {each.short for each in gallery.public() if each.module != gallery.GYM} <= names


def test_the_gallery_shows_every_mod_of_the_examples() -> None:
    found = gallery.of_examples()
    assert {"own_piece", "by_distance", "keep_large", "near", "finished"} <= found
    assert not gallery.missing()


def test_what_a_mod_is() -> None:
    values = [vars(quire)[name] for name in quire.__all__]
    found = {
        name for name, value in zip(quire.__all__, values, strict=True) if gallery.is_mod(value)
    }
    assert found == {"and_masks", "noop_mask", "not_mask", "or_masks"}


def entries() -> dict[str, str]:
    """The entries of the page by name."""
    parts = re.split(r"^### (\w+)\n", gallery.page(), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


ENTRIES = entries()


@pytest.mark.parametrize(("kind", "name"), sorted(SHOWN))
def test_a_mod_has_picture_code_sparsity_and_time(kind: str, name: str) -> None:
    shown = ENTRIES[name]
    assert re.search(rf"\{{image\}} gallery/{name}(-light)?\.(png|svg)\n", shown)
    assert re.search(r"```python\n.+?\n```", shown, re.DOTALL)
    assert ("sparsity " in shown) == (kind == "masks")
    assert re.search(r"\d ms, [\d.]+ x as fast as (SDPA|torch ops) \(Zen 5, AVX-512\)", shown), (
        f"measure it: python benchmarks/gallery.py --only {kind} --save"
    )


def test_the_pictures_are_on_the_site(site: Path) -> None:
    page = (site / "gallery.html").read_text()
    pictures = set(re.findall(r'src="_images/([\w-]+)\.(?:png|svg)"', page))
    for kind, name in SHOWN:
        curves = {f"{name}-light", f"{name}-dark"}
        assert (curves if kind in gallery.CURVES else {name}) <= pictures


@pytest.mark.parametrize("name", gallery.catalogue.ORIGINS)
def test_mods_of_examples_are_shown_with_their_code(name: str) -> None:
    assert f"from [{gallery.catalogue.ORIGINS[name]}]" in ENTRIES[name]
    assert f"def {name}(" in ENTRIES[name] or f"{name} = " in ENTRIES[name]


def test_code_is_shown_with_what_it_names_and_without_what_is_said_above_it() -> None:
    assert gallery.written("near") == ["WINDOW = 32\nnear = causal & sliding_window(WINDOW)"]
    causal = ENTRIES["causal"].partition("```python\n")[2]
    assert causal.startswith("def causal(b: Tensor,") and '"""' not in causal
    assert (
        "    return torch.sigmoid(" in ENTRIES["sigmoid"] and "sigmoid(-1.0)" in ENTRIES["sigmoid"]
    )


def test_names_of_attention_gym_lead_to_mods() -> None:
    table = gallery.renamed()
    rows = dict(re.findall(r"^\| \[(\w+)\]\S+ \| (.+) \|$", table, re.MULTILINE))
    assert rows.keys() == set(attention_gym.__all__)
    assert rows["causal_mask"] == "[causal](#causal)"
    assert (
        rows["generate_packed_causal_doc_mask_mod"] == "[document](#document) and [causal](#causal)"
    )
