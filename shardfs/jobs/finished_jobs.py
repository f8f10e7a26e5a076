"""Notes of finished jobs, so that a job that is repeated says so.

The target of a job has only the files of the dataset. So the note is in the state directory of the user.
"""

from __future__ import annotations

import json
import logging
import os
from contextlib import suppress
from typing import TYPE_CHECKING

import mmh3

from shardfs.model.own_places import require_own_place
from shardfs.storage.source_locks import source_id, state_directory

if TYPE_CHECKING:
    from pathlib import Path

    from shardfs.model.values import Version

log = logging.getLogger(__name__)


def fingerprint(raw: bytes) -> str:
    """Return a digest of 128 bits (MurmurHash3) as 32 hexadecimal digits."""
    return mmh3.mmh3_x64_128_digest(raw).hex()


def note(place: str, job: bytes, version: Version) -> None:
    """Note that a job has made the dataset in `place`, instead of any earlier job there.

    Without a note, a repeated job is an error. An OSError is only logged.

    Args:
        place: the path or URL of the dataset.
        job: identifies the job.
        version: that of a document of the dataset, so that the note is not about another dataset in the same place.
    """
    path = _path(place)
    try:
        with suppress(FileExistsError):
            path.parent.mkdir(parents=True, mode=0o700)
        _require_own(path)
        new = path.with_suffix(f".{os.getpid()}")
        new.write_bytes(_content(job, version))
        new.replace(path)
    except OSError as e:
        log.warning("cannot note that the job is finished, so that a repeated job would be an error: %s", e)


def is_noted(place: str, job: bytes, version: Version) -> bool:
    """Return whether this job has made the dataset in `place`. A note that another user could forge does not count."""
    with suppress(OSError):
        path = _path(place)
        _require_own(path)
        return path.read_bytes() == _content(job, version)
    return False


def _require_own(path: Path) -> None:
    for directory in path.parents[:2]:
        require_own_place(str(directory), "use chmod")


def _path(place: str) -> Path:
    return state_directory() / "finished" / f"{source_id(place).hex()}.json"


def _content(job: bytes, version: Version) -> bytes:
    return json.dumps({"job": fingerprint(job), "document": fingerprint(repr(version).encode())}).encode()
