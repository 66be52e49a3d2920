"""Which parts of a benchmark `--only` runs, and that the pages name parts that exist."""

from __future__ import annotations

import ctypes
import importlib
import json
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from quire.codegen.llvm.target import Target

ROOT = Path(__file__).parent.parent


@pytest.fixture
def race(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("_race")


def unequal() -> None: ...
def equal() -> None: ...
def prefill() -> None: ...


@pytest.mark.parametrize(
    ("only", "runs"),
    [("equal", [equal]), ("qual", [unequal, equal]), ("", [unequal, equal, prefill])],
)
def test_a_name_wins_over_a_part_of_one(race: ModuleType, only: str, runs: list[object]) -> None:
    assert race.chosen_parts((unequal, equal, prefill), only) == runs


def test_a_name_that_nothing_has(race: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"\(unequal, equal, prefill\).*: decode"):
        race.chosen_parts((unequal, equal, prefill), "decode")


def test_a_row_says_what_is_better(
    race: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    table = race.Table("a title")
    table.add("a case", 1.5, "x as fast as SDPA", ">= 1.2", ours_ms=3)
    with pytest.raises(AssertionError, match="more or less is better"):
        table.add("a case", 1.5, "x as fast as SDPA", "1.2")
    table.write(str(tmp_path / "rows.json"))
    assert json.loads((tmp_path / "rows.json").read_text())["rows"] == table.rows
    _, heading, row = capsys.readouterr().out.splitlines()
    assert heading.split() == ["case", "figure", "unit", "wanted", "more"]
    assert " ".join(row.split()) == "a case 1.500 x as fast as SDPA >= 1.2 ours ms: 3"
    assert heading.index("wanted") == row.index(">= 1.2")


def test_figures_are_kept_by_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    results = importlib.import_module("_results")
    under = results.conditions(threads=2, seconds=0.5)
    assert {"date", "commit", "versions"} <= under.keys() and "torch" in under["versions"]
    old = [{"part": "sdpa", "case": "a", "figure": 1.0}, {"part": "mods", "case": "b", "figure": 2}]
    results.keep("forward", under, old, tmp_path)
    path = results.keep("forward", under, [{"part": "sdpa", "case": "c", "figure": 3}], tmp_path)
    kept = json.loads(path.read_text())
    assert kept["target"] == Target.host().cpu == path.parent.name and kept["processor"]
    assert kept["parts"]["sdpa"]["rows"] == [{"case": "c", "figure": 3}]
    assert kept["parts"]["mods"]["rows"] == [{"case": "b", "figure": 2}]
    assert kept["parts"]["sdpa"]["command"] == "python benchmarks/forward.py --only sdpa"


def test_the_pages_name_parts_that_exist() -> None:
    pages = "".join(page.read_text() for page in [ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
    named = re.findall(r"(\w+\.py) --only (\w+)", pages)
    assert len(named) > 5
    for script, part in named:
        text = (ROOT / "benchmarks" / script).read_text()
        for shared in re.findall(r"^import (_\w+)$", text, re.MULTILINE):
            text += (ROOT / "benchmarks" / f"{shared}.py").read_text()
        assert f"def {part}(table" in text, (script, part)


@pytest.mark.parametrize("phase", ["keys", "values"])
def test_products_of_a_tile_can_be_measured_alone(
    monkeypatch: pytest.MonkeyPatch, phase: str
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    tiles = importlib.import_module("tiles")
    monkeypatch.setattr(tiles, "TURNS", 1)
    code, work = tiles.product(Target.host(), torch.float32, phase, 64)
    memory = torch.ones((1 << 18) + 16)
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(code.address("run"))((memory.data_ptr() + 63) & ~63)
    assert work > 0
    assert memory.max() == (64.0 if phase == "keys" else 1.0 + tiles.KEYS)
