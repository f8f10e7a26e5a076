"""How verbs print."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Mapping


def write(data: bytes | memoryview) -> None:
    """Write bytes as they are, at once."""
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def write_json(value: Mapping[str, Any]) -> None:
    """A JSON object, as one line."""
    click.echo(json.dumps(value))


def human_bytes(n: float) -> str:
    """A number of bytes with its unit."""
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while n >= 1024 and len(units) > 1:
        n /= 1024
        units.pop(0)
    return f"{n:.0f} B" if units[0] == "B" else f"{n:.1f} {units[0]}"
