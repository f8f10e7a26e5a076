"""The writable tree: a file tree that FUSE and fsspec call, made of parts.

A closed chunk goes to the journal as a whole (`JournaledKind`), and from there to its shard (`WriteBuffer`). Each part
calls only parts that `WriteTree.__init__` builds before it, and can be built and tested without the later ones.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from shardfs.formats.create_rules import Rules
from shardfs.model.errors import ShardfsError
from shardfs.storage import syscalls
from shardfs.storage.cache import nothing
from shardfs.storage.writers import open_writer
from shardfs.write.buffers import Budget
from shardfs.write.contents import FileContents
from shardfs.write.descriptions import Descriptions
from shardfs.write.directories import Directories
from shardfs.write.documents import Documents
from shardfs.write.entries import Entries
from shardfs.write.file_calls import FileCalls
from shardfs.write.journaled import CompressedKind
from shardfs.write.kinds import Kinds
from shardfs.write.metadata import FileMetadata
from shardfs.write.name_kind import ExpectedDatasets
from shardfs.write.names import Names
from shardfs.write.open_files import OpenFiles
from shardfs.write.overlay import Overlay
from shardfs.write.publishing import Publishing
from shardfs.write.renames import Renames
from shardfs.write.writeback import WriteBuffer

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.storage.writers import Writer
    from shardfs.vfs.tree import Tree
    from shardfs.write.journal import Journal

log = logging.getLogger(__name__)


class WriteTree:
    """A writable mount of a source. Thread-safe. It starts with the versions in the journal.

    The calls of the file tree are those of the parts, which document them: `Overlay` for all that reads, `FileCalls`
    for open files, `FileMetadata`, `Entries` and `Renames` for names.
    """

    def __init__(
        self,
        base: Tree,
        writer: Writer,
        pending: WriteBuffer,
        documents: Documents,
        budget: Budget,
        waiting: Callable[[], None] = nothing,
    ) -> None:
        """`budget` limits the memory for files open for writing; `waiting` is called before a thread waits."""
        self.base, self.writer, self.pending, self.documents = base, writer, pending, documents
        names = Names(base, documents, waiting)
        contents = FileContents(names, pending, writer, budget)
        directories = Directories(names, local=writer.local)
        view = Overlay(contents, directories)
        opened = OpenFiles(contents)
        compressed = CompressedKind(contents, view, opened)
        descriptions = Descriptions(contents, view, opened, compressed)
        kinds = Kinds(contents, compressed, descriptions)
        calls = FileCalls(contents, view, opened, descriptions, kinds)
        metadata = FileMetadata(contents, view, opened, kinds)
        entries = Entries(contents, view, directories, opened, descriptions, kinds, metadata)
        renames = Renames(contents, view, opened, descriptions, kinds, entries)
        self._handles, self._descriptions = opened.handles, descriptions
        self.hooks, self.store, self.retry, self.caches = names.hooks, base.store, base.retry, base.caches
        self.note = None

        self.lookup, self.attributes = view.lookup, view.attributes
        self.resolve, self.number = view.resolve, view.number
        self.chunk_number, self.is_chunk = view.chunk_number, view.is_chunk
        self.shown_path, self.remember, self.forget = names.shown_path, names.remember, names.forget
        self.read, self.read_many, self.scan = view.read, view.read_many, view.scan
        self.is_unlinked = view.is_unlinked
        self.small_listing, self.usage, self.statvfs = view.small_listing, view.usage, view.statvfs

        self.create, self.open, self.write, self.truncate = calls.create, calls.open, calls.write, calls.truncate
        self.flush, self.fsync, self.release, self.allocate = calls.flush, calls.fsync, calls.release, calls.allocate

        self.set_mode, self.set_times, self.xattrs = metadata.set_mode, metadata.set_times, metadata.xattrs
        self.set_xattr, self.remove_xattr = metadata.set_xattr, metadata.remove_xattr

        self.unlink, self.link, self.rename = entries.unlink, entries.link, renames.rename
        self.mkdir, self.rmdir, self.sync_directory = entries.mkdir, entries.rmdir, entries.sync_directory

        self.state, self.left = pending.state, pending.left
        descriptions.publish_chosen()
        view.recover()
        descriptions.uncompress()
        pending.attach(kinds.published, kinds.is_held)

    def close(self, timeout: float) -> list[str]:
        """Close all open files, publish within `timeout` seconds, and close the journal. Return the paths left over.

        The kernel may no longer report the last closes, so open handles are closed here first.
        """
        for handle in list(self._handles):
            try:
                self.flush(handle)
            except (OSError, ShardfsError) as e:
                log.warning("an open file could not be saved at unmount, and its last changes are lost: %s", e)
            self.release(handle)
        self._descriptions.pass_strays_through()
        try:
            return self.pending.close(timeout)
        finally:
            self.writer.close()


def open_write_tree(
    base: Tree,
    journal: Journal,
    *,
    publishing: Publishing | None = None,
    rules: Rules | None = None,
    replace_links: bool = False,
    layout: str = "",
    waiting: Callable[[], None] = nothing,
) -> WriteTree:
    """Return a writable tree on top of a read-only one. The versions in the journal are pending.

    Args:
        publishing: when and how shards are published; its `dirty_bytes` also limit the memory of open files.
        replace_links: passed to `LocalWriter`.
        layout: passed to `WriteBuffer`.
        rules: passed to `ExpectedDatasets`.

    Raise UnsupportedError, with the reason, if the source cannot be written; BusyError if another host writes to it.
    """
    publishing = publishing or Publishing()
    writer = open_writer(base.store, replace_links=replace_links, journal=journal.directory)
    try:
        pending = WriteBuffer(
            journal, writer, base.datasets.forms.now, base.directories.shown_version, publishing, waiting, layout
        )
    except BaseException:
        writer.close()
        raise
    expected = ExpectedDatasets(base, rules or Rules())
    documents = Documents(base, writer, expected, wins=publishing.conflict == "ours")
    budget = Budget(publishing.dirty_bytes, lambda: syscalls.open_unnamed(str(journal.directory)))
    return WriteTree(base, writer, pending, documents, budget, waiting)
