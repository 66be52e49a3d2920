"""A mask, a score mod, a plan or the pages of a cache, as text and as a picture.

    print(quire.draw(quire.mods.causal, 4096))
    quire.draw(quire.mods.sliding_window(4096), 1_000_000, path="window.png")

Reading order: drawing (the function), subject (a mask and the kinds of its cells), survey (the
kinds of cells of a mask_mod), scores (the values of a score mod), scale (numbers along an axis),
text (for a terminal), picture (with matplotlib, which only this file imports), plans and pages.
Time and memory are bounded by the number of cells, however long the sequences are.
"""

from quire.draw.base import Drawing
from quire.draw.drawing import draw

__all__ = ["Drawing", "draw"]
