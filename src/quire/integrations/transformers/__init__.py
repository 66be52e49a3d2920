"""Models of transformers on quire: `attn_implementation="quire"`.

    import quire.integrations.transformers                        # registers the name
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="quire")

    enable(model)                                                 # a model that is loaded
    enable(model, mask=sliding_window(256))                       # with a mod of yours

    model.generate(**batch, past_key_values=PagedCache(model.config), max_new_tokens=64)

Reading order: attend (the function that every layer calls), mask (what all layers get in place
of a mask tensor), cache (pages for `generate`), rows (which sequence a row of the batch is),
packed (one row of tokens of many sequences, for quire.engine), ignored
(models that do not look up their attention).
"""

from __future__ import annotations

from quire.errors import MissingPackageError

try:
    from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
except ImportError as missing:
    raise MissingPackageError(
        f"the package transformers must be installed, but importing it raises: {missing}. Install "
        f"it: pip install 'quire[models]'."
    ) from missing

from quire.integrations.transformers import latent
from quire.integrations.transformers.attention import AttentionWeightsWarning, attend
from quire.integrations.transformers.cache import PagedCache
from quire.integrations.transformers.ignored import IgnoredAttentionWarning, tell, watch
from quire.integrations.transformers.mask import TokenMask, token_mask
from quire.integrations.transformers.user_mods import ATTRIBUTE, Mods
from quire.mods import MaskMod, ScoreMod

NAME = "quire"

__all__ = [
    "NAME",
    "AttentionWeightsWarning",
    "IgnoredAttentionWarning",
    "PagedCache",
    "TokenMask",
    "enable",
    "register",
]


def register() -> None:
    """Make `attn_implementation="quire"` known to transformers. Importing this module does it."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, token_mask)
    watch(NAME, _prepare)


def _prepare(model: PreTrainedModel) -> None:
    latent.prepare(model)
    tell(model, NAME)


def enable(
    model: PreTrainedModel, *, mask: MaskMod | None = None, score_mod: ScoreMod | None = None
) -> PreTrainedModel:
    """Make all layers of a loaded model compute attention with quire. Return the model.

    `mask(b, h, q_idx, kv_idx)` hides keys in addition to those that the model hides, and
    `score_mod` changes scores after the model has changed them. Positions count from the first
    token of a row, without padding. Both apply to every layer, until `enable` is called again.
    """
    on_quire(model)
    for module in model.modules():
        setattr(module, ATTRIBUTE, Mods(mask, score_mod))
    return model


def on_quire(model: PreTrainedModel) -> PreTrainedModel:
    """Make all layers of a loaded model compute attention with quire, and leave its mods alone."""
    register()
    model.set_attn_implementation(NAME)
    _prepare(model)
    return model


register()
