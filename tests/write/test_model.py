"""T3: random sequences of what a file system is asked, compared after each step with a dictionary.

The model knows objects, names that lead to them, and open files; what of an object survives a crash (what it was at the
last close, fsync or rename); and what must be in the shards once all is published, which is read without shardfs.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from shardfs import rewriting
from shardfs.inodes import ROOT
from shardfs.store import LocalStore
from shardfs.writers.local import LocalWriter
from tests import data_n5
from tests.write.engines import BareFiles, TreeFiles, Whole
from tests.write.scale import times
from tests.write.targets import TARGETS, Target, n5_blocks

if TYPE_CHECKING:
    from shardfs.model import Blob, Collection, Plan

TARGET = TARGETS["zarr_end"]
NUMBERS = [0, 1, 4, 5, 2, 6]  # a whole shard, and half of another one
CHUNKS = {TARGET.path(number): number for number in NUMBERS}
SCRATCH = ["c/0/0.0123456789abcdef0123456789abcdef.partial", "c/1/1#1"]
ORPHAN = "c/0/7"
PATHS = [*CHUNKS, *SCRATCH, ORPHAN]

paths = st.sampled_from(PATHS)
chunk_paths = st.sampled_from(list(CHUNKS))
contents = st.one_of(
    st.integers(1, 60_000).map(TARGET.shown),
    st.binary(max_size=20),
    st.integers(1, 5000).map(lambda n: b"x" * n),
)


def stored_chunks(target: Target, root: Path) -> dict[int, bytes]:
    """What is in the shards."""
    out = {}
    index = data_n5.Index(fastest="last")
    for number, coords in enumerate(target.chunks):
        shard, local = zip(*(divmod(i, 2) for i in coords), strict=True)
        path = root / "c" / data_n5.key(shard)
        if path.exists():
            blocks = n5_blocks(path.read_bytes(), (2, 2), index)
            if local in blocks:
                out[number] = blocks[local]
    return out


@dataclass(eq=False)
class Object:
    """A file; `kept` is what survives a crash, None if nothing does."""

    data: bytearray
    kept: bytes | None


@dataclass(eq=False)
class Handle:
    """An open file."""

    number: int
    handle: int
    object: Object
    writes: bool


class WritingMachine(RuleBasedStateMachine):
    """One array in process, without FUSE."""

    handles = Bundle("handles")

    def __init__(self) -> None:
        super().__init__()
        base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self.top = Path(tempfile.mkdtemp(prefix="shardfs-model-", dir=base))
        self.store, self.journal = self.top / "store", self.top / "journal"
        self.store.mkdir()
        self.journal.mkdir(mode=0o700)
        TARGET.create(self.store)
        TARGET.fill(self.store, TARGET.array({number: 100 + number for number in (0, 1, 2)}))
        self.names = {TARGET.path(n): Object(bytearray(d), d) for n, d in stored_chunks(TARGET, self.store).items()}
        self.stored = stored_chunks(TARGET, self.store)
        self.open_handles: list[Handle] = []
        self.stack = ExitStack()
        self.mount()

    def mount(self) -> None:
        self.files: TreeFiles = self.stack.enter_context(Whole().open(TARGET, self.store, self.journal))
        self.tree = self.files.tree

    def teardown(self) -> None:
        with suppress(OSError):
            for handle in self.open_handles:
                self.tree.release(handle.handle)
            self.stack.close()
        shutil.rmtree(self.top, ignore_errors=True)

    # ---- whole files ----

    @rule(path=paths, data=contents, sync=st.booleans())
    def write(self, path: str, data: bytes, sync: bool) -> None:
        """Open with O_TRUNC, write, close."""
        self.files.write(path, data, sync=sync)
        known = self.names.setdefault(path, Object(bytearray(), None))
        known.data[:] = data
        known.kept = bytes(data)

    @rule(path=paths)
    def unlink(self, path: str) -> None:
        if path not in self.names:
            with pytest.raises(FileNotFoundError):
                self.files.unlink(path)
            return
        self.files.unlink(path)
        del self.names[path]

    @rule(old=paths, new=paths, noreplace=st.booleans())
    def rename(self, old: str, new: str, noreplace: bool) -> None:
        def call() -> None:
            there = (*self.files._parent(old, make=True), *self.files._parent(new, make=True))
            self.tree.rename(*there, noreplace=noreplace)

        if old not in self.names:
            with pytest.raises(FileNotFoundError):
                call()
        elif noreplace and new in self.names:
            with pytest.raises(FileExistsError):
                call()
        else:
            call()
            if old != new:
                moved = self.names[new] = self.names.pop(old)
                moved.kept = bytes(moved.data)

    @rule(old=paths, new=paths)
    def link(self, old: str, new: str) -> None:
        """A clone."""
        if old not in self.names:
            return
        if new in self.names:
            with pytest.raises(FileExistsError):
                self.files.link(old, new)
            return
        self.files.link(old, new)
        source = self.names[old]
        source.kept = bytes(source.data)
        self.names[new] = Object(bytearray(source.data), bytes(source.data))

    @rule(path=paths, size=st.integers(0, 3000))
    def truncate(self, path: str, size: int) -> None:
        """By path, with no file open, perhaps."""
        if path not in self.names:
            return
        self.tree.truncate(self.tree.resolve(path).number, size, None)
        known = self.names[path]
        _resize(known.data, size)
        if not any(h.object is known and h.writes for h in self.open_handles):
            known.kept = bytes(known.data)

    # ---- open files ----

    @rule(target=handles, path=paths, writes=st.booleans(), truncate=st.booleans())
    def open(self, path: str, writes: bool, truncate: bool) -> Handle | None:
        flags = os.O_RDWR | (os.O_TRUNC if truncate else 0) if writes else os.O_RDONLY
        if path in self.names:
            number = self.tree.resolve(path).number
            handle = self.tree.open(number, flags)
        elif writes:
            parent, name = self.files._parent(path, make=True)
            found, handle = self.tree.create(parent, name, flags | os.O_CREAT | os.O_EXCL, 0o644)
            number = found.number
            self.names[path] = Object(bytearray(), None)
        else:
            return None
        self.tree.remember(number)
        known = self.names[path]
        if writes and truncate:
            known.data.clear()
        opened = Handle(number, handle, known, writes)
        self.open_handles.append(opened)
        return opened

    @rule(handle=handles, offset=st.integers(0, 2000), data=contents)
    def pwrite(self, handle: Handle | None, offset: int, data: bytes) -> None:
        if handle is None or handle not in self.open_handles or not handle.writes or not data:
            return
        assert self.tree.write(handle.handle, offset, data) == len(data)
        known = handle.object.data
        if len(known) < offset:
            _resize(known, offset)
        known[offset : offset + len(data)] = data

    @rule(handle=handles)
    def fsync(self, handle: Handle | None) -> None:
        if handle is not None and handle in self.open_handles and handle.writes:
            self.tree.fsync(handle.handle)
            handle.object.kept = bytes(handle.object.data)

    @rule(handle=consumes(handles))
    def close(self, handle: Handle | None) -> None:
        if handle is not None and handle in self.open_handles:
            self._close(handle)

    def _close(self, handle: Handle) -> None:
        self.tree.flush(handle.handle)
        self.tree.release(handle.handle)
        self.tree.forget(handle.number, 1)
        self.open_handles.remove(handle)
        if handle.writes:
            handle.object.kept = bytes(handle.object.data)

    # ---- all of it ----

    @rule()
    def publish(self) -> None:
        self.files.publish()
        self._published()
        assert stored_chunks(TARGET, self.store) == self.stored

    def _published(self) -> None:
        """What is closed is in the shards, but for what is empty."""
        for path, number in CHUNKS.items():
            known = self.names.get(path)
            if known is None or known.kept is None:
                self.stored.pop(number, None)
            elif known.kept:
                self.stored[number] = known.kept

    @rule()
    def crash(self) -> None:
        """kill -9, and the next mount."""
        self.files.die()
        self.stack.close()
        self.open_handles.clear()
        for path, known in list(self.names.items()):
            if path in SCRATCH or known.kept is None:
                del self.names[path]
            else:
                known.data[:] = known.kept
        self.mount()

    @rule()
    def mount_anew(self) -> None:
        for handle in list(self.open_handles):
            self._close(handle)
        self.stack.close()
        self._published()
        for path in SCRATCH:
            self.names.pop(path, None)
        self.mount()

    @precondition(lambda self: not self.open_handles)
    @rule(token=st.integers(1, 60_000), number=st.sampled_from(NUMBERS))
    def write_natively(self, token: int, number: int) -> None:
        """Another program, while nothing is mounted; then all is packed."""
        self.mount_anew()
        self.stack.close()
        path = TARGET.path(number)
        if all(len(data) == len(TARGET.shown(1)) for data in self.stored.values()) and all(
            known.data for known in self.names.values()
        ):
            held = {n: int.from_bytes(d[:4], "little") for n, d in self.stored.items()}
            if all(TARGET.shown(t) == self.stored[n] for n, t in held.items()):
                TARGET.fill(self.store, TARGET.array({**held, number: token}))
                data = TARGET.shown(token)
                self.stored[number], self.names[path] = data, Object(bytearray(data), data)
        self._pack()
        assert stored_chunks(TARGET, self.store) == self.stored
        self.mount()

    def _pack(self) -> None:
        writer = LocalWriter(LocalStore(str(self.store)))
        collection = BareFiles(TARGET, self.store, self.top / "none")._collection
        for shard in range(4):
            key = f"c/{rewriting.key(collection, shard)}"
            if (self.store / key).exists():
                writer.update(key, partial(_packed, collection, shard))

    # ---- what must hold ----

    @invariant()
    def all_is_as_it_should_be(self) -> None:
        for path in PATHS:
            known = self.names.get(path)
            found = self.files.read(path)
            assert found == (None if known is None else bytes(known.data)), path
            if known is not None:
                assert self.tree.resolve(path).size == len(known.data), path
        for handle in self.open_handles:
            size = self.tree.attributes(handle.number).size
            assert size == len(handle.object.data)
            assert bytes(self.tree.read(handle.number, 0, size + 1)) == bytes(handle.object.data)

    @invariant()
    def all_is_listed(self) -> None:
        wanted: dict[str, set[str]] = {}
        for path in self.names:
            directory, _, name = path.rpartition("/")
            wanted.setdefault(directory, set()).add(name)
        for directory in {path.rpartition("/")[0] for path in PATHS}:
            try:
                number = self.tree.resolve(directory).number
            except FileNotFoundError:
                assert directory not in wanted
                continue
            listed = [os.fsdecode(name) for batch in self.tree.scan(number) for name in batch.names.tolist()]
            assert len(listed) == len(set(listed))
            assert set(listed) == wanted.get(directory, set()), directory
        assert self.tree.lookup(ROOT, b"zarr.json").size > 0


def _packed(collection: Collection, shard: int, old: Blob | None) -> Plan | None:
    return None if old is None else rewriting.repack(collection, shard, old)


def _resize(data: bytearray, size: int) -> None:
    del data[size:]
    data.extend(bytes(size - len(data)))


TestModel = pytest.mark.slow(pytest.mark.timeout(110 + 100 * times())(WritingMachine.TestCase))
TestModel.settings = settings(
    max_examples=60 * times(),
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=True,
)
