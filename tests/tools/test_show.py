"""`quire show`: finds what the user wrote, prints what it becomes, and says what was wrong."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

import quire
from quire import errors
from quire.runtime.mods import COLUMN
from quire.tools import show

PROGRAM = """
from functools import partial
import torch
import neighbour
import quire

print("loading", __name__)
slope = torch.full((4,), 0.1)


def prefer_near(score, b, h, q_idx, kv_idx):
    print("tracing")  # not [bold]
    return score - slope[h] * (q_idx - kv_idx)


class Masks:
    @staticmethod
    def near(b, h, q_idx, kv_idx):
        return q_idx - kv_idx < neighbour.WINDOW


def banded(width, b, h, q_idx, kv_idx):
    return q_idx - kv_idx < width


def of_any(*args):
    return args[-1] <= args[-2]


@quire.mods.Mask
def decorated(b, h, q_idx, kv_idx):
    return kv_idx <= q_idx


def branching(b, h, q_idx, kv_idx):
    return True if q_idx > kv_idx else False


eight = partial(banded, 8)
window = quire.mods.sliding_window(256)
number = 3
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "neighbour.py").write_text("WINDOW = 7\n")
    monkeypatch.delitem(sys.modules, "neighbour", raising=False)
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def shown(
    place: str,
    kind: str | None = None,
    dtype: str = "float32",
    target: str = "x86-64-v3",
    stage: str = "all",
) -> str:
    console = Console(file=io.StringIO(), width=80, highlight=False)
    show.run(console, place, kind, dtype, target, stage)
    return console.file.getvalue()  # type: ignore[attr-defined]


# what is printed


def test_everything_in_order(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mod = show.load(f"{file}:prefer_near")
    stages = quire.kernel(mod, target="x86-64-v3").stages
    source = (
        "def prefer_near(score, b, h, q_idx, kv_idx):\n"
        '    print("tracing")  # not [bold]\n'
        "    return score - slope[h] * (q_idx - kv_idx)"
    )
    parts = {"python": source, **stages}
    expected = "".join(f"\n{title}\n\n{text.rstrip()}\n" for title, text in parts.items())
    capsys.readouterr()
    assert shown(f"{file}:prefer_near") == expected.expandtabs()
    assert list(parts) == ["python", *COLUMN]
    assert capsys.readouterr() == ("", "loading __shown__\ntracing\n")


@pytest.mark.parametrize("stage", ["graph", "llvm", "asm"])
def test_one_stage_alone_is_its_text(file: Path, stage: str) -> None:
    mod = show.load(f"{file}:Masks.near")
    text = quire.kernel(mask_mod=mod, target="aarch64").stages[stage]
    actual = shown(f"{file}:Masks.near", target="aarch64", stage=stage)
    assert actual == text.rstrip().expandtabs() + "\n"


def test_dtype_and_host(file: Path) -> None:
    place = f"{file}:prefer_near"
    assert "<4 x double>" in shown(place, dtype="float64", stage="llvm")
    here = quire.kernel(show.load(place)).stages["llvm"]
    assert shown(place, target="host", stage="llvm") == here.rstrip() + "\n"


@pytest.mark.parametrize(
    ("name", "kind"),
    [("prefer_near", "score"), ("Masks.near", "mask"), ("eight", "mask"), ("window", "mask")],
)
def test_the_signature_tells_the_kind(file: Path, name: str, kind: str) -> None:
    assert shown(f"{file}:{name}", stage="graph").startswith(f"{kind}:\n")


@pytest.mark.parametrize("kind", ["score", "mask"])
def test_or_the_user_does(file: Path, kind: str) -> None:
    assert shown(f"{file}:of_any", kind=kind, stage="graph").startswith(f"{kind}:\n")


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("Masks.near", "@staticmethod\ndef near(b, h, q_idx, kv_idx):"),
        ("eight", "def banded(width, b, h, q_idx, kv_idx):"),
        ("decorated", "@quire.mods.Mask\ndef decorated("),
        ("window", "def _sliding_window(\n"),
    ],
)
def test_source(file: Path, name: str, first: str) -> None:
    source = show.source_of(show.load(f"{file}:{name}"))
    assert source is not None and source.startswith(first)


def test_without_source_the_trace_is_first() -> None:
    names: dict[str, Callable[..., object]] = {}
    exec("def typed_in(b, h, q_idx, kv_idx): return q_idx >= kv_idx", names)
    assert show.source_of(names["typed_in"]) is None
    made = quire.kernel(mask_mod=names["typed_in"])
    assert next(show._all(names["typed_in"], made))[0] == "trace"


# mistakes


@pytest.mark.parametrize("place", ["program.py", ":near", "program.py:", ""])
def test_not_a_place(place: str) -> None:
    message = r"must be FILE\.py:NAME or MODULE:NAME, .* but is .*Name a score_mod"
    with pytest.raises(errors.ArgumentError, match=message):
        show.load(place)


def test_no_such_file(tmp_path: Path) -> None:
    for path in (tmp_path / "none.py", tmp_path):
        with pytest.raises(
            errors.ArgumentError, match=r"be a Python file, but there is no such .* Check"
        ):
            show.load(f"{path}:near")


@pytest.mark.parametrize("name", ["far", "Masks.far", "neighbour.far", "number.far", "a..b"])
def test_no_such_name(file: Path, name: str) -> None:
    with pytest.raises(errors.ArgumentError) as caught:
        show.load(f"{file}:{name}")
    assert str(caught.value) == (
        f"{file} must have a function {name!r}, but has none. "
        f"Choose one of its own: prefer_near, banded, of_any, decorated, branching."
    )


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("x = 1\nx = y\n", "NameError: name 'y' is not defined at program.py:2: `x = y`. Put"),
        ("x = (\n", "SyntaxError: '(' was never closed (program.py, line 1). Put"),
        ("raise SystemExit(3)\n", "SystemExit: 3 at program.py:1"),
        ("import torch\ntorch.zeros(2, 'x')", "TypeError: "),
    ],
)
def test_a_file_that_does_not_run(file: Path, program: str, reason: str) -> None:
    file.write_text(program)
    with pytest.raises(errors.ArgumentError) as caught:
        show.load(f"{file}:near")
    message = str(caught.value)
    assert message.startswith(f"{file} must run before a mod of it can be shown, but it ended")
    assert reason in message and "\n" not in message
    assert message.endswith('does not need under `if __name__ == "__main__":`.')


@pytest.mark.parametrize(
    ("name", "kind", "error", "message"),
    [
        ("number", None, errors.NotCallableError, "must be a function of .* is a int"),
        ("Masks", None, errors.ModSignatureError, "'Masks' takes 0 positional .* Give it 4 or 5"),
        ("Masks.near", "score", errors.ModSignatureError, "score_mod must take 5 .* takes 4"),
        ("branching", None, errors.TracedBranchError, r"program\.py:\d+: `return True if"),
    ],
)
def test_not_a_mod(
    file: Path, name: str, kind: str | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        shown(f"{file}:{name}", kind=kind)


@pytest.mark.parametrize(
    ("option", "word", "choices"),
    [
        ("kind", "bias", "score, mask"),
        ("dtype", "int8", "float32, bfloat16, float16, float64"),
        ("stage", "c", "graph, llvm, asm, trace, shift, bound, narrow, lower, compile, all"),
    ],
)
def test_not_an_option(option: str, word: str, choices: str) -> None:
    with pytest.raises(errors.ArgumentError) as caught:
        shown("not looked at", **{option: word})
    assert str(caught.value) == (
        f"--{option} must be one of {choices}, but is {word!r}. Leave it out for the default."
    )


def test_not_a_target(file: Path) -> None:
    with pytest.raises(errors.ArgumentError, match=r"aarch64, .* got 'z80'\. Leave it out"):
        shown(f"{file}:prefer_near", target="z80")
