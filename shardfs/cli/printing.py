"""Output functions for all verbs. They raise OSError if the output cannot be written, such as BrokenPipeError."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
import time
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

import click

from shardfs.model.text import human_bytes, printable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


def write(data: bytes | memoryview) -> None:
    """Write bytes unchanged to standard output, and flush it."""
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def write_json(value: Mapping[str, Any]) -> None:
    """Print a JSON object as one line of ASCII to standard output."""
    click.echo(json.dumps(value))


def csv_line(fields: Iterable[str]) -> bytes:
    """One line of CSV with its line feed, quoted where needed. Undecodable bytes of names are restored."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(fields)
    return text.getvalue().encode(errors="surrogateescape")


def echo(*lines: str, err: bool = False) -> None:
    """Print lines, each with control characters and line breaks as escapes, to standard output or standard error.

    Names of files, sources and mounts may contain anything. A terminal would obey what is in them.
    """
    for line in lines:
        click.echo(printable(line), err=err)


def natural(text: str) -> list[list[str | int]]:
    """Sort key for paths: compares components, and numbers in names by value, so that s2 sorts before s10."""
    parts = (re.split(r"(\d+)", name) for name in text.split("/"))
    return [[int(word) if i % 2 else word for i, word in enumerate(words)] for words in parts]


@contextmanager
def waiting(doing: str) -> Iterator[Callable[[str], object]]:
    """Context manager that shows progress on standard error if it is a terminal.

    Yields the function to call with how far the work is. Each call replaces the line `doing: how far`, such as
    "publishing: 3 chunks left". Nothing is shown before the first call.
    """
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


LINES_S = 5.0
"""Seconds between the lines of a `ProgressDisplay` that is not on a terminal."""


class ProgressDisplay:
    """Context manager that shows on standard error how far a job on files is: a bar on a terminal, otherwise lines.

    Args:
        files: the number of all files, from which the time left is estimated.
        enabled: False to show nothing.
    """

    def __init__(self, files: int, *, enabled: bool = True) -> None:
        self._files = files
        self._enabled = enabled
        self._on_terminal = sys.stderr.isatty()
        self._done = self._copied = self._nbytes = 0
        self._began = self._printed = time.monotonic()

    def __enter__(self) -> Self:
        if self._enabled and self._on_terminal:
            from rich import progress
            from rich.console import Console

            columns = progress.TextColumn("{task.description}", markup=False), progress.BarColumn()
            self._bar = progress.Progress(*columns, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("", total=self._files)
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._enabled and self._on_terminal:
            self._bar.stop()

    def advance(self, files: int, nbytes: int) -> None:
        """Count `files` more finished files, and their bytes. `nbytes` is 0 if an earlier run has finished them."""
        self._done += files
        self._nbytes += nbytes
        self._copied += files if nbytes else 0
        if self._enabled and self._on_terminal:
            self._bar.update(self._task, completed=self._done, description=self._text())
        elif self._enabled and time.monotonic() - self._printed >= LINES_S:
            self._printed = time.monotonic()
            echo(self._text(), err=True)

    def _text(self) -> str:
        took = max(time.monotonic() - self._began, 1e-3)
        speed = f"{human_bytes(self._nbytes)}, {human_bytes(self._nbytes / took)}/s"
        text = f"{self._done:,} of {self._files:,} files, {speed}"
        if not self._copied:
            return text
        seconds_left = took * max(self._files - self._done, 0) / self._copied
        return f"{text}, {timedelta(seconds=round(seconds_left))} left"
