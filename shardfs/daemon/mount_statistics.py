"""Statistics of a mount as JSON, in the Prometheus text format, and as one line. Never accesses the store."""

from __future__ import annotations

import json
import os
import time
from errno import errorcode
from typing import TYPE_CHECKING, Any, Protocol

from shardfs.daemon.status_fields import Kind, metrics
from shardfs.fuse.protocol import NAMES
from shardfs.model.file_tree import FileTree
from shardfs.model.text import counted
from shardfs.model.version import __version__
from shardfs.storage.counters import BOUNDS_S, ORDINARY, Histogram

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardfs.daemon.shutdown import Writing
    from shardfs.daemon.status_fields import Row
    from shardfs.fuse.server import Server
    from shardfs.storage.retry import RetryPolicy
    from shardfs.storage.store import Store


class ObservableTree(FileTree, Protocol):
    """A file tree with the figures that the statistics of a mount include."""

    @property
    def retry(self) -> RetryPolicy | None:
        """The retry policy of a remote store; None for a local store."""

    @property
    def store(self) -> Store:
        """The store of the source."""

    def caches(self) -> dict[str, dict[str, int]]:
        """For each cache, by its name: `hits` and `misses`, and `bytes` in use and their `limit`."""


class Status:
    """Statistics of one mount since this object was created. Thread-safe.

    `facts` go into the snapshot unchanged: source, mountpoint, layout, and the address of the status page, if any.
    `writing` is None for a read-only mount.
    """

    def __init__(
        self, server: Server, tree: ObservableTree, facts: Mapping[str, Any], writing: Writing | None = None
    ) -> None:
        self._server = server
        self._tree = tree
        self._facts = facts
        self._writing = writing
        self._start = time.time()
        self._start_clock = time.monotonic()

    def snapshot(self) -> dict[str, Any]:
        """All statistics, as JSON serializable values by name. Times are in seconds, `started` since the epoch.

        `caches` has a group for each cache. `store` is None for a local source, `writing` (`Writing.state`) for a
        read-only mount. `requests`, `errors` and `latencies` are by operation; `errors` then by errno.
        """
        counts = self._server.counts()
        errors: dict[str, dict[str, int]] = {}
        for (opcode, number), n in sorted(counts.errors.items()):
            errors.setdefault(_name(opcode), {})[errorcode.get(number, str(number))] = n
        return {
            "version": __version__,
            "pid": os.getpid(),
            **self._facts,
            "started": self._start,
            "uptime": time.monotonic() - self._start_clock,
            "cpu": time.process_time(),
            "resident_bytes": _resident_bytes(),
            **self._server.load(),
            "requests": {_name(opcode): n for opcode, n in sorted(counts.calls.items())},
            "errors": errors,
            "latencies": {_name(opcode): _latency(h) for opcode, h in sorted(counts.times.items()) if h.count},
            "bytes_served": counts.nbytes,
            "caches": self._tree.caches(),
            "store": _store(self._tree),
            "writing": None if self._writing is None else self._writing.state(),
        }

    def problems(self) -> list[str]:
        """Damage found in the journal, one sentence each, to print when the mount starts."""
        return [] if self._writing is None else self._writing.state()["problems"]

    def as_json(self) -> bytes:
        """Content of the file `.shardfs/status.json`: the snapshot."""
        return json.dumps(self.snapshot(), indent=1).encode() + b"\n"

    def as_prometheus(self) -> bytes:
        """Content of `.shardfs/metrics`, in the text format of prometheus.io/docs/instrumenting/exposition_formats."""
        return "".join(f"{line}\n" for line in _metrics(self.snapshot(), self._server.counts().times)).encode()

    def line(self) -> str:
        """The main statistics as one line of text without a line feed, for the service manager."""
        s = self.snapshot()
        failed = sum(n for counts in s["errors"].values() for name, n in counts.items() if name not in ORDINARY)
        words = [counted(sum(s["requests"].values()), "request"), f"{s['bytes_served'] / 2**20:.1f} MiB served"]
        words += [f"{failed} failed"] if failed else []
        words += [f"{s['waiting']} waiting"] if s["waiting"] else []
        if store := s["store"]:
            words.append(f"{store['bytes_fetched'] / 2**20:.1f} MiB fetched")
        for key, state in _UNPUBLISHED.items():
            if s["writing"] and (n := s["writing"][key]):
                words.append(f"{n} {state}")
        return ", ".join([*words, "the store does not answer"] if store and store["silent"] else words)


_UNPUBLISHED = {
    "dirty_chunks": "chunks to be published",
    "failing": "SHARDS CANNOT BE PUBLISHED",
    "refused": "FILES WERE REFUSED AT CLOSE",
}


def _name(opcode: int) -> str:
    return NAMES.get(opcode, str(opcode))


def _latency(times: Histogram) -> dict[str, Any]:
    """Count, mean, and upper bounds of the median and the 99th percentile. None: above the last bound."""
    median, p99 = (None if (s := times.below(share)) == float("inf") else s for share in (0.5, 0.99))
    return {"count": times.count, "mean": times.seconds / times.count, "median_below": median, "p99_below": p99}


def _store(tree: ObservableTree) -> dict[str, Any] | None:
    retry = tree.retry
    if retry is None:
        return None
    counters = retry.counters.snapshot()
    times = _times(counters)
    return {
        **counters,
        "errors": {errorcode.get(number, str(number)): n for number, n in counters["errors"].items()},
        "silent": retry.silent,
        "latency": _latency(times) if times.count else None,
    }


def _times(store: Mapping[str, Any]) -> Histogram:
    times = Histogram()
    times.bins = store["bins"]
    times.seconds = store["seconds"]
    return times


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---- Prometheus


def _metrics(snapshot: Mapping[str, Any], times: Mapping[int, Histogram]) -> Iterator[str]:
    labels = {name: snapshot.get(name, "") for name in ("version", "source", "mountpoint", "layout")}
    yield from _metric("info", "What is mounted.", Kind.GAUGE, [(labels, 1)])
    for figure, rows in metrics(snapshot):
        yield from _metric(figure.metric_name, figure.help, figure.kind, rows)
    errors: list[Row] = [
        ({"op": op, "errno": e}, n) for op, counts in snapshot["errors"].items() for e, n in counts.items()
    ]
    yield from _metric("request_errors_total", "FUSE requests that were answered with an errno.", Kind.COUNTER, errors)
    named = {_name(op): h for op, h in times.items() if h.count}
    yield from _histogram("request_seconds", "Time to answer; one in 64 answers from memory is timed.", named, "op")
    if (store := snapshot["store"]) is not None:
        yield from _histogram("store_seconds", "Operations of the store, with retries.", {"": _times(store)}, "")


def _metric(name: str, words: str, kind: Kind, rows: list[Row]) -> Iterator[str]:
    yield f"# HELP shardfs_{name} {words}"
    yield f"# TYPE shardfs_{name} {'counter' if kind is Kind.COUNTER else 'gauge'}"
    for labels, value in rows:
        yield f"shardfs_{name}{_labels(labels)} {value}"


def _histogram(name: str, words: str, rows: Mapping[str, Histogram], label: str) -> Iterator[str]:
    yield f"# HELP shardfs_{name} {words}"
    yield f"# TYPE shardfs_{name} histogram"
    for value, times in rows.items():
        labels, below = {label: value} if label else {}, 0
        for bound, n in zip((*BOUNDS_S, float("inf")), times.bins, strict=True):
            below += n
            le = "+Inf" if bound == float("inf") else f"{bound:g}"
            yield f"shardfs_{name}_bucket{_labels({**labels, 'le': le})} {below}"
        yield f"shardfs_{name}_sum{_labels(labels)} {times.seconds:g}"
        yield f"shardfs_{name}_count{_labels(labels)} {below}"


def _labels(labels: Mapping[str, Any]) -> str:
    pairs = ",".join(f'{name}="{_escaped(str(value))}"' for name, value in labels.items())
    return f"{{{pairs}}}" if pairs else ""


def _escaped(text: str) -> str:
    text = text.encode(errors="replace").decode()
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
