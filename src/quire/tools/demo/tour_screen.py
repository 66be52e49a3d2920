"""The output of the tour of a language model: at most 80 columns, and pictures in a folder."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from quire.draw import Drawing, draw
from quire.draw.pages import draw_pages
from quire.errors import MissingPackageError
from quire.integrations import smollm2
from quire.mods import and_masks, causal
from quire.tools.colour import coloured
from quire.tools.demo.chat import QUESTIONS, SOURCE, TalkResult, mask_mod, talk
from quire.tools.demo.page import say, title
from quire.tools.demo.talker import Asked, Talker, talker

PICTURED, BLOCK = 256, 4  # tokens of the mask's picture, and of a block in it
SAMPLES = 4
HOW = "pip install 'quire[draw]'"


def run(console: Console, folder: Path, new: int) -> None:
    """Print the tour, with `new` tokens in each answer."""
    folder.mkdir(parents=True, exist_ok=True)
    with console.status("loading a language model"):
        speaker = talker()
        for ready in (True, False):  # compiles kernels, and loads the weights into memory
            talk(speaker, QUESTIONS[:2], 2, lambda _: None, ours=ready)
    introduce(console, speaker)
    ours = _chat(console, speaker, folder, new)
    _compare(console, speaker, ours, new)
    _fork(console, speaker, folder, new // 2)
    _mod(console, speaker, folder, new, ours.answers[-1])
    pictures = str(folder) if any(folder.iterdir()) else "none without matplotlib: " + HOW
    say(console, Text(f"\nPictures: {pictures}"))


def _save(drawing: Drawing, path: Path) -> None:
    """Save a picture if matplotlib is installed."""
    with contextlib.suppress(MissingPackageError):
        drawing.save(path)


def introduce(console: Console, speaker: Talker) -> None:
    """Print the name of the model and the number of threads."""
    threads = torch.get_num_threads()
    say(console, f"{speaker.name}, {threads} thread{'s' * (threads > 1)}, float32.")
    if speaker.missing:
        say(
            console,
            f"It says nothing that makes sense: {', '.join(speaker.missing)} not installed. "
            f"{smollm2.HOW_TO_INSTALL}",
        )


def _chat(console: Console, speaker: Talker, folder: Path, new: int) -> TalkResult:
    title(console, "Questions of unequal lengths in one batch, on a cache in pages")
    lengths = speaker.batch(QUESTIONS)["attention_mask"].sum(1).tolist()
    heads = [
        f"{question[:44]}{'…' * (len(question) > 44)} ({length} tokens)"
        for question, length in zip(QUESTIONS, lengths, strict=True)
    ]
    found = stream(console, heads, speaker, QUESTIONS, new)
    _save(draw_pages(found.maps), folder / "pages.svg")
    title(console, "Its pages, a letter for each sequence")
    say(console, str(found.maps[-1]))
    return found


def stream(
    console: Console,
    heads: Sequence[str],
    speaker: Talker,
    questions: Sequence[Asked],
    new: int,
    samples: int = 1,
) -> TalkResult:
    """Answer questions. Print answers while they grow if there is a terminal, else at the end."""
    if not console.is_terminal:
        found = talk(speaker, questions, new, lambda _: None, ours=True, samples=samples)
        console.print(_answers(heads, found.answers))
        return found
    blank = [""] * len(heads)
    with Live(_answers(heads, blank), console=console, auto_refresh=False) as live:

        def show(answers: list[str]) -> None:
            live.update(_answers(heads, answers), refresh=True)

        return talk(speaker, questions, new, show, ours=True, samples=samples)


def _answers(heads: Sequence[str], answers: Sequence[str]) -> RenderableType:
    parts: list[Text] = []
    for head, answer in zip(heads, answers, strict=True):
        parts += [Text(head, style="bold cyan"), Text(answer or "…")]
    return Padding(Group(*parts), (0, 0, 0, 2))


def _compare(console: Console, speaker: Talker, ours: TalkResult, new: int) -> None:
    title(console, "The same batch, padded, with PyTorch's attention")
    with console.status("running it again"):
        theirs = talk(speaker, QUESTIONS, new, lambda _: None, ours=False)
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for name in ("", "sdpa + DynamicCache", "quire + PagedCache", ""):
        table.add_column(name, justify="left" if not name else "right", header_style="dim")
    rows = {
        "new tokens a second": (theirs.rate, ours.rate, "{:.1f}"),
        "seconds to the first": (theirs.first, ours.first, "{:.2f}"),
        "cache, MB": (theirs.cache_bytes / 1e6, ours.cache_bytes / 1e6, "{:.1f}"),
    }
    for name, (their, our, form) in rows.items():
        table.add_row(name, form.format(their), form.format(our), f"{our / their:.2f} of it")
    say(console, table)
    same = sum(a == b for a, b in zip(ours.answers, theirs.answers, strict=True))
    say(console, Text(f"\n{same} of {len(QUESTIONS)} answers are the same.", style="dim"))


def _fork(console: Console, speaker: Talker, folder: Path, new: int) -> None:
    title(console, f"One question, {SAMPLES} answers that share its pages")
    heads = [f"answer {number + 1}" for number in range(SAMPLES)]
    found = stream(console, heads, speaker, QUESTIONS[-1:], new, samples=SAMPLES)
    _save(draw_pages(found.maps), folder / "samples.svg")
    say(console, "\n" + str(found.maps[-1]))


def _mod(console: Console, speaker: Talker, folder: Path, new: int, before: str) -> None:
    from quire.integrations.transformers import enable

    title(console, "A mod of yours in every layer, by one line")
    say(console, coloured(SOURCE + "\nenable(model, mask=window_with_a_sink)", "python"))
    mask = mask_mod()
    _save(draw(and_masks(causal, mask), PICTURED, block_size=BLOCK), folder / "mask.png")
    enable(speaker.model, mask=mask)
    try:
        heads = ["the long question again: 64 tokens back, and the first 4"]
        found = stream(console, heads, speaker, QUESTIONS[-1:], new)
    finally:
        enable(speaker.model)
    verdict = "The same answer." if found.answers[0] == before else "Another answer than above."
    say(console, Text(f"\n{verdict}", style="dim"))
