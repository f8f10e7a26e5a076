"""The writable tree: a file tree that FUSE and fsspec call, made of parts.

A closed chunk goes to the journal as a whole (`JournaledKind`), and from there to its shard (`WriteBuffer`). Each part
calls only parts that `WriteTree.__init__` builds before it, and can be built and tested without the later ones.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardfs.formats.create_rules import Rules
from shardfs.storage import syscalls
from shardfs.storage.cache import nothing
from shardfs.storage.writers import open_writer
from shardfs.write.buffers import Budget
from shardfs.write.descriptions import Descriptions
from shardfs.write.directories import Directories
from shardfs.write.documents import Documents
from shardfs.write.file_attributes import FileMetadata
from shardfs.write.file_calls import FileCalls
from shardfs.write.file_contents import FileContents
from shardfs.write.file_kinds import Kinds
from shardfs.write.journaled import CompressedKind
from shardfs.write.name_kind import ExpectedDatasets
from shardfs.write.names import Names
from shardfs.write.open_files import OpenFiles
from shardfs.write.overlay import Overlay
from shardfs.write.publish_shard import Publishing
from shardfs.write.renames import Renames
from shardfs.write.writeback import WriteBuffer

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.storage.writers import Writer
    from shardfs.vfs.tree import Tree
    from shardfs.write.journal import Journal


class WriteTree(Overlay):
    """A writable mount of a source. Thread-safe. It starts with the versions in the journal.

    The calls that read are those of `Overlay`. The others are those of the parts, which document them: `FileCalls` for
    open files, `FileMetadata`, `Entries` and `Renames` for names.
    """

    def __init__(
        self,
        source_tree: Tree,
        writer: Writer,
        pending: WriteBuffer,
        documents: Documents,
        budget: Budget,
        waiting: Callable[[], None] = nothing,
    ) -> None:
        """`budget` limits the memory for files open for writing; `waiting` is called before a thread waits."""
        names = Names(source_tree, documents, waiting)
        contents = FileContents(names, pending, writer, budget)
        directories = Directories(names, local=writer.local)
        super().__init__(contents, directories)
        self.source_tree = source_tree
        self.writer = writer
        self.pending = pending
        self.documents = documents
        self.hooks = names.hooks
        self.store = source_tree.store
        self.retry = source_tree.retry
        self.caches = source_tree.caches
        self.note_read = None
        self.state = pending.state
        self.left = pending.left
        self.shown_path = names.shown_path
        self.remember = names.remember
        self.forget = names.forget
        opened = OpenFiles(contents)
        compressed = CompressedKind(contents, self, opened)
        self._descriptions = Descriptions(contents, self, opened, compressed)
        kinds = Kinds(contents, compressed, self._descriptions)
        self._calls = FileCalls(contents, self, opened, self._descriptions, kinds)
        metadata = FileMetadata(contents, self, opened, kinds)
        entries = Renames(contents, self, directories, opened, self._descriptions, kinds, metadata)
        self._expose(self._calls, metadata, entries)
        self._descriptions.publish_chosen()
        self.recover()
        self._descriptions.convert_compressed_orphans()
        self.is_closed = False
        pending.attach(kinds.published, kinds.is_held)

    def _expose(self, calls: FileCalls, metadata: FileMetadata, entries: Renames) -> None:
        """Take over the calls that change files and names."""
        self.create = calls.create
        self.open = calls.open
        self.write = calls.write
        self.truncate = calls.truncate
        self.flush = calls.flush
        self.fsync = calls.fsync
        self.release = calls.release
        self.unsaved = calls.unsaved
        self.allocate = calls.allocate
        self.xattrs = metadata.xattrs
        self.set_mode = metadata.set_mode
        self.set_times = metadata.set_times
        self.set_xattr = metadata.set_xattr
        self.remove_xattr = metadata.remove_xattr
        self.unlink = entries.unlink
        self.link = entries.link
        self.rename = entries.rename
        self.mkdir = entries.mkdir
        self.rmdir = entries.rmdir
        self.sync_directory = entries.sync_directory

    def close(self, timeout: float) -> list[str]:
        """Close all open files, publish within `timeout` seconds, and close the journal. Return the paths left over.

        The kernel may no longer report the last closes, so open handles are closed here first. The caller sends no call
        that changes anything afterwards: calls on plain files of a local source would still change them.
        """
        if self.is_closed:
            return self.pending.close(timeout)
        self.is_closed = True
        self._calls.close_all()
        self._descriptions.pass_strays_through()
        try:
            return self.pending.close(timeout)
        finally:
            self.writer.close()


def open_write_tree(
    source_tree: Tree,
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
    writer = open_writer(source_tree.store, replace_links=replace_links, journal=journal.directory)
    try:
        pending = WriteBuffer(
            journal,
            writer,
            source_tree.datasets.forms.now,
            source_tree.directories.shown_version,
            publishing,
            waiting,
            layout,
        )
    except BaseException:
        writer.close()
        raise
    expected = ExpectedDatasets(source_tree, rules or Rules())
    documents = Documents(source_tree, writer, expected, wins=publishing.conflict == "ours")
    budget = Budget(publishing.dirty_bytes, lambda: syscalls.open_unnamed(str(journal.directory)))
    return WriteTree(source_tree, writer, pending, documents, budget, waiting)
