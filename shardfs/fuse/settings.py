"""How a mount behaves towards the kernel and its users."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass

from shardfs.fuse import lowlevel


@dataclass(frozen=True, slots=True, kw_only=True)
class FuseSettings:
    """How a mount behaves towards the kernel and its users; names as mount.fuse3(8) has them.

    Args:
        file_mode, dir_mode: permission bits, before `umask`.
        attr_timeout, entry_timeout, negative_timeout: seconds the kernel may remember attributes, names, and that
            a name does not exist. The source of a read-only mount is taken not to change.
        max_read, max_readahead: bytes; 0 leaves the kernel's own.
        threads: requests that may wait for the store at the same time, plus one.
        poll_us: microseconds to look for the next request before going to sleep, while requests come densely.
        direct_io: read chunks over 128 KiB past the page cache: faster once, but they cannot be mapped shared. Without
            effect if `rw`.
        keep_listings: the kernel may keep listings for as long as it likes. Without effect if `rw`.
        rw: files may be changed, if the tree is one that can be.
        kernel: further mount options for the kernel, such as nodev or noexec.
    """

    allow_other: bool = False
    default_permissions: bool = False
    uid: int | None = None
    gid: int | None = None
    umask: int = 0
    file_mode: int = 0o444
    dir_mode: int = 0o555
    attr_timeout: float = 3600.0
    entry_timeout: float = 3600.0
    negative_timeout: float = 3600.0
    max_read: int = 0
    max_readahead: int = 0
    threads: int = 16
    poll_us: int = 0
    direct_io: bool = False
    keep_listings: bool = True
    rw: bool = False
    kernel: tuple[str, ...] = ()

    def options(self) -> list[str]:
        """The mount options for libfuse. A mount is read-only to the kernel too, so that it asks for no changes."""
        flags = ("allow_other", "default_permissions")
        access = ("nosuid", "nodev") if self.rw else ("ro",)
        return [*access, *(name for name in flags if getattr(self, name)), *self.kernel]

    def encoder(self, *, remembered: bool = True) -> lowlevel.Encoder:
        """The encoder of replies that shows files as these settings want them; the kernel may not remember some."""
        return lowlevel.Encoder(
            file_mode=stat.S_IFREG | self.file_mode & ~self.umask,
            dir_mode=stat.S_IFDIR | self.dir_mode & ~self.umask,
            uid=os.getuid() if self.uid is None else self.uid,
            gid=os.getgid() if self.gid is None else self.gid,
            attr_timeout=self.attr_timeout if remembered else 0,
            entry_timeout=self.entry_timeout if remembered else 0,
            negative_timeout=self.negative_timeout if remembered else 0,
        )

    def limits(self) -> lowlevel.Limits:
        """What INIT settles. Readahead is a background request, of which the kernel sends few at a time by itself."""
        return lowlevel.Limits(self.max_read, self.max_readahead, max(64, 2 * self.threads))
