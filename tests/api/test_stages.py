"""What mods become, as text that is the same on every machine.

`pytest --update-golden` writes the files anew; look at the difference before committing it.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import quire
from quire.api.stages import kernel
from quire.errors import ArgumentError
from quire.runtime import mods

GOLDEN = Path(__file__).parent / "golden"
MODS = {
    "causal": {"mask_mod": quire.mods.causal},
    "sliding_window": {"mask_mod": quire.mods.sliding_window(256)},
    "document": {"mask_mod": quire.mods.document(lengths=[5, 3])},
    "alibi": {"score_mod": quire.mods.alibi(8)},
    "softcap": {"score_mod": quire.mods.softcap(20.0)},
}


@pytest.mark.parametrize("stage", ["graph", "llvm"])
@pytest.mark.parametrize("name", MODS)
def test_golden(name: str, stage: str, request: pytest.FixtureRequest) -> None:
    actual = kernel(**MODS[name], target="x86-64-v3").stages[stage] + "\n"
    path = GOLDEN / f"{name}.{stage}"
    if request.config.getoption("--update-golden"):
        path.write_text(actual)
    assert actual == path.read_text(), f"{path.name} has changed: look, then --update-golden"


@pytest.mark.parametrize("target", ["x86-64-v3", "x86-64-v4", "aarch64"])
def test_every_target_has_assembly(target: str) -> None:
    made = kernel(quire.mods.softcap(20.0), quire.mods.causal, target=target)
    assert "full:" in made.stages["asm"]


def test_the_stages_are_the_column() -> None:
    stages = kernel(quire.mods.alibi(8), quire.mods.causal, target="x86-64-v3").stages
    assert list(stages) == ["trace", "shift", "bound", "narrow", "lower", "compile"]
    assert stages["graph"] == stages["narrow"] != stages["bound"] != stages["shift"]
    assert (stages["llvm"], stages["asm"]) == (stages["lower"], stages["compile"])
    assert "int64" in stages["bound"] and "can:" in stages["bound"]
    assert "can:" not in stages["shift"]


def test_a_step_that_is_added_is_shown_and_run(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setitem(mods.GRAPH_STEPS, "more", lambda graphs, _: seen.append(1) or graphs)
    assert "more" in kernel(mask_mod=quire.mods.causal).graphs
    quire.flex_attention(*torch.randn(3, 1, 1, 7, 9), mask_mod=lambda b, h, q, k: q * 3 > k * 5)
    assert len(seen) == 2


def test_what_depends_on_one_side_only_is_outside_the_loop() -> None:
    """documents: one vector load for the queries, one scalar load for each key, no gathers."""
    asm = kernel(mask_mod=quire.mods.document(lengths=[5, 3]), target="x86-64-v3").stages["asm"]
    assert "vpgather" not in asm


def test_this_machine_is_the_default() -> None:
    assert kernel(mask_mod=quire.mods.causal).tile.target == quire.codegen.llvm.target.Target.host()


def test_float64_has_half_the_lanes() -> None:
    made = kernel(quire.mods.softcap(2.0), dtype=torch.float64, target="x86-64-v3")
    assert "<4 x double>" in made.stages["llvm"]


def test_nothing_to_show() -> None:
    with pytest.raises(
        ArgumentError, match="a score_mod or a mask_mod must be given, but both are None"
    ):
        kernel()
    with pytest.raises(KeyError, match="'c' is none of the stages graph, llvm, asm"):
        kernel(mask_mod=quire.mods.causal).stages["c"]
    with pytest.raises(ArgumentError, match="expected a target out of"):
        kernel(mask_mod=quire.mods.causal, target="z80")
