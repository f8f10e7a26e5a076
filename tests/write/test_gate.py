"""Many at a time, or one alone."""

from __future__ import annotations

import threading
import time

from shardfs.write.rw_lock import RWLock


def test_who_is_alone_meets_nobody() -> None:
    gate, inside, alone, counts = RWLock(), [0], [0], []
    lock, over = threading.Lock(), threading.Event()

    def together() -> None:
        while not over.is_set():
            with gate.shared(), gate.shared():
                with lock:
                    inside[0] += 1
                counts.append((inside[0], alone[0]))
                with lock:
                    inside[0] -= 1

    def by_itself() -> None:
        for _ in range(100):
            with gate.alone():
                alone[0] += 1
                counts.append((inside[0], alone[0]))
                with gate.shared():
                    time.sleep(0.0001)
                alone[0] -= 1
            with gate.shared(), gate.alone(), gate.alone():
                counts.append((inside[0], alone[0] + 1))

    threads = [threading.Thread(target=f, daemon=True) for f in (together, together, together, by_itself, by_itself)]
    for thread in threads:
        thread.start()
    for thread in reversed(threads):
        if thread is threads[2]:
            over.set()
        thread.join(60)
        assert not thread.is_alive()
    assert {s for s in counts if s[1]} == {(0, 1)}
    assert any(s[1] == 0 for s in counts)


def test_an_error_opens_it_again() -> None:
    gate = RWLock()
    for way in (gate.alone, gate.shared):
        try:
            with way():
                raise OSError
        except OSError:
            pass
    with gate.alone():
        pass
