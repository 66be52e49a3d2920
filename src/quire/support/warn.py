"""Warnings that point at the user's line.

Frames of torch are skipped as those of quire are: torch.compile may stand between user and quire.
"""

from __future__ import annotations

import os
import sys
import warnings

import torch

_QUIRE = os.path.dirname(__file__)
_SKIPPED = tuple(os.path.dirname(place) + os.sep for place in (_QUIRE, torch.__file__))


def warn(message: str, category: type[Warning], through: tuple[str, ...] = ()) -> None:
    """Warn at the innermost line that is not in quire, torch or the directories `through`."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED + through):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
