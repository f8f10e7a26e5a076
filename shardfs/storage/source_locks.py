"""Canonical names of sources, and the owners that journal locks, source locks and lease objects name."""

from __future__ import annotations

import errno
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

from shardfs.model.errors import BusyError
from shardfs.model.redact import public_name
from shardfs.storage.mount_table import topmost

LOCK = "lock"

SOURCE_LOCK = ".shardfs.lock"


def canonical(source: str) -> str:
    """One name for one source: links resolved, `file://` taken off, without credentials, options and last slash."""
    protocol, separator, rest = source.partition("://")
    if separator and protocol not in ("file", "local"):
        host, slash, path = rest.partition("/")
        return f"{protocol}://{host.rpartition('@')[2]}{slash}{path.partition('?')[0]}".rstrip("/")
    return os.path.realpath(rest if separator else source)


def names(source: str) -> list[str]:
    """The canonical name without secrets; of a local source also `DEVICE:PATH`, the same wherever that is mounted.

    Two sources overlap if a name of one is a name of the other, or of a directory above it.
    """
    name = canonical(public_name(source))
    above = {name, *map(str, Path(name).parents)}
    if "://" in name or not (found := [e for e in topmost().values() if e.mountpoint in above]):
        return [name]
    mount = max(found, key=lambda e: len(e.mountpoint))
    inside = os.path.normpath(os.path.join(mount.root, os.path.relpath(name, mount.mountpoint)))
    return [name, f"{mount.device}:{inside}"]


def read_owner(path: str) -> dict[str, Any]:
    """What the last owner of a lock wrote of itself; nothing if that cannot be read."""
    try:
        told = json.loads(Path(path).read_bytes())
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def busy(owner: dict[str, Any], source: str = "", other: str = "") -> BusyError:
    """The error of a second writer; `other` is the source of the first one, if that is not the same as `source`."""
    why = f"already {describe(owner)}"
    if other:
        why = f"overlaps {other}, which is {why}: unmount that first, or mount read-only"
    error = BusyError(errno.EBUSY, why, *([public_name(source)] if source else []))
    error.owner = owner
    return error


def describe(owner: dict[str, Any]) -> str:
    """In words; ends with a statement about where and since when."""
    words = f"mounted rw by pid {owner.get('pid', '?')}"
    if owner.get("host") != socket.gethostname():
        words += f" on {owner.get('host', 'another host')}"
    if owner.get("mountpoint"):
        words += f" at {owner['mountpoint']}"
    elif owner.get("pid") == os.getpid():
        words += ", this process, by another file system object of fsspec"
    if isinstance(since := owner.get("since"), int | float):
        words += time.strftime(" since %Y-%m-%d %H:%M:%S", time.localtime(since))
    return words


def _about_us(mountpoint: str, source: str) -> dict[str, Any]:
    return {
        "sources": names(source) if source else [],
        "host": socket.gethostname(),
        "boot": _first_line("/proc/sys/kernel/random/boot_id"),
        "pid": os.getpid(),
        "started": _first_line("/proc/self/stat").rpartition(")")[2].split()[19:20],
        "mountpoint": mountpoint,
        "since": int(time.time()),
    }


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
