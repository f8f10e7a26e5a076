"""Statistics of a mount as JSON, in the Prometheus text format, and as one line. Never accesses the store."""

from __future__ import annotations

import json
import os
import time
from errno import errorcode
from typing import TYPE_CHECKING, Any

from shardfs.fuse.protocol import NAMES
from shardfs.model.version import __version__
from shardfs.storage.counters import BOUNDS_S, ORDINARY, Histogram

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardfs.daemon.shutdown import Writing
    from shardfs.fuse.server import Server
    from shardfs.vfs.tree import Tree
    from shardfs.write.tree import WriteTree
    from shardfs.write.unpublished import Unpublished


class Status:
    """Statistics of one mount since this object was created. `facts` holds source, mountpoint, layout and so on."""

    def __init__(
        self,
        server: Server,
        tree: Tree | WriteTree | Unpublished,
        facts: Mapping[str, Any],
        writing: Writing | None = None,
    ) -> None:
        self._server, self._tree, self._facts, self._writing = server, tree, facts, writing
        self._began, self._began_clock = time.time(), time.monotonic()

    def snapshot(self) -> dict[str, Any]:
        """All statistics, as JSON serializable values. Times are in seconds."""
        counts = self._server.counts()
        errors: dict[str, dict[str, int]] = {}
        for (opcode, number), n in sorted(counts.errors.items()):
            errors.setdefault(_name(opcode), {})[errorcode.get(number, str(number))] = n
        return {
            "version": __version__,
            "pid": os.getpid(),
            **self._facts,
            "started": self._began,
            "uptime": time.monotonic() - self._began_clock,
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
        """Damage found in the journal, to print when the mount starts."""
        return [] if self._writing is None else self._writing.state()["problems"]

    def as_json(self) -> bytes:
        """Content of the file `status.json`."""
        return json.dumps(self.snapshot(), indent=1).encode() + b"\n"

    def as_prometheus(self) -> bytes:
        """Content of the file `metrics`, in the format of prometheus.io/docs/instrumenting/exposition_formats."""
        counts, told = self._server.counts(), self.snapshot()
        return "".join(f"{line}\n" for line in _metrics(told, counts.times)).encode()

    def line(self) -> str:
        """The main statistics as one line of text."""
        told = self.snapshot()
        n, failed = sum(told["requests"].values()), sum(_failures(told["errors"]))
        words = [f"{n} requests", f"{told['bytes_served'] / 2**20:.1f} MiB served"]
        words += [f"{failed} failed"] if failed else []
        words += [f"{told['waiting']} waiting"] if told["waiting"] else []
        store = told["store"]
        words += [f"{store['bytes_fetched'] / 2**20:.1f} MiB fetched"] if store else []
        if (writing := told["writing"]) is not None:
            words += [f"{writing['dirty_chunks']} chunks to be published"] if writing["dirty_chunks"] else []
            words += [f"{writing['failing']} SHARDS CANNOT BE PUBLISHED"] if writing["failing"] else []
            words += [f"{writing['refused']} FILES WERE REFUSED AT CLOSE"] if writing["refused"] else []
        return ", ".join([*words, *(["the store does not answer"] if store and store["silent"] else [])])


def _failures(errors: Mapping[str, Mapping[str, int]]) -> Iterator[int]:
    for numbers in errors.values():
        yield from (n for name, n in numbers.items() if name not in ORDINARY)


def _name(opcode: int) -> str:
    return NAMES.get(opcode, str(opcode))


def _latency(times: Histogram) -> dict[str, Any]:
    """Count, mean, and upper bounds of the median and the 99th percentile. None: above the last bound."""
    half, most = (None if (s := times.below(share)) == float("inf") else s for share in (0.5, 0.99))
    return {"count": times.count, "mean": times.seconds / times.count, "median_below": half, "p99_below": most}


def _store(tree: Tree | WriteTree | Unpublished) -> dict[str, Any] | None:
    patience = tree.patience
    if patience is None:
        return None
    told = patience.counters.snapshot()
    times = Histogram()
    times.bins, times.seconds = told.pop("bins"), told.pop("seconds")
    told["errors"] = {errorcode.get(number, str(number)): n for number, n in told["errors"].items()}
    return {
        **told,
        "silent": patience.silent,
        "latency": _latency(times) if times.count else None,
        "bins": times.bins,
        "seconds": times.seconds,
    }


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# ---- Prometheus


def _metrics(told: Mapping[str, Any], times: Mapping[int, Histogram]) -> Iterator[str]:
    labels = {name: told.get(name, "") for name in ("version", "source", "mountpoint", "layout")}
    yield from _metric("info", "gauge", "What is mounted.", [(labels, 1)])
    yield from _metric("start_time_seconds", "gauge", "When the mount began, since the epoch.", [({}, told["started"])])
    yield from _metric("cpu_seconds_total", "counter", "CPU time of the daemon.", [({}, told["cpu"])])
    yield from _metric("resident_bytes", "gauge", "Memory of the daemon.", [({}, told["resident_bytes"])])
    for name, words in _LOADS.items():
        yield from _metric(name, "gauge", words, [({}, told[name])])
    by_op = [({"op": op}, n) for op, n in told["requests"].items()]
    yield from _metric("requests_total", "counter", "FUSE requests.", by_op)
    errors = [({"op": op, "errno": e}, n) for op, found in told["errors"].items() for e, n in found.items()]
    yield from _metric("request_errors_total", "counter", "FUSE requests that were answered with an errno.", errors)
    named = {_name(op): h for op, h in times.items() if h.count}
    yield from _histogram("request_seconds", "Answers; of those from memory one in 64 is timed.", named, "op")
    yield from _metric("bytes_served_total", "counter", "Bytes of files.", [({}, told["bytes_served"])])
    for name, (kind, words) in _CACHES.items():
        rows = [({"cache": c}, cache[name.removesuffix("_total")]) for c, cache in told["caches"].items()]
        yield from _metric(f"cache_{name}", kind, words, rows)
    if told["store"] is not None:
        yield from _store_metrics(told["store"])
    if told["writing"] is not None:
        yield from _writing_metrics(told["writing"])


def _writing_metrics(writing: Mapping[str, Any]) -> Iterator[str]:
    for name, (kind, words) in _WRITING.items():
        yield from _metric(name, kind, words, [({}, writing[name.removesuffix("_total").removeprefix("publish_")])])
    yield from _metric("orphans", "gauge", "Files that belong to no array.", [({}, writing["orphans"])])
    yield from _metric("unpublishable_shards", "gauge", "Shards that fail now.", [({}, writing["failing"])])
    yield from _metric("refused_files", "gauge", "Files refused at their last close.", [({}, writing["refused"])])
    yield from _metric("read_only", "gauge", "1 if the journal has failed.", [({}, int(bool(writing["read_only"])))])


_LOADS = {
    "threads": "Threads that answer requests.",
    "waiting": "Threads that wait for the source.",
    "postponed": "Requests that wait for a thread.",
}
_WRITING = {
    "journal_bytes": ("gauge", "How large the journal is."),
    "journal_limit": ("gauge", "How large it may grow."),
    "dirty_chunks": ("gauge", "Chunks that were written and are not published yet."),
    "dirty_shards": ("gauge", "Shards in which these belong."),
    "written_bytes_total": ("counter", "Bytes that programs wrote."),
    "published_bytes_total": ("counter", "Bytes that were written to the source."),
    "published_chunks_total": ("counter", "Chunks that have reached it."),
    "published_shards_total": ("counter", "Shards that were replaced."),
    "publish_conflicts_total": ("counter", "Chunks that somebody else had changed, too."),
    "publish_failures_total": ("counter", "Attempts to publish a shard that failed."),
}
_CACHES = {
    "hits_total": ("counter", "Values that were there."),
    "misses_total": ("counter", "Values that had to be loaded."),
    "bytes": ("gauge", "Memory in use."),
    "limit": ("gauge", "The most that may be used."),
}


def _store_metrics(store: Mapping[str, Any]) -> Iterator[str]:
    kinds = [({"kind": kind}, n) for kind, n in store["requests"].items()]
    yield from _metric("store_requests_total", "counter", "Operations of the store.", kinds)
    errors = [({"errno": e}, n) for e, n in store["errors"].items()]
    yield from _metric("store_errors_total", "counter", "Operations that failed.", errors)
    yield from _metric("store_retries_total", "counter", "Further attempts.", [({}, store["retries"])])
    yield from _metric("store_timeouts_total", "counter", "Attempts without an answer.", [({}, store["timeouts"])])
    yield from _metric("store_bytes_fetched_total", "counter", "Bytes that came.", [({}, store["bytes_fetched"])])
    yield from _metric("store_silent", "gauge", "1 while the store does not answer.", [({}, int(store["silent"]))])
    times = Histogram()
    times.bins, times.seconds = store["bins"], store["seconds"]
    yield from _histogram("store_seconds", "Operations of the store, with retries.", {"": times}, "")


def _metric(name: str, kind: str, words: str, rows: list[tuple[dict[str, Any], Any]]) -> Iterator[str]:
    yield f"# HELP shardfs_{name} {words}"
    yield f"# TYPE shardfs_{name} {kind}"
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
    if not labels:
        return ""
    pairs = (f'{name}="{_escaped(str(value))}"' for name, value in labels.items())
    return "{" + ",".join(pairs) + "}"


def _escaped(text: str) -> str:
    text = text.encode(errors="replace").decode()
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
