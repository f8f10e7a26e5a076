"""Opens a source as options say. All of `mount`, `doctor`, `recover`, fsspec and the verbs that read call this."""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING, Any

from shardfs.config import loading
from shardfs.model import redact
from shardfs.model.errors import OptionError
from shardfs.storage.source_errors import opening

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.config.options import Options
    from shardfs.daemon.mount_statistics import ObservableTree
    from shardfs.vfs.tree import Tree
    from shardfs.write.tree import WriteTree

SPENT = 16 << 20
"""Maximum bytes of decoded chunks to keep after the kernel has read them, because requests may arrive out of order."""


def check(options: Options) -> None:
    """Raise OptionError if options contradict each other (`loading.check`) or `create` is invalid."""
    from shardfs.formats.create_rules import parse

    loading.check(options)
    try:
        parse(options.create or "")
    except ValueError as e:
        raise OptionError(f"create: {e}") from None


def open_source(source: str, options: Options, **hooks: Any) -> Tree:
    """The tree of a source, an absolute path or URL, to be read. `hooks` are further arguments of `open_tree`.

    Raise the errors of `open_tree`: OSError, NotADatasetError, UnsupportedError. Their messages name the source.
    """
    from shardfs.vfs import tree

    redact.add_secrets(source)
    with opening(source):
        return tree.open_with_options(source, options, **hooks)


def open_to_write(tree: Tree, source: str, options: Options, **hooks: Any) -> WriteTree:
    """The writable tree on top of the tree that `open_source` returned. Its `close` publishes and frees the journal.

    Locks the journal, and begins to publish what is in it. `hooks` are further arguments of `open_writable`, whose
    errors are raised, such as BusyError.
    """
    from shardfs.write.open_rw import open_writable

    with opening(source):
        return open_writable(tree, source, options, **hooks)


def require_writable(tree: Tree, source: str, options: Options) -> None:
    """Raise the errors of `open_to_write`. Changes nothing, apart from probes on object stores."""
    from shardfs.write import open_rw

    with opening(source):
        open_rw.require_writable(tree.store, source, options)


def open_for_mount(source: str, options: Options, **hooks: Any) -> Tree:
    """The tree of a source as a mount with these options reads it: see `open_source`."""
    if options.default_permissions:
        hooks["make"] = _with_modes(options)
    # Evict chunks that the kernel has read and caches, unless `direct_io` is set.
    return open_source(source, options, spent_bytes=None if options.direct_io else SPENT, **hooks)


def _with_modes(options: Options) -> Callable[..., Tree]:
    """What makes the tree of a mount on which the kernel checks the modes of files."""
    from shardfs.vfs.source_modes import TreeWithModes

    gid = os.getgid() if options.gid is None else options.gid
    files, directories = options.file_mode is None, options.dir_mode is None
    return partial(TreeWithModes, gid=gid, files=files, directories=directories)


def open_mounted(
    source: str, mountpoint: str, options: Options, waiting: Callable[[], None]
) -> tuple[ObservableTree, WriteTree | None]:
    """The tree for a mount, and the same tree as the side that writes, None for a read-only mount.

    `waiting` is called before a request waits for the store. Raise the errors of `open_source` and `open_to_write`.
    """
    tree = open_for_mount(source, options, waiting=waiting)
    if not options.rw:
        return tree, None
    writable = open_to_write(tree, source, options, mountpoint=mountpoint, waiting=waiting)
    return writable, writable
