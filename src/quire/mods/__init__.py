"""Ready-made mods: masks, score changes, and the ways to put them together.

    >>> mask = and_masks(document(lengths=[512, 1024]), sliding_window(256))
    >>> mask.__name__
    'and_masks(document, sliding_window_256)'

Every mod is called with positions, as a function that a user would write, so it serves wherever a
mod is taken, alone or as a part of another. Its `__name__` says its parameters. Tensors given to a
factory are captured as they are: gradients reach them, and a later edit in place takes effect.

Mods are values: they are copied, pickled, compared and printed by what they were made with. Masks
combine as `a & b | ~c`, score mods as `f >> g`. A module that learns a bias owns a module such as
`LearnedDistanceBias`. A mod that was given a parameter follows copies of the module that keeps
both, but not `load_state_dict(assign=True)` or `torch.func.functional_call`, which put another
tensor in the parameter's place.

In the drawings a row is a query, a column a key, and 1 means that the query sees the key.
`quire.mods.attention_gym` has the same mods under attention-gym's names.
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
