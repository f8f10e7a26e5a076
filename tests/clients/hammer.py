"""Several processes that write chunks until the mount goes away: `hammer ARRAY TARGET LOG WRITERS`.

For each line on standard input they write until an error, and a line of JSON says what that was: the numbers of errors
by name. Each writer has its own chunks, and goes through the ways in which tools write.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from collections import Counter
from contextlib import suppress
from pathlib import Path

from tests.write.history import Log
from tests.write.targets import TARGETS, Target


def hammer(path: Path, target: Target, log: Log, numbers: list[int], start: int) -> str:
    """Write until something fails; the name of the error."""
    token = start
    while True:
        for number in numbers:
            token += 1000
            try:
                _one(path, target, log, number, token + number, token // 1000 % 5)
            except OSError as e:
                return errno.errorcode.get(e.errno or 0, str(e))


def _one(path: Path, target: Target, log: Log, number: int, token: int, way: int) -> None:
    chunk = path / target.path(number)
    if way == 4:
        log.issue(number, None)
        with suppress(FileNotFoundError):
            os.unlink(chunk)
        log.ack(number, "closed")
        return
    with suppress(FileExistsError):
        os.makedirs(chunk.parent)
    data = target.shown(token)
    name = f"{chunk}.{token:032x}.partial" if way % 2 else str(chunk)
    if way % 2 == 0:
        log.issue(number, token)
    fd = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    try:
        os.write(fd, data[:500])
        os.write(fd, data[500:])
        if way == 3:
            os.fsync(fd)
    finally:
        os.close(fd)  # its error is one of the write
    if way % 2:
        log.issue(number, token)
        os.rename(name, chunk)
    log.ack(number, "closed")


def main(path: str, name: str, log_path: str, writers: str) -> None:
    target, log = TARGETS[name], Log(Path(log_path))
    for turn, _ in enumerate(sys.stdin, 1):
        children = {}
        for writer in range(int(writers)):
            reader, end = os.pipe()
            pid = os.fork()
            if pid == 0:
                numbers = list(range(writer, len(target.chunks), int(writers)))
                first = 2_000_000 * turn  # enough for 2,000 turns: a token has 32 bits
                with os.fdopen(end, "w") as out:
                    out.write(hammer(Path(path), target, log, numbers, first))
                os._exit(0)
            os.close(end)
            children[pid] = reader
        said: Counter[str] = Counter()
        for pid, reader in children.items():
            os.waitpid(pid, 0)
            with os.fdopen(reader) as file:
                said[file.read()] += 1
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
