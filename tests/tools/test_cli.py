"""The command line as a user meets it: in a process of its own, with and without a terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import quire
from quire import cli
from quire.config import config
from quire.runtime.cache import LIMIT_BYTES, ObjectCache, cache_key
from quire.tools.demo import screen
from quire.tools.demo.check import Check, Results, check
from quire.tools.demo.contest import Comparison, Outcome
from quire.tools.demo.mod import block_mask
from quire.tools.doctor import report
from quire.tools.measure import Reading
from quire.tools.show import load

ROOT = Path(__file__).parents[2]
SMALL = ("demo", "--tokens", "128", "--seconds", "0.1")
COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def run(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """`quire ...` without a terminal."""
    command = [sys.executable, "-m", "quire.cli", *arguments]
    return subprocess.run(
        command, env=plain_environ(environ), capture_output=True, text=True, timeout=110
    )


def run_in_terminal(*arguments: str, columns: int, **environ: str) -> str:
    """All that `quire ...` writes to a terminal of that width, escape codes included."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "quire.cli", *arguments]
    env = plain_environ({"TERM": "xterm-256color", "COLUMNS": str(columns), **environ})
    process = subprocess.Popen(command, env=env, stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    written = bytearray()
    try:
        while chunk := os.read(ours, 65536):
            written += chunk
    except OSError:  # how Linux says that the other side is closed
        pass
    os.close(ours)
    assert process.wait(timeout=110) == 0, written.decode()
    return written.decode().replace("\r\n", "\n")


def plain_environ(more: dict[str, str]) -> dict[str, str]:
    """This process's environment without what changes how rich writes."""
    changing = {"NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLUMNS", "LINES"}
    return {name: text for name, text in os.environ.items() if name not in changing} | more


# doctor


def test_doctor_prints_every_finding() -> None:
    done = run("doctor")
    assert (done.returncode, done.stderr) == (0, "")
    assert not COLOUR.search(done.stdout)
    lines = [re.split(r"\s{2,}", line.strip())[0] for line in done.stdout.splitlines()]
    assert [what for what, _ in report()] == [line for line in lines if line in dict(report())]
    assert re.search(rf"^torch +{re.escape(torch.__version__)} *$", done.stdout, re.MULTILINE)


def test_doctor_wraps_in_a_narrow_terminal_and_keeps_to_no_color() -> None:
    narrow = run_in_terminal("doctor", columns=50)
    assert COLOUR.search(narrow)
    assert max(len(COLOUR.sub("", line)) for line in narrow.splitlines()) <= 50
    plain = run_in_terminal("doctor", columns=50, NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", plain)


# show


@pytest.fixture
def mods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / "mods.py"
    path.write_text(
        "def near(b, h, q_idx, kv_idx):\n"
        "    return q_idx - kv_idx < 8\n\n\n"
        "def branching(b, h, q_idx, kv_idx):\n"
        "    return True if q_idx > kv_idx else False\n"
    )
    return path


def test_show_in_a_pipe(mods: Path) -> None:
    done = run("show", f"{mods}:near", "--target", "aarch64", "--stage", "llvm")
    assert (done.returncode, done.stderr) == (0, "")
    stages = quire.kernel(mask_mod=load(f"{mods}:near"), target="aarch64").stages
    assert done.stdout.rstrip() == stages["llvm"].rstrip()
    assert max(map(len, done.stdout.splitlines())) > 80, "long lines are kept"


def test_show_in_a_terminal_and_without_colours(mods: Path) -> None:
    bright = run_in_terminal("show", f"{mods}:near", columns=80)
    assert "\x1b[1mpython\x1b[0m" in bright and "\x1b[94mlt\x1b[0m" in bright
    plain = run_in_terminal("show", f"{mods}:near", columns=80, NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*[39][0-9]", plain)
    assert COLOUR.sub("", bright) == COLOUR.sub("", plain)


def test_show_of_a_mod_in_a_module() -> None:
    assert "le %0, %1 : bool" in run("show", "quire.mods:causal", "--stage", "graph").stdout
    done = run("show", "quire.mods:near")
    assert done.returncode == 2
    assert "quire.mods must have a function 'near', but has none. Choose one" in done.stderr
    assert "causal" in done.stderr


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("no.such.module:near", "ends in .py, but importing it raises: No module named"),
        ("near", "must be FILE.py:NAME or MODULE:NAME, as in mods.py:near or quire.mods:causal, b"),
    ],
)
def test_places_without_a_mod(
    place: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["quire", "show", place])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_messages_name_options() -> None:
    done = run("draw", "quire.mods:causal")
    assert done.returncode == 2
    assert done.stderr.endswith(
        "but is None. Give the number of queries, and --kv-len if it differs.\n"
    )


@pytest.mark.parametrize("command", [("show", "quire.mods:causal"), ("doctor",), ("--help",)])
def test_nobody_reads_on(command: tuple[str, ...]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "quire.cli", *command],
        env=plain_environ({}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(timeout=110) in (0, 1)


# draw and why


def test_draw_in_a_pipe_and_into_a_file(mods: Path, tmp_path: Path) -> None:
    done = run("draw", f"{mods}:near", "--q-len", "1000", "--kv-len", "700")
    assert (done.returncode, done.stderr) == (0, "")
    expected = str(quire.draw(load(f"{mods}:near"), 1000, 700))
    assert done.stdout == expected + "\n"
    assert expected.startswith("near: 1,000 queries x 700 keys in blocks of 128, sparsity ")
    for suffix in ("png", "svg"):
        path = tmp_path / f"mask.{suffix}"
        exit_code, output = invoke("draw", f"{mods}:near", "--q-len", "64", "-o", str(path))
        assert (exit_code, output.replace("\n", "")) == (0, f"wrote {path}")
        drawing = quire.draw(load(f"{mods}:near"), 64)
        expected_bytes = drawing.png() if suffix == "png" else drawing.svg().encode()
        assert path.read_bytes() == expected_bytes


def test_draw_in_a_terminal(mods: Path) -> None:
    bright = run_in_terminal("draw", f"{mods}:near", "--q-len", "1000000", columns=50)
    assert "\x1b[32m██" in bright and "\x1b[90m·" in bright
    lines = COLOUR.sub("", bright).rstrip("\n").split("\n")
    assert "\n".join(lines) == str(quire.draw(load(f"{mods}:near"), 1_000_000, width=50))
    assert max(map(len, lines[1:-1])) <= 50


def test_draw_options(mods: Path) -> None:
    with mods.open("a") as file:
        file.write(
            "\n\ndef by_head(b, h, q_idx, kv_idx):\n"
            "    return q_idx - kv_idx < 64 * h + 256 * b\n\n\n"
            "import quire\n\n"
            "mask = quire.create_block_mask(by_head, 2, 4, 512, 512, 'cpu', 64)\n"
        )
    options = ("--b", "1", "--h", "3")
    of_mod = invoke("draw", f"{mods}:by_head", "--q-len", "512", "--block-size", "64", *options)
    assert of_mod == invoke("draw", f"{mods}:mask", *options)
    expected = quire.draw(load(f"{mods}:by_head"), 512, block_size=64, b=1, h=3)
    assert of_mod == (0, f"{expected}\n")


def test_draw_tells_a_score_mod_by_its_parameters(mods: Path, tmp_path: Path) -> None:
    with mods.open("a") as file:
        file.write(
            "\n\ndef nearer(score, b, h, q_idx, kv_idx):\n    return score * h - q_idx + b\n"
        )
    options = ("--q-len", "9", "--kv-len", "5", "--b", "2", "--h", "3", "--score", "-1.5")
    exit_code, output = invoke("draw", f"{mods}:nearer", *options)
    expected = quire.draw(load(f"{mods}:nearer"), 9, 5, b=2, h=3, score=-1.5)
    assert (exit_code, output) == (0, f"{expected}\n")
    assert output.startswith("nearer: 9 queries x 5 keys, score -1.5 becomes -10.5 to -2.5\n")
    bright = run_in_terminal("draw", f"{mods}:nearer", "--q-len", "9", columns=50)
    assert "\x1b[32m██" in bright and "\x1b[32m░░" in bright
    pytest.importorskip("matplotlib")
    path = tmp_path / "nearer.png"
    exit_code, output = invoke("draw", f"{mods}:nearer", *options, "-o", str(path))
    assert (exit_code, path.read_bytes()) == (0, expected.png())


def test_why(mods: Path) -> None:
    done = run("why", f"{mods}:near", "--q", "17", "--kv", "3")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == (
        "near at b = 0, h = 0, q_idx = 17, kv_idx = 3\n\n"
        "mods.py:2: return q_idx - kv_idx < 8\n"
        "    q_idx - kv_idx        17 - 3 = 14\n"
        "    (q_idx - kv_idx) < 8  14 < 8 = False\n\n"
        "near = False\n"
    )
    bright = run_in_terminal("why", f"{mods}:near", "--q", "17", "--kv", "3", columns=80)
    assert COLOUR.sub("", bright) == done.stdout and COLOUR.search(bright)


def test_why_of_a_score_mod(mods: Path) -> None:
    with mods.open("a") as file:
        file.write("\n\ndef halved(score, b, h, q_idx, kv_idx):\n    return score / (h + b)\n")
    place = f"{mods}:halved"
    options = ("--q", "0", "--kv", "0", "--b", "1", "--h", "3", "--score", "-2.5")
    exit_code, output = invoke("why", place, *options)
    assert exit_code == 0 and output.endswith("halved = -0.625\n")


def test_a_mod_at_fault_is_told_with_its_line(mods: Path) -> None:
    done = run("show", f"{mods}:branching")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("quire: ") and "Traceback" not in done.stderr
    assert "mods.py:6: `return True if q_idx > kv_idx else False`" in done.stderr


def test_the_options_of_show(mods: Path) -> None:
    options = ("--kind", "mask", "--dtype", "float64", "--target", "x86-64-v3", "--stage", "llvm")
    exit_code, output = invoke("show", f"{mods}:near", *options)
    assert exit_code == 0 and "<4 x double>" in output


# cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectCache:
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "kernels"))
    config.cache_clear()
    return ObjectCache(tmp_path / "kernels")


def cache_info() -> dict[str, str]:
    exit_code, output = invoke("cache", "info")
    assert exit_code == 0
    rows = (re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in output.splitlines())
    return dict(rows)


def test_cache_info_and_clear(cache: ObjectCache) -> None:
    cache.put(cache_key("a"), b"x" * 1000)
    size = cache.usage().size
    assert size > 1000
    assert cache_info() == {
        "directory": str(cache.directory),
        "used": "yes",
        "objects": "1",
        "size": f"{size:,} bytes",
        "limit": f"{LIMIT_BYTES:,} bytes",
    }
    assert invoke("cache", "clear") == (0, f"removed 1 object from {cache.directory}\n")
    assert cache_info()["objects"] == "0"
    assert invoke("cache", "clear") == (0, f"removed 0 objects from {cache.directory}\n")


def test_a_cache_that_is_not_used(cache: ObjectCache) -> None:
    cache.put(cache_key("a"), b"x")
    cache.directory.chmod(0o755)
    assert cache_info()["used"] == "no: others may enter it (mode 755, not 700)"
    refused = run("cache", "clear")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith(
        "quire: the cache directory must be one that quire can use, but"
    )
    assert len(list(cache.directory.iterdir())) == 1


# demo


@pytest.mark.slow
def test_demo_in_a_pipe() -> None:
    done = run(*SMALL, PYTHONIOENCODING="ascii")  # the worst that an output can be
    assert (done.returncode, done.stderr) == (0, "")
    assert "\x1b" not in done.stdout
    for title in ("A mod is plain Python", "What it lets attention see"):
        assert title in done.stdout
    for row in Results._fields:
        assert re.search(rf"{row.replace('_', ' ')} +\d\.\de-\d\d +\d\.\de-\d\d +\?", done.stdout)
    assert re.search(
        r"forward +[\d.]+ [mµ?]?s +[\d.]+ [mµ?]?s +\d+(\.\d)? x (faster|slower)", done.stdout
    )
    assert re.search(r"forward and backward +refuses +[\d.]+ [mµ?]?s", done.stdout)
    assert "FlexAttention does not support backward on CPU." in " ".join(done.stdout.split())
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_demo_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(contest: list[Comparison], *_: object) -> list[Outcome]:
        refused = Reading(refusal="NotImplementedError: not here. Go elsewhere.")
        return [
            Outcome(contest[0].name, Reading(1.5, 900_000_000), Reading(0.1, 12_000_000)),
            Outcome(contest[1].name, refused, Reading(0.3, None)),
            Outcome(contest[2].name, Reading(0.01, 10_000_000), Reading(0.15, 41_000_000)),
            Outcome(contest[3].name, Reading(0.00004, 100_000), Reading(0.0004, 400_000)),
        ]

    monkeypatch.setattr(screen, "measure", measured)
    console = Console(file=io.StringIO(), force_terminal=True, width=80, highlight=False)
    assert screen.run(console, tokens=128, seconds=1.0, threads=2)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\x1b[32m✓" in shown and "✗" not in shown
    assert "━" in shown, "no progress bar"
    text = COLOUR.sub("", shown)
    assert re.search(r"forward +1\.5 s +100 ms +15 x faster\n +900 MB +12 MB +75 x less", text)
    assert re.search(r"forward and backward +refuses +300 ms *\n +unknown *\n", text)
    assert re.search(r"SDPA +10 ms +150 ms +15 x slower\n +10 MB +41 MB +4\.1 x more", text)
    assert re.search(r"128 tokens +40 µs +400 µs +10 x slower\n +0 MB +0 MB *\n", text)
    assert re.search(r"PyTorch, forward and backward: NotImplementedError: not here\. *\n", text)
    last_states = (line.rpartition("\x1b[2K")[2] for line in text.splitlines())
    assert max(map(len, last_states)) <= 80


def test_the_picture_of_the_demo_is_its_mask() -> None:
    mask = quire.create_mask(block_mask(64).mask_mod, None, None, 64, 64, "cpu")[0, 0]
    cells = block_mask(64, 4).rows().runs.cells()[0, 0]
    counts = mask.view(16, 4, 16, 4).sum((1, 3))
    assert cells.tolist() == torch.where(counts == 16, 2, (counts > 0).int()).tolist()


@pytest.mark.parametrize(
    ("row", "holds"),
    [
        (Check("", theirs=1e-6, ours=3.9e-6, largest=1.0), True),
        (Check("", theirs=1e-6, ours=5.0e-6, largest=1.0), False),
        (Check("", theirs=0.0, ours=2e-6, largest=10.0), True),
        (Check("", theirs=1e-6, ours=float("nan"), largest=1.0), False),
    ],
)
def test_an_error_is_bounded_by_that_of_torch(row: Check, holds: bool) -> None:
    assert row.holds is holds


def test_a_wrong_number_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    right = quire.flex_attention

    def wrong(query: torch.Tensor, *args: object, **options: object) -> object:
        return right(query * 1.001, *args, **options)  # type: ignore[call-overload]

    assert all(row.holds for row in check(128))
    monkeypatch.setattr(quire, "flex_attention", wrong)
    assert not any(row.holds for row in check(128))


def test_a_failed_check_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.demo, "run", lambda *args: False)
    assert invoke("demo")[0] == 1
    monkeypatch.setattr(cli.demo, "run", lambda *args: True)
    assert invoke("demo")[0] == 0


# mistakes


def invoke(*arguments: str) -> tuple[int, str]:
    """The exit code and output of `quire ...` within this process, for what needs no other."""
    result = CliRunner().invoke(cli.app, arguments)
    return result.exit_code, result.output


def test_help_names_the_commands() -> None:
    for _, output in (invoke("--help"), invoke()):
        assert re.search(r"demo .*doctor .*show .*draw .*why .*cache ", output, re.DOTALL)


def test_version() -> None:
    assert invoke("--version") == (0, f"quire {quire.__version__}\n")


def test_a_number_out_of_range_is_explained() -> None:
    exit_code, output = invoke("demo", "--tokens", "3")
    assert exit_code == 2
    assert "--tokens" in output and "16" in output


def test_an_error_of_ours_is_one_line_without_a_traceback() -> None:
    done = run(*SMALL, QUIRE_BACKEND="fast")
    assert done.returncode == 2
    assert done.stderr.strip().startswith("quire: QUIRE_BACKEND must be one of auto, eager")
    assert "Traceback" not in done.stderr


def test_importing_quire_imports_nothing_of_the_command_line() -> None:
    program = "import sys, quire; print({'rich', 'typer', 'quire.cli'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "set()\n"
