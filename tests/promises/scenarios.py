"""The promises, each with the sentences of the documentation that it comes from, and the scenario that shows it.

A scenario does a few steps in one cell of the matrix, and asserts what the source has afterwards as the form's own
library reads it, what the mount shows, what is refused, and what stays in the journal.
"""

from __future__ import annotations

import errno
import threading
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from shardfs.model.errors import BusyError, CorruptShardError, UnsupportedError
from shardfs.write import recover
from tests.promises.forms import AROUND, NATIVE
from tests.promises.place import PUBLISH_S
from tests.waiting import wait_until
from tests.write.places import NEW
from tests.write.targets import described, token_in

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.fsspec_fs.filesystem import ShardFileSystem
    from tests.promises.place import Place

NONE = ("none",)
CREATES = ("creates",)
MOUNT = ("mount",)
LOCKING = ("tensorstore-os", "tensorstore-lockfile")
WHOLE = ("replaces", "zarr-python", "tensorstore-none", *LOCKING)
"""Programs that replace a shard as a whole."""
WRITERS = (*WHOLE, "overwrites", "tensorstore-non_atomic")
WRITABLE = ("disk", "memory", "moto", "s3", "gs", "azure")
SHARED = tuple(store for store in WRITABLE if store != "memory")
READABLE = (*WRITABLE, "http")


@dataclass(frozen=True)
class Promise:
    """What is promised.

    Args:
        sentences: parts of docs/durability.md or docs/semantics.md, word for word.
        parties: the kinds of other programs that the promise is about.
        stores: where it holds.
        needs_absence: some chunk is not there.
        converts: the layout shows other bytes than are stored.
        document: a document is changed.
    """

    sentences: tuple[str, ...]
    run: Callable[[Place], None]
    parties: tuple[str, ...] = NONE
    stores: tuple[str, ...] = WRITABLE
    needs_absence: bool = False
    converts: bool = False
    document: bool = False


PROMISES: dict[str, Promise] = {}


def promise(*sentences: str, **where: object) -> Callable[[Callable[[Place], None]], None]:
    def add(run: Callable[[Place], None]) -> None:
        PROMISES[run.__name__] = Promise(sentences, run, **where)  # type: ignore[arg-type]

    return add


# ---- one mount ----


@promise(
    "every program on this mount, at once",
    "Exit code 0 means that everything is published.",
)
def published(place: Place) -> None:
    with place.mount() as fs:
        for number in (place.first, place.other):
            place.write_accepted(fs, number)
        place.shows_all(fs)
        place.publish(fs)
        place.check()
        place.write_accepted(fs, place.first)  # over what this mount has published
        place.write_accepted(fs, place.second)
        place.end(fs)


@promise("Removing the last chunk of a shard removes the shard.", needs_absence=True)
def removed(place: Place) -> None:
    with place.mount() as fs:
        place.remove(fs, place.other)
        for number in place.shard_members:
            if number != place.absent:
                place.remove(fs, number)
        place.shows_all(fs)
        place.end(fs)
    assert place.shard(place.first) is None
    place.shows_all(place.reader())


@promise("shardfs does not rewrite shards without a changed chunk.", "keeps all old bytes at the same offsets")
def untouched(place: Place) -> None:
    before = {number: place.shard(number) for number in (place.first, place.other)}
    with place.mount() as fs:
        place.write_accepted(fs, place.first)
        place.end(fs)
    assert place.shard(place.other) == before[place.other]
    old, new = before[place.first], place.shard(place.first)
    assert old is not None
    assert new is not None
    if place.cell.form not in AROUND:
        index = 256  # bytes at most, where the index is at the start; else the old one stays, too
        assert new[index : len(old)] == old[index:]


@promise(
    "`kill -9` of your program and of shardfs",
    "The next writable mount finds the data in the journal, shows the data, and publishes it.",
)
def killed(place: Place) -> None:
    with place.mount() as fs:
        place.write_accepted(fs, place.first)
        place.write_accepted(fs, place.other)
        place.kill(fs)
    with place.mount() as fs:
        place.shows_all(fs)
        place.end(fs)


@promise("The chunk has the bytes of a version that this mount has published, or was publishing when it crashed.")
def killed_in_a_publish(place: Place) -> None:
    """The next mount publishes the other chunk first, while a program has this one open."""
    with place.mount() as fs:
        place.write_accepted(fs, place.first)
        place.publish_and_die(fs)
    with place.mount() as fs:
        with place.opened(fs, place.first):
            place.write_accepted(fs, place.second)
            place.publish_closed(fs)
        place.write_accepted(fs, place.first, 2 * NEW)
        place.kill(fs)
    with place.mount() as fs:
        place.end(fs)


@promise("Only this mount has replaced the shard since the version noted.")
def waited_for_a_later_publish(place: Place) -> None:
    """A chunk that is open for writing is not published with its neighbour, which may move it."""
    with place.mount(compact="eager") as fs:
        for token in (2 * NEW, 3 * NEW, 4 * NEW):  # until more than half of the shard is dead bytes
            place.write_accepted(fs, place.second, token)
            place.publish(fs)
        place.write_accepted(fs, place.first)
        with place.opened(fs, place.first):
            place.write_accepted(fs, place.second)
            place.publish_closed(fs)
        place.end(fs)


@promise(
    "Programs on one mount never lose each other's chunks.",
    "a program has written over the chunk while this mount was publishing it",
    parties=("zarr-python", "tensorstore-none"),
)
def wrote_over_during_a_publish(place: Place) -> None:
    """Both chunks are written over after each step of a publish; at last another program writes a third one."""

    def write_both() -> None:
        place.write_accepted(fs, place.first, token + 100)
        place.write_accepted(fs, place.second, token + 200)

    with place.mount() as fs:
        for token, step in ((NEW, "plan"), (2 * NEW, "begun"), (3 * NEW, "done")):
            place.write_accepted(fs, place.first, token)
            with place.meanwhile(write_both, step):
                place.publish_closed(fs)
            place.publish(fs)
            place.check()
        place.write_accepted(fs, place.first)
        with place.meanwhile(lambda: place.write_accepted(fs, place.first, 2 * NEW)):
            place.publish_closed(fs)
        place.theirs(place.shard_members[-1])
        place.end(fs)


@promise("Deleted chunks stay deleted", needs_absence=True)
def removed_and_killed(place: Place) -> None:
    with place.mount() as fs:
        place.remove(fs, place.first)
        place.kill(fs)
    with place.mount() as fs:
        place.shows_all(fs)
        place.end(fs)


@promise("`flush` and `umount` report a chunk that fails a check, and the source stays unchanged.")
def damaged_journal(place: Place) -> None:
    before = place.store.files()
    with place.mount() as fs:
        place.write(fs, place.first)
        data = fs.tree.pending.backlog.versions[place.path(place.first)].data  # type: ignore[union-attr]
        assert data is not None
        (segment,) = (place.top / "journals").rglob("*.wal")
        with segment.open("r+b") as file:
            file.seek(data.start + data.size // 2)
            file.write(b"damage")
        with pytest.raises(OSError, match=place.path(place.first)):
            fs.publish(timeout=PUBLISH_S)
        now = place.store.files()
        assert {key: now[key] for key in before} == before


@promise(
    "Programs cannot write a chunk into a damaged shard, such as a shard file of 0 bytes.",
    "shardfs publishes the chunk when the shard is repaired.",
    needs_absence=True,
)
def damaged_shard(place: Place) -> None:
    key = place.target.shard_key(place.target.chunks[place.first])
    data = place.store.files()[key]
    with place.mount() as fs:
        place.write_accepted(fs, place.absent)
        place.store.put(key, b"")
        with pytest.raises((OSError, CorruptShardError)) as caught:
            place.publish(fs)
        assert getattr(caught.value, "errno", errno.EIO) == errno.EIO
        assert place.store.files()[key] == b""
        place.store.put(key, data)
        place.end(fs)
    place.store.put(key, b"")
    with place.mount() as fs, pytest.raises((OSError, CorruptShardError)):
        place.write(fs, place.first)
    assert place.store.files()[key] == b""


@promise(
    "If `close` or `fsync` refuses a version, `shardfs status` names the file",
    "Bytes that cannot be a chunk of the array are refused with EINVAL, and the chunk stays as it was",
    converts=True,
)
def refused(place: Place) -> None:
    with place.mount() as fs:
        with pytest.raises(OSError, match=r".") as caught:
            fs.pipe_file(place.path(place.first), b"no chunk")
        assert caught.value.errno == errno.EINVAL
        place.shows_all(fs)
        assert [*fs.tree.pending.refused.state(9)] == [place.path(place.first)]  # type: ignore[union-attr]
        place.end(fs)


# ---- another program writes the same shards ----


@promise("The chunk has other bytes, or was created or removed.", parties=WRITERS)
def both_wrote(place: Place) -> None:
    with place.mount() as fs:
        place.write(fs, place.first)
        place.write_accepted(fs, place.other)
        place.theirs(place.first)
        place.refused(fs)
        place.shows(fs, place.first, NEW + place.first)
        place.end(fs, place.first)


@promise("The chunk has other bytes, or was created or removed.", parties=WHOLE, needs_absence=True)
def both_created(place: Place) -> None:
    with place.mount() as fs:
        place.write(fs, place.absent)
        place.theirs(place.absent)
        place.refused(fs)
        place.kill(fs)
    with place.mount() as fs:
        place.refused(fs)
        place.end(fs, place.absent)


@promise("The chunk has other bytes, or was created or removed.", parties=WHOLE, needs_absence=True)
def wrote_what_they_removed(place: Place) -> None:
    with place.mount() as fs:
        place.write(fs, place.first)
        place.theirs_removed(place.first)
        place.refused(fs)
        place.end(fs, place.first)


@promise("The chunk was absent, and still is; or both writers removed it.", parties=WHOLE, needs_absence=True)
def both_removed(place: Place) -> None:
    with place.mount() as fs:
        place.write_accepted(fs, place.absent)
        fs.rm_file(place.path(place.first))
        place.theirs_removed(place.first)
        place.end(fs)


BESIDE = (
    "The shard has another version, and the chunk has the bytes noted, wherever they are now.",
    "The shard has another version, and the chunk's earlier bytes are not known.",
)


def _end_beside(place: Place, fs: ShardFileSystem) -> None:
    """On an object store nothing is known of a chunk that was not read."""
    if place.knows_bases:
        place.tokens[place.first] = NEW + place.first
        place.end(fs)
    else:
        assert "earlier bytes are not known" in place.refused(fs)
        place.end(fs, place.first)


@promise(*BESIDE, parties=WRITERS)
def wrote_side_by_side(place: Place) -> None:
    with place.mount() as fs:
        place.write(fs, place.first)
        place.theirs(place.second)
        _end_beside(place, fs)


@promise(*BESIDE, parties=("replaces",))
def killed_and_wrote_side_by_side(place: Place) -> None:
    with place.mount() as fs:
        place.write(fs, place.first)
        place.kill(fs)
    place.theirs(place.second)
    with place.mount() as fs:
        _end_beside(place, fs)


@promise("Otherwise shardfs merges the new chunks into the current version.", parties=WHOLE)
def wrote_during_a_publish(place: Place) -> None:
    """A program that takes a lock waits for it in a thread."""
    threads = list[threading.Thread]()

    def change() -> None:
        thread = threading.Thread(target=place.theirs, args=(place.second,))
        threads.append(thread)
        thread.start()
        if place.cell.party not in LOCKING:
            thread.join()

    with place.mount() as fs:
        place.write_accepted(fs, place.first)
        with place.meanwhile(change):
            place.publish(fs)
        threads[0].join(PUBLISH_S)
        place.end(fs)


@promise("The chunk has other bytes, or was created or removed.", parties=("replaces",))
def both_wrote_during_a_publish(place: Place) -> None:
    with place.mount() as fs:
        place.write(fs, place.first)
        with place.meanwhile(lambda: place.theirs(place.first)):
            place.refused(fs)
        place.end(fs, place.first)


@promise("With `conflict=ours`, your version\nreplaces the other one, and the log reports it.", parties=WRITERS)
def ours_wins(place: Place) -> None:
    with place.mount(conflict="ours") as fs:
        place.write(fs, place.first)
        place.theirs(place.first)
        place.tokens[place.first] = NEW + place.first
        place.end(fs)
    assert f"replaces 1 chunk of its version, first {place.path(place.first)}" in place.log.text


@promise(
    "A **conflict** is a chunk that another writer may have changed in the source since you wrote to the chunk.",
    parties=WRITERS,
)
def killed_before_they_wrote(place: Place) -> None:
    """A chunk that was there, and one that was not."""
    numbers = [place.first, *place.absent_numbers]
    with place.mount() as fs:
        for number in numbers:
            place.write(fs, number)
        place.kill(fs)
    for number in numbers:
        place.theirs(number)
    with place.mount() as fs:
        place.refused(fs)
        for number in numbers:
            place.shows(fs, number, NEW + number)
        place.end(fs, *numbers)


@promise("`shardfs recover --ours` or `--theirs` resolves the conflict.", parties=("replaces",))
def decided(place: Place) -> None:
    with place.mount() as fs:
        for number in (place.first, place.other):
            place.write(fs, number)
            place.theirs(number)
        place.refused(fs)
        place.end(fs, place.first, place.other)
    (journal,) = (place.top / "journals").iterdir()
    recover.decide(journal, ours=[place.path(place.first)], theirs=[place.path(place.other)])
    place.tokens[place.first] = NEW + place.first
    with place.mount() as fs:
        place.end(fs)


@promise(
    "This also holds for chunks that this mount has written and published.",
    "If another program has changed such a chunk, its size and time become those of the source.",
    parties=WHOLE,
)
def wrote_later(place: Place) -> None:
    """One chunk was written and published here, the other one was only opened."""
    with place.mount(index_ttl=0) as fs:
        place.write_accepted(fs, place.first)
        with place.opened(fs, place.second):
            pass
        place.publish(fs)
        for number in (place.second, place.first):
            place.theirs(number)
            place.shows_all(fs)
        place.write_accepted(fs, place.first)  # this is no conflict
        place.end(fs)


@promise("If another program has changed such a chunk", parties=WHOLE, needs_absence=True)
def removed_later(place: Place) -> None:
    with place.mount(index_ttl=0) as fs:
        place.write_accepted(fs, place.first)
        place.publish(fs)
        place.theirs_removed(place.first)
        place.shows_all(fs)
        place.write_accepted(fs, place.first)
        place.end(fs)


@promise(
    "So the mount refuses to write a document that another program has changed",
    "a change between the comparison and the replacement is ESTALE, too.",
    parties=("replaces",),
    document=True,
)
def both_changed_the_document(place: Place) -> None:
    """Before the document is written here, and right before the mount stores it."""
    name = place.target.document

    def edited(data: bytes, token: int) -> bytes:
        return described(data, place.target, token)

    with place.mount() as fs:
        place.open_document(fs)
        mine = edited(fs.cat_file(name), 1)
        place.store.put(name, edited(place.store.files()[name], 2))
        place.refuses_document(fs, mine)
        place.open_document(fs)
        mine = edited(fs.cat_file(name), 3)
        with place.before_an_update(fs, lambda: place.store.put(name, edited(place.store.files()[name], 4))):
            place.refuses_document(fs, mine)
        assert token_in(place.store.files()[name], place.target) == 4
        place.open_document(fs)
        fs.pipe_file(name, edited(fs.cat_file(name), 5))
        assert token_in(place.store.files()[name], place.target) == 5
        place.end(fs, name)  # the version that was refused stays until a user decides


# ---- another program creates the array anew ----


@promise(
    "**Chunks that wait to be published are conflicts**, deletions too.",
    "and nothing of the new\n  array is changed",
    parties=CREATES,
)
def created_anew(place: Place) -> None:
    with place.mount(conflict="ours") as fs:
        for number in (place.first, place.absent):
            place.write(fs, number)
        fs.rm_file(place.path(place.other))
        place.create_anew()
        assert "created the array anew" in place.refused(fs)
        place.end(fs, place.first, place.absent, place.other)


@promise(
    "When a program opens the array's document, the mount shows the new array",
    "A writable mount of a local source shows another program's version as soon as a program opens the document",
    parties=CREATES,
    stores=("disk",),
)
def created_anew_and_opened(place: Place) -> None:
    with place.mount() as fs:
        place.open_document(fs)
        place.write(fs, place.first)
        place.create_anew()
        place.refused(fs)
        place.open_document(fs)
        place.shows_all(fs)
        place.refused(fs)
        with suppress(OSError):  # `close` reports the conflict once
            place.write(fs, place.first)
        place.write_accepted(fs, place.first)
        place.end(fs)


@promise(
    "`shardfs recover` refuses `--ours`: use `--export` to keep the former chunks, then `--theirs`.", parties=CREATES
)
def created_anew_and_decided(place: Place) -> None:
    with place.mount() as fs:
        place.write(fs, place.first)
        place.kill(fs)
    place.create_anew()
    with place.mount() as fs:
        place.refused(fs)
        place.end(fs, place.first)
    (journal,) = (place.top / "journals").iterdir()
    with pytest.raises(OSError, match="--export"):
        recover.decide(journal, ours=["."])
    assert recover.export(journal, place.top / "out").files == 1
    recover.decide(journal, theirs=["."])
    with place.mount() as fs:
        place.write_accepted(fs, place.first)
        place.end(fs)


@promise("names, sizes and bytes are the new ones from then on", parties=CREATES, stores=READABLE)
def created_anew_and_read(place: Place) -> None:
    fs = place.reader()
    place.shows_all(fs)
    place.create_anew()
    wait_until(lambda: place.is_shown(fs))


@promise("While there is no document, chunks stay in the journal", parties=CREATES)
def no_document(place: Place) -> None:
    document = NATIVE[place.form].document
    files = place.store.files()
    with place.mount() as fs:
        place.write_accepted(fs, place.first)
        place.store.remove(document)
        assert "no document" in place.refused(fs)
        place.store.put(document, files[document])
        place.end(fs)


# ---- several mounts ----


@promise("A source has at most one writable mount at a time.", parties=MOUNT, stores=SHARED)
def second_writable_mount(place: Place) -> None:
    with place.mount() as fs:
        with pytest.raises(BusyError):
            place.mount("others").__enter__()
        place.write_accepted(fs, place.first)
        place.end(fs)
    with place.mount("journals") as fs:
        place.end(fs)


@promise("Read-only mounts, commands that read a source", "show published data", parties=MOUNT)
def mount_that_reads(place: Place) -> None:
    other = place.reader()
    place.shows_all(other)
    with place.mount() as fs:
        place.write(fs, place.first)
        place.shows_all(other)
        place.tokens[place.first] = NEW + place.first
        place.publish(fs)
        place.shows_all(other)
        place.end(fs)


@promise(
    "the mount notices the new version at the next read",
    "A local shard can be replaced safely by a rename",
    parties=WHOLE,
    stores=READABLE,
)
def replaced_and_read(place: Place) -> None:
    fs = place.reader()
    place.shows_all(fs)
    place.theirs(place.first)
    place.shows_all(fs)


@promise("refused: without conditional writes", stores=("http",))
def not_writable(place: Place) -> None:
    with pytest.raises(UnsupportedError, match=r"^[^ ]*: this store has no conditional writes"):
        place.mount().__enter__()
    place.shows_all(place.reader())
