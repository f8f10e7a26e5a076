"""Threads that increment a number in a file, by compare-and-swap: `count_tensorstore DIRECTORY KEY THREADS N LOCK`."""

from __future__ import annotations

import json
import sys
import threading
from typing import Any


def increment(store: Any, key: str, times: int) -> None:
    count = 0
    while count < times:
        read = store.read(key).result()
        value = int(read.value) if read.state == "value" else 0
        # 1,000 bytes: whoever finds half of them sees it.
        new = str(value + 1).zfill(1000).encode()
        stamp = store.write(key, new, if_equal=read.stamp.generation).result()
        count += bool(stamp.generation)


def main(directory: str, key: str, threads: str, times: str, lock: str) -> None:
    import tensorstore as ts

    context = {"file_io_locking": {"mode": lock}}
    spec = {"driver": "file", "path": f"{directory}/", "context": context}
    running = []
    for _ in range(int(threads)):
        store = ts.KvStore.open(spec, context=ts.Context()).result()
        running.append(threading.Thread(target=increment, args=(store, key, int(times))))
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    print(json.dumps(int(store.read(key).result().value)))


if __name__ == "__main__":
    main(*sys.argv[1:])
