"""Output functions for all verbs."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


def write(data: bytes | memoryview) -> None:
    """Write bytes unchanged to standard output and flush."""
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def write_json(value: Mapping[str, Any]) -> None:
    """Print a JSON object as one line."""
    click.echo(json.dumps(value))


def csv_line(fields: Iterable[str]) -> bytes:
    """A line of CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(fields)
    return text.getvalue().encode(errors="surrogateescape")


def printable(text: str) -> str:
    """Replace control characters, line breaks and undecodable bytes by Python escapes."""
    return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    if character.isprintable():
        return character
    if "\udc80" <= character <= "\udcff":  # surrogateescape: an undecodable byte
        return f"\\x{ord(character) - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()


def natural(text: str) -> list[list[str | int]]:
    """Sort key for paths: compares components, and numbers in names by value, so that s2 sorts before s10."""
    parts = (re.split(r"(\d+)", name) for name in text.split("/"))
    return [[int(word) if i % 2 else word for i, word in enumerate(words)] for words in parts]


def human_bytes(n: float) -> str:
    """Text of a number of bytes with a binary unit."""
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while n >= 1024 and len(units) > 1:
        n /= 1024
        units.pop(0)
    return f"{n:.0f} B" if units[0] == "B" else f"{n:.1f} {units[0]}"


@contextmanager
def waiting(doing: str) -> Iterator[Callable[[str], object]]:
    """Context manager that shows progress on standard error if it is a terminal. Yields the function to report it."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console

    status = Console(stderr=True).status(doing)

    def tell(how_far: str) -> None:
        status.update(f"{doing}: {how_far}")
        status.start()  # start at the first report only: most operations finish before it

    try:
        yield tell
    finally:
        status.stop()
