"""Write the journal of this release: `python -m tests.golden.journal.write`, once per format, before it is released."""

from __future__ import annotations

import json
from pathlib import Path

import shardfs
from shardfs.write.journal import Journal, RecordKind
from tests.write.journals import content, open_journal


def main() -> None:
    directory = Path(__file__).parent / shardfs.__version__.partition(".dev")[0]
    journal = open_journal(directory)
    times = {"mtime_ns": 1_700_000_000_123_456_789, "mode": 0o644}
    journal.append(RecordKind.PUT, {"path": "a/c/0/0", "scratch": False, "base": [4096, 100], **times}, b"chunk")
    journal.append(RecordKind.DEL, {"path": "a/c/0/1", "base": None})
    journal.append(
        RecordKind.PUT, {"path": "a/c/0/2.\udcff.partial", "scratch": True, "base": "?", **times}, bytes(4096)
    )
    journal.append(
        RecordKind.MOVE, {"from": "a/c/0/2.\udcff.partial", "to": "a/c/0/2", "lsn": 3, "gone": False, "base": "?"}
    )
    journal.sync()
    journal.append(
        RecordKind.BEGIN, {"key": "a/c/0", "base": [1, 2], "temp": ".shardfs-1.tmp", "temp_ino": 7, "lsns": [1, 2]}
    )
    journal.append(RecordKind.DONE, {"key": "a/c/0", "lsns": [1, 2], "entries": {"a/c/0/0": [9, 9], "a/c/0/1": None}})
    journal.append(RecordKind.CONFLICT, {"path": "a/c/0/2", "lsn": 4, "why": "another writer"})
    journal.append(RecordKind.DROP, {"path": "a/c/0/2", "lsn": 4})
    journal.append(RecordKind.CLEAN, {})
    journal.close(clean=False)
    (directory / "lock").unlink()
    with Journal.peek(directory) as peek:
        told = [
            [record.lsn, record.kind.name, record.meta, None if data is None else data.hex()]
            for record, (*_, data) in zip(peek.recovered, content(peek), strict=True)
        ]
    (directory / "content.json").write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()
