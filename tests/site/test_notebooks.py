"""The notebooks run from their first cell to their last, and are kept with what they show."""

from __future__ import annotations

from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).parent.parent.parent / "docs" / "notebooks").glob("*.ipynb"))


def test_there_are_three() -> None:
    assert len(NOTEBOOKS) == 3


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of the client's own packages
def test_they_run(path: Path, tmp_path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: quire[docs]")
    client = pytest.importorskip("nbclient", reason="nbclient is not installed: quire[docs]")
    kept = nbformat.read(path, as_version=4)
    run = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    client.NotebookClient(run, timeout=100, resources=resources).execute()
    for old, new in zip(kept.cells, run.cells, strict=True):
        if old.cell_type == "code":
            kinds = [[each.output_type for each in cell.outputs] for cell in (old, new)]
            assert kinds[0] == kinds[1], f"run {path.name} again and keep its results"
            assert "stderr" not in {each.get("name") for each in new.outputs}, new.outputs


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_they_read_well(path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: quire[docs]")
    notebook = nbformat.read(path, as_version=4)
    assert notebook.cells[0].source.startswith("# ")
    words = sum(len(cell.source.split()) for cell in notebook.cells if cell.cell_type == "markdown")
    assert words > 80
    assert not any("```" in cell.source for cell in notebook.cells), (
        "write code into cells that run"
    )
