"""Models that attend by themselves, whatever `attn_implementation` says: whoever asks is told.

transformers takes any name that is registered and leaves it to the layers to look it up. Those that
were written before its attention interface do not, and compute as they always did. Some of them ask
for a mask, and can do nothing with one of quire's, so they are set to "eager", which they are.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from typing import Any
from weakref import WeakSet

import transformers
from torch import nn
from transformers import PreTrainedModel

from quire.support.warn import warn

INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # what a layer looks its attention up in
_IS_ATTENTION = re.compile("attention|attn", re.I)
_HAS_WEIGHTS = re.compile("softmax|logsumexp|scaled_dot_product|multi_head_attention", re.I)
_TRANSFORMERS = os.path.dirname(transformers.__file__) + os.sep


class IgnoredAttentionWarning(UserWarning):
    """A model was to attend with quire and does not look up which attention it is to use."""


def layers_that_ignore(model: nn.Module) -> list[nn.Module]:
    """The layers that attend by themselves, if no layer of a model looks its attention up."""
    modules = list(model.modules())
    kinds: set[Any] = {type(module) for module in modules}
    if any(INTERFACE in _source(kind) for kind in kinds):
        return []
    return [module for module in modules if _attends(type(module))]


def _attends(kind: Any) -> bool:
    """Whether modules of a class have weights of attention: by its name, and by what it computes.

    A router of experts has a softmax too, and a norm may be named after the attention before it.
    """
    return bool(_IS_ATTENTION.search(kind.__name__) and _HAS_WEIGHTS.search(_source(kind)))


@functools.cache
def _source(kind: Any) -> str:
    """The text of a class and of those it is made from; nothing of what has none, or is torch's."""
    own = [each for each in kind.__mro__ if not each.__module__.startswith(("torch.", "builtins"))]
    try:
        return "\n".join(inspect.getsource(each) for each in own if each is not PreTrainedModel)
    except (OSError, TypeError):
        return ""


_told: WeakSet[nn.Module] = WeakSet()  # layers of a part, when the whole model is made of parts


def tell(model: PreTrainedModel, name: str) -> None:
    """Warn if a model, or a model in it, attends by itself; once for each layer there is."""
    for part in model.modules():
        layers = layers_that_ignore(part) if isinstance(part, PreTrainedModel) else []
        if layers and part.config._attn_implementation == name:
            part.config._attn_implementation = "eager"
        new = [layer for layer in layers if layer not in _told]
        if new:
            _told.update(new)
            _warn(part, new, name)


def _warn(part: nn.Module, layers: list[nn.Module], name: str) -> None:
    kinds = ", ".join(sorted({type(layer).__name__ for layer in layers}))
    warn(
        f'attn_implementation="{name}": expected a model whose layers look up the attention that '
        f"they are to use, got {type(part).__name__}, whose {kinds} computes its own: it runs "
        f'as with "eager", and no mod of yours reaches it. Leave the argument out, or call '
        f"quire.attention in a layer of yours.",
        IgnoredAttentionWarning,
        through=(_TRANSFORMERS,),
    )


def watch(name: str) -> None:
    """Tell of every model that is made from now on and asks for the attention of this name.

    Nothing of quire is called when such a model is made or run, so its making has to be watched.
    """
    made = PreTrainedModel.post_init
    if getattr(made, "watches", None) == name:
        return

    @functools.wraps(made)
    def post_init(self: PreTrainedModel) -> None:
        made(self)
        if self.config._attn_implementation == name:
            tell(self, name)

    post_init.watches = name  # type: ignore[attr-defined]
    PreTrainedModel.post_init = post_init
