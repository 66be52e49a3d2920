"""Environment variables: what they mean, and the errors for wrong values."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from quire.config import BACKENDS, Config, config
from quire.errors import ArgumentError


def test_nothing_set_gives_the_defaults() -> None:
    assert Config.read({}) == Config(
        backend="auto",
        cache_dir=Path.home() / ".cache" / "quire",
        check_rows=0,
        target=None,
        threads=None,
    )


def test_an_empty_variable_counts_as_unset() -> None:
    names = ("BACKEND", "CACHE_DIR", "CHECK", "TARGET", "THREADS")
    names = ("XDG_CACHE_HOME", *(f"QUIRE_{name}" for name in names))
    assert Config.read(dict.fromkeys(names, "")) == Config.read({})


@pytest.mark.parametrize("backend", BACKENDS)
def test_backend(backend: str) -> None:
    assert Config.read({"QUIRE_BACKEND": backend.upper()}).backend == backend


@pytest.mark.parametrize("text", ["1", "true", "YES", "on"])
def test_check_on(text: str) -> None:
    assert Config.read({"QUIRE_CHECK": text}).check_rows > 1000


@pytest.mark.parametrize("text", ["0", "false", "NO", "off"])
def test_check_off(text: str) -> None:
    assert Config.read({"QUIRE_CHECK": text}).check_rows == 0


def test_check_says_how_many_rows() -> None:
    assert Config.read({"QUIRE_CHECK": "64"}).check_rows == 64


def test_threads() -> None:
    assert Config.read({"QUIRE_THREADS": " 3 "}).threads == 3


def test_cache_dir_expands_and_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/reader")
    assert Config.read({"QUIRE_CACHE_DIR": "kernels"}).cache_dir == tmp_path / "kernels"
    assert Config.read({"QUIRE_CACHE_DIR": "~/k"}).cache_dir == Path("/home/reader/k")


def test_default_cache_dir_follows_xdg_unless_relative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/reader")
    assert Config.read({"XDG_CACHE_HOME": "/x"}).cache_dir == Path("/x/quire")
    assert Config.read({"XDG_CACHE_HOME": "x"}).cache_dir == Path("/home/reader/.cache/quire")


@pytest.mark.parametrize(
    ("system", "environ", "expected"),
    [
        ("linux", {"XDG_CACHE_HOME": "/x", "LOCALAPPDATA": "/l"}, "/x/quire"),
        ("freebsd14", {}, "/home/reader/.cache/quire"),
        ("darwin", {"XDG_CACHE_HOME": "/x"}, "/home/reader/Library/Caches/quire"),
        ("win32", {"XDG_CACHE_HOME": "/x", "LOCALAPPDATA": "/l"}, "/l/quire"),
        ("win32", {}, "/home/reader/AppData/Local/quire"),
    ],
)
def test_default_cache_dir_is_where_the_system_has_caches(
    system: str, environ: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/reader")
    monkeypatch.setattr("sys.platform", system)
    assert Config.read(environ).cache_dir == Path(expected)


def test_without_a_home_there_is_no_place_for_a_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert not Config.read({}).cache_dir.is_absolute()
    assert Config.read({"QUIRE_CACHE_DIR": "/k"}).cache_dir == Path("/k")
    with pytest.raises(ArgumentError, match=r"'~/k', and the home directory in it is .* in full"):
        Config.read({"QUIRE_CACHE_DIR": "~/k"})


def test_a_path_that_is_too_long_is_read_as_it_is() -> None:
    path = "/" + "x" * 300
    assert Config.read({"QUIRE_CACHE_DIR": path}).cache_dir == Path(path)


@pytest.mark.parametrize(
    ("name", "text", "expected", "advice"),
    [
        ("QUIRE_BACKEND", "cuda", "one of auto, eager, inductor, jit", "let quire choose"),
        ("QUIRE_CHECK", "maybe", "1 or 0", "Unset it"),
        ("QUIRE_CHECK", "-5", "1 or 0", "Unset it"),
        ("QUIRE_THREADS", "two", "a whole number of at least 1", "as many threads as torch"),
        ("QUIRE_THREADS", "0", "a whole number of at least 1", "as many threads as torch"),
        ("QUIRE_THREADS", "-1", "a whole number of at least 1", "as many threads as torch"),
        ("QUIRE_THREADS", "²", "a whole number of at least 1", "as many threads as torch"),
        ("QUIRE_CACHE_DIR", __file__, "a directory", "Name another path"),
    ],
)
def test_a_bad_value_names_the_variable(name: str, text: str, expected: str, advice: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        Config.read({name: text})
    message = str(caught.value)
    assert message.startswith(f"{name} must be {expected}")
    assert repr(text) in message
    assert advice in message


def test_the_environment_is_read_once_until_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_THREADS", "5")
    config.cache_clear()
    assert config().threads == 5
    monkeypatch.setenv("QUIRE_THREADS", "6")
    assert config().threads == 5
    config.cache_clear()
    assert config().threads == 6


def test_it_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        config().check_rows = 1  # type: ignore[misc]


def test_the_readme_has_a_row_for_every_variable() -> None:
    root = Path(__file__).parents[2]
    read = re.findall(r'parsed\("(QUIRE_\w+)"', (root / "src/quire/config.py").read_text())
    rows = re.findall(r"^\| `(QUIRE_\w+)` \|", (root / "README.md").read_text(), re.MULTILINE)
    assert rows == sorted(set(read))
