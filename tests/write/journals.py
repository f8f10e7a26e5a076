"""Journals for tests: opened quickly, and left as a killed process would leave them."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

from google_crc32c import value as crc32c

from shardfs.write.journal import Journal, RecordKind
from shardfs.write.journal.records import HEADER_SIZE

if TYPE_CHECKING:
    from pathlib import Path

    from shardfs.write.journal import Reading, Record

SOURCE = "memory://source"
MiB = 1 << 20


def open_journal(directory: Path, source: str = SOURCE, **options: Any) -> Journal:
    options = {"limit_bytes": 64 * MiB, "segment_bytes": MiB, "commit_s": 0, **options}
    return Journal.open(directory, source, **options)


def kill(journal: Journal) -> None:
    """As the kernel does for a process that is killed: descriptors are closed, and so locks freed; nothing else."""
    journal._stop.set()
    if journal._committer.is_alive():
        journal._committer.join()
    journal._close_files()


def make_newer(segment: Path) -> None:
    """As if a later version of shardfs had written it."""
    header = bytearray(segment.read_bytes()[:HEADER_SIZE])
    header[16:18] = struct.pack("<H", 2)
    header[-4:] = struct.pack("<I", crc32c(bytes(header[:-4])))
    with open(segment, "r+b") as file:
        file.write(header)


def put(journal: Journal, path: str, data: bytes = b"data") -> Record:
    return journal.append(
        RecordKind.PUT, {"path": path, "mtime_ns": 1, "mode": 0o644, "scratch": False, "base": None}, data
    )


def content(journal: Journal | Reading) -> list[tuple[int, RecordKind, str, bytes | None]]:
    return [
        (r.lsn, r.kind, r.meta.get("path", ""), None if r.data is None else journal.read(r.data))
        for r in journal.recovered
    ]
