"""The names in the HTML page with which a web server lists a directory."""

from __future__ import annotations

from html.parser import HTMLParser
from typing import TYPE_CHECKING
from urllib.parse import unquote, urljoin, urlsplit

if TYPE_CHECKING:
    from collections.abc import Iterable


class PageLinks(HTMLParser):
    """Collects the link targets of an HTML page, which is given to `feed` piece by piece.

    Attributes:
        targets: as they are written in the page, in its order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.targets: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "a":
            self.targets += [value for name, value in attrs if name == "href" and value]


def names_in(links: Iterable[str], url: str) -> dict[str, bool]:
    """Return the names directly below `url` to which links of the page lead, each with whether it ends with a slash.

    The names are decoded, in the order of the links, each once. Links with a query or fragment, to other hosts or to
    other directories are left out.
    """
    page = urlsplit(url.rstrip("/") + "/")
    above = [unquote(part, errors="surrogateescape") for part in page.path.split("/")[:-1]]
    names: dict[str, bool] = {}
    for link in links:
        try:
            target = urlsplit(urljoin(page.geturl(), link.replace(";", "%3B")))  # otherwise a `;` at the end is lost
        except ValueError:  # an invalid URL
            continue
        if target.query or target.fragment or target.netloc != page.netloc:
            continue  # such as a link that sorts the listing
        parts = target.path.removesuffix("/").split("/")
        *parents, name = (unquote(part, errors="surrogateescape") for part in parts)
        if parents == above and name not in ("", ".", "..") and "/" not in name and "\0" not in name:
            names[name] = names.get(name, False) or target.path.endswith("/")
    return names
