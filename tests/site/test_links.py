"""Links to other sites: their form, their hosts, and the builder that asks them."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from builder import links
from builder.source import ROOT

EXTERNAL = sorted(set(links.external()))


@pytest.mark.parametrize(("path", "link"), EXTERNAL, ids=lambda each: str(each)[-40:])
def test_links_to_other_sites_are_of_known_hosts(path: Path, link: str) -> None:
    assert not links.wrong(link), path


def test_every_host_is_linked_to() -> None:
    used = {link.split("/")[2] for _, link in EXTERNAL}
    assert links.HOSTS.keys() <= used


@pytest.mark.parametrize(
    ("link", "why"),
    [
        ("https://semver.org", ""),
        ("http://127.0.0.1:8000/v1", ""),
        ("http://{at}", ""),
        ("http://semver.org", "begins with https"),
        ("https://semver.org/.", "ends with its last letter"),
        ("https://another.example/x", "not one of the hosts"),
    ],
)
def test_the_form_of_links(link: str, why: str) -> None:
    assert why in links.wrong(link) and bool(why) == bool(links.wrong(link))


def test_the_site_leads_to_no_other_host(site: Path) -> None:
    pages = [path.read_text() for path in site.rglob("*.html")]
    found = {
        link for page in pages for link in re.findall(r'(?:href|src)="(https?://[^"]+)"', page)
    }
    assert "https://semver.org" in found
    assert not [link for link in found if links.wrong(link)]


def test_the_builder_finds_the_links_that_it_asks(site: Path) -> None:
    """Without a network it asks none, but reads the whole site and lists what it would ask."""
    if importlib.util.find_spec("sphinx") is None:
        pytest.skip("sphinx is not installed: pip install 'quire[docs]'")
    command = [sys.executable, ROOT / "docs" / "builder", "--links", "--quiet"]
    done = subprocess.run(
        [*command, "--out", site.parent, "-D", "linkcheck_ignore=https?://.*"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (site.parent / "links" / "output.json").read_text().splitlines()
    found = {each["uri"]: each["status"] for each in map(json.loads, lines)}
    wanted = {link for path, link in EXTERNAL if path.suffix == ".md" and path.parent != ROOT}
    assert {link for link in wanted if "127.0.0.1" not in link} <= found.keys()
    assert {status for uri, status in found.items() if uri.startswith("http")} == {"ignored"}
