"""Serves a `MemoryTree` until it is unmounted: `python -m tests.write.serve_memory MOUNTPOINT [ACCESS_LOG]`.

Prints a line as soon as the mount answers, and nothing else unless there is a bug. Ends when its standard input does,
so that no test leaves it behind.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading

from shardfs.fuse.access import AccessLog
from shardfs.fuse.libfuse import Session
from shardfs.fuse.server import Server
from shardfs.fuse.settings import FuseSettings
from tests.write.memory_tree import MemoryTree


def main(mountpoint: str, access_log: str | None = None) -> None:
    logging.basicConfig(level=logging.ERROR)
    settings = FuseSettings(rw=True, file_mode=0o644, dir_mode=0o755)
    server = Server(settings, AccessLog.open(access_log) if access_log else None)
    session = Session([*settings.options(), "fsname=memory", "subtype=shardfs"], settings.max_background())
    session.mount(mountpoint)
    ended = threading.Event()
    session.negotiate()
    server.start(MemoryTree(), session, ended.set)
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    print("ready", flush=True)
    threading.Thread(target=_watch, args=(ended,), daemon=True).start()
    ended.wait()
    session.unmount()
    os._exit(0)


def _watch(ended: threading.Event) -> None:
    sys.stdin.read()
    ended.set()


if __name__ == "__main__":
    main(*sys.argv[1:])
