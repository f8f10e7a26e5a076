"""Read a tree at random and check every byte: `read_at_random.py EXPECTED.json SECONDS SEED`, in the tree's directory.

Ends after SECONDS and `LEAST`, or on SIGTERM, and prints how often it did what. Whatever is not as expected ends it
with status 1. Knows only the standard library, so that many can be started.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from typing import Any

LEAST = {"read": 50, "listed": 5, "absent": 5}
"""How often it does what, however slow the machine is."""


class Reader:
    """`expected`: "files" with their MD5, "absent" names, "directories" with the number of their entries."""

    def __init__(self, expected: dict[str, Any], seed: int) -> None:
        self.sums: dict[str, str] = expected["files"]
        self.files = sorted(self.sums)
        self.absent: list[str] = expected["absent"]
        self.directories = sorted(expected["directories"].items())
        self.random = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.ended = False

    def end(self, *_: object) -> None:
        self.ended = True

    def run(self, seconds: float) -> None:
        stop = time.monotonic() + seconds
        while not self.ended and (time.monotonic() < stop or any(self.done[action] < n for action, n in LEAST.items())):
            number = self.random.random()
            if number < 0.8:
                self.read()
            elif number < 0.9:
                self.look_for_absent()
            else:
                self.list()

    def read(self) -> None:
        name = self.random.choice(self.files)
        fd = os.open(name, os.O_RDONLY)
        try:
            size = os.fstat(fd).st_size
            data = os.pread(fd, size + 1, 0)
            if len(data) != size or hashlib.md5(data).hexdigest() != self.sums[name]:
                raise AssertionError(f"{name}: {len(data)} bytes of {size} differ from what was written")
            begin = self.random.randrange(size)
            if os.pread(fd, 1000, begin) != data[begin : begin + 1000]:
                raise AssertionError(f"{name}: other bytes at {begin}")
            if self.random.random() < 0.7:
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)  # the next reader asks the daemon again
        finally:
            os.close(fd)
        self.done["read"] += 1
        self.done["bytes"] += size

    def look_for_absent(self) -> None:
        name = self.random.choice(self.absent)
        if os.path.exists(name):
            raise AssertionError(f"{name} exists")
        self.done["absent"] += 1

    def list(self) -> None:
        name, wanted = self.random.choice(self.directories)
        with os.scandir(name) as entries:
            count = sum(1 for _ in entries)
        if count != wanted:
            raise AssertionError(f"{name}: {count} entries instead of {wanted}")
        self.done["listed"] += 1


def main(expected: str, seconds: str, seed: str) -> None:
    with open(expected) as file:
        reader = Reader(json.load(file), int(seed))
    signal.signal(signal.SIGTERM, reader.end)
    reader.run(float(seconds))
    print(json.dumps(reader.done))


if __name__ == "__main__":
    main(*sys.argv[1:])
