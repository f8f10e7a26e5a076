"""Journals can be looked at, exported and opened again, and then nothing new is lost."""

from __future__ import annotations

import shutil
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hypothesis import strategies as st

from shardfs.model.errors import UnsupportedError
from shardfs.write import recover
from shardfs.write.journal.records import ALIGN, HEADER_SIZE, RecordKind, decode_head, encode_head, encode_meta
from tests.fuzzing.inputs import Draw, bent
from tests.strategies import json_values
from tests.write.journals import SOURCE, kill, open_journal
from tests.write.test_journal_damage import not_synced, of_two_mounts, peek, synced, wals


def damaged(draw: Draw) -> None:
    """Most changes are sealed: what nobody seals is found out early."""
    files = dict(draw.draw(st.sampled_from(_journals())))
    name = draw.draw(st.sampled_from(sorted(files)))
    files[name] = (bent if draw.draw(st.integers(0, 2)) == 2 else _with_another_record)(draw, files[name])
    with TemporaryDirectory() as top:
        directory = Path(top, "j")
        directory.mkdir(mode=0o700)
        for file, data in files.items():
            (directory / file).write_bytes(data)
        with suppress(UnsupportedError):
            before, _, _ = peek(directory)
            recover.read(directory)
            with suppress(OSError):
                recover.export(directory, Path(top, "out"))
            journal = open_journal(directory, SOURCE)
            records = [(r.lsn, r.kind) for r in journal.recovered]
            kill(journal)
            assert records == [(lsn, kind) for lsn, kind, _, _ in before]
        shutil.rmtree(directory)


@cache
def _journals() -> list[dict[str, bytes]]:
    journals = []
    for make in (not_synced, synced, of_two_mounts):
        with TemporaryDirectory() as top:
            make(Path(top, "j"))
            journals.append({path.name: path.read_bytes().rstrip(b"\0") for path in wals(Path(top, "j"))})
    return journals


def _with_another_record(draw: Draw, data: bytes) -> bytes:
    """One head says something else, and its checksum is right."""
    heads = [at for at in range(HEADER_SIZE, len(data), ALIGN) if decode_head(data[at : at + 128]) is not None]
    if not heads:
        return data
    at = draw.draw(st.sampled_from(heads))
    head = decode_head(data[at : at + 128])
    assert head is not None
    meta = draw.draw(st.dictionaries(st.sampled_from(_MEMBERS), json_values | st.text(max_size=8)))
    fields = draw.draw(st.fixed_dictionaries({}, optional=_FIELDS))
    sealed = encode_meta(meta)
    raw = encode_head(head._replace(**{"meta_size": len(sealed), **fields}), sealed)
    return data[:at] + raw + data[at + len(raw) :]


_MEMBERS = (
    "path",
    "from",
    "to",
    "lsn",
    "lsns",
    "base",
    "entries",
    "key",
    "temp",
    "temp_ino",
    "mtime_ns",
    "mode",
    "why",
)
_U64 = st.integers(0, 9) | st.sampled_from((2**31, 2**32, 2**62, 2**63 - 1, 2**63, 2**64 - 1))
_FIELDS: dict[str, Any] = {
    "kind": st.sampled_from([*map(int, RecordKind), 0, 99, 255]),
    "data_size": _U64,
    "sequence": _U64,
    "lsn": _U64,
    "durable": _U64,
    "oldest": _U64,
    "data_crc": st.integers(0, 2**32 - 1),
}
