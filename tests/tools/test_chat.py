"""`quire tour` and `quire chat`, with a model that knows nothing: what they show and count."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

pytest.importorskip("transformers")

from quire import cli
from quire.errors import MissingPackageError
from quire.integrations import smollm2
from quire.kv.page_map import SHARED
from quire.tools.demo import chat, tour_screen
from quire.tools.demo.talker import LETTERS, Spelling, Talker, talker

COLOUR = re.compile(r"\x1b\[[\d;?]*[a-zA-Z]")


@pytest.fixture(autouse=True)
def _without_smollm2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "NEEDED", ("no_such_package",))


@pytest.fixture
def speaker() -> Talker:
    return talker()


def test_answers_are_those_of_pytorch_and_take_fewer_rows(speaker: Talker) -> None:
    heard: list[list[str]] = []
    ours = chat.talk(speaker, chat.QUESTIONS, 8, heard.append, ours=True)
    theirs = chat.talk(speaker, chat.QUESTIONS, 8, lambda _: None, ours=False)
    assert ours.answers == theirs.answers == heard[-1]
    assert len(heard) == 8 == len(ours.maps)
    assert ours.num_tokens == theirs.num_tokens == 4 * 7
    assert ours.cache_bytes < 0.6 * theirs.cache_bytes
    assert 0 < ours.first < ours.seconds


def test_samples_share_the_pages_of_their_question(speaker: Talker) -> None:
    found = chat.talk(speaker, chat.QUESTIONS[-1:], 6, lambda _: None, ours=True, samples=4)
    prompt = speaker.batch(chat.QUESTIONS[-1:])["attention_mask"].sum()
    assert found.maps[-1].count(SHARED) == prompt // 16
    assert len(set(found.answers)) > 1


def test_the_mod_that_is_shown_is_the_one_that_runs() -> None:
    mask = chat.mask_mod()
    q_idx = torch.tensor(100)
    seen = [int(kv) for kv in range(101) if mask(0, 0, q_idx, torch.tensor(kv))]
    assert seen == [0, 1, 2, 3, *range(37, 101)]


def test_in_a_terminal(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, highlight=False)
    tour_screen.run(console, tmp_path, new=8)
    text = COLOUR.sub("", console.file.getvalue())  # type: ignore[attr-defined]
    assert "no_such_package not installed" in " ".join(text.split())
    assert re.search(r"new tokens a second +[\d.]+ +[\d.]+ +[\d.]+ of it", text)
    assert "4 of 4 answers are the same." in text
    assert re.search(r"4 answers that share its pages[^§]*\d+ shared", text)
    assert "enable(model, mask=window_with_a_sink)" in text
    assert {path.name for path in tmp_path.iterdir()} == {"pages.svg", "samples.svg", "mask.png"}
    for name in ("pages.svg", "samples.svg"):
        ElementTree.parse(tmp_path / name)


def test_without_matplotlib_there_are_no_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "quire.draw.picture", raising=False)
    monkeypatch.delattr(sys.modules["quire.draw"], "picture", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    console = Console(file=io.StringIO(), width=80, highlight=False)
    tour_screen.run(console, tmp_path, new=8)
    said = console.file.getvalue()  # type: ignore[attr-defined]
    assert said.endswith("Pictures: none without matplotlib: pip install 'quire[draw]'\n")


def test_the_command(tmp_path: Path) -> None:
    options = ["tour", "--new", "8", "--threads", "1", "-o", str(tmp_path / "pictures")]
    result = CliRunner().invoke(cli.app, options)
    assert result.exit_code == 0, result.output
    assert f"Pictures: {tmp_path / 'pictures'}" in "".join(result.output.splitlines())
    assert "\x1b" not in result.output


def test_a_conversation() -> None:
    lines = "How are you?\n\nAnd then?\n"
    result = CliRunner().invoke(cli.app, ["chat", "--new", "8"], input=lines)
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert "no_such_package not installed" in text
    read = [int(number) for number in re.findall(r"(\d+) tokens read in [\d.]+ s, then", text)]
    assert read[0] == len("How are you?")
    assert len(read) == 2 and read[1] > read[0] + len("And then?"), "it remembers what was said"
    assert re.findall(r"(\d+) pages", text) == ["2", "3"]


def test_threads_are_those_of_torch_unless_given() -> None:
    torch.set_num_threads(1)
    result = CliRunner().invoke(cli.app, ["chat"], input="")
    assert "a small random model, 1 thread, float32." in result.output
    result = CliRunner().invoke(cli.app, ["chat", "--threads", "2"], input="")
    assert "a small random model, 2 threads, float32." in result.output


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for command in ("chat", "tour"):
        result = CliRunner().invoke(cli.app, [command])
        assert isinstance(result.exception, MissingPackageError)
        missing = f"transformers must be installed for {command}, but is not. Install it: pip"
        assert missing in str(result.exception)


def test_letters_are_tokens() -> None:
    batch = Spelling().apply_chat_template([[{"content": "Abc."}], [{"content": "z"}]])
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [0, 0, 0, 1]]
    assert Spelling().decode(batch["input_ids"][0]) == "abc."
    assert Spelling().decode(torch.tensor([len(LETTERS)])) == ""
