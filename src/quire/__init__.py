"""quire: attention that you program in plain Python, on any CPU."""

import gc
from importlib.metadata import version

# What importing makes stays. Looking for garbage in it, and in all of torch, would take longer.
_collecting = gc.isenabled()
gc.disable()
try:
    from quire import mods
    from quire.api.plan import Plan, plan
    from quire.attention import attention
    from quire.aux_outputs import AuxOutput, AuxRequest
    from quire.block_mask import BlockMask, create_block_mask, create_mask
    from quire.draw import draw
    from quire.dropout import random
    from quire.dynamo import OneGraphWarning
    from quire.errors import QuireError
    from quire.explain import explain
    from quire.gradients import AttentionGradients, attention_gradients
    from quire.kernel_options import FlexKernelOptions, KernelOptionWarning
    from quire.memory import Dense, Paged, Ragged
    from quire.merge import merge_attention
    from quire.mods import and_masks, noop_mask, not_mask, or_masks
    from quire.nested import jagged_scaled_dot_product_attention
    from quire.paged import PagedAttention
    from quire.patch import patch_torch, unpatch_torch
    from quire.request import EagerModWarning
    from quire.stages import kernel
    from quire.torch_api import flex_attention
    from quire.varlen import varlen_attention, varlen_attn
    from quire.why import why
finally:
    if _collecting:
        gc.enable()

__version__ = version("quire")

__all__ = [
    "AttentionGradients",
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
    "create_block_mask",
    "create_mask",
    "draw",
    "explain",
    "flex_attention",
    "jagged_scaled_dot_product_attention",
    "kernel",
    "merge_attention",
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
    "why",
]


def __dir__() -> list[str]:
    """What completion offers: the public names, not everything that is imported above."""
    return [*__all__, "errors"]
