"""Warnings that point at the user's line.

Frames of torch are skipped as those of quire are: torch.compile may stand between user and quire.
"""

from __future__ import annotations

import os
import sys
import warnings

import torch

import quire.errors

_SKIPPED = tuple(os.path.dirname(file) + os.sep for file in (quire.errors.__file__, torch.__file__))


def warn(message: str, category: type[Warning], through: tuple[str, ...] = ()) -> None:
    """Warn at the innermost line that is not in quire, torch or the directories `through`."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_SKIPPED + through):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
