"""What a writer may do to a sharded array, in a few steps each; every test of crashes and errors goes through all.

A scenario is a function of a `Session`, which does its steps and notes what is asked for and what was acknowledged.
It comes with the chunks that were there before.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.write.targets import described

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tests.write.engines import TreeFiles
    from tests.write.history import Log
    from tests.write.targets import Target

FIRST = 1000
"""Tokens from here on are those of chunks that a scenario writes; smaller ones were there before."""


class Session:
    """A writer of one array, which notes what it is told."""

    def __init__(self, target: Target, files: TreeFiles, log: Log, root: Path) -> None:
        self.target, self.files, self.log, self.root = target, files, log, root
        self._tokens = FIRST

    def token(self, number: int) -> int:
        """A content that nothing has had before; which chunk it is for can be read from it."""
        self._tokens += 100
        return self._tokens + number

    # ---- single chunks ----

    def write(self, number: int, *, sync: bool = False) -> int:
        """Directly, as z5py does."""
        token = self.token(number)
        self.log.issue(number, token)
        self.files.write(self.target.path(number), self.target.shown(token), sync=sync)
        self.log.ack(number, "synced" if sync else "closed")
        return token

    def write_beside(self, number: int, *, sync: bool = False, suffix: str = "abcdef0123456789abcdef0123456789") -> int:
        """To a name beside it that is then renamed, as zarr-python and tensorstore do."""
        token, path = self.token(number), self.target.path(number)
        scratch = f"{path}.{suffix}.partial"
        self.files.write(scratch, self.target.shown(token), sync=sync)
        self.log.issue(number, token)
        self.files.rename(scratch, path)
        if sync:
            self.files.sync_directory(path.rpartition("/")[0])
        self.log.ack(number, "synced" if sync else "closed")
        return token

    def write_linked(self, number: int) -> int:
        """To a name beside it that is linked and unlinked, as obstore does; the chunk must not exist."""
        token, path = self.token(number), self.target.path(number)
        self.files.write(f"{path}#1", self.target.shown(token))
        self.log.issue(number, token)
        self.files.link(f"{path}#1", path)
        self.log.ack(number, "closed")
        self.files.unlink(f"{path}#1")
        return token

    def write_locked(self, number: int) -> int:
        """To its lock, which becomes the chunk, as tensorstore does."""
        token = self.token(number)
        self.log.issue(number, token)
        self.files.write_locked(self.target.path(number), self.target.shown(token))
        self.log.ack(number, "synced")
        return token

    def patch(self, number: int, *, sync: bool = False) -> int:
        """In place and without O_TRUNC; the chunk must be there and as long as its new content."""
        token, path = self.token(number), self.target.path(number)
        data = self.target.shown(token)
        self.log.issue(number, token)
        self.files.patch(path, 0, data, sync=sync)
        self.log.ack(number, "synced" if sync else "closed")
        return token

    def delete(self, number: int, *, sync: bool = False) -> None:
        path = self.target.path(number)
        self.log.issue(number, None)
        self.files.unlink(path)
        if sync:
            self.files.sync_directory(path.rpartition("/")[0])
        self.log.ack(number, "synced" if sync else "closed")

    def describe(self, *, beside: bool = False, sync: bool = False) -> None:
        """Change the metadata document, directly or by a rename onto it."""
        number, name = self.target.described_as, self.target.document
        token = self.token(number)
        data = described(self.files.read(name) or b"", self.target, token)
        place = f"{name.rpartition('.')[0] or name}.0123456789abcdef0123456789abcdef.partial" if beside else name
        if not beside:
            self.log.issue(number, token)
        self.files.write(place, data, sync=sync)
        if beside:
            self.log.issue(number, token)
            self.files.rename(place, name)
            if sync:
                self.files.sync_directory("")
        self.log.ack(number, "synced" if sync else "closed")

    def move(self, old: int, new: int, token: int) -> None:
        """A chunk onto another."""
        self.log.issue(old, None)
        self.log.issue(new, token)
        self.files.rename(self.target.path(old), self.target.path(new))
        self.log.ack(old, "closed")
        self.log.ack(new, "closed")

    # ---- all of it ----

    def publish(self) -> None:
        self.files.publish()
        self.log.ack_all("published")

    def write_natively(self, tokens: Mapping[int, int]) -> None:
        """As another program does, which knows nothing of us: `tokens` are all chunks that there shall be then."""
        for number, token in tokens.items():
            self.log.issue(number, token)
        self.target.fill(self.root, self.target.array(tokens))
        for number in tokens:
            self.log.ack(number, "published")


@dataclass(frozen=True)
class Scenario:
    """`before`: which chunks are there at first; the others are not. `documents`: whether one is written."""

    name: str
    run: Callable[[Session], None] = field(repr=False)
    before: Callable[[Target], list[int]] = field(repr=False)
    documents: bool = False

    def initial(self, target: Target) -> dict[int, int]:
        """The tokens of the chunks that are there at first."""
        return {number: 100 + number for number in self.before(target)}


SCENARIOS: dict[str, Scenario] = {}


def none(target: Target) -> list[int]:
    return []


def all_of_them(target: Target) -> list[int]:
    return list(range(len(target.chunks)))


def every_second(target: Target) -> list[int]:
    return list(range(0, len(target.chunks), 2))


def _scenario(
    before: Callable[[Target], list[int]], *, documents: bool = False
) -> Callable[[Callable[[Session], None]], None]:
    def keep(run: Callable[[Session], None]) -> None:
        SCENARIOS[run.__name__] = Scenario(run.__name__, run, before, documents)

    return keep


def _first_shard(session: Session) -> list[int]:
    return next(iter(session.target.shards().values()))


@_scenario(none)
def first_chunk(s: Session) -> None:
    """In an array without any: directories and the shard are new. What fsync said is so before it is published."""
    s.write(0, sync=True)
    s.publish()


@_scenario(none)
def whole_shard(s: Session) -> None:
    for number in _first_shard(s):
        s.write(number)
    s.publish()


@_scenario(all_of_them)
def overwrite(s: Session) -> None:
    s.write(1)
    s.publish()


@_scenario(all_of_them)
def overwrite_twice(s: Session) -> None:
    """Each publish replaces what the one before it wrote."""
    for _ in range(2):
        s.write(0, sync=True)
        s.publish()


@_scenario(all_of_them)
def newest_wins(s: Session) -> None:
    """Three versions of which one is published."""
    for sync in (False, True, False):
        s.write(0, sync=sync)
    s.publish()


@_scenario(all_of_them)
def delete_one(s: Session) -> None:
    s.delete(0)
    s.publish()


@_scenario(all_of_them)
def delete_shard(s: Session) -> None:
    """The last chunk of a shard goes, and the shard with it."""
    for number in _first_shard(s):
        s.delete(number)
    s.publish()


@_scenario(every_second)
def come_and_go(s: Session) -> None:
    """A chunk that is gone before it was published, and one that comes back."""
    s.write(1)
    s.delete(1)
    s.delete(0)
    s.write(0)
    s.publish()
    s.delete(0, sync=True)


@_scenario(every_second)
def renamed(s: Session) -> None:
    """As zarr-python and tensorstore write: one new chunk, one that replaces another."""
    s.write_beside(0, sync=True)
    s.write_beside(1, suffix="00000000000000000000000000000000")
    s.publish()


@_scenario(every_second)
def locked(s: Session) -> None:
    """As tensorstore writes: a new chunk, one that replaces what is stored, one that replaces what is journaled."""
    s.write_locked(1)
    s.write_locked(0)
    s.write_locked(1)
    s.publish()
    s.write_locked(0)


@_scenario(every_second)
def linked(s: Session) -> None:
    s.write_linked(1)
    s.publish()


@_scenario(all_of_them)
def two_shards(s: Session) -> None:
    """One publish, two shards."""
    for members in s.target.shards().values():
        s.write(members[0], sync=True)
    s.publish()


@_scenario(all_of_them)
def moved(s: Session) -> None:
    """A chunk onto another one, within a shard and from one to another."""
    shards = list(s.target.shards().values())
    token = s.write(shards[0][0])
    s.move(shards[0][0], shards[0][1], token)
    s.move(shards[0][1], shards[1][0], token)
    s.publish()


@_scenario(all_of_them)
def patched(s: Session) -> None:
    """Written into in place, as it lies in the shard and as it waits to be published."""
    s.patch(0)
    s.patch(0, sync=True)
    s.publish()
    s.patch(0)
    s.publish()


@_scenario(every_second, documents=True)
def document(s: Session) -> None:
    """The document is written between chunks, twice."""
    s.write(0)
    s.describe(sync=True)
    s.write(1)
    s.describe(beside=True, sync=True)
    s.publish()
    s.describe()
    s.write(2)


@_scenario(every_second)
def left_in_the_journal(s: Session) -> None:
    """Nothing is published: the next mount has to do it."""
    s.write(0, sync=True)
    s.write(1)
    s.delete(2, sync=True)
    s.write_beside(3)
