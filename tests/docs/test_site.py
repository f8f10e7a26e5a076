"""The documentation site: built without a warning, every link leads somewhere, nothing comes from another host."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from functools import partial
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest

import shardfs
from tests.datasets import ROOT
from tests.docs.browser import visit

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.slow

LOADS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "object": "data"}
"""Elements of HTML, and the attribute with an address that a browser loads."""


class _Loaded(HTMLParser):
    """Collects what a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        if attributes.get("rel") not in ("canonical", "next", "prev"):
            self.addresses.append(attributes.get(LOADS.get(tag, "")) or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for package in ("material", "mkdocstrings", "mkdocs_jupyter"):
        if find_spec(package) is None:
            pytest.skip(f"no {package}: pip install '.[docs]'")
    path = tmp_path_factory.mktemp("site") / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert built.returncode == 0, built.stderr
    return path


def test_every_page_in_the_navigation_is_there(site: Path) -> None:
    for page in ("index", "tutorial/index", "recipes/gdal/index", "cli/index", "python/index", "notebook/index"):
        assert (site / f"{page}.html").exists()


def test_the_public_names_are_documented(site: Path) -> None:
    page = (site / "python/index.html").read_text()
    assert [name for name in shardfs.__all__ if f'id="shardfs.{name}"' not in page] == ["__version__"]
    assert "Base class of shardfs" in page


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    outside = set()
    for page in site.rglob("*.html"):
        parser = _Loaded()
        parser.feed(page.read_text())
        outside |= {(page.name, address) for address in parser.addresses if urlsplit(address).netloc}
    styles = "".join(style.read_text() for style in (*site.rglob("*.css"), *site.rglob("*.svg")))
    assert (outside, "url(http" in styles, "@import" in styles) == (set(), False, False)


@pytest.fixture
def served(site: Path) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


FOUND = "Array.from(document.querySelectorAll('.md-search-result__item h1')).map(e => e.textContent).join('|')"


@pytest.mark.parametrize(
    ("page", "wanted", "expected"),
    [
        ("?q=offline", FOUND, "Options"),
        ("notebook/", "document.readyState == 'complete' ? document.title : ''", "shardfs"),
    ],
    ids=["search", "notebook"],
)
def test_a_browser_needs_only_this_host(page: str, wanted: str, expected: str, served: str) -> None:
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("no chromium")
    addresses, text = visit(browser, served + page, wanted)
    assert expected in text
    assert [address for address in addresses if not address.startswith((served, "data:"))] == []
