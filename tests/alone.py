"""A program with mounts of its own: `[*alone(), PROGRAM, ...]` is a command to be run in `ROOT`.

What other tests have mounted at that moment is let go in there: their daemons would go on after they have unmounted it,
as it would still be mounted somewhere.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress

from shardfs.daemon.unmount import unmount
from shardfs.storage.mount_table import FS_TYPE, entries


def alone(*flags: str) -> list[str]:
    """What to put before a command; `flags` are further ones of unshare(1)."""
    return ["unshare", "--mount", "--propagation=private", *flags, sys.executable, "-m", "tests.alone"]


def main(command: list[str]) -> None:
    for entry in list(entries()):
        if entry.type == FS_TYPE:
            with suppress(OSError):  # something else is mounted above it
                unmount(entry.mountpoint, lazy=True)
    os.execvp(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1:])
