"""`quire demo`: a mod in three lines, drawn, checked and measured beside PyTorch.

Every figure is made while you watch. Reading order: mod (what is shown), check (is it right?),
contest (what does it cost?), screen (how it looks).
"""

from quire.demo.screen import run

__all__ = ["run"]
