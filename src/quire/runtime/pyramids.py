"""Pyramids of captured tensors, built anew at each call, since what tensors hold may change."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from quire.codegen.arguments import CaptureShape
from quire.ir.bound import Pyramid, heap


def capture_shapes(
    captures: Sequence[Tensor], pyramids: Sequence[Pyramid]
) -> tuple[CaptureShape, ...]:
    """What generated code knows of captured tensors and of pyramids of them."""
    ranks = [captures[pyramid.slot].dim() for pyramid in pyramids]
    return (*map(CaptureShape.of, captures), *(CaptureShape(rank, rank - 1) for rank in ranks))


def build(captures: Sequence[Tensor], pyramids: Sequence[Pyramid]) -> list[Tensor]:
    """The pyramids of some tensors."""
    return [heap(captures[pyramid.slot], pyramid).contiguous() for pyramid in pyramids]
