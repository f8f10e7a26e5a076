"""A dataset in one cell of the matrix: what a mount and the other program do with it, and what is stored at the end."""

from __future__ import annotations

import errno
import math
import os
import warnings
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest

from shardfs.fsspec_fs import filesystem
from shardfs.fsspec_fs.filesystem import ShardFileSystem
from shardfs.model.errors import ShardfsError
from shardfs.write.publish_shard import Job
from shardfs.write.publisher import Publisher
from shardfs.write.tree import WriteTree
from tests.promises import parties
from tests.promises.forms import ANEW, FULL, NATIVE, SHOWN
from tests.write.engines import TreeFiles
from tests.write.places import NEW, OLD, THEIRS
from tests.write.tokens import token_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from pathlib import Path

    from tests.promises.axes import Cell
    from tests.promises.stores import Store
    from tests.write.targets import Target

PUBLISH_S = 120


class Place:
    """An array of which every chunk is there but `absent`, in a store.

    Attributes:
        tokens: of the chunks that the source should have, by their number.
        first, second: two chunks of one shard; `other` is one of another shard.
        absent: a chunk of the first shard that is not there. Some forms have all: `absent_numbers` is empty then.
        knows_bases: whether the mount knows the stored bytes of a chunk that is written over.
    """

    def __init__(self, cell: Cell, store: Store, top: Path, log: pytest.LogCaptureFixture) -> None:
        self.cell = cell
        self.store = store
        self.top = top
        self.log = log
        self.form = cell.form
        shards = list(self.target.shards().values())
        self.first, self.second, self.absent = shards[0][:3]
        self.other = shards[1][0]
        self.absent_numbers = [] if cell.form in FULL else [self.absent]
        self.shard_members = shards[0]
        self.knows_bases = cell.store == "disk"
        self.tokens = {n: OLD + n for n in range(len(self.target.chunks)) if n not in self.absent_numbers}
        self._renderings = 0
        for key, data in self.rendered(self.tokens).items():
            store.put(key, data)

    @property
    def target(self) -> Target:
        """The array in its present form, as the mount shows it."""
        return SHOWN[self.form, self.cell.layout]

    # ---- natively ----

    def rendered(self, tokens: Mapping[int, int]) -> dict[str, bytes]:
        """Return the files that the form's own library writes for these chunks."""
        self._renderings += 1
        root = self.top / f"rendered{self._renderings}"
        root.mkdir()
        target = NATIVE[self.form]
        target.create(root)
        target.fill(root, target.array(tokens))
        return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}

    def stored_tokens(self) -> dict[int, int]:
        """Return the tokens of the chunks in the store, as the form's own library reads them."""
        self._renderings += 1
        root = self.top / f"stored{self._renderings}"
        for key, data in self.store.files().items():
            path = root / key
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            elements = next(iter(NATIVE[self.form].readers.values()))(root)
        tokens = ((number, token_of(block)) for number, block in NATIVE[self.form].split(elements))
        return {number: token for number, token in tokens if token is not None}

    def check(self) -> None:
        """The source has the tokens that it should have."""
        assert self.stored_tokens() == self.tokens

    def shard(self, number: int) -> bytes | None:
        return self.store.files().get(self.target.shard_key(self.target.chunks[number]))

    # ---- the other program ----

    def theirs(self, number: int) -> None:
        """The other program writes a chunk."""
        self.tokens[number] = THEIRS + number
        parties.PROGRAMS[self.cell.party](self, number, THEIRS + number)

    def theirs_removed(self, number: int) -> None:
        """The other program removes a chunk, by writing zeros if that is its way."""
        del self.tokens[number]
        parties.PROGRAMS[self.cell.party](self, number, None)

    def create_anew(self) -> None:
        """The other program deletes the array, and creates it in another form with other chunks."""
        self.form = ANEW[self.form]
        self.tokens = {number: THEIRS + number for number in self.tokens}
        for key in self.store.files():
            if "shardfs" not in key:
                self.store.remove(key)
        for key, data in self.rendered(self.tokens).items():
            self.store.put(key, data)

    # ---- mounts ----

    def path(self, number: int) -> str:
        return self.target.path(number)

    @contextmanager
    def mount(
        self, journal: str = "journals", index_ttl: float = math.inf, **options: str
    ) -> Iterator[ShardFileSystem]:
        """A writable mount that publishes when it is asked to. At the end it is killed, unless it was closed."""
        words = {"journal": str(self.top / journal), "idle": "3600", "age": "3600", **options}
        fs = self._opened(rw=True, index_ttl=index_ttl, write_options=words)
        try:
            yield fs
        finally:
            if fs._arguments in filesystem._trees:
                self.kill(fs)

    def reader(self) -> ShardFileSystem:
        """A mount that is only read, and looks at the source each time."""
        return self._opened(index_ttl=0)

    def _opened(self, **how: Any) -> ShardFileSystem:
        options = self.store.options
        return ShardFileSystem(
            self.store.url, self.cell.layout, storage_options=options, skip_instance_cache=True, **how
        )

    def kill(self, fs: ShardFileSystem) -> None:
        """As kill -9 does: nothing of it reaches the journal and the source any more, and its locks are free."""
        with filesystem._writing:
            tree = filesystem._trees.pop(fs._arguments)
        TreeFiles(tree, tree.pending.journal).die()

    def write(self, fs: ShardFileSystem, number: int, token: int = NEW) -> None:
        """A program writes and closes a chunk on a mount."""
        fs.pipe_file(self.path(number), self.target.shown(token + number))

    def write_accepted(self, fs: ShardFileSystem, number: int, token: int = NEW) -> None:
        """The same, for a chunk that will be published."""
        self.write(fs, number, token)
        self.tokens[number] = token + number

    @contextmanager
    def opened(self, fs: ShardFileSystem, number: int) -> Iterator[None]:
        """A program has a chunk open for writing, and does not write."""
        tree = written(fs)
        handle = tree.open(tree.resolve(self.path(number)).number, os.O_RDWR)
        yield
        tree.release(handle)

    def open_document(self, fs: ShardFileSystem) -> None:
        """A program opens the document; after ESTALE it looks the name up again, as the kernel does."""
        tree = written(fs)
        for _ in range(2):
            with suppress(OSError):
                tree.release(tree.open(tree.resolve(self.target.document).number, os.O_RDONLY))
                return
        raise AssertionError(self.target.document)

    def refuses_document(self, fs: ShardFileSystem, data: bytes) -> None:
        """Writing the document is ESTALE."""
        with pytest.raises(OSError, match="read it again") as caught:
            fs.pipe_file(self.target.document, data)
        assert caught.value.errno == errno.ESTALE

    def remove(self, fs: ShardFileSystem, number: int) -> None:
        fs.rm_file(self.path(number))
        del self.tokens[number]

    def publish(self, fs: ShardFileSystem) -> None:
        fs.publish(timeout=PUBLISH_S)

    def refused(self, fs: ShardFileSystem) -> str:
        """Publish, which is ESTALE. Return the reason."""
        with pytest.raises(OSError, match=r".") as caught:
            self.publish(fs)
        assert caught.value.errno == errno.ESTALE, caught.value
        return str(caught.value)

    def shows(self, fs: ShardFileSystem, number: int, token: int | None) -> None:
        """A chunk on a mount has this token; None: it is absent."""
        if token is None:
            assert not fs.exists(self.path(number))
            return
        data = self.target.shown(token)
        assert fs.cat_file(self.path(number)) == data
        assert fs.info(self.path(number))["size"] == len(data)

    def shows_all(self, fs: ShardFileSystem) -> None:
        """All chunks on a mount are those that the source should have."""
        for number in range(len(self.target.chunks)):
            self.shows(fs, number, self.tokens.get(number))

    def is_shown(self, fs: ShardFileSystem) -> bool:
        """Return `shows_all`. A mount reads the documents of a remote source at most once a second, by their names."""
        fs.exists(self.target.document)
        with suppress(AssertionError, OSError, ShardfsError):
            self.shows_all(fs)
            return True
        return False

    def end(self, fs: ShardFileSystem, *left: int | str) -> None:
        """Unmount; these chunks and documents stay in the journal, and no other ones."""
        paths = [self.path(one) if isinstance(one, int) else one for one in left]
        assert sorted(fs.close(PUBLISH_S)) == sorted(paths)
        journals = self.top / "journals"
        assert bool(left) == any(journals.iterdir())
        assert [key for key in self.store.files() if "shardfs" in key] == []
        self.check()

    # ---- in the middle of a publish ----

    def publish_closed(self, fs: ShardFileSystem) -> None:
        """Publish as after `age` seconds: chunks that are open for writing wait for the next publish."""
        pending = written(fs).pending
        for shard in list(pending.shards):
            pending.publisher.publish(shard)

    def publish_and_die(self, fs: ShardFileSystem) -> None:
        """Killed after the source has the new shard, before the journal knows that."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Publisher, "_arrived", lambda *_: None)
            self.publish_closed(fs)
        self.kill(fs)

    @contextmanager
    def before_an_update(self, fs: ShardFileSystem, change: Callable[[], object]) -> Iterator[None]:
        """A change is made right before the mount replaces an object."""
        writer = written(fs).writer
        update = writer.update

        def late(*args: Any) -> Any:
            patch.undo()
            change()
            return update(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writer, "update", late)
            yield

    @contextmanager
    def meanwhile(self, change: Callable[[], object], step: str = "begun") -> Iterator[None]:
        """A change is made once, after this step of a publish; by default before the old shard is replaced."""
        calls = [change]
        original = getattr(Job, step)

        def change_after(job: Job, *args: Any) -> Any:
            outcome = original(job, *args)
            if calls:
                calls.pop()()
            return outcome

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Job, step, change_after)
            yield
        assert calls == []


def written(fs: ShardFileSystem) -> WriteTree:
    assert isinstance(fs.tree, WriteTree)
    return fs.tree
