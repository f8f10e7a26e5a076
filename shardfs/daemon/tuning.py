"""Limits, garbage collection and memory allocation of a process that serves a mount."""

from __future__ import annotations

import ctypes
import fcntl
import gc
import os
import resource
from contextlib import suppress

M_TRIM_THRESHOLD = -1
M_MMAP_THRESHOLD = -3
M_ARENA_MAX = -8
KEPT_BYTES = 16 << 20

DESCRIPTORS = 2048
"""File descriptors for which the process reserves room: 1,024 open shards, and everything else."""


def prepare_process() -> None:
    """Tune limits, garbage collection and memory allocation of a serving process. Call before starting threads.

    What the system refuses stays as it is.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with suppress(OSError):
        # The kernel doubles the descriptor table as it fills. In a process with threads, each doubling takes 10 ms
        # during a request. So grow the table now, to a size that suffices for all open shards.
        os.close(fcntl.fcntl(2, fcntl.F_DUPFD_CLOEXEC, min(hard, DESCRIPTORS) - 1))
    # Each look-up allocates an object that lives for a while. By default the collector runs after a few hundred
    # look-ups. These runs take 4 % of the time of a request and free nothing.
    gc.set_threshold(50_000, 20, 100)
    _keep_memory()


def _keep_memory() -> None:
    """Let glibc keep `KEPT_BYTES` of freed memory instead of returning all of it to the kernel.

    Decoding allocates and frees whole chunks. Getting a page from the kernel costs as much as decoding part of a page.
    """
    with suppress(OSError, AttributeError):  # only glibc has mallopt
        mallopt = ctypes.CDLL(None).mallopt
        for parameter, value in ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, 8 << 20), (M_TRIM_THRESHOLD, KEPT_BYTES)):
            mallopt(parameter, value)
