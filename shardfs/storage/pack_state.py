"""The state of a job that packs a local source in place: its names in the source, and how far it is."""

from __future__ import annotations

import errno
import json
import os
import stat
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from enum import StrEnum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, Self

from shardfs.model.errors import NOT_FOUND, BusyError
from shardfs.model.own_places import is_closed
from shardfs.storage.regular_files import parse_object, read_regular

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

STATE = ".shardfs-pack.json"
"""Describes an unfinished job: at the root of the source of a job in place, else at the root of the target."""

DIRECTORY = ".shardfs-pack"
"""The files of a job in place, at the root of its source."""

PLAIN = f"{DIRECTORY}/plain"
"""The documents of the dataset whose chunks are plain files, under the names that they have in the source."""

SHARDED = f"{DIRECTORY}/sharded"
"""The documents of the sharded dataset and its finished shards, under the names that they have in the source."""

MAX_STATE = 64 << 20
"""Most bytes of `STATE`."""

PACK, UNPACK = "pack", "unpack"
"""Commands, and directions of a job: a job in place goes back in the direction UNPACK."""


class Stage(StrEnum):
    """How far a job in place is. Packing goes from PLAIN to SHARDED, and `--abort` back; `ROUTES` has all steps.

    - BEGUN: the source is unchanged. The job writes the documents of the form that the source does not have yet.
    - PLAIN: every chunk is a plain file. Documents of plain files are in the source or in `PLAIN`.
    - MIXED: none of these documents is in the source. A chunk is in its shard in `SHARDED` if that shard exists, else a
      plain file.
    - SHARDED: every chunk is in a shard. Documents and shards are in the source or in `SHARDED`.
    - DONE: the source is complete. The job removes `DIRECTORY`.
    """

    BEGUN = "begun"
    PLAIN = "plain"
    MIXED = "mixed"
    SHARDED = "sharded"
    DONE = "done"


_LISTS: Mapping[str, type] = {"chunks_per_shard": int, "arrays": str}
_VALUES: Mapping[str, type] = {"shard_bytes": int}
"""The options of `PackState`, and the types of their values, or of the items of lists."""

ROUTES: Mapping[str, list[Stage]] = {
    PACK: [Stage.BEGUN, Stage.PLAIN, Stage.MIXED, Stage.SHARDED, Stage.DONE],
    UNPACK: [Stage.BEGUN, Stage.SHARDED, Stage.MIXED, Stage.PLAIN, Stage.DONE],
}


@dataclass(frozen=True, slots=True)
class PackState:
    """The content of `STATE` in the source of a job in place.

    Args:
        direction: where the job goes, PACK or UNPACK. `--abort` reverses it.
        plain, sharded: the paths of the documents of both forms, without those that are the same in both.
        options: the options of the command, as JSON.
    """

    direction: str
    stage: Stage
    plain: list[str]
    sharded: list[str]
    options: Any

    def after(self) -> Stage:
        """Return the stage that follows in this direction. Not for DONE, which raises IndexError."""
        route = ROUTES[self.direction]
        return route[route.index(self.stage) + 1]

    def raw(self) -> bytes:
        """Return the state as the content of its file."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def read(cls, root: str) -> Self | None:
        """Return the state in the directory of a source; None if there is none.

        Raise FileExistsError if the file describes another kind of job, is damaged, or is missing although `DIRECTORY`
        exists; PermissionError if it or a directory of the job is a link or a special file.
        """
        for name in (DIRECTORY, PLAIN, SHARDED):
            _require_directory(os.path.join(root, name))
        try:
            document = parse_object(read_regular(os.path.join(root, STATE), MAX_STATE), MAX_STATE)
        except FileNotFoundError:
            if os.path.lexists(os.path.join(root, DIRECTORY)):
                why = f"contains {DIRECTORY} of a job in place, but {STATE} is missing: bring that file back"
                raise FileExistsError(errno.EEXIST, why, root) from None
            return None
        except ValueError as e:
            raise _damaged(root, str(e)) from e
        if "stage" not in document:
            why = "is the target of an unfinished pack or unpack; repeat that command first"
            raise FileExistsError(errno.EEXIST, why, root)
        return cls._checked(root, document)

    @classmethod
    def _checked(cls, root: str, document: dict[str, Any]) -> Self:
        """The state that a file describes. Other programs may have written it, so each member is checked."""
        if document.keys() != {field.name for field in fields(cls)}:
            raise _damaged(root, "members are missing or unknown")
        if document["direction"] not in list(ROUTES):
            raise _damaged(root, "the direction is unknown")
        if document["stage"] not in list(Stage):
            raise _damaged(root, "the stage is unknown")
        for keys in (document["plain"], document["sharded"]):
            if not isinstance(keys, list) or not all(map(_is_inside, keys)):
                raise _damaged(root, "a list should have the paths of documents in the source")
        options = document["options"]
        if not isinstance(options, dict) or not all(map(_is_option, options, options.values())):
            raise _damaged(root, "the options of the command are unknown or have other types")
        return cls(**{**document, "stage": Stage(document["stage"])})


def _damaged(root: str, why: str) -> FileExistsError:
    text = f"{STATE} is damaged, or of another version of shardfs ({why}): bring back the file, or use that version"
    return FileExistsError(errno.EEXIST, text, root)


def _is_inside(key: Any) -> bool:
    """Return whether it is the path of a file in the source, without parts that lead out of it."""
    return isinstance(key, str) and "\0" not in key and not {"", ".", ".."} & set(key.split("/"))


def _is_option(name: str, value: Any) -> bool:
    """Return whether an option of pack or unpack has its type."""
    if isinstance(value, list):
        return name in _LISTS and all(type(item) is _LISTS[name] for item in value)
    return name in _VALUES and type(value) is _VALUES[name]


def _require_directory(path: str) -> None:
    """Raise PermissionError if there is something else than a directory. A link could lead out of the source."""
    with suppress(FileNotFoundError):
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            why = "should be a directory of a job in place, and is none; move it out of the source"
            raise PermissionError(errno.EACCES, why, path)


class UnfinishedJob(NamedTuple):
    """An unfinished job in place, for programs that read its source.

    Args:
        root: the directory of the source.
        directories: the directories of the documents that the job replaces, relative to the source; "" is the source.
        groups: those that have others of them below.
    """

    root: str
    directories: frozenset[str]
    groups: frozenset[str]

    @classmethod
    def from_directory(cls, root: str) -> Self | None:
        """Return the job in the directory of a source; None if it has none, or if only files of the job are left.

        Raise the errors of `PackState.read`, but not for the target of another kind of job.
        """
        try:
            info = os.lstat(os.path.join(root, STATE))
        except NOT_FOUND:
            return None
        return cls._read(root, (info.st_ino, info.st_mtime_ns))

    @classmethod
    @lru_cache(8)
    def _read(cls, root: str, _version: tuple[int, int]) -> Self | None:
        try:
            state = PackState.read(root)
        except FileExistsError:
            if os.path.lexists(os.path.join(root, PLAIN)):
                raise
            return None
        if state is None or state.stage == Stage.DONE:
            return None
        directories = {key.rpartition("/")[0] for key in (*state.plain, *state.sharded)}
        above = {at[:end] for at in directories if at for end in (0, *(i for i, c in enumerate(at) if c == "/"))}
        return cls(root, frozenset(directories), frozenset(directories & above))

    def busy(self, path: str, meanwhile: str = "") -> BusyError:
        """Return the error for an array of the job, or for its source. `meanwhile` ends the message."""
        ways = f"finish with `shardfs pack --in-place {self.root}`, or go back with `--abort`"
        return BusyError(errno.EBUSY, f"is being packed in place; {ways}{meanwhile}", path)


class SourceJobs:
    """The unfinished jobs in place in a local source, and those in the directories above the source.

    Directories above the source are looked at once: a job that begins there later is not seen. Raise the errors of
    `UnfinishedJob.from_directory`.
    """

    def __init__(self, source: str) -> None:
        self._root = os.path.realpath(source)
        self._above = [job.root for job in _jobs_above(self._root)]

    def require_none(self, directory: str, *, is_array: bool) -> None:
        """Raise BusyError if an unfinished job packs the array whose documents are in a directory.

        Args:
            directory: a directory of the source.
            is_array: whether documents of an array are there now. The job may have moved them.
        """
        real = os.path.realpath(directory)
        for job in self._concerning(real):
            at = real.removeprefix(job.root).lstrip("/")
            if at in job.directories and (is_array or at not in job.groups):
                raise job.busy(real)

    def _concerning(self, real: str) -> Iterator[UnfinishedJob]:
        """Yield the unfinished jobs in a directory of the source, given by its real path, and above this directory."""
        if not f"{real}/".startswith(f"{self._root.rstrip('/')}/"):  # a link led out of the source
            yield from unfinished_jobs(real)
            return
        directories = [real]
        while directories[-1] != self._root:
            directories.append(os.path.dirname(directories[-1]))
        yield from filter(None, map(UnfinishedJob.from_directory, directories))
        yield from filter(None, map(_job_above, self._above))


def unfinished_jobs(source: str) -> Iterator[UnfinishedJob]:
    """Yield the unfinished jobs in place in the directory of a local source, and above it.

    None for a URL or a relative path. Raise the errors of `UnfinishedJob.from_directory` for the source itself.
    """
    if os.path.isabs(source):
        root = os.path.realpath(source)
        if (job := UnfinishedJob.from_directory(root)) is not None:
            yield job
        yield from _jobs_above(root)


def _jobs_above(root: str) -> Iterator[UnfinishedJob]:
    """Yield the unfinished jobs in the directories above a source, which is given by its real path."""
    while root != (root := os.path.dirname(root)):
        if (job := _job_above(root)) is not None:
            yield job


def _job_above(root: str) -> UnfinishedJob | None:
    """Return the unfinished job in a directory above a source; None if there is none that can be trusted.

    In a directory like `/tmp`, any user could write a state. It must not stop the users of sources below.
    """
    with suppress(OSError):
        if os.path.lexists(os.path.join(root, STATE)) and is_closed(root):
            return UnfinishedJob.from_directory(root)
    return None


def require_finished(source: str) -> None:
    """Raise BusyError if a local source that is to be written has an unfinished job in place, or is in its source."""
    for job in unfinished_jobs(source):
        raise job.busy(job.root, "; until then, mount read-only; its array cannot be read")


def require_no_job_in(root: str, path: str) -> None:
    """Raise BusyError if the directory `path` below a source has an unfinished job: its files alone are incomplete."""
    if path and os.path.lexists(os.path.join(root, path, STATE)):
        raise BusyError(errno.EBUSY, "has an unfinished pack or unpack; end that job first", path)
