"""T3: random sequences of what a file system is asked, compared after each step with a dictionary.

The model knows objects, names that lead to them, and open files; what of an object survives a crash (what it was at the
last close, fsync or rename); and what must be in the shards once all is published, which is read without shardfs.
It is asked in this process, or of a mount: `python -m tests.write.model DIRECTORY --examples N --steps N`.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import sys
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from shardfs.shards import rewriting
from shardfs.shards.open_chunks import open_chunks
from shardfs.shards.rewriting import StoredShard
from shardfs.storage.local import LocalStore
from shardfs.storage.writers.local import LocalWriter
from shardfs.vfs import chunk_trees
from shardfs.vfs.chunk_dirs import ChunkDirs
from shardfs.vfs.tree import open_tree
from tests import data_n5
from tests.write.engines import TreeFiles, Whole
from tests.write.mounts import WritableMount
from tests.write.scale import times
from tests.write.semantics.calls import InProcess, renameat2
from tests.write.steps import Steps
from tests.write.targets import TARGETS, Target, n5_blocks

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardfs.model.blobs import Blob, Plan
    from shardfs.model.collection import Collection
    from shardfs.model.values import U64, Coords, Sizes
    from shardfs.shards.chunk_store import ChunkStore
    from shardfs.storage.store import Store
    from tests.write.semantics.calls import Calls

TARGET = TARGETS["zarr_end"]
NUMBERS = [0, 1, 4, 5, 2, 6]  # a whole shard, and half of another one
CHUNKS = {TARGET.path(number): number for number in NUMBERS}
LOCK = f"{TARGET.path(0)}.__lock"
SCRATCH = ["c/0/0.0123456789abcdef0123456789abcdef.partial", "c/1/1#1", LOCK]
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


# ------------------------------------------------------------------------------------------------------- who is asked


class Asked(Protocol):
    """The calls of a file system, and how it comes and goes. Errors are OSError."""

    calls: Calls
    is_mount: ClassVar[bool]
    """It can be mapped, and to publish it starts programs: what is open is closed once more in each of them."""

    def mount(self) -> None: ...
    def unmount(self) -> None:
        """All is published that can be."""

    def kill(self, files: Iterable[int]) -> None:
        """As `kill -9` does; these open files are closed without a further word."""

    def publish(self) -> None: ...
    def rename(self, old: str, new: str, *, noreplace: bool) -> None: ...

    def open(self, path: str, flags: int) -> int:
        """With the directories on the way to a new file."""
        if flags & os.O_CREAT:
            self.make_parents(path)
        return self.calls.open(path, flags, 0o644)

    def make_parents(self, path: str) -> None:
        parts = path.split("/")
        for n in range(1, len(parts)):
            with suppress(FileExistsError):
                self.calls.mkdir("/".join(parts[:n]), 0o755)

    def read(self, path: str) -> bytes | None:
        try:
            file = self.calls.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return None
        try:
            return self.calls.pread(file, 1 << 20, 0)
        finally:
            self.calls.close(file)

    def write(self, path: str, data: bytes, *, sync: bool) -> None:
        half = len(data) // 2
        file = self.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            self.calls.write(file, data[:half])
            self.calls.write(file, data[half:])
            if sync:
                self.calls.fsync(file)
        finally:
            self.calls.close(file)


class OnTree(Asked):
    """A tree in this process."""

    is_mount = False

    def __init__(self, store: Path, top: Path) -> None:
        self._store, self._journal = store, top / "journal"
        self._journal.mkdir(mode=0o700)
        self._stack = ExitStack()

    def mount(self) -> None:
        self._files: TreeFiles = self._stack.enter_context(Whole().open(TARGET, self._store, self._journal))
        self.calls: InProcess = InProcess(self._files.tree, forgets=True)

    def unmount(self) -> None:
        self._stack.close()

    def kill(self, files: Iterable[int]) -> None:
        self._files.die()
        self._stack.close()

    def publish(self) -> None:
        self._files.publish()

    def rename(self, old: str, new: str, *, noreplace: bool) -> None:
        self.calls.rename(old, new, noreplace=noreplace)


class OnMount(Asked):
    """A mount, which is the working directory. Nothing is published before it is asked for, or a shard complete."""

    is_mount = True
    calls = os

    def __init__(self, store: Path, top: Path) -> None:
        self._mount = WritableMount(store, top, "-o", "idle=1000000,age=1000000")

    def mount(self) -> None:
        self._mount.mount()
        os.chdir(self._mount.path)

    def unmount(self) -> None:
        os.chdir("/")
        run = self._mount.umount()
        assert run.returncode in (0, 3), run.stderr  # 3: there are orphans, or chunks of no bytes

    def kill(self, files: Iterable[int]) -> None:
        os.chdir("/")
        self._mount.kill()
        for file in files:
            with suppress(OSError):
                os.close(file)
        self._mount.clear()

    def publish(self) -> None:
        run = self._mount.flush()
        assert run.returncode == 0, run.stderr

    def rename(self, old: str, new: str, *, noreplace: bool) -> None:
        renameat2(old, new, int(noreplace))


# ---------------------------------------------------------------------------------------------------------- the model


@dataclass(eq=False)
class Object:
    """A file; `kept` is what survives a crash, None if nothing does."""

    data: bytearray
    kept: bytes | None


@dataclass(eq=False)
class Handle:
    """An open file."""

    file: int
    object: Object
    writes: bool


class WritingMachine(RuleBasedStateMachine):
    """One array."""

    handles = Bundle("handles")
    least_steps: ClassVar[int] = 0
    """Between mounts."""
    initial: ClassVar[tuple[int, ...]] = (0, 1, 2)
    """The chunks that are there at first."""
    place: ClassVar[Path | None] = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None

    def __init__(self) -> None:
        super().__init__()
        self.top = Path(tempfile.mkdtemp(prefix="shardfs-model-", dir=self.place))
        self.store = self.top / "store"
        self.store.mkdir()
        TARGET.create(self.store)
        TARGET.fill(self.store, TARGET.array({number: 100 + number for number in self.initial}))
        self.stored = self.in_shards()
        self.names = {TARGET.path(n): Object(bytearray(d), d) for n, d in self.stored.items()}
        self.open_handles: list[Handle] = []
        self.asked = self.ask()
        self.mount()

    def ask(self) -> Asked:
        return OnTree(self.store, self.top)

    def in_shards(self) -> dict[int, bytes]:
        """The chunks in the shards, as they are shown."""
        return stored_chunks(TARGET, self.store)

    def mount(self) -> None:
        self.asked.mount()
        self.steps = 0

    def rested(self) -> bool:
        """Whether it may be mounted again."""
        return self.steps > self.least_steps

    def teardown(self) -> None:
        with suppress(OSError):
            self.asked.kill(handle.file for handle in self.open_handles)
        shutil.rmtree(self.top, ignore_errors=True)

    # ---- whole files ----

    @rule(path=paths, data=contents, sync=st.booleans())
    def write(self, path: str, data: bytes, sync: bool) -> None:
        """Open with O_TRUNC, write, close."""
        self.asked.write(path, data, sync=sync)
        entry = self.names.setdefault(path, Object(bytearray(), None))
        entry.data[:] = data
        entry.kept = bytes(data)

    @rule(path=paths)
    def unlink(self, path: str) -> None:
        if path not in self.names:
            with pytest.raises(FileNotFoundError):
                self.asked.calls.unlink(path)
            return
        self.asked.calls.unlink(path)
        del self.names[path]

    @rule(old=paths, new=paths, noreplace=st.booleans())
    def rename(self, old: str, new: str, noreplace: bool) -> None:
        self.asked.make_parents(new)
        call = partial(self.asked.rename, old, new, noreplace=noreplace)
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
                self.asked.calls.link(old, new)
            return
        self.asked.make_parents(new)
        self.asked.calls.link(old, new)
        source = self.names[old]
        source.kept = bytes(source.data)
        self.names[new] = Object(bytearray(source.data), bytes(source.data))

    @rule(path=paths, size=st.integers(0, 3000))
    def truncate(self, path: str, size: int) -> None:
        """By path, with no file open, perhaps."""
        if path not in self.names:
            return
        self.asked.calls.truncate(path, size)
        entry = self.names[path]
        _resize(entry.data, size)
        if not any(h.object is entry and h.writes for h in self.open_handles):
            entry.kept = bytes(entry.data)

    # ---- open files ----

    @rule(target=handles, path=paths, writes=st.booleans(), truncate=st.booleans())
    def open(self, path: str, writes: bool, truncate: bool) -> Handle | None:
        flags = os.O_RDWR | (os.O_TRUNC if truncate else 0) if writes else os.O_RDONLY
        if path in self.names:
            file = self.asked.open(path, flags)
        elif writes:
            file = self.asked.open(path, flags | os.O_CREAT | os.O_EXCL)
            self.names[path] = Object(bytearray(), None)
        else:
            return None
        entry = self.names[path]
        if writes and truncate:
            entry.data.clear()
        opened = Handle(file, entry, writes)
        self.open_handles.append(opened)
        return opened

    @rule(handle=handles, offset=st.integers(0, 2000), data=contents)
    def pwrite(self, handle: Handle | None, offset: int, data: bytes) -> None:
        if handle is None or handle not in self.open_handles or not handle.writes or not data:
            return
        assert self.asked.calls.pwrite(handle.file, data, offset) == len(data)
        content = handle.object.data
        if len(content) < offset:
            _resize(content, offset)
        content[offset : offset + len(data)] = data

    @rule(handle=handles)
    def fsync(self, handle: Handle | None) -> None:
        if handle is not None and handle in self.open_handles and handle.writes:
            self.asked.calls.fsync(handle.file)
            handle.object.kept = bytes(handle.object.data)

    @precondition(lambda self: self.asked.is_mount)
    @rule(handle=handles, offset=st.integers(0, 2000), data=st.binary(min_size=1, max_size=20))
    def map_write(self, handle: Handle | None, offset: int, data: bytes) -> None:
        if handle is None or handle not in self.open_handles or not handle.writes:
            return
        entry = handle.object
        if len(entry.data) >= offset + len(data):
            with mmap.mmap(handle.file, offset + len(data)) as mapped:
                mapped[offset:] = data
                mapped.flush()
            entry.data[offset : offset + len(data)] = data
            entry.kept = bytes(entry.data)

    @rule(handle=consumes(handles))
    def close(self, handle: Handle | None) -> None:
        if handle is not None and handle in self.open_handles:
            self._close(handle)

    def _close(self, handle: Handle) -> None:
        self.asked.calls.close(handle.file)
        self.open_handles.remove(handle)
        if handle.writes:
            handle.object.kept = bytes(handle.object.data)

    # ---- all of it ----

    @rule()
    def publish(self) -> None:
        self.asked.publish()
        for handle in self.open_handles:
            if handle.writes and self.asked.is_mount:
                handle.object.kept = bytes(handle.object.data)
        self._published()
        assert self.in_shards() == self.stored

    def _published(self) -> None:
        """What is closed is in the shards, but for what is empty."""
        for path, number in CHUNKS.items():
            entry = self.names.get(path)
            if entry is None or entry.kept is None:
                self.stored.pop(number, None)
            elif entry.kept:
                self.stored[number] = entry.kept

    @precondition(rested)
    @rule()
    def crash(self) -> None:
        """kill -9, and the next mount."""
        self.asked.kill(handle.file for handle in self.open_handles)
        self.open_handles.clear()
        for path, entry in list(self.names.items()):
            if path in SCRATCH or entry.kept is None:
                del self.names[path]
            else:
                entry.data[:] = entry.kept
        self.mount()

    @precondition(rested)
    @rule()
    def mount_anew(self) -> None:
        self._unmount()
        self.mount()

    def _unmount(self) -> None:
        for handle in list(self.open_handles):
            self._close(handle)
        self.asked.unmount()
        self._published()
        for path in SCRATCH:
            self.names.pop(path, None)

    @precondition(lambda self: self.rested() and not self.open_handles)
    @rule(token=st.integers(1, 60_000), number=st.sampled_from(NUMBERS))
    def write_natively(self, token: int, number: int) -> None:
        """Another program, while nothing is mounted; then all is packed."""
        self._unmount()
        path = TARGET.path(number)
        if all(len(data) == len(TARGET.shown(1)) for data in self.stored.values()) and all(
            known.data for known in self.names.values()
        ):
            tokens = {n: int.from_bytes(d[:4], "little") for n, d in self.stored.items()}
            if all(TARGET.shown(t) == self.stored[n] for n, t in tokens.items()):
                TARGET.fill(self.store, TARGET.array({**tokens, number: token}))
                data = TARGET.shown(token)
                self.stored[number], self.names[path] = data, Object(bytearray(data), data)
        self._pack()
        assert self.in_shards() == self.stored
        self.mount()

    def _pack(self) -> None:
        writer = LocalWriter(LocalStore(str(self.store)))
        (sharded,) = open_tree(str(self.store)).collections()
        collection = sharded.collection
        for shard in range(4):
            key = f"c/{rewriting.key(collection, shard)}"
            if (self.store / key).exists():
                writer.update(key, Steps(partial(_packed, collection, shard)))

    # ---- what must hold ----

    @invariant()
    def all_is_as_it_should_be(self) -> None:
        self.steps += 1
        for path in PATHS:
            entry = self.names.get(path)
            values = self.asked.read(path)
            assert values == (None if entry is None else bytes(entry.data)), path
            if entry is not None:
                assert self.asked.calls.lstat(path).st_size == len(entry.data), path
        for handle in self.open_handles:
            size = self.asked.calls.fstat(handle.file).st_size
            assert size == len(handle.object.data)
            assert self.asked.calls.pread(handle.file, size + 1, 0) == bytes(handle.object.data)

    @invariant()
    def all_is_listed(self) -> None:
        wanted: dict[str, set[str]] = {}
        for path in self.names:
            directory, _, name = path.rpartition("/")
            wanted.setdefault(directory, set()).add(name)
        for directory in {path.rpartition("/")[0] for path in PATHS}:
            try:
                listed = self.asked.calls.listdir(directory)
            except FileNotFoundError:
                assert directory not in wanted
                continue
            assert len(listed) == len(set(listed))
            assert set(listed) == wanted.get(directory, set()), directory
        assert self.asked.calls.lstat("zarr.json").st_size > 0


def _packed(collection: Collection, shard: int, old: Blob | None) -> Plan | None:
    return None if old is None else StoredShard(collection, shard, old).repack()


def _resize(data: bytearray, size: int) -> None:
    del data[size:]
    data.extend(bytes(size - len(data)))


# ------------------------------------------------------------------------------------------------------------ a mount


def told(examples: int, steps: int, *, is_repeatable: bool = False) -> settings:
    """`same`: always the same examples, and the first that fails is told as it is."""
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        derandomize=is_repeatable,
        database=None,
        phases=(Phase.generate,) if is_repeatable else (Phase.generate, Phase.shrink),
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )


class MountedMachine(WritingMachine):
    """... on a mount, and seldom on a new one: that takes a second."""

    least_steps = 8

    def ask(self) -> Asked:
        return OnMount(self.store, self.top)


class Turned:
    """A `Transform` that stores chunks backwards, with a byte more. Any bytes are a chunk."""

    name, unwritable = "turned", None

    def sizes(self, coords: U64, source_bytes: Sizes) -> Sizes:
        """Half of the chunks must be decoded for it."""
        return np.where(coords.sum(axis=1) % 2 == 1, source_bytes - 1, -1)

    def show(self, coords: Coords, source_bytes: bytes) -> bytes:
        return source_bytes[-2::-1]

    def work(self, coords: Coords, source_bytes: int) -> int:
        return source_bytes

    def store(self, coords: Coords, view_bytes: bytes) -> bytes:
        return view_bytes[::-1] + b"~"

    def is_exact(self, coords: Coords, view_bytes: bytes) -> bool:
        return len(view_bytes) % 2 == 1


class TurnedMachine(WritingMachine):
    """... whose chunks are not stored as they are shown, as through a layout."""

    initial = ()

    def ask(self) -> Asked:
        def directories(path: str, collection: Collection, *more: Any, **named: Any) -> ChunkDirs:
            return ChunkDirs(path, replace(collection, transform=Turned()), *more, **named)

        def chunks(store: Store, directory: str, path: str, collection: Collection, *more: Any) -> ChunkStore:
            return open_chunks(store, directory, path, replace(collection, transform=Turned()), *more)

        self._patch = mock.patch.multiple(chunk_trees, ChunkDirs=directories, open_chunks=chunks)
        self._patch.start()
        return super().ask()

    def in_shards(self) -> dict[int, bytes]:
        return {n: Turned().show((), data) for n, data in super().in_shards().items()}

    def teardown(self) -> None:
        self._patch.stop()
        super().teardown()

    @precondition(lambda self: False)
    @rule()
    def write_natively(self) -> None:
        """No program writes such chunks."""


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("directory", type=Path)
    parser.add_argument("--examples", type=int, default=100)
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args(arguments)
    MountedMachine.place = options.directory
    run_state_machine_as_test(
        MountedMachine, settings=told(options.examples, options.steps, is_repeatable=times() == 1)
    )


if __name__ == "__main__":
    main(sys.argv[1:])
