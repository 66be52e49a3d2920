"""Builds the site into build/site: python docs/builder, or make docs."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from builder import tables
from builder.stage import ROOT, stage


def build(folder: Path, *, quiet: bool = False) -> int:
    """Build the site below a folder, anew: its sources in `source`, its pages in `site`."""
    from sphinx.cmd.build import main as sphinx

    shutil.rmtree(folder / "site", ignore_errors=True)  # pages of what is no more
    stage(folder / "source")
    options = ["-b", "html", "-c", str(ROOT / "docs"), "-W", "--keep-going", "-j", "2"]
    options += ["-D", f"html_static_path={folder / 'static'}"]
    options += ["-d", str(folder / "doctrees")] + (["-q"] if quiet else [])
    return sphinx([*options, str(folder / "source"), str(folder / "site")])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "docs", help="where to build")
    parser.add_argument("--quiet", action="store_true", help="print warnings alone")
    parser.add_argument(
        "--tables", action="store_true", help="only write the tables of figures in pages anew"
    )
    given = parser.parse_args()
    if given.tables:
        tables.write()
        sys.exit()
    status = build(given.out, quiet=given.quiet)
    print(f"The site is in {given.out / 'site' / 'index.html'}")
    sys.exit(status)
