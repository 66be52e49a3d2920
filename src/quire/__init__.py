"""quire: attention that you program in plain Python, on any CPU."""

import gc
from importlib.metadata import version

# Objects that imports make stay alive. Looking for garbage among them would only take time.
_collecting = gc.isenabled()
gc.disable()
try:
    from quire import distributed, mods
    from quire import linear as linear
    from quire import operator as operator
    from quire.api.attention import attention
    from quire.api.explain import explain
    from quire.api.flex import flex_attention
    from quire.api.gradients import AttentionGradients, attention_gradients
    from quire.api.kernel_options import FlexKernelOptions, KernelOptionWarning
    from quire.api.merge import merge_attention
    from quire.api.nested import jagged_scaled_dot_product_attention
    from quire.api.paged import PagedAttention
    from quire.api.patch import patch_torch, unpatch_torch
    from quire.api.pieces import AttentionPiece, attention_piece, merge_pieces
    from quire.api.plan import Plan, plan
    from quire.api.stages import kernel
    from quire.api.varlen import varlen_attention, varlen_attn
    from quire.api.why import why
    from quire.aux_outputs import AuxOutput, AuxRequest
    from quire.block_mask import BlockMask, create_block_mask, create_mask
    from quire.draw import draw
    from quire.errors import QuireError
    from quire.memory import Dense, Paged, Ragged
    from quire.mods import and_masks, noop_mask, not_mask, or_masks, weights
    from quire.mods.dropout import random
    from quire.request import EagerModWarning
    from quire.support.dynamo import OneGraphWarning
finally:
    if _collecting:
        gc.enable()

__version__ = version("quire")

__all__ = [
    "AttentionGradients",
    "AttentionPiece",
    "AuxOutput",
    "AuxRequest",
    "BlockMask",
    "Dense",
    "EagerModWarning",
    "FlexKernelOptions",
    "KernelOptionWarning",
    "OneGraphWarning",
    "Paged",
    "PagedAttention",
    "Plan",
    "QuireError",
    "Ragged",
    "__version__",
    "and_masks",
    "attention",
    "attention_gradients",
    "attention_piece",
    "create_block_mask",
    "create_mask",
    "distributed",
    "draw",
    "explain",
    "flex_attention",
    "jagged_scaled_dot_product_attention",
    "kernel",
    "merge_attention",
    "merge_pieces",
    "mods",
    "noop_mask",
    "not_mask",
    "or_masks",
    "patch_torch",
    "plan",
    "random",
    "unpatch_torch",
    "varlen_attention",
    "varlen_attn",
    "weights",
    "why",
]


def __dir__() -> list[str]:
    """What completion offers: the public names, not everything that is imported above."""
    return [*__all__, "errors"]
