"""Ready-made mods: masks, score changes, and the ways to put them together.

    >>> mask = and_masks(document(lengths=[512, 1024]), sliding_window(256))
    >>> mask.__name__
    'and_masks(document, sliding_window_256)'

Every mod is an ordinary function of positions, as a user would write it, so it serves wherever a
mod is taken, alone or as a part of another. Its `__name__` says its parameters. Tensors given to a
factory are captured as they are: gradients reach them, and a later edit in place takes effect.

In the drawings a row is a query, a column a key, and 1 means that the query sees the key.
`quire.mods.attention_gym` has the same mods under attention-gym's names.
"""

from quire.mods.compose import (
    MaskMod,
    ScoreMod,
    and_masks,
    noop_mask,
    not_mask,
    offset,
    or_masks,
)
from quire.mods.masks import (
    block_diffusion,
    causal,
    dilated_sliding_window,
    global_sliding_window,
    neighbourhood,
    padding,
    prefix_lm,
    sliding_window,
)
from quire.mods.packed import document, shared_prefix, tree
from quire.mods.scores import (
    alibi,
    distance_bias,
    relative_position_bias,
    softcap,
    table_bias,
)

__all__ = [
    "MaskMod",
    "ScoreMod",
    "alibi",
    "and_masks",
    "block_diffusion",
    "causal",
    "dilated_sliding_window",
    "distance_bias",
    "document",
    "global_sliding_window",
    "neighbourhood",
    "noop_mask",
    "not_mask",
    "offset",
    "or_masks",
    "padding",
    "prefix_lm",
    "relative_position_bias",
    "shared_prefix",
    "sliding_window",
    "softcap",
    "table_bias",
    "tree",
]
