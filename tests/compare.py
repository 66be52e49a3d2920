"""The one way to compare numbers: bound the error, do not tune the tolerance.

`actual` is compared with `truth`, the same computation in float64. It may be wrong by at most a
small multiple of what `peer`, PyTorch's own arithmetic in the same dtype, is wrong by.
"""

from __future__ import annotations

import torch
from torch import Tensor

RMS_FACTOR = 2.0
MAX_FACTOR = 4.0


def assert_as_good_as(actual: Tensor, peer: Tensor, truth: Tensor, name: str = "output") -> None:
    """Error of `actual` against float64 `truth`: rms at most 2 x, maximum at most 4 x `peer`'s,
    plus one rounding of the largest value in the dtype."""
    assert actual.shape == truth.shape, f"{name}: shape {actual.shape}, expected {truth.shape}"
    assert truth.dtype == torch.float64, "the truth is computed in float64"
    _assert_same_specials(actual, truth, name)
    finite = torch.isfinite(truth)
    if not bool(finite.any()):
        return
    exact = truth[finite]
    ours = (actual.double()[finite] - exact).abs()
    theirs = (peer.double()[finite] - exact).nan_to_num(0.0, 0.0, 0.0).abs()
    epsilon = 2 * torch.finfo(peer.dtype).eps * max(1.0, exact.abs().max().item())
    rms, rms_bound = _rms(ours), RMS_FACTOR * _rms(theirs) + epsilon
    assert rms <= rms_bound, f"{name}: rms error {rms:.3e} exceeds {rms_bound:.3e}"
    worst, worst_bound = ours.max().item(), MAX_FACTOR * theirs.max().item() + epsilon
    assert worst <= worst_bound, f"{name}: error {worst:.3e} exceeds {worst_bound:.3e}"


def _assert_same_specials(actual: Tensor, truth: Tensor, name: str) -> None:
    """What is not finite is so in the same places."""
    different = torch.isfinite(actual) != torch.isfinite(truth)
    assert not bool(different.any()), (
        f"{name}: {int(different.sum())} elements are finite in one and not in the other, first at "
        f"{different.nonzero()[0].tolist()}"
    )


def _rms(error: Tensor) -> float:
    return error.square().mean().sqrt().item()
