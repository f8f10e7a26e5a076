"""T17: whatever a journal, a shard or a document holds, reading and rewriting it ends in what is declared to come.

Checksums are made right again after most changes: what nobody seals is found out early. Each target has
SHARDFS_FUZZ_SECONDS.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from shardfs import recover, rewriting
from shardfs.create_rules import Rule
from shardfs.errors import CorruptShardError, UnfitChunkError, UnsupportedError
from shardfs.formats import format_of
from shardfs.journal.records import ALIGN, HEADER_SIZE, Kind, decode_head, encode_head, encode_meta
from tests import handmade
from tests.strategies import json_paths, json_values, replaced
from tests.suites.shard_format import MemoryBlob
from tests.write.bombs import PLAIN, SHARDED
from tests.write.journals import SOURCE, kill, open_journal
from tests.write.test_journal_damage import not_synced, of_two_mounts, peek, synced, wals
from tests.write.test_rewriting import precomputed, published, stored_chunk, zarr

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from shardfs.model import Collection, Coords

FUZZ_S = float(os.environ.get("SHARDFS_FUZZ_SECONDS", "60"))
EXAMPLES = 100

pytestmark = [pytest.mark.torture, pytest.mark.timeout(FUZZ_S + 300)]

Draw = st.DataObject


def fuzzed(target: Callable[[Draw], None]) -> None:
    """Call it again and again, with other data each time, until its time is over."""
    end, rounds = time.monotonic() + FUZZ_S, int.from_bytes(os.urandom(4))
    while time.monotonic() < end:
        rounds += 1
        how = settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=(Phase.generate, Phase.shrink),
        )
        seed(rounds)(how(given(st.data())(target)))()


def bent(draw: Draw, data: bytes) -> bytes:
    """The data with some of it changed, cut, doubled or gone."""
    out = bytearray(data)
    for _ in range(draw.draw(st.integers(1, 4))):
        at = draw.draw(st.integers(0, max(len(out) - 1, 0)))
        size = draw.draw(st.integers(0, 64))
        match draw.draw(st.sampled_from(("set", "cut", "double", "remove", "end"))):
            case "set":
                new = draw.draw(st.binary(min_size=1, max_size=16))
                out[at : at + len(new)] = new
            case "double":
                out[at:at] = out[at : at + size]
            case "remove":
                del out[at : at + size]
            case "cut":
                out[at : at + size] = bytes(len(out[at : at + size]))
            case "end":
                del out[at:]
    return bytes(out)


# ---- journals ----


@cache
def _journals() -> list[dict[str, bytes]]:
    found = []
    for make in (not_synced, synced, of_two_mounts):
        with TemporaryDirectory() as top:
            make(Path(top, "j"))
            found.append({path.name: path.read_bytes().rstrip(b"\0") for path in wals(Path(top, "j"))})
    return found


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
    "kind": st.sampled_from([*map(int, Kind), 0, 99, 255]),
    "data_size": _U64,
    "sequence": _U64,
    "lsn": _U64,
    "durable": _U64,
    "oldest": _U64,
    "data_crc": st.integers(0, 2**32 - 1),
}


@pytest.mark.parametrize("sealed", [True, False], ids=["sealed", "bent"])
def test_journals(sealed: bool) -> None:
    """They can be looked at, exported and opened again, and then nothing new is lost."""

    def target(draw: Draw) -> None:
        files = dict(draw.draw(st.sampled_from(_journals())))
        name = draw.draw(st.sampled_from(sorted(files)))
        files[name] = (_with_another_record if sealed else bent)(draw, files[name])
        with TemporaryDirectory() as top:
            directory = Path(top, "j")
            directory.mkdir(mode=0o700)
            for file, data in files.items():
                (directory / file).write_bytes(data)
            with suppress(UnsupportedError):
                before, _, _ = peek(directory)
                recover.look(directory)
                with suppress(OSError):
                    recover.export(directory, Path(top, "out"))
                journal = open_journal(directory, SOURCE)
                found = [(r.lsn, r.kind) for r in journal.recovered]
                kill(journal)
                assert found == [(lsn, kind) for lsn, kind, _, _ in before]
            shutil.rmtree(directory)

    fuzzed(target)


# ---- shards ----

_ZARR = zarr((4, 4), (4, 4), (2, 2))
_START = zarr((4, 4), (4, 4), (2, 2), location="start")
_IDS = precomputed(handmade.volume_info((4, 4, 2), (2, 2, 1), handmade.sharding(minishard=1, index="raw", data="raw")))
_NUMBER = st.integers(0, 80) | st.sampled_from((2**32, 2**40, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1))


def _zarr_shard(draw: Draw, location: handmade.Location) -> bytes:
    entries = draw.draw(st.dictionaries(st.integers(0, 3), st.tuples(_NUMBER, _NUMBER)))
    return handmade.zarr_shard([b"0000", b"11", b"222222", None], location=location, entries=entries)


def _ids_shard(draw: Draw) -> bytes:
    """Numbers anywhere in both indices of a sound shard."""
    made = published(_IDS, None, {(0, 0, 0): b"0000", (1, 1, 0): b"1111", (0, 1, 1): b"2222"})
    assert made is not None
    shard = bytearray(made)
    for at, number in draw.draw(
        st.dictionaries(st.integers(0, len(shard) // 8 - 1), _NUMBER | _NUMBER.map(lambda n: -n % 2**64))
    ).items():
        shard[8 * at : 8 * at + 8] = number.to_bytes(8, "little")
    return bytes(shard)


def _chunk(collection: Collection, shard: bytes, coords: Coords) -> bytes | None:
    """None if there is none, or none that can be read."""
    try:
        entry = rewriting.entry(collection, MemoryBlob(shard), coords)
    except CorruptShardError:
        return None
    if entry is None or sum(entry) > len(shard):
        return None
    return stored_chunk(collection, shard, coords)


_TARGETS: dict[str, tuple[Collection, Callable[[Draw], bytes], list[Coords]]] = {
    "end": (_ZARR, lambda draw: _zarr_shard(draw, "end"), [(i, j) for i in range(2) for j in range(2)]),
    "start": (_START, lambda draw: _zarr_shard(draw, "start"), [(i, j) for i in range(2) for j in range(2)]),
    "ids": (_IDS, _ids_shard, [(i, j, k) for i in range(2) for j in range(2) for k in range(2)]),
}


@pytest.mark.parametrize("kind", sorted(_TARGETS))
def test_shards(kind: str) -> None:
    """A rewrite is refused, or all that could be read before can be read afterwards and is the same."""
    collection, make, cells = _TARGETS[kind]

    def target(draw: Draw) -> None:
        old = make(draw)
        if draw.draw(st.integers(0, 9)) == 0:
            old = bent(draw, old)
        puts = draw.draw(st.dictionaries(st.sampled_from(cells), st.binary(min_size=4, max_size=4), max_size=3))
        drops = {c for c in draw.draw(st.sets(st.sampled_from(cells), max_size=2)) if c not in puts}
        if not puts and not drops:
            return
        before = {c: _chunk(collection, old, c) for c in cells}
        for pack in (False, True):
            try:
                new = published(collection, old, puts, drops, pack=pack)
            except (CorruptShardError, UnfitChunkError, UnsupportedError):
                continue
            kept = {c: data for c, data in before.items() if data is not None and c not in puts and c not in drops}
            if new is None:
                assert not puts
                assert not kept
                continue
            found = {c: _chunk(collection, new, c) for c in cells}
            assert {c: found[c] for c in kept} == kept
            assert {c: found[c] for c in puts} == puts
            assert {found[c] for c in drops} <= {None}
        with suppress(CorruptShardError):
            usage = rewriting.usage(collection, 0, MemoryBlob(old))
            assert 0 <= usage.dead <= usage.size == len(old)
        with suppress(CorruptShardError, UnsupportedError):
            rewriting.repack(collection, 0, MemoryBlob(old))

    fuzzed(target)


# ---- documents ----

_FORMATS = {"zarr": "zarr3", "volume": "precomputed", "n5": "n5"}


@pytest.mark.parametrize("kind", sorted(_FORMATS))
def test_documents(kind: str) -> None:
    """One that is written is refused with ValueError, or what comes of it can be opened, edited and shown."""
    form = format_of(_FORMATS[kind])
    name, sharded = SHARDED[kind]
    opened = form.open("a", {name: json.dumps(sharded).encode()})
    assert opened is not None
    shown = json.loads(opened.documents[name])

    def target(draw: Draw) -> None:
        document = draw.draw(st.sampled_from((shown, PLAIN[kind][1], sharded)))
        for _ in range(draw.draw(st.integers(0, 3))):
            paths = json_paths(document)
            if not paths:
                break
            document = replaced(document, draw.draw(st.sampled_from(paths)), draw.draw(json_values))
        raw = json.dumps(document).encode()
        if draw.draw(st.integers(0, 4)) == 0:
            raw = bent(draw, raw)
        stored = {name: json.dumps(sharded).encode()}
        makers: list[Callable[[], Mapping[str, bytes] | None]] = [
            lambda: form.edit("a", stored, name, raw),
            lambda: form.edit("a", {}, name, raw),
            lambda: form.shard("a", name, raw, Rule(_FORMATS[kind])),
        ]
        for make in makers:
            try:
                documents = make()
            except (ValueError, UnsupportedError):
                continue
            if documents is not None:
                with suppress(CorruptShardError):
                    form.open("a", documents)
        with suppress(ValueError):
            form.references("a", name, raw)
        again = form.sharding({name: raw})
        if again is not None:
            with suppress(ValueError):
                form.shard("a", name, json.dumps(PLAIN[kind][1]).encode(), again)

    fuzzed(target)
