"""Canonical names of sources, the directories of their journals, and the owner records in locks and lease objects."""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardfs.model.errors import BusyError
from shardfs.model.redact import public_name
from shardfs.storage.mount_table import topmost
from shardfs.storage.regular_files import parse_object, read_regular

if TYPE_CHECKING:
    from collections.abc import Mapping

MAX_RECORD = 1 << 16
"""Most bytes of an owner record."""

_TEXTS, _NUMBERS = frozenset({"host", "boot", "mountpoint", "job"}), frozenset({"pid", "since"})
_LISTS: Mapping[str, type] = {"sources": str, "started": str, "journal": int}
"""The members of an owner record, and the items of those that are lists."""

_MOST = 1 << 40
"""Numbers in an owner record are below this: no time and no process number is larger."""

LOCK = "lock"

SOURCE_LOCK = ".shardfs.lock"


def canonical(source: str) -> str:
    """Return the canonical name of a source, without `file://`, credentials, query and trailing slash.

    Symbolic links of local paths are resolved.
    """
    protocol, separator, path = source.partition("://")
    if separator and protocol not in ("file", "local"):
        host, slash, below = path.partition("/")
        return f"{protocol}://{host.rpartition('@')[2]}{slash}{below.partition('?')[0]}".rstrip("/")
    return os.path.realpath(path if separator else source)


def source_id(source: str) -> bytes:
    """Return a 16-byte hash of the source's canonical name."""
    return hashlib.blake2b(os.fsencode(canonical(source)), digest_size=16).digest()


def state_directory() -> Path:
    """Return the default directory of journals: `$XDG_STATE_HOME/shardfs`, or `~/.local/state/shardfs`."""
    home = os.environ.get("XDG_STATE_HOME", "")
    return Path(home if os.path.isabs(home) else os.path.expanduser("~/.local/state"), "shardfs")


def journal_directory(source: str, base: str | Path | None = None) -> Path:
    """Return the directory of a source's journal below `base` (default: `state_directory()`). It need not exist."""
    return (state_directory() if base is None else Path(base)) / source_id(source).hex()


def names(source: str) -> list[str]:
    """Return the names of a source: its canonical name without secrets and, for a local source, `DEVICE:PATH`.

    `DEVICE:PATH` is the same wherever the device is mounted. Two sources overlap if a name of one is a name of the
    other, or of a directory above it.
    """
    name = canonical(public_name(source))
    above = {name, *map(str, Path(name).parents)}
    if "://" in name or not (mounts := [e for e in topmost().values() if e.mountpoint in above]):
        return [name]
    mount = max(mounts, key=lambda e: len(e.mountpoint))
    inside = os.path.normpath(os.path.join(mount.root, os.path.relpath(name, mount.mountpoint)))
    return [name, f"{mount.device}:{inside}"]


def read_owner(path: str) -> dict[str, Any]:
    """Return the record that the last owner wrote into a lock file; {} if the file is missing or unreadable."""
    try:
        return owner_in(read_regular(path, MAX_RECORD))
    except (OSError, ValueError):
        return {}


def owner_in(raw: bytes) -> dict[str, Any]:
    """Return the owner record in the bytes of a lock, without members of other names or types; {} if they hold none."""
    try:
        record = parse_object(raw, MAX_RECORD)
    except ValueError:
        return {}
    return {name: value for name, value in record.items() if _is_fit(name, value)}


def _is_fit(name: str, value: Any) -> bool:
    """Return whether a member of an owner record, which another program may have written, has its type."""
    if isinstance(value, list):
        return name in _LISTS and all(isinstance(item, _LISTS[name]) for item in value)
    if type(value) is int:
        return name in _NUMBERS and 0 <= value < _MOST
    return name in _TEXTS and isinstance(value, str)


def busy(owner: dict[str, Any], source: str = "", other: str = "") -> BusyError:
    """Return the error for a second writer.

    Args:
        owner: the record of the first writer; the error has it as `owner`.
        source: the source of the second writer; "" if the error names none.
        other: the first writer's source if it differs from `source`.
    """
    why = f"already {describe(owner)}"
    if other:
        why = f"overlaps {other}, which is {why}: unmount that first, or mount read-only"
    error = BusyError(errno.EBUSY, why, *([public_name(source)] if source else []))
    error.owner = owner
    return error


def describe(owner: dict[str, Any]) -> str:
    """Describe an owner for messages: process, host, mountpoint and start time."""
    words = f"{owner.get('job') or 'mounted rw'} by pid {owner.get('pid', '?')}"
    if owner.get("host") != socket.gethostname():
        words += f" on {owner.get('host', 'another host')}"
    if owner.get("mountpoint"):
        words += f" at {owner['mountpoint']}"
    elif owner.get("pid") == os.getpid() and not owner.get("job"):
        words += ", this process, by another file system object of fsspec"
    if isinstance(since := owner.get("since"), int | float):
        words += time.strftime(" since %Y-%m-%d %H:%M:%S", time.localtime(since))
    return words


def owner_record(mountpoint: str, source: str, job: str = "") -> dict[str, Any]:
    """Return the record of this process, for a lock that it holds. `job`: what it does, if it is no mount."""
    return {
        "sources": names(source) if source else [],
        "host": socket.gethostname(),
        "boot": boot_id(),
        "pid": os.getpid(),
        "started": _first_line("/proc/self/stat").rpartition(")")[2].split()[19:20],
        "mountpoint": mountpoint,
        "job": job,
        "since": int(time.time()),
    }


def boot_id() -> str:
    """Return the kernel's random number of this start of the machine; "" without /proc."""
    return _first_line("/proc/sys/kernel/random/boot_id")


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""
