"""A mask, a score mod or the pages of a cache, as text and as a picture.

    print(quire.draw(quire.mods.causal, 4096))
    quire.draw(quire.mods.sliding_window(4096), 1_000_000, path="window.png")

Reading order: drawing (the function), subject (a mask, asked what its cells are), survey (a
mask_mod asked about cells), scores (a score mod, asked for values), scale (numbers along an axis),
text (for a terminal), picture (by matplotlib, which nothing else imports) and pages. However long
the sequences are, a bounded number of cells is asked about, and no array has a side for each token.
"""

from quire.draw.drawing import Drawing, draw

__all__ = ["Drawing", "draw"]
