"""What may be left of files after a power loss, by a model: which calls count when nobody has synced them.

The model is the one of POSIX and no better, a superset of what ext4 and XFS do: until a file's fsync any of its writes
may be missing, whole or by sectors, while its length may be there; until a directory's fsync names may be missing. Only
the order of changes within one directory is kept, and a rename is done or not done. fsync of a file does not make its
name last.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import random
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from shardfs.model.kinds import LOCK_ENDING
from shardfs.storage.writers.lock_file import OWN_MODE
from tests.write.faults import Args, Calls, Function

SECTOR = 512
SYNCS = frozenset({"fsync", "fdatasync", "fsync_directory"})

Place = tuple[int, str]
"""A name: the directory's number, and what it is called there."""


class Write(NamedTuple):
    """Bytes of a file; `data` None: it is cut or extended to `at` bytes. `mtime_ns`: of the file from then on."""

    file: int
    at: int
    data: bytes | None
    mtime_ns: int = 0


class Names(NamedTuple):
    """A change of names, done as a whole: each place leads to a number from then on, or nowhere (None)."""

    places: tuple[tuple[Place, int | None], ...]


class Sync(NamedTuple):
    """Of a file or a directory. One that has failed makes nothing last, nor does another one make that which this one
    should have: the kernel takes the pages for clean."""

    number: int
    failed: bool = False


class Mark(NamedTuple):
    """Something noted in between: the log's line."""

    line: str


Event = Write | Names | Sync | Mark


class Recorder(Calls):
    """Notes what calls do to the files below `roots`, as events in the order in which they were done.

    Calls of several threads are done one after the other meanwhile.

    Args:
        failing: whether the call of this number and name fails with EIO, if it is an fsync.
    """

    def __init__(self, roots: Sequence[Path], *, failing: Callable[[int, str], bool] = lambda n, name: False) -> None:
        super().__init__()
        self.events: list[Event] = []
        self._failing = failing
        self.inodes: dict[int, int] = {}
        self._order = threading.RLock()
        self._numbers: dict[tuple[int, int], int] = {}
        self._next = 0
        self.roots = {str(root): self._known(os.stat(root)) for root in roots}
        self.start = Disk()
        for root in roots:
            self._take(root)

    # ---- what was there before ----

    def _take(self, directory: Path) -> None:
        number = self._known(os.stat(directory))
        self.start.directories.add(number)
        for entry in os.scandir(directory):
            child = self._known(entry.stat(follow_symlinks=False))
            self.start.names[number, entry.name] = child
            if entry.is_dir(follow_symlinks=False):
                self._take(Path(entry.path))
            else:
                data = bytearray(Path(entry.path).read_bytes())
                self.start.files[child] = File(data, mtime_ns=entry.stat(follow_symlinks=False).st_mtime_ns)

    def _known(self, info: os.stat_result) -> int:
        key = info.st_dev, info.st_ino
        if key not in self._numbers:
            self._numbers[key] = self._next
            self.inodes[self._next] = info.st_ino
            self._next += 1
        return self._numbers[key]

    def _new(self, info: os.stat_result) -> int:
        """Of a file that was just made: its inode number may have been another's before."""
        self._numbers.pop((info.st_dev, info.st_ino), None)
        return self._known(info)

    # ---- events ----

    def mark(self, line: str) -> None:
        with self._order:
            self.events.append(Mark(line))

    def do(self, number: int, name: str, function: Function, args: Args) -> Any:
        with self._order:
            if name in SYNCS and self._failing(number, name):
                self.events.append(Sync(self._number(args[0]), failed=True))
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            handler: Callable[[Function, Args], Any] | None = getattr(self, f"_do_{name}", None)
            return function(*args) if handler is None else handler(function, args)

    def _place(self, path: str | bytes, at: int | None) -> Place:
        directory, _, base = os.fsdecode(path).rpartition("/")
        if not directory and not os.fsdecode(path).startswith("/"):
            info = os.fstat(at) if at is not None else os.stat(".")
        else:
            info = os.stat(directory or "/", dir_fd=at)
        return self._known(info), base

    def _at(self, place: tuple[str, int | None]) -> int | None:
        try:
            return self._known(os.stat(place[0], dir_fd=place[1], follow_symlinks=False))
        except FileNotFoundError:
            return None

    def _number(self, fd: int) -> int:
        return self._known(os.fstat(fd))

    def _wrote(self, fd: int, at: int, data: bytes | None) -> None:
        info = os.fstat(fd)
        self.events.append(Write(self._known(info), at, data, info.st_mtime_ns))

    def _do_open(self, function: Function, args: Args) -> Any:
        path, flags, _, at = args
        existed = self._at((path, at)) is not None
        fd = function(*args)
        if flags & os.O_CREAT and not existed:
            self.events.append(Names(((self._place(path, at), self._new(os.fstat(fd))),)))
        elif flags & os.O_TRUNC:
            self._wrote(fd, 0, None)
        return fd

    def _do_mkdir(self, function: Function, args: Args) -> Any:
        out = function(*args)
        path, _, at = args
        number = self._new(os.stat(path, dir_fd=at))
        self.start.directories.add(number)
        self.events.append(Names(((self._place(path, at), number),)))
        return out

    def _do_write(self, function: Function, args: Args) -> Any:
        fd, data = args
        position = os.lseek(fd, 0, os.SEEK_CUR)
        n = function(*args)
        self._wrote(fd, position, bytes(data[:n]))
        return n

    def _do_pwrite(self, function: Function, args: Args) -> Any:
        fd, data, position = args
        n = function(*args)
        self._wrote(fd, position, bytes(data[:n]))
        return n

    def _do_copy_file_range(self, function: Function, args: Args) -> Any:
        source, target, _, start, position = args
        n = function(*args)
        self._wrote(target, position, os.pread(source, n, start))
        return n

    def _do_clone(self, function: Function, args: Args) -> Any:
        target, source, start, size, position = args
        out = function(*args)
        self._wrote(target, position, os.pread(source, size, start))
        return out

    def _do_ftruncate(self, function: Function, args: Args) -> Any:
        out = function(*args)
        self._wrote(args[0], args[1], None)
        return out

    def _do_fallocate(self, function: Function, args: Args) -> Any:
        before = os.fstat(args[0]).st_size
        out = function(*args)
        after = os.fstat(args[0]).st_size
        if after != before:
            self._wrote(args[0], after, None)
        return out

    def _do_fsync(self, function: Function, args: Args) -> Any:
        out = function(*args)
        self.events.append(Sync(self._number(args[0])))
        return out

    def _do_utime(self, function: Function, args: Args) -> Any:
        out = function(*args)
        info = os.stat(args[0])
        self.events.append(Write(self._known(info), info.st_size, b"", info.st_mtime_ns))
        return out

    _do_fdatasync = _do_fsync
    _do_fsync_directory = _do_fsync

    def _do_rename(self, function: Function, args: Args) -> Any:
        old, new, at, new_at = args[:4]
        number, places = self._at((old, at)), (self._place(old, at), self._place(new, new_at))
        out = function(*args)
        if places[0] != places[1]:
            self.events.append(Names(((places[0], None), (places[1], number))))
        return out

    _do_rename_new = _do_rename

    def _do_exchange(self, function: Function, args: Args) -> Any:
        old, new, at, new_at = args[:4]
        numbers = self._at((old, at)), self._at((new, new_at))
        out = function(*args)
        self.events.append(Names(((self._place(old, at), numbers[1]), (self._place(new, new_at), numbers[0]))))
        return out

    def _do_link(self, function: Function, args: Args) -> Any:
        old, new, at, new_at = args
        out = function(*args)
        self.events.append(Names(((self._place(new, new_at), self._at((old, at))),)))
        return out

    def _do_unlink(self, function: Function, args: Args) -> Any:
        place = self._place(*args)
        out = function(*args)
        self.events.append(Names(((place, None),)))
        return out

    _do_rmdir = _do_unlink


@dataclass
class File:
    """What is on the disk for sure, and what may be."""

    sure: bytearray = field(default_factory=bytearray)
    pending: list[Write] = field(default_factory=list)
    lost: int = 0  # so many of the first pending ones nobody will ever sync
    mtime_ns: int = 0

    def settle(self, *, failed: bool) -> None:
        if failed:
            self.lost = len(self.pending)
            return
        lost_parts, later = self.pending[: self.lost], self.pending[self.lost :]
        for write in later:
            apply(self.sure, write)
            lost_parts = [part for lost in lost_parts for part in _beside(lost, write, len(self.sure))]
        self.pending, self.lost = lost_parts, len(lost_parts)


def _beside(lost: Write, later: Write, size: int) -> Iterator[Write]:
    """What may be there of a write that was lost, after a later one, which is there; the file has `size` bytes."""
    if lost.data is None:
        if later.data is not None and lost.at >= size:
            yield lost
        return
    if before := lost.data[: max(later.at - lost.at, 0)]:
        yield lost._replace(data=before)
    if later.data is None:
        return
    stop = later.at + len(later.data)
    if after := lost.data[max(stop - lost.at, 0) :]:
        yield lost._replace(at=max(stop, lost.at), data=after)


def put(data: bytearray, at: int, part: bytes) -> None:
    """As pwrite."""
    if len(data) < at:
        data.extend(bytes(at - len(data)))
    data[at : at + len(part)] = part


def resize(data: bytearray, size: int) -> None:
    """As ftruncate."""
    if size < len(data):
        del data[size:]
    else:
        data.extend(bytes(size - len(data)))


def apply(data: bytearray, write: Write) -> None:
    if write.data is None:
        resize(data, write.at)
    else:
        put(data, write.at, write.data)


class Disk:
    """Files and names after some of the events."""

    def __init__(self) -> None:
        self.files: dict[int, File] = {}
        self.directories: set[int] = set()
        self.names: dict[Place, int] = {}
        self.pending: list[Names] = []

    def step(self, event: Event) -> None:
        match event:
            case Write():
                file = self.files.setdefault(event.file, File())
                file.pending.append(event)
                file.mtime_ns = event.mtime_ns
            case Names():
                self.pending.append(event)
                for _, number in event.places:
                    if number is not None and number not in self.directories:
                        self.files.setdefault(number, File())
            case Sync():
                if event.number in self.directories:
                    if not event.failed:
                        self._settle(event.number)
                elif event.number in self.files:
                    self.files[event.number].settle(failed=event.failed)

    def _settle(self, directory: int) -> None:
        """Changes in it are there for sure, with all that came before them in the directories that they reach."""
        wanted = {directory}
        kept: list[Names] = []
        chosen: list[Names] = []
        for change in reversed(self.pending):
            touched = {place[0] for place, _ in change.places}
            if touched & wanted:
                wanted |= touched
                chosen.append(change)
            else:
                kept.append(change)
        for change in reversed(chosen):
            rename(self.names, change)
        self.pending = kept[::-1]


def rename(names: dict[Place, int], change: Names) -> None:
    for place, number in change.places:
        if number is None:
            names.pop(place, None)
        else:
            names[place] = number


class State(NamedTuple):
    """One thing that may be found: directories and files by path, below each root."""

    what: str
    directories: tuple[str, ...]
    files: tuple[tuple[str, bytes], ...]
    known: tuple[tuple[int, int], ...]
    """Of each file its number and mtime."""

    def digest(self) -> bytes:
        out = hashlib.blake2b(repr(self.directories).encode(), digest_size=16)
        for path, data in self.files:
            out.update(f"\0{path}\0{len(data)}\0".encode())
            out.update(data.rstrip(b"\0"))
        return out.digest()

    def write(self, roots: dict[str, Path]) -> dict[int, int]:
        """Make it, with other directories in place of the roots; they must not exist.

        Return the files' inode numbers, and their numbers here.
        """
        inodes = {}
        for path in self.directories:
            _moved(path, roots).mkdir(parents=True, mode=0o700)
        for (path, data), (number, mtime_ns) in zip(self.files, self.known, strict=True):
            target = _moved(path, roots)
            tokens = data.rstrip(b"\0")
            with target.open("xb") as file:
                file.write(tokens)
                file.truncate(len(data))  # a journal is mostly a hole
            # An inode has its mode from the beginning. Here only shardfs makes lock files, with a mode of their own.
            target.chmod(OWN_MODE if path.endswith(LOCK_ENDING) else stat.S_IRUSR | stat.S_IWUSR)
            os.utime(target, ns=(mtime_ns, mtime_ns))
            inodes[target.stat().st_ino] = number
        return inodes


def _moved(path: str, roots: dict[str, Path]) -> Path:
    root, _, tail = path.partition("//")
    return roots[root] / tail if tail else roots[root]


Choice = Callable[[Sequence[Write]], list[Write]]
"""Which of a file's pending writes are there, and what of them."""


def nothing(pending: Sequence[Write]) -> list[Write]:
    return []


def everything(pending: Sequence[Write]) -> list[Write]:
    return list(pending)


def lengths(pending: Sequence[Write]) -> list[Write]:
    """The file is as long as it should be, and of zeros behind what was synced."""
    length = max((w.at if w.data is None else w.at + len(w.data) for w in pending), default=0)
    return [Write(pending[0].file, length, b"")] if pending else []


def torn(chance: random.Random) -> Choice:
    """Any of the writes, and any sectors of them."""

    def choose(pending: Sequence[Write]) -> list[Write]:
        out = []
        for write in pending:
            how = chance.randrange(4)
            if how == 0:
                continue
            if how == 1 or write.data is None:
                out.append(write)
                continue
            out += _sectors(write, chance, prefix=how == 2)
        return out

    return choose


def _sectors(write: Write, chance: random.Random, *, prefix: bool) -> Iterator[Write]:
    assert write.data is not None
    stop = write.at + len(write.data)
    cuts = [write.at, *range(write.at - write.at % SECTOR + SECTOR, stop, SECTOR), stop]
    upto = chance.randrange(len(cuts)) if prefix else len(cuts)
    for i, (a, b) in enumerate(itertools.pairwise(cuts)):
        if (i < upto) if prefix else chance.randrange(2):
            yield Write(write.file, a, write.data[a - write.at : b - write.at])


def states(disk: Disk, roots: dict[str, int], chance: random.Random, more: int) -> Iterator[State]:
    """What may be found if the power goes now: the extremes, and `more` at random."""
    last = len(disk.pending)
    yield _state("all of it", disk, roots, everything, lambda _: last)
    yield _state("only what was synced", disk, roots, nothing, lambda _: 0)
    yield _state("names before data", disk, roots, nothing, lambda _: last)
    yield _state("names and lengths before data", disk, roots, lengths, lambda _: last)
    yield _state("data before names", disk, roots, everything, lambda _: 0)
    for _ in range(more):
        yield _state("at random", disk, roots, torn(chance), lambda n: chance.randrange(n + 1))


def _state(description: str, disk: Disk, roots: dict[str, int], choice: Choice, upto: Callable[[int], int]) -> State:
    names = dict(disk.names)
    for change in _kept(disk.pending, upto):
        rename(names, change)
    below: dict[int, list[tuple[str, int]]] = {}
    for (directory, name), number in names.items():
        below.setdefault(directory, []).append((name, number))
    contents: dict[int, bytes] = {}
    directories: list[str] = []
    files: list[tuple[str, bytes]] = []
    known: list[tuple[int, int]] = []

    def walk(path: str, number: int) -> None:
        directories.append(path)
        for name, child in sorted(below.get(number, ())):
            inside = f"{path}/{name}" if "//" in path else f"{path}//{name}"
            if child in disk.directories:
                walk(inside, child)
                continue
            if child not in contents:
                data = bytearray(disk.files[child].sure)
                for write in choice(disk.files[child].pending):
                    apply(data, write)
                contents[child] = bytes(data)
            files.append((inside, contents[child]))
            known.append((child, disk.files[child].mtime_ns))

    for root, number in roots.items():
        walk(root, number)
    return State(description, tuple(directories), tuple(files), tuple(known))


def _kept(pending: Sequence[Names], upto: Callable[[int], int]) -> list[Names]:
    """Of each directory's changes the first so many; one of two directories is there only if both have come so far."""
    count: dict[int, int] = {}
    for change in pending:
        for directory in {place[0] for place, _ in change.places}:
            count[directory] = count.get(directory, 0) + 1
    lengths = {directory: upto(n) for directory, n in count.items()}
    out = []
    for change in pending:
        touched = {place[0] for place, _ in change.places}
        if all(lengths[directory] > 0 for directory in touched):
            out.append(change)
            for directory in touched:
                lengths[directory] -= 1
        else:
            for directory in touched:
                lengths[directory] = 0  # what comes later in it is not there, either
    return out


def walk_states(
    recorder: Recorder, *, more: int, seed: int, marks_only: bool = False
) -> Iterator[tuple[list[str], State]]:
    """Every different state after each prefix of the events, with the lines that were noted before.

    `marks_only`: only right after something was noted.
    """
    chance, fingerprints, disk, lines = random.Random(seed), set(), recorder.start, []
    for event in [None, *recorder.events]:
        if isinstance(event, Mark):
            lines.append(event.line)
        elif event is not None:
            disk.step(event)
        if marks_only and not isinstance(event, Mark):
            continue
        for state in states(disk, recorder.roots, chance, more):
            key = state.digest(), len(lines)
            if key not in fingerprints:
                fingerprints.add(key)
                yield list(lines), state
