"""A disk image as a single file that notes what reaches it: `python -m tests.write.recorded_disk FILE IMAGE RECORD`.

Whatever is written to FILE is in IMAGE and noted in RECORD before it is answered; a flush is noted, too. A file system
on a loop device on FILE has it as a disk with a cache. Prints a line as soon as FILE is there. Ends when FILE is
unmounted or standard input ends.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import threading
from struct import Struct
from typing import TYPE_CHECKING, NamedTuple

from shardfs.fuse import libfuse, protocol

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_HEAD = Struct("=qQ")  # where, or -1 for a flush; how many bytes follow


class Event(NamedTuple):
    """What reached the disk; `data` None: a flush. `end` is where its note ends."""

    end: int
    at: int
    data: bytes | None


def events(record: Path) -> Iterator[Event]:
    """All that was noted, in order."""
    noted, end = record.read_bytes(), 0
    while end < len(noted):
        at, size = _HEAD.unpack_from(noted, end)
        begin, end = end + _HEAD.size, end + _HEAD.size + size
        yield Event(end, at, None if at < 0 else noted[begin:end])


class Disk:
    """Answers requests about the one file that there is."""

    def __init__(self, image: str, record: str) -> None:
        self._image = os.open(image, os.O_RDWR)
        self._record = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._encoder = protocol.Encoder(
            file_mode=stat.S_IFREG | 0o600, dir_mode=0, uid=os.geteuid(), gid=os.getegid(),
            attr_timeout=1e9, entry_timeout=0, negative_timeout=0,
        )  # fmt: skip

    def serve(self, fd: int) -> None:
        """Until it is unmounted."""
        buffer = bytearray(protocol.REQUEST_BUFFER)
        while True:
            try:
                os.readv(fd, [buffer])
            except OSError as e:
                if e.errno == errno.ENODEV:
                    return
                continue
            _, opcode, unique, *_ = protocol.HEADER_IN.unpack_from(buffer)
            if opcode not in (protocol.FORGET, protocol.BATCH_FORGET, protocol.INTERRUPT):
                os.writev(fd, self._answer(opcode, unique, memoryview(buffer)[protocol.BODY :]))

    def _answer(self, opcode: int, unique: int, body: memoryview) -> list[bytes | bytearray]:
        match opcode:
            case protocol.GETATTR:
                return [self._encoder.attributes_reply(unique, 1, False, os.fstat(self._image).st_size, 0)]
            case protocol.OPEN:
                return [protocol.open_reply(unique, protocol.OPEN_KEEP_CACHE)]
            case protocol.READ:
                at, size = protocol.READ_IN.unpack_from(body)
                data = os.pread(self._image, size, at)
                return [protocol.data_header(unique, len(data)), data]
            case protocol.WRITE:
                _, at, size = protocol.WRITE_IN.unpack_from(body)
                data = bytes(body[protocol.WRITE_IN.size : protocol.WRITE_IN.size + size])
                os.pwrite(self._image, data, at)
                os.writev(self._record, [_HEAD.pack(at, size), data])
                return [protocol.write_reply(unique, size)]
            case protocol.FSYNC:
                os.write(self._record, _HEAD.pack(-1, 0))
                return [protocol.error_reply(unique, 0)]
            case protocol.FLUSH | protocol.RELEASE:
                return [protocol.error_reply(unique, 0)]
        return [protocol.error_reply(unique, errno.ENOSYS)]


def _watch() -> None:
    sys.stdin.read()
    os._exit(0)


def main(path: str, image: str, record: str) -> None:
    session = libfuse.Session(["fsname=disk", "subtype=shardfs"], 64)
    session.mount(path)
    session.negotiate()
    threading.Thread(target=_watch, daemon=True).start()
    print("ready", flush=True)
    Disk(image, record).serve(session.fd)


if __name__ == "__main__":
    main(*sys.argv[1:])
