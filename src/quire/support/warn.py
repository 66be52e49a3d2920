"""Warnings that point at the user's line, however deep in the package they arise.

Frames of torch count as ours: what stands between the user and us there is torch.compile.
"""

from __future__ import annotations

import os
import sys
import warnings

import torch

_OURS = tuple(
    os.path.dirname(place) + os.sep for place in (os.path.dirname(__file__), torch.__file__)
)


def warn(message: str, category: type[Warning], through: tuple[str, ...] = ()) -> None:
    """Warn at the innermost line that is neither quire's nor torch's, nor below `through`."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS + through):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
