"""Puts all pages into one folder, from which Sphinx builds the site.

Pages of docs/ read well on a code host, where links lead to files. Here a link to a file of the
source leads to its page in the reference, and one to a script to a page that shows it.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path, PurePosixPath

from builder import explorer, figures, gallery, reference
from builder.source import ROOT
from builder.structure import DOCS, toctrees

ELSEWHERE = re.compile(r"<!-- not on the site -->.*?<!-- end -->", re.DOTALL)
LINK = re.compile(r"\[([^\[\]]*)\]\(([^)\s#]+)(#[^)\s]*)?\)")
IMAGE = re.compile(r'<img src="([^"]+)"')
PICTURES = ("*.svg", "*.png")
SCRIPTS = ("examples", "benchmarks")
LISTED = ("reference/index", "reference/modules/index", "source/index")


def head(name: str) -> str:
    """Return the first lines of a page that the list of pages at the side does not have.

    That list is on every page. The text of modules and scripts is not searched, so that a search
    finds guides and public names.
    """
    public = name.startswith("reference/quire")
    return f"---\norphan: true\n{'' if public else 'nosearch: true' + chr(10)}---\n\n"


def stage(folder: Path) -> None:
    """Write the sources of the site into a folder, anew, and beside it what is copied as it is."""
    shutil.rmtree(folder.parent / "static", ignore_errors=True)
    shutil.copytree(DOCS / "static", folder.parent / "static")
    write(folder.parent / "static" / "explorer-data.js", explorer.data())
    shutil.rmtree(folder, ignore_errors=True)
    places = placed()
    for path, place in places.items():
        write(folder / place, rewritten(path.read_text(), path, place, places))
    for pattern in PICTURES:
        for path in DOCS.rglob(pattern):
            write(folder / path.relative_to(DOCS), path.read_bytes())
    for path in DOCS.glob("notebooks/*.ipynb"):
        write(folder / path.relative_to(DOCS), path.read_bytes())
    write(folder / "project" / "index.md", PROJECT)
    for name, content in {**figures.pictures(), **gallery.pictures()}.items():
        write(folder / name, content)
    for name, text in added().items():
        write(folder / f"{name}.md", f"{(folder / f'{name}.md').read_text()}\n{text}\n")
    for name, text in (reference.pages() | scripts()).items():
        write(folder / f"{name}.md", text if name in LISTED else head(name) + text)
    for name, text in add_toctrees(folder).items():
        write(folder / f"{name}.md", text)


def added() -> dict[str, str]:
    """Return what is generated below pages that are written by hand."""
    widget = (DOCS / "builder" / "explorer.html").read_text()
    return {
        "index": REFERENCE,
        "figures": figures.page(),
        "gallery": gallery.page(),
        "explorer": f"```{{raw}} html\n{widget}```",
    }


REFERENCE = """
**Reference**: a page for every [public name](reference/index.md), with its signature, an example,
figures and errors, and one for every [module](reference/modules/index.md).
"""

PROJECT = """# Project

- [Changelog](CHANGELOG.md): what changed for users.
- [Contributing](CONTRIBUTING.md): how the code is written and tested.
- [Security](SECURITY.md): what quire promises, and how to report a weakness.
- [Scripts](../source/index.md): the examples and benchmarks, to read.
"""


def write(path: Path, content: str | bytes) -> None:
    """Write a file, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
        path.write_text(content)
    else:
        path.write_bytes(content)


def placed() -> dict[Path, PurePosixPath]:
    """Return the pages that are written by hand, and where they go."""
    pages = [path for path in DOCS.rglob("*.md") if "builder" not in path.parts]
    found = {path: PurePosixPath(path.relative_to(DOCS).as_posix()) for path in pages}
    for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"):
        found[ROOT / name] = PurePosixPath("project") / name
    return found


def scripts() -> dict[str, str]:
    """Return a page for every script, and their index."""
    found, lines = {}, []
    for folder in SCRIPTS:
        for path in sorted((ROOT / folder).glob("*.py")):
            name, text = f"{folder}/{path.name}", path.read_text()
            found[f"source/{folder}/{path.stem}"] = f"# {name}\n\n```python\n{text}```\n"
            first = ([*text.split('"""'), ""])[1].split("\n")[0]
            lines.append(f"- [`{name}`]({folder}/{path.stem}.md): {first}")
    return {**found, "source/index": "# Scripts\n\n" + "\n".join(lines) + "\n"}


def rewritten(
    text: str, path: Path, place: PurePosixPath, places: dict[Path, PurePosixPath]
) -> str:
    """Return a page with links that lead to the same things on the site.

    Of a link to a file that the site does not show, such as a test, only its words are left.
    Remarks for readers of the files are left out.
    """

    def found(link: str) -> str | None:
        target = place_of((path.parent / link).resolve(), places)
        return os.path.relpath(target, place.parent) if target else None

    def moved(match: re.Match[str]) -> str:
        words, link, heading = match.groups()
        if "://" in link or link.startswith("mailto:"):
            return match[0]
        target = found(link)
        return f"[{words}]({target}{heading or ''})" if target else words

    def drawn(match: re.Match[str]) -> str:
        return f'<img src="{found(match[1]) or match[1]}"'

    return IMAGE.sub(drawn, LINK.sub(moved, ELSEWHERE.sub("", text)))


def place_of(file: Path, places: dict[Path, PurePosixPath]) -> PurePosixPath | None:
    """Return where a file of the repository is shown on the site; None if nowhere."""
    if file in places:
        return places[file]
    if not file.is_relative_to(ROOT):
        return None
    inside = file.relative_to(ROOT)
    if file.is_relative_to(DOCS):
        return PurePosixPath(file.relative_to(DOCS).as_posix())
    if inside.parts[0] in SCRIPTS and inside.suffix == ".py":
        return PurePosixPath("source", inside.parts[0], f"{inside.stem}.md")
    if inside.parts[0] == "src":
        parts = inside.relative_to("src").with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        return PurePosixPath("reference", "modules", f"{name}.md")
    return PurePosixPath("index.md") if inside == Path("README.md") else None


def add_toctrees(folder: Path) -> dict[str, str]:
    """Return the pages that have others below them, with hidden lists of these."""
    found = {}
    for page, pages in toctrees().items():
        text = (folder / f"{page}.md").read_text()
        entries = "\n".join(f"/{name}" for name in pages)
        text += f"\n```{{toctree}}\n:hidden:\n\n{entries}\n```\n"
        found[page] = text
    return found
