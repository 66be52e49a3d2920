"""Block masks: which key blocks each query block reads, and the mask_mod that decides inside them.

    block_mask = create_block_mask(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx, B=None, H=None,
                                   Q_LEN=1024, KV_LEN=1024)
    block_mask.sparsity()        # 43.75
    print(block_mask)

Reading order: blocks (lists, grids and runs), checks (of lists), tiles and classify (which blocks a
mask_mod makes), tensors (the fields of a mask), mask (its methods), create (from a mask_mod);
elements, algebra (`&`, `|`, `~`), parts (slices, other lengths, some queries), files.
"""

from quire.block_mask.blocks import NOOP_BLOCK_SIZE, BlockRows, Span
from quire.block_mask.create import create_block_mask, create_mask
from quire.block_mask.elements import element_mod
from quire.block_mask.mask import BlockMask, check_fits

__all__ = [
    "NOOP_BLOCK_SIZE",
    "BlockMask",
    "BlockRows",
    "Span",
    "check_fits",
    "create_block_mask",
    "create_mask",
    "element_mod",
]
