"""Builds the site into build/docs/site: python docs/builder, or make docs."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from builder.source import ROOT


def build(folder: Path, *options: str) -> int:
    """Build the site below a folder, anew: its sources in `source`, its pages in `site`."""
    from builder.stage import stage

    shutil.rmtree(folder / "site", ignore_errors=True)  # pages of what is no more
    stage(folder / "source")
    status = run("html", folder, folder / "site", *options)
    print(f"The site is in {folder / 'site' / 'index.html'}")
    return status


def check_links(folder: Path, *options: str) -> int:
    """Ask for the page of every link of a site to another site, which needs the network."""
    if not (folder / "source").exists():
        from builder.stage import stage

        stage(folder / "source")
    return run("linkcheck", folder, folder / "links", *options)


def run(builder: str, folder: Path, out: Path, *more: str) -> int:
    """Run a builder of Sphinx on the sources of the site. Warnings are errors."""
    from sphinx.cmd.build import main as sphinx

    options = ["-b", builder, "-c", str(ROOT / "docs"), "-W", "--keep-going", "-j", "2"]
    options += ["-D", f"html_static_path={folder / 'static'}", "-d", str(folder / "doctrees")]
    return sphinx([*options, *more, str(folder / "source"), str(out)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, epilog="Other options go to Sphinx.")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "docs", help="where to build")
    parser.add_argument("--quiet", action="store_true", help="print warnings alone")
    parser.add_argument(
        "--links", action="store_true", help="only look whether links to other sites lead somewhere"
    )
    parser.add_argument(
        "--tables", action="store_true", help="only write the tables of figures in pages anew"
    )
    given, options = parser.parse_known_args()
    if given.tables:
        from builder import tables

        tables.write()
        sys.exit()
    options += ["-q"] if given.quiet else []
    sys.exit((check_links if given.links else build)(given.out, *options))
