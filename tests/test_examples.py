"""The examples run, and show what they say they show."""

from __future__ import annotations

import importlib
import math
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree

import pytest
import torch

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.fixture
def gpt(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The training, of a model that is smaller still."""
    torch.set_num_threads(1)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = importlib.import_module("train_gpt")
    for name, value in {"WIDTH": 32, "LAYERS": 2, "BATCH": 3, "REACH": 20}.items():
        monkeypatch.setattr(module, name, value)
    return module


def test_training_with_and_without_quire(
    gpt: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "loss.svg"
    gpt.main(["--steps", "12", "--length", "72", "--out", str(picture)])
    said = capsys.readouterr().out
    assert "3 x 72 tokens" in said
    assert "step   11   loss: quire" in said
    apart = float(said.split("at most ")[1].split()[0])
    assert apart < 1e-4
    charts = importlib.import_module("charts")
    colours = {f"stroke: {style['color']}": 0 for style in charts.STYLES}
    for path in ElementTree.parse(picture).findall(".//{*}path"):
        for colour in colours:
            if "clip-path" in path.attrib and colour in path.attrib["style"]:
                colours[colour] += len(re.findall("[ML]", path.attrib["d"]))
    assert list(colours.values()) == [12, 12]


def test_training_learns(gpt: ModuleType) -> None:
    quire_s, sdpa_s = gpt.train(steps=12, length=72)
    assert abs(quire_s.losses[0] - math.log(256)) < 1
    assert quire_s.losses[-1] < quire_s.losses[0] - 0.1
    for training in (quire_s, sdpa_s):
        assert all(bool(block.bias.any()) for block in training.model.blocks)
    assert len(quire_s.seconds) == len(sdpa_s.seconds) == 12


def test_rows_are_full_of_pieces(gpt: ModuleType) -> None:
    files = gpt.standard_library()
    tokens, targets, document = next(gpt.packed(files, 200, torch.Generator().manual_seed(1)))
    assert tokens.shape == targets.shape == document.shape == (3, 200)
    assert document.amax() > 0 and not document[:, 0].any()
    steps = document.diff(dim=1)
    assert set(steps.unique().tolist()) == {0, 1}
    follows = tokens[:, 1:] == targets[:, :-1]
    assert follows[steps == 0].all()  # within a piece, a target is the next token


def test_a_chart_of_padding(gpt: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    charts = importlib.import_module("charts")
    batches = [[3, 5], [1]]
    panels = [charts.Panel("one", batches, True, 2.5), charts.Panel("two", batches, False, 1.0)]
    charts.save(lambda: charts.padding_chart("texts", panels), tmp_path / "a.svg")
    charts.save(lambda: charts.padding_chart("texts", panels), tmp_path / "a.png")
    words = {text.text for text in ElementTree.parse(tmp_path / "a.svg").findall(".//{*}text")}
    assert {"texts", "one", "two", "2.50 s", "1.00 s"} <= words
    assert {"11 tokens computed", "9 tokens computed", "padding of its batch"} <= words
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_native_sparse_attention_learns_and_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    sparse = importlib.import_module("native_sparse")
    for name, value in {"BATCH": 2, "LENGTH": 150}.items():
        monkeypatch.setattr(sparse, name, value)
    model, losses = sparse.train(steps=8)
    assert abs(losses[0] - math.log(256)) < 1
    assert losses[-1] < losses[0] - 1
    text = next(sparse.batches(torch.Generator().manual_seed(1)))[:, :130]
    with torch.no_grad():
        whole = model(text)
    torch.testing.assert_close(sparse.decode(model, text), whole, rtol=1e-4, atol=1e-4)


def test_curves_of_weights_and_prob_mods(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    curves = importlib.import_module("weight_curves")
    scores, probs = torch.linspace(-4, 4, 33), torch.linspace(0.1, 0.9, 17)
    wanted = {
        "exp": scores.exp(),
        "squared_relu": scores.relu().square(),
        "softplus": torch.nn.functional.softplus(scores),
        "relu": scores.relu(),
        "sigmoid(0)": scores.sigmoid(),
    }
    for name, weight in curves.WEIGHTS.items():
        torch.testing.assert_close(curves.weight_curve(weight, scores), wanted[name])
    torch.testing.assert_close(curves.prob_curve(curves.sharpen, probs), probs * probs)
    curves.main(["--out", str(tmp_path / "a.svg")])
    words = {text.text for text in ElementTree.parse(tmp_path / "a.svg").findall(".//{*}text")}
    assert {*wanted, "keep_large", "sharpen", "score", "probability"} <= words
