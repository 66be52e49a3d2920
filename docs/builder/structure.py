"""Which page stands where on the site. A page of docs/ that is not named here is a how-to page."""

from __future__ import annotations

from pathlib import Path

DOCS = Path(__file__).parent.parent

LEARN = [
    "learn/ten_minutes",
    "learn/invent_a_mask",
    "learn/learned_bias",
    "learn/pack_sequences",
    "learn/page_a_cache",
    "learn/serve",
    "learn/processes",
    "notebooks/inventing_an_attention",
    "notebooks/packed_training",
    "notebooks/inside_a_paged_cache",
]
FROM = [
    "howto/from_flex_attention",
    "howto/from_flash_attention",
    "howto/from_paged_attention",
    "howto/from_xformers",
]
WHY = [
    "architecture",
    "why/same_bits",
    "why/bounds",
    "why/decoding",
    "differences",
    "processors",
    "extending",
]
FIGURES = ["figures", "gallery", "explorer"]
PROJECT = ["project/CHANGELOG", "project/CONTRIBUTING", "project/SECURITY", "source/index"]
ELSEWHERE = {"index", *FIGURES}


def how_to() -> list[str]:
    """Return the how-to pages: first those for who comes from elsewhere, then all other pages."""
    named = {*LEARN, *FROM, *WHY, *ELSEWHERE}
    return FROM + sorted(path.stem for path in DOCS.glob("*.md") if path.stem not in named)


def toctrees() -> dict[str, list[str]]:
    """Return for a page the pages below it."""
    sections = ["learn/index", "howto/index", "reference/index", "why/index", "figures"]
    return {
        "index": [*sections, "project/index"],
        "learn/index": LEARN,
        "howto/index": how_to(),
        "reference/index": ["reference/modules/index"],
        "why/index": WHY,
        "figures": ["gallery", "explorer"],
        "project/index": PROJECT,
    }
