"""How verbs print."""

from __future__ import annotations

import json
import re
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping


def write(data: bytes | memoryview) -> None:
    """Write bytes as they are, at once."""
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def write_json(value: Mapping[str, Any]) -> None:
    """A JSON object, as one line."""
    click.echo(json.dumps(value))


def printable(text: str) -> str:
    """Escapes of Python in place of what would break a row or steer a terminal, and of bytes that are no text."""
    return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    if character.isprintable():
        return character
    if "\udc80" <= character <= "\udcff":  # how Python keeps such a byte
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()


def natural(text: str) -> list[list[str | int]]:
    """A sort key: paths by component, and numbers in names by value, so that s2 is before s10."""
    parts = (re.split(r"(\d+)", name) for name in text.split("/"))
    return [[int(word) if i % 2 else word for i, word in enumerate(words)] for words in parts]


def human_bytes(n: float) -> str:
    """A number of bytes with its unit."""
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while n >= 1024 and len(units) > 1:
        n /= 1024
        units.pop(0)
    return f"{n:.0f} B" if units[0] == "B" else f"{n:.1f} {units[0]}"


@contextmanager
def waiting(doing: str) -> Iterator[Callable[[str], object]]:
    """Show on standard error what takes long and how far it is, if standard error is a terminal."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    status = Console(stderr=True).status(doing)

    def tell(how_far: str) -> None:
        status.update(f"{doing}: {how_far}")
        status.start()  # not before there is something to tell: most of what may take long does not

    try:
        yield tell
    finally:
        status.stop()
