"""How a mount behaves towards the kernel and its users."""

from __future__ import annotations

import math
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardfs.fuse.protocol import Encoder

if TYPE_CHECKING:
    from shardfs.config.options import Options


@dataclass(frozen=True, slots=True, kw_only=True)
class FuseSettings:
    """How a mount behaves towards the kernel and its users. Most names are those of mount.fuse3(8).

    Args:
        uid, gid: the owner and group of all files; None for those of this process.
        file_mode, dir_mode: permission bits, before `umask` is removed from them.
        attr_timeout, entry_timeout, negative_timeout: seconds for which the kernel may cache attributes, names, and
            the absence of a name. The source of a read-only mount is assumed not to change.
        threads: the number of requests that may wait for the store at the same time, plus one.
        poll_us: while one thread asks densely, poll for its next request for at most so many microseconds before
            sleeping; 0 turns that off. See `Polling`.
        direct_io: files over 128 KiB bypass the page cache. The first read is faster, but such files cannot be mapped
            shared. Ignored with `rw`.
        keep_listings: the kernel may cache listings without a time-out. Ignored with `rw`.
        rw: the mount is writable. Its tree must be a `WriteTree`.
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
    threads: int = 16
    poll_us: int = 100
    direct_io: bool = False
    keep_listings: bool = True
    rw: bool = False
    kernel: tuple[str, ...] = ()

    @classmethod
    def from_options(cls, options: Options) -> FuseSettings:
        """The settings that the options of a mount ask for. The kernel caches nothing longer than `index_ttl`."""
        values = {name: getattr(options, name) for name in cls.__dataclass_fields__ if name != "keep_listings"}
        values["keep_listings"] = options.index_ttl == math.inf
        if options.allow_root:
            # The kernel admits only the owner or, with allow_other, all users. The check of libfuse for allow_root
            # misses requests that the kernel answers from its cache. But the kernel always checks owner and mode, and
            # root passes.
            values.update(allow_other=True, default_permissions=True, umask=options.umask | 0o077)
        for name, mode in (("file_mode", 0o644), ("dir_mode", 0o755)):
            if values[name] is None:
                values[name] = mode if options.rw else mode & ~0o222
        for name in ("attr_timeout", "entry_timeout", "negative_timeout"):
            # For an entry in its cache, the kernel sends no request, so the daemon could not notice an expired index.
            values[name] = min(values[name], options.index_ttl)
        return cls(**values)

    def options(self) -> list[str]:
        """The mount options for libfuse, but not the name of the source. `ro` has the kernel itself refuse changes."""
        flags = ("allow_other", "default_permissions")
        access = ("nosuid", "nodev") if self.rw else ("ro",)
        return [*access, *(name for name in flags if getattr(self, name)), *self.kernel]

    def encoder(self, *, most_s: float = math.inf) -> Encoder:
        """An encoder of replies for one thread. The kernel caches the replies for at most `most_s` seconds."""
        return Encoder(
            file_mode=stat.S_IFREG | self.file_mode & ~self.umask,
            dir_mode=stat.S_IFDIR | self.dir_mode & ~self.umask,
            uid=os.getuid() if self.uid is None else self.uid,
            gid=os.getgid() if self.gid is None else self.gid,
            attr_timeout=min(self.attr_timeout, most_s),
            entry_timeout=min(self.entry_timeout, most_s),
            negative_timeout=min(self.negative_timeout, most_s),
            umask=self.umask,
        )

    def max_background(self) -> int:
        """Return how many background requests, such as read-ahead, the kernel may send. Its default limit is low."""
        return max(64, 2 * self.threads)
