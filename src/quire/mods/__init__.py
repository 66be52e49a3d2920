"""Ready-made mods: masks, changes of scores, and functions that combine them.

    >>> mask = and_masks(document(lengths=[512, 1024]), sliding_window(256))
    >>> mask.__name__
    'and_masks(document, sliding_window_256)'

A mod is a function of positions like one that a user writes, so it can be given wherever a mod is
expected, alone or as a part of another. Its `__name__` contains its parameters. A tensor that is
given to one of these functions is not copied: it receives gradients, and later changes in place
take effect.

Mods are values: they can be copied, pickled, compared and printed. Masks are combined as
`a & b | ~c`, score_mods as `f >> g`. For a learned bias use a module such as `LearnedDistanceBias`:
a mod that was given a parameter keeps using it after `load_state_dict(assign=True)` or
`torch.func.functional_call` replaced it (see `objects.py`).

In the drawings a row is a query, a column is a key, and 1 means that the query sees the key.
`quire.mods.attention_gym` has the same mods under the names that attention-gym uses.

Reading order: objects (mods as values), compose (mods made of mods), masks, packed (documents,
shared prompts, trees), scores.
"""

from quire.mods.compose import (
    Mask,
    MaskMod,
    ScoreChange,
    ScoreMod,
    ScoreModule,
    and_masks,
    in_turn,
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
    LearnedAlibi,
    LearnedDistanceBias,
    LearnedRelativePositionBias,
    LearnedTableBias,
    alibi,
    distance_bias,
    relative_position_bias,
    softcap,
    table_bias,
)

__all__ = [
    "LearnedAlibi",
    "LearnedDistanceBias",
    "LearnedRelativePositionBias",
    "LearnedTableBias",
    "Mask",
    "MaskMod",
    "ScoreChange",
    "ScoreMod",
    "ScoreModule",
    "alibi",
    "and_masks",
    "block_diffusion",
    "causal",
    "dilated_sliding_window",
    "distance_bias",
    "document",
    "global_sliding_window",
    "in_turn",
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
