"""A mask as text and as a picture.

    print(quire.draw(quire.mods.causal, 4096))
    quire.draw(quire.mods.sliding_window(4096), 1_000_000, path="window.png")

Reading order: drawing (the function), subject (what is drawn), survey (a mask_mod asked about
cells), scale (numbers along an axis), text (for a terminal), sheet (the layout of a picture), svg,
png and strokes (its letters). However long the sequences are, a bounded number of cells is asked
about, and no array has a side for each token.
"""

from quire.draw.drawing import Drawing, draw

__all__ = ["Drawing", "draw"]
