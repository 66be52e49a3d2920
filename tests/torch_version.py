"""Which PyTorch the tests run with: what it does differs from version to version."""

from __future__ import annotations

import torch

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])

# What PyTorch has mended since 2.13: a slice knows its length, _adjust drops the blocks that it
# should, sparsity() is no longer negative. A mask for another length is a RuntimeError since then.
MASKS_MENDED = TORCH >= (2, 14)

# What it says of nested tensors that no kernel of its own takes; a build for CUDA asks for the
# driver before it says so.
NO_BACKEND = "No viable backend" + ("|CUDA error" if torch.version.cuda else "")
