"""A local source in the middle of `pack --in-place` or `unpack --in-place`: where its documents and chunks are now."""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from shardfs.model.errors import BusyError
from shardfs.model.kinds import LOCK
from shardfs.storage.local import LocalStore
from shardfs.storage.pack_state import PACK, PLAIN, SHARDED, STATE, PackState, Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from shardfs.storage.local import LocalBlob
    from shardfs.storage.store import DirEntry, Store

T = TypeVar("T")

FILES, HERE = "files", ""
"""Places of a chunk: its own file, or a shard at its final place. The third place is a shard in `SHARDED`."""


def places(state: PackState) -> tuple[str, ...]:
    """Return where a chunk may be. The job moves it to a later place only, so a search in this order does not miss it.

    There is a file of the same name for `FILES` and for `HERE` in most formats, so never both are possible.
    """
    packs = state.direction == PACK
    match state.stage:
        case Stage.MIXED:
            return (FILES, SHARDED) if packs else (SHARDED, FILES)
        case Stage.SHARDED:
            return (SHARDED, HERE) if packs else (HERE, SHARDED)
        case Stage.PLAIN:
            return (FILES,)
    return (HERE,) if packs == (state.stage == Stage.DONE) else (FILES,)


class InPlaceStore(LocalStore):
    """The source of an unfinished job in place, with the documents of the sharded dataset wherever they are now.

    Documents of the plain dataset only are hidden: with these, other libraries would take its chunks for missing ones.
    That and documents that were read stay as they are after the job, too, for programs that have opened the dataset.

    Attributes:
        sharded: the keys of the documents of the sharded dataset.
        stored: the files without that. It keeps none of them open, so that the disk frees the space of deleted ones.
    """

    def __init__(self, store: LocalStore, state: PackState) -> None:
        super().__init__(store.root, store._waiting, store.read_ahead, follow_symlinks=store.follow_symlinks)
        self.name = store.name
        self.stored = LocalStore(store.root, store._waiting, follow_symlinks=store.follow_symlinks, keep_open=False)
        self._state: tuple[tuple[int, int], PackState | None] = (0, 0), None
        self.sharded = frozenset(state.sharded)
        self._hidden = frozenset(state.plain) - self.sharded
        self._read: dict[str, bytes] = {}

    def state(self) -> PackState | None:
        """Return the state of the job, the same object until it changes; None if the job has ended."""
        try:
            info = os.stat(self.path(STATE))
        except FileNotFoundError:
            return None
        version = info.st_ino, info.st_mtime_ns
        if self._state[0] != version:
            self._state = version, PackState.read(self.root)
        return self._state[1]

    def documents(self, directory: str, names: Sequence[str], limit: int) -> dict[str, bytes]:
        keys = {name: _join(directory, name) for name in names}
        read = {name: self._read[key] for name, key in keys.items() if key in self._read}
        found = super().documents(directory, [name for name in names if name not in read], limit)
        self._read |= {keys[name]: raw for name, raw in found.items() if keys[name] in self.sharded}
        return {**found, **read}

    def _open(self, key: str) -> LocalBlob:
        return self._anywhere(key, super()._open)

    def entry(self, key: str) -> DirEntry:
        return self._anywhere(key, super().entry)

    def _anywhere(self, key: str, call: Callable[[str], T]) -> T:
        """Return `call` of the key of a document, another file or a directory, wherever it is."""
        for at in (_aside(key), key, _aside(key)) if key not in self._hidden else ():
            with suppress(FileNotFoundError, NotADirectoryError):
                return call(at)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)

    def scan(self, key: str) -> Iterator[DirEntry]:
        """Yield the entries of a directory in both places, without locks that the job holds or has left."""
        seen = set()
        for at in (_aside(key), key):
            for entry in super().scan(at):
                name = entry.name
                if name in seen or _join(key, name) in self._hidden or os.fsencode(name).endswith(LOCK):
                    continue
                if at != key:
                    seen.add(name)
                yield entry


def _join(directory: str, name: str) -> str:
    return f"{directory}/{name}" if directory and name else directory or name


def _aside(key: str) -> str:
    return _join(SHARDED, key)


def in_place_store(store: Store) -> Store:
    """Return an `InPlaceStore` if a job in place is unfinished in the source; else the store itself.

    Raise BusyError if the job has only begun: it may change everything before a mount can notice.
    """
    if not isinstance(store, LocalStore) or not os.path.lexists(store.path(STATE)):
        return store
    try:
        state = PackState.read(store.root)
    except FileExistsError:
        if os.path.lexists(store.path(PLAIN)):
            raise
        return store  # the target of another kind of job
    if state is None or state.stage == Stage.DONE:
        return store
    if state.stage == Stage.BEGUN:
        raise BusyError(errno.EBUSY, f"{command(state)} begins here; open it later, or repeat the command", store.root)
    return InPlaceStore(store, state)


def require_same_job(store: Store) -> None:
    """Raise BusyError if a job in place has begun since the store was opened.

    A job looks for mounts when its state is written. A mount that it did not see then finds the state here.
    """
    if type(store) is LocalStore and in_place_store(store) is not store:
        raise BusyError(errno.EBUSY, "a job in place has begun in the source; mount again", store.root)


def command(state: PackState) -> str:
    """Return the command that ends a job."""
    return f"shardfs {state.command} --in-place{'' if state.direction == state.command else ' --abort'}"


def require_finished(store: Store) -> None:
    """Raise BusyError if a job in place is unfinished in the source."""
    if isinstance(store, InPlaceStore) and (state := store.state()) is not None:
        why = f"has an unfinished job in place: end it with {command(state)}; until then, mount read-only"
        raise BusyError(errno.EBUSY, why, store.root)
