"""The figures of a mount: one table makes the checks of `status.json`, text, the status page and metrics.

A figure is a number in a group of the snapshot (`Status.snapshot`), or a number for each value of a label. A new one
needs a line in `FIGURES`, beside the code that counts.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from shardfs.model.text import counted, human_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    Values = Mapping[str, Any]
    """A snapshot, or a group of it."""

    Row = tuple[dict[str, str], Any]
    """A sample of a metric: labels and value."""


AnyValues = TypeVar("AnyValues", bound="Values")


class Kind(Enum):
    """Whether a figure only grows, is a present value, or is a state: true, or the reason for it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    FLAG = "flag"


class Cell(NamedTuple):
    """How the status page shows a figure.

    Args:
        title: `{cache}` stands for the name of the cache.
        how: "value"; "rate" per second; or the name of another figure: the share of this one in the sum of both.
    """

    title: str
    how: str = "value"


class Figure(NamedTuple):
    """A line of the table.

    Args:
        group: "" for the snapshot itself; "caches" has a group for each cache.
        unit: "bytes", "seconds", or the noun that is counted; empty for a mere number.
        help: the description of the metric.
        line: the line in `shardfs status`: `{name}`, `{name/rest}` for a share, `{name per other}` for a quotient.
            Empty if the line of another figure shows this one. None: the name and the value.
        always: show the line even if all of its figures are 0.
        label: the label of the metric, if the figure is a mapping.
        metric: the name of the metric without prefix, if not made of group and name.
    """

    group: str
    name: str
    kind: Kind
    unit: str
    help: str
    line: str | None = None
    always: bool = False
    cells: tuple[Cell, ...] = ()
    label: str = ""
    metric: str = ""

    @property
    def metric_name(self) -> str:
        """The name of the metric, without the prefix `shardfs_`."""
        prefix = {"caches": "cache_", "store": "store_"}.get(self.group, "")
        return self.metric or f"{prefix}{self.name}{'_total' if self.kind is COUNTER else ''}"

    def total(self, values: Values) -> Any:
        """The value of the figure in `values`, a group that has it; the sum of those of all labels."""
        return sum(values[self.name].values()) if self.label else values[self.name]

    def text(self, value: Any) -> str:
        """A value of the figure for people, with its unit; with a label, the counts that are not 0, highest first."""
        if self.label:
            counts = sorted(value.items(), key=lambda count: -count[1])
            return ", ".join(f"{name} {n}" for name, n in counts if n) or "none"
        if self.kind is FLAG or not self.unit:
            return str(value)
        return human_bytes(value) if self.unit == "bytes" else counted(value, self.unit)


COUNTER = Kind.COUNTER
GAUGE = Kind.GAUGE
FLAG = Kind.FLAG

FIGURES: tuple[Figure, ...] = (
    Figure("", "started", GAUGE, "seconds", "When the mount began, since the epoch.", "", metric="start_time_seconds"),
    Figure("", "cpu", COUNTER, "seconds", "CPU time of the daemon.", "", metric="cpu_seconds_total"),
    Figure(
        "", "bytes_served", COUNTER, "bytes", "Bytes of files.", "served: {bytes_served}", always=True,
        cells=(Cell("served", "rate"), Cell("served in all")),
    ),
    Figure(
        "", "requests", COUNTER, "request", "FUSE requests.", "requests: {requests}", always=True,
        cells=(Cell("requests", "rate"),), label="op",
    ),
    Figure("", "threads", GAUGE, "thread", "Threads that answer requests.", ""),
    Figure(
        "", "waiting", GAUGE, "request", "Threads that wait for the source.",
        "waiting for the source: {waiting}, and {postponed} for a thread",
    ),
    Figure("", "postponed", GAUGE, "", "Requests that wait for a thread.", ""),
    Figure(
        "caches", "hits", COUNTER, "", "Lookups that found a value.",
        "{cache} cache: {hits/misses}, {bytes} of {limit}", always=True, cells=(Cell("{cache} cache", "misses"),),
    ),
    Figure("caches", "misses", COUNTER, "", "Values that had to be loaded.", ""),
    Figure("caches", "bytes", GAUGE, "bytes", "Memory in use.", ""),
    Figure("caches", "limit", GAUGE, "bytes", "Maximum memory.", ""),
    Figure(
        "store", "requests", COUNTER, "", "Operations of the store.", "store: {requests}; {bytes_fetched} fetched",
        always=True, label="kind",
    ),
    Figure(
        "store", "bytes_fetched", COUNTER, "bytes", "Bytes read from the store.", "", cells=(Cell("fetched", "rate"),),
    ),
    Figure("store", "silent", FLAG, "", "1 while the store does not answer.", "THE STORE DOES NOT ANSWER"),
    Figure("store", "errors", COUNTER, "", "Operations that failed.", "errors of the store: {errors}", label="errno"),
    Figure(
        "store", "retries", COUNTER, "", "Further attempts.", "retries: {retries}; time-outs: {timeouts}",
        cells=(Cell("retries"),),
    ),
    Figure("store", "timeouts", COUNTER, "", "Attempts without an answer.", ""),
    Figure(
        "store", "bytes_ahead_used", COUNTER, "bytes", "Bytes fetched before a program asked for them, and read.",
        "fetched ahead: {bytes_ahead_used} read, {bytes_ahead_wasted} not read",
        cells=(Cell("ahead", "bytes_ahead_wasted"),),
    ),
    Figure("store", "bytes_ahead_wasted", COUNTER, "bytes", "Bytes fetched ahead that no program read.", ""),
    Figure(
        "store", "disk_cache_hits", COUNTER, "", "Byte ranges that the disk cache had.",
        "disk cache: {disk_cache_hits/disk_cache_misses}, {bytes_from_disk_cache} read",
        cells=(Cell("disk cache", "disk_cache_misses"),),
    ),
    Figure("store", "disk_cache_misses", COUNTER, "", "Byte ranges that the disk cache did not have.", ""),
    Figure("store", "bytes_from_disk_cache", COUNTER, "bytes", "Bytes read from the disk cache.", ""),
    Figure("writing", "read_only", FLAG, "", "1 if the journal has failed.", "READ-ONLY NOW: {read_only}"),
    Figure(
        "writing", "dirty_chunks", GAUGE, "chunk", "Chunks that are written and not published yet.",
        "to be published: {dirty_chunks} of {dirty_shards}", always=True, cells=(Cell("to publish"),),
    ),
    Figure("writing", "dirty_shards", GAUGE, "shard", "Shards of these chunks.", ""),
    Figure(
        "writing", "journal_bytes", GAUGE, "bytes", "Size of the journal.",
        "journal: {journal_bytes} of {journal_limit} in {journal}", always=True,
        cells=(Cell("journal"),),
    ),
    Figure("writing", "journal_limit", GAUGE, "bytes", "Maximum size of the journal.", ""),
    Figure(
        "writing", "written_bytes", COUNTER, "bytes", "Bytes that programs wrote.",
        "written: {written_bytes}; published: {published_bytes} in {published_shards}"
        "{published_bytes per written_bytes}", always=True,
    ),
    Figure(
        "writing", "published_bytes", COUNTER, "bytes", "Bytes that were written to the source.", "",
        cells=(Cell("published", "rate"),),
    ),
    Figure("writing", "published_chunks", COUNTER, "chunk", "Chunks that were written to the source.", ""),
    Figure("writing", "published_shards", COUNTER, "shard", "Shards that were replaced.", ""),
    Figure(
        "writing", "conflicts", COUNTER, "chunk", "Chunks that another program had changed, too.",
        metric="publish_conflicts_total",
    ),
    Figure(
        "writing", "failures", COUNTER, "attempt", "Attempts to publish a shard that failed.",
        "failed attempts to publish: {failures}", metric="publish_failures_total",
    ),
    Figure("writing", "orphans", GAUGE, "file", "Files that belong to no array.", ""),
    Figure("writing", "failing", GAUGE, "shard", "Shards that fail now.", "", metric="unpublishable_shards"),
    Figure("writing", "refused", GAUGE, "file", "Files refused at their last close.", "", metric="refused_files"),
    Figure("", "resident_bytes", GAUGE, "bytes", "Memory of the daemon.", "", cells=(Cell("memory"),)),
)  # fmt: skip


def of_group(group: str) -> dict[str, Figure]:
    """The figures of a group by name, in the order of the table."""
    return {figure.name: figure for figure in FIGURES if figure.group == group}


def groups(figure: Figure, snapshot: AnyValues) -> dict[str, AnyValues]:
    """The groups of a snapshot that have this figure: those of all caches by their names; any other one as `""`.

    Empty if the snapshot has None for the group, as a read-only mount has for "writing".
    """
    group: Any = snapshot[figure.group] if figure.group else snapshot
    if group is None:
        return {}
    return dict(group) if figure.group == "caches" else {"": group}


def complete(snapshot: dict[str, Any]) -> None:
    """Change a snapshot of another version: add the figures that it lacks, as 0; {} with a label, None for a flag."""
    for figure in FIGURES:
        for values in groups(figure, snapshot).values():
            values.setdefault(figure.name, {} if figure.label else None if figure.kind is FLAG else 0)


def lines(group: str, values: Values, **names: str) -> Iterator[str]:
    """Yield the lines of a group for `shardfs status`, without those whose figures are all 0 unless `always` is set.

    `names`: what words in braces stand for that are no figures of the group, such as `cache`.
    """
    figures = of_group(group)
    for figure in figures.values():
        line = f"{figure.name.replace('_', ' ')}: {{{figure.name}}}" if figure.line is None else figure.line
        words = [figure.name, *re.findall(r"\w+", " ".join(re.findall(r"\{(.*?)\}", line)))]
        if line and (figure.always or any(figures[name].total(values) for name in words if name in figures)):
            yield re.sub(r"\{(\w+)(/| per |)(\w*)\}", lambda token: _text(figures, values, names, token), line)


def _text(figures: Mapping[str, Figure], values: Values, names: Mapping[str, str], token: re.Match[str]) -> str:
    name, relation, other = token.groups()
    if name not in figures:
        return names[name]
    if relation == "/":
        both = values[name] + values[other]
        return f"{100 * values[name] / both:.1f} % of {both} found" if both else "not used"
    if relation:
        return f", {values[name] / values[other]:.2f} bytes for each" if values[name] and values[other] else ""
    return figures[name].text(values[name])


def metrics(snapshot: Values) -> Iterator[tuple[Figure, list[Row]]]:
    """Yield each figure that the mount has, with the samples of its metric. A flag is 0 or 1."""
    for figure in FIGURES:
        rows: list[Row] = []
        for cache, values in groups(figure, snapshot).items():
            labels = {"cache": cache} if cache else {}
            value = values[figure.name]
            if figure.label:
                rows += [({**labels, figure.label: name}, n) for name, n in value.items()]
            else:
                rows.append((labels, int(bool(value)) if figure.kind is FLAG else value))
        if rows or groups(figure, snapshot):
            yield figure, rows
