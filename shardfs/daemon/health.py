"""What is wrong with mounts, each with a remedy: for `shardfs doctor` and the status page."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from shardfs.daemon.asking import Mount, mounts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

OK, NOTE, WRONG = "ok", "note", "wrong"
"""States of a diagnosis. NOTE marks a missing feature that only some users need."""

FULL = 0.9
"""The share of its limit at which a journal is almost full."""

FRESH_S = 1.0
"""How long `MountsReport` repeats an answer. To make one starts a process for each mount."""


class Diagnosis(NamedTuple):
    """The result of one check.

    Args:
        check: the name of the check, the same for all of its results.
        state: OK, NOTE or WRONG.
        message: the finding, for users.
        fix: the remedy; empty if none is needed.
    """

    check: str
    state: str
    message: str
    fix: str = ""


def examine_mount(mount: Mount) -> Iterator[Diagnosis]:
    """Yield diagnoses from what a mount has reported: whether daemon and store answer, and what is not published."""
    point = mount.mountpoint
    if mount.status is None:
        yield Diagnosis("mount", WRONG if mount.is_wrong else NOTE, f"{point}: {mount.finding}", mount.fix)
    elif (store := mount.status["store"]) and store["silent"]:
        fix = "check the network and the store; the mount recovers by itself"
        yield Diagnosis("mount", WRONG, f"{point}: its store does not answer", fix)
    else:
        failed = sum(store["errors"].values()) - store["errors"].get("ENOENT", 0) if store else 0
        note = f"; its store has failed {failed} times, see {point}/.shardfs/log" if failed else ""
        yield Diagnosis("mount", NOTE if failed else OK, f"{point}: answers{note}")
    if mount.writing:
        yield from _writing(point, mount.writing)


def _writing(point: str, w: Mapping[str, Any]) -> Iterator[Diagnosis]:
    """Check what a writable mount cannot publish or keep."""
    if w["read_only"]:
        fix = f"free space on the disk of {w['journal']}, then mount it again"
        yield Diagnosis("writing", WRONG, f"{point}: accepts no more writes: {w['read_only']}", fix)
    for path, why in w["errors"].items():
        fix = f"shardfs tries again by itself; at once: shardfs flush {point}"
        yield Diagnosis("writing", WRONG, f"{path}: is not published: {why}", fix)
    for path, why in w["refused_paths"].items():
        yield Diagnosis("writing", WRONG, f"{path or 'more files'}: was refused at close: {why}", "write it again")
    for path in w["orphan_paths"]:
        fix = "write the metadata of its array, or delete the file"
        yield Diagnosis("writing", NOTE, f"{path}: belongs to no array, so it is not published", fix)
    if w["journal_bytes"] > FULL * w["journal_limit"]:
        fix = f"programs that write will wait; shardfs flush {point}, or mount with a larger journal_limit"
        yield Diagnosis("writing", NOTE, f"{point}: the journal is almost full", fix)


class MountsReport:
    """The mounts that this user sees, as JSON. Thread-safe; made once a second at most, however many clients ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made_at = -FRESH_S
        self._json = b""

    def as_json(self) -> bytes:
        """Return a JSON array, at most `FRESH_S` old, with an object for each mount.

        An object has the fields of `Mount`, and `problems`: the diagnoses that are not OK.
        """
        with self._lock:
            if time.monotonic() - self._made_at >= FRESH_S:
                self._json = json.dumps(list(map(_described, mounts()))).encode()
                self._made_at = time.monotonic()
            return self._json


def _described(mount: Mount) -> dict[str, object]:
    """A mount with its problems, each with a remedy."""
    problems = [diagnosis._asdict() for diagnosis in examine_mount(mount) if diagnosis.state != OK]
    return {**mount._asdict(), "problems": problems}
