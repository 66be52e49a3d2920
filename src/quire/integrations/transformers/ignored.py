"""A warning for models that ignore `attn_implementation` and compute attention themselves.

transformers accepts any registered name, and layers look the function up. Layers that were written
before its attention interface do not look it up. Some of these models still ask for a mask, and
cannot use quire's. So their implementation is set to "eager", which describes what they do.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import transformers
from torch import nn
from transformers import PreTrainedModel

from quire.support.warn import warn

INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # the table in which layers look up their attention
_IS_ATTENTION = re.compile("attention|attn", re.I)
_HAS_WEIGHTS = re.compile("softmax|logsumexp|scaled_dot_product|multi_head_attention", re.I)
_TRANSFORMERS = os.path.dirname(transformers.__file__) + os.sep


class IgnoredAttentionWarning(UserWarning):
    """A model was told to use quire, but does not look up its attention function."""


def layers_that_ignore(model: nn.Module) -> list[nn.Module]:
    """Return the attention layers of a model if none of its layers looks its attention up."""
    modules = list(model.modules())
    kinds: set[Any] = {type(module) for module in modules}
    if any(INTERFACE in _source(kind) for kind in kinds):
        return []
    return [module for module in modules if _attends(type(module))]


def _attends(kind: Any) -> bool:
    """Return whether a class computes attention, by its name and by its source.

    The name alone is not enough: a norm may be named after the attention before it. The source
    alone is not enough either: a router of experts has a softmax too.
    """
    return bool(_IS_ATTENTION.search(kind.__name__) and _HAS_WEIGHTS.search(_source(kind)))


@functools.cache
def _source(kind: Any) -> str:
    """Return the source of a class and of its bases outside torch, or "" if it is not known."""
    own = [each for each in kind.__mro__ if not each.__module__.startswith(("torch.", "builtins"))]
    try:
        return "\n".join(inspect.getsource(each) for each in own if each is not PreTrainedModel)
    except (OSError, TypeError):
        return ""


_told: WeakSet[nn.Module] = WeakSet()  # layers that were named in a warning already


def tell(model: PreTrainedModel, name: str) -> None:
    """Warn if a model, or a model inside it, ignores its attention. Name each layer once."""
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
        f'attn_implementation="{name}": the layers of a model must look up their attention, but '
        f'{kinds} of {type(part).__name__} computes its own: it runs as with "eager", and ignores '
        f"your mods. Leave the argument out, or call quire.attention in your own layer.",
        IgnoredAttentionWarning,
        through=(_TRANSFORMERS,),
    )


def watch(name: str, prepare: Callable[[PreTrainedModel], None]) -> None:
    """Call `prepare` for each new model that asks for the attention `name`.

    Such a model calls nothing of quire, so `PreTrainedModel.post_init` is wrapped.
    """
    made = PreTrainedModel.post_init
    if getattr(made, "watches", None) == name:
        return

    @functools.wraps(made)
    def post_init(self: PreTrainedModel) -> None:
        made(self)
        if self.config._attn_implementation == name:
            prepare(self)

    post_init.watches = name  # type: ignore[attr-defined]
    PreTrainedModel.post_init = post_init
