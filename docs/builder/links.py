"""Links to other sites: the list of their hosts, and where pages have them.

`python docs/builder --links` asks each of them for its page; tests have no network, and look at the
hosts alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from builder.source import ROOT

HOSTS = {
    "docs.ray.io": "Ray Serve, which replicas run in",
    "github.com": "the source of transformers",
    "semver.org": "what a version means",
}
"""The hosts that pages may lead to, and why."""

HERE = {"127.0.0.1:8000", "localhost:8000"}
"""A server that a reader has started."""

LINK = re.compile(r"https?://[^\s<>()\"'`\\]*")
FILES = ("*.md", "*.cff", "docs/**/*.md", "docs/**/*.ipynb", "docs/examples/*.py", "src/**/*.py")


def external() -> Iterator[tuple[Path, str]]:
    """Yield the links of pages, notebooks, examples and docstrings to other sites."""
    for pattern in FILES:
        for path in ROOT.glob(pattern):
            for link in LINK.findall(path.read_text()):
                yield path, link


def wrong(link: str) -> str:
    """Return what is wrong with the form of a link, or nothing."""
    scheme, _, rest = link.partition("://")
    host = rest.partition("/")[0].rstrip(".,;:")
    if host in HERE or not re.search(r"\w", host) or "{" in host:
        return ""  # a server of the reader, or no address but a piece of one
    if host not in HOSTS:
        return f"{host} is not one of the hosts in docs/builder/links.py"
    if scheme != "https":
        return "a link to another site begins with https"
    return "a link ends with its last letter or slash" if link[-1] in ".,;:?#" else ""
