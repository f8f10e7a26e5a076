"""T3: random sequences of what a file system is asked, compared after each step with a dictionary.

The model knows objects, names that lead to them, and open files; what of an object survives a crash (what it was at the
last close, fsync or rename); and what must be in the shards once all is published, which is read without shardfs.
It is asked in this process, or of a mount: `python -m tests.write.model DIRECTORY --examples N --steps N`.
"""

from __future__ import annotations

import argparse
import ctypes
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
from tests.write.steps import Steps
from tests.write.targets import TARGETS, Target, n5_blocks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from shardfs.model.blobs import Blob, Plan
    from shardfs.model.collection import Collection
    from shardfs.model.values import U64, Coords, Sizes
    from shardfs.shards.chunk_store import ChunkStore
    from shardfs.storage.store import Store

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

    maps: bool
    starts_programs: bool
    """To publish: what is open is closed once more in each of them, as FUSE has it."""

    def mount(self) -> None: ...
    def unmount(self) -> None:
        """All is published that can be."""

    def kill(self) -> None:
        """As `kill -9` does; whatever is open is closed without a further word."""

    def publish(self) -> None: ...
    def read(self, path: str) -> bytes | None: ...
    def size(self, path: str) -> int: ...
    def names(self, directory: str) -> Sequence[str]: ...
    def write(self, path: str, data: bytes, *, sync: bool) -> None: ...
    def unlink(self, path: str) -> None: ...
    def rename(self, old: str, new: str, *, noreplace: bool) -> None: ...
    def link(self, old: str, new: str) -> None: ...
    def truncate(self, path: str, size: int) -> None: ...
    def open(self, path: str, flags: int) -> int: ...
    def close(self, file: int) -> None: ...
    def pread(self, file: int, size: int) -> bytes: ...
    def pwrite(self, file: int, offset: int, data: bytes) -> int: ...
    def fsync(self, file: int) -> None: ...
    def length(self, file: int) -> int: ...
    def map_write(self, file: int, offset: int, data: bytes) -> None:
        """Through a shared mapping, to bytes that are there, and with `msync`."""


class InProcess:
    """The calls that FUSE would make."""

    maps = starts_programs = False

    def __init__(self, store: Path, top: Path) -> None:
        self._store, self._journal = store, top / "journal"
        self._journal.mkdir(mode=0o700)
        self._stack = ExitStack()
        self._numbers: dict[int, int] = {}

    def mount(self) -> None:
        self._files: TreeFiles = self._stack.enter_context(Whole().open(TARGET, self._store, self._journal))
        self._tree = self._files.tree
        self.publish, self.read, self.unlink, self.link = (
            self._files.publish,
            self._files.read,
            self._files.unlink,
            self._files.link,
        )

    def unmount(self) -> None:
        self._stack.close()

    def kill(self) -> None:
        self._files.die()
        self._stack.close()
        self._numbers.clear()

    def size(self, path: str) -> int:
        return self._tree.resolve(path).size

    def names(self, directory: str) -> list[str]:
        number = self._tree.resolve(directory).number
        return [os.fsdecode(name) for batch in self._tree.scan(number) for name in batch.names.tolist()]

    def write(self, path: str, data: bytes, *, sync: bool) -> None:
        self._files.write(path, data, sync=sync)

    def rename(self, old: str, new: str, *, noreplace: bool) -> None:
        names = (*self._files._parent(old, make=True), *self._files._parent(new, make=True))
        self._tree.rename(*names, noreplace=noreplace)

    def truncate(self, path: str, size: int) -> None:
        self._tree.truncate(self._tree.resolve(path).number, size, None)

    def open(self, path: str, flags: int) -> int:
        if flags & os.O_CREAT:
            parent, name = self._files._parent(path, make=True)
            attributes, file = self._tree.create(parent, name, flags, 0o644)
            number = attributes.number
        else:
            number = self._tree.resolve(path).number
            file = self._tree.open(number, flags)
        self._tree.remember(number)
        self._numbers[file] = number
        return file

    def close(self, file: int) -> None:
        self._tree.flush(file)
        self._tree.release(file)
        self._tree.forget(self._numbers.pop(file), 1)

    def pread(self, file: int, size: int) -> bytes:
        return bytes(self._tree.read(self._numbers[file], 0, size))

    def pwrite(self, file: int, offset: int, data: bytes) -> int:
        return self._tree.write(file, offset, data)

    def fsync(self, file: int) -> None:
        self._tree.fsync(file)

    def length(self, file: int) -> int:
        return self._tree.attributes(self._numbers[file]).size

    def map_write(self, file: int, offset: int, data: bytes) -> None:
        raise NotImplementedError


class OnMount:
    """What a program does. Nothing is published before it is asked for, or a shard complete."""

    maps = starts_programs = True

    def __init__(self, store: Path, top: Path) -> None:
        self._mount = WritableMount(store, top, "-o", "idle=1000000,age=1000000")
        self._files: set[int] = set()

    def mount(self) -> None:
        self._mount.mount()

    def unmount(self) -> None:
        run = self._mount.umount()
        assert run.returncode in (0, 3), run.stderr  # 3: there are orphans, or chunks of no bytes

    def kill(self) -> None:
        self._mount.kill()
        for file in self._files:
            with suppress(OSError):
                os.close(file)
        self._files.clear()
        self._mount.clear()

    def publish(self) -> None:
        run = self._mount.flush()
        assert run.returncode == 0, run.stderr

    def _path(self, path: str, *, make: bool = False) -> Path:
        full_path = self._mount.path / path
        if make:
            full_path.parent.mkdir(parents=True, exist_ok=True)
        return full_path

    def read(self, path: str) -> bytes | None:
        try:
            return self._path(path).read_bytes()
        except FileNotFoundError:
            return None

    def size(self, path: str) -> int:
        return self._path(path).stat().st_size

    def names(self, directory: str) -> list[str]:
        return os.listdir(self._path(directory))

    def write(self, path: str, data: bytes, *, sync: bool) -> None:
        half = len(data) // 2
        with self._path(path, make=True).open("wb", buffering=0) as file:
            file.write(data[:half])
            file.write(data[half:])
            if sync:
                os.fsync(file.fileno())

    def unlink(self, path: str) -> None:
        self._path(path).unlink()

    def rename(self, old: str, new: str, *, noreplace: bool) -> None:
        paths = [os.fsencode(self._path(path, make=True)) for path in (old, new)]
        if ctypes.CDLL(None, use_errno=True).renameat2(-100, paths[0], -100, paths[1], int(noreplace)):
            raise OSError(ctypes.get_errno(), old)

    def link(self, old: str, new: str) -> None:
        os.link(self._path(old), self._path(new, make=True))

    def truncate(self, path: str, size: int) -> None:
        os.truncate(self._path(path), size)

    def open(self, path: str, flags: int) -> int:
        file = os.open(self._path(path, make=bool(flags & os.O_CREAT)), flags, 0o644)
        self._files.add(file)
        return file

    def close(self, file: int) -> None:
        self._files.remove(file)
        os.close(file)

    def pread(self, file: int, size: int) -> bytes:
        return os.pread(file, size, 0)

    def pwrite(self, file: int, offset: int, data: bytes) -> int:
        return os.pwrite(file, data, offset)

    def fsync(self, file: int) -> None:
        os.fsync(file)

    def length(self, file: int) -> int:
        return os.fstat(file).st_size

    def map_write(self, file: int, offset: int, data: bytes) -> None:
        with mmap.mmap(file, offset + len(data)) as mapped:
            mapped[offset:] = data
            mapped.flush()


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
        return InProcess(self.store, self.top)

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
            self.asked.kill()
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
                self.asked.unlink(path)
            return
        self.asked.unlink(path)
        del self.names[path]

    @rule(old=paths, new=paths, noreplace=st.booleans())
    def rename(self, old: str, new: str, noreplace: bool) -> None:
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
                self.asked.link(old, new)
            return
        self.asked.link(old, new)
        source = self.names[old]
        source.kept = bytes(source.data)
        self.names[new] = Object(bytearray(source.data), bytes(source.data))

    @rule(path=paths, size=st.integers(0, 3000))
    def truncate(self, path: str, size: int) -> None:
        """By path, with no file open, perhaps."""
        if path not in self.names:
            return
        self.asked.truncate(path, size)
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
        assert self.asked.pwrite(handle.file, offset, data) == len(data)
        content = handle.object.data
        if len(content) < offset:
            _resize(content, offset)
        content[offset : offset + len(data)] = data

    @rule(handle=handles)
    def fsync(self, handle: Handle | None) -> None:
        if handle is not None and handle in self.open_handles and handle.writes:
            self.asked.fsync(handle.file)
            handle.object.kept = bytes(handle.object.data)

    @precondition(lambda self: self.asked.maps)
    @rule(handle=handles, offset=st.integers(0, 2000), data=st.binary(min_size=1, max_size=20))
    def map_write(self, handle: Handle | None, offset: int, data: bytes) -> None:
        if handle is None or handle not in self.open_handles or not handle.writes:
            return
        entry = handle.object
        if len(entry.data) >= offset + len(data):
            self.asked.map_write(handle.file, offset, data)
            entry.data[offset : offset + len(data)] = data
            entry.kept = bytes(entry.data)

    @rule(handle=consumes(handles))
    def close(self, handle: Handle | None) -> None:
        if handle is not None and handle in self.open_handles:
            self._close(handle)

    def _close(self, handle: Handle) -> None:
        self.asked.close(handle.file)
        self.open_handles.remove(handle)
        if handle.writes:
            handle.object.kept = bytes(handle.object.data)

    # ---- all of it ----

    @rule()
    def publish(self) -> None:
        self.asked.publish()
        for handle in self.open_handles:
            if handle.writes and self.asked.starts_programs:
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
        self.asked.kill()
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
                assert self.asked.size(path) == len(entry.data), path
        for handle in self.open_handles:
            size = self.asked.length(handle.file)
            assert size == len(handle.object.data)
            assert self.asked.pread(handle.file, size + 1) == bytes(handle.object.data)

    @invariant()
    def all_is_listed(self) -> None:
        wanted: dict[str, set[str]] = {}
        for path in self.names:
            directory, _, name = path.rpartition("/")
            wanted.setdefault(directory, set()).add(name)
        for directory in {path.rpartition("/")[0] for path in PATHS}:
            try:
                listed = self.asked.names(directory)
            except FileNotFoundError:
                assert directory not in wanted
                continue
            assert len(listed) == len(set(listed))
            assert set(listed) == wanted.get(directory, set()), directory
        assert self.asked.size("zarr.json") > 0


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
