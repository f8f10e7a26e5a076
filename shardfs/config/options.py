"""The table of all options, and its loaders: environment, `-o`, profiles, command line flags.

Each loader returns `Values`: field name -> parsed value, for the given options only. `merged` combines them.
"""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TypeAlias

from shardfs.config.parsers import (
    address,
    file_path,
    finite_seconds,
    natural,
    octal,
    one_of,
    positive,
    positive_seconds,
    seconds,
    size,
    switch,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

Values: TypeAlias = dict[str, Any]


# ---- the table ----


@dataclass(frozen=True, slots=True)
class Setting:
    """An option: a field of `Options` with its metadata. `name` is also its name in `-o`, with `-` or `_`.

    Args:
        value: the kind of value in one word, or the choices separated by `|`; empty for a switch.
        default: the default in the user's notation, or the behaviour without the option in words.
        scope: the heading of the option's group in help and docs.
    """

    name: str
    help: str
    parse: Callable[[str], Any]
    value: str
    default: str
    scope: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "SHARDFS_" + self.name.upper()

    @property
    def choices(self) -> tuple[str, ...]:
        """All valid values; empty if these are not enumerable."""
        return tuple(self.value.split("|")) if "|" in self.value else ()


LAYOUTS = ("native", "zarr2", "zarr3", "n5", "precomputed", "bcolz")

LAYOUT_CODECS: Mapping[str, tuple[str, ...]] = {
    "native": (),
    "zarr2": ("raw", "gzip", "zlib", "zstd", "blosc"),
    "zarr3": ("raw", "gzip", "zstd", "blosc"),
    "n5": ("raw", "gzip", "zstd", "blosc"),
    "precomputed": ("raw",),
    "bcolz": ("blosc",),
}
"""Values of `chunk_codec` that each layout accepts."""

VIEW, USERS, KERNEL, CACHE, DAEMON = "What is shown", "Who may read", "The kernel", "Caches", "The daemon"

STORE, FILES, WRITING = "Sources behind a network", "Configuration files", "Writing"

SCOPES = (VIEW, USERS, KERNEL, CACHE, STORE, DAEMON, WRITING, FILES)
"""The groups of options, in the order of help and docs."""


def _option(default: str, parse: Callable[[str], Any], value: str, scope: str, help: str, *, unset: str = "") -> Any:
    """A field with the default `default`, parsed; or None, if `unset` describes what happens without the option."""
    metadata = {"parse": parse, "value": value, "scope": scope, "help": help, "default": unset or default}
    return field(default=None if unset else parse(default), metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All options of a mount. `settings()` has the help text of each field."""

    layout: str = _option(
        "native",
        one_of(*LAYOUTS),
        "|".join(LAYOUTS),
        VIEW,
        "How to show datasets: native shows what a writer of the same format writes without sharding; the other "
        "layouts show plain files of another format.",
    )
    chunk_codec: str | None = _option(
        "",
        one_of(*LAYOUT_CODECS["zarr2"]),
        "|".join(LAYOUT_CODECS["zarr2"]),
        VIEW,
        "Show all chunks uncompressed (raw) or in this codec, for programs that lack the codec of the source. Layouts "
        "zarr2, zarr3 (not zlib) and n5 (not zlib). Chunks in another codec are decoded, and not compressed again.",
        unset="the codec of the source, if the layout has it",
    )
    unsupported: str = _option(
        "fail",
        one_of("fail", "skip"),
        "fail|skip",
        VIEW,
        "What to do with arrays that the layout cannot show: fail refuses the mount, skip omits them; `shardfs info` "
        "lists them.",
    )
    symlinks: str = _option(
        "inside",
        one_of("inside", "follow"),
        "inside|follow",
        VIEW,
        "Follow symbolic links of a local source only inside the source, or everywhere.",
    )
    allow_other: bool = _option(
        "false", switch, "", USERS, "Let other users use the mount. Requires default_permissions."
    )
    allow_root: bool = _option(
        "false", switch, "", USERS, "Let root use the mount, besides you. Removes the permission bits for others."
    )
    default_permissions: bool = _option("false", switch, "", USERS, "Let the kernel check the owner and mode of files.")
    uid: int | None = _option("", natural, "NUMBER", USERS, "The owner of all files.", unset="your own")
    gid: int | None = _option("", natural, "NUMBER", USERS, "The group of all files.", unset="your own")
    umask: int = _option("0", octal, "OCTAL", USERS, "Permission bits to remove from all modes.")
    file_mode: int | None = _option("", octal, "OCTAL", USERS, "The mode of files.", unset="0444; 0644 with rw")
    dir_mode: int | None = _option("", octal, "OCTAL", USERS, "The mode of directories.", unset="0555; 0755 with rw")
    attr_timeout: float = _option(
        "1h", finite_seconds, "SECONDS", KERNEL, "How long the kernel may cache sizes, modes and times."
    )
    entry_timeout: float = _option("1h", finite_seconds, "SECONDS", KERNEL, "How long the kernel may cache names.")
    negative_timeout: float = _option(
        "1h",
        finite_seconds,
        "SECONDS",
        KERNEL,
        "How long the kernel may cache that a name does not exist.",
    )
    max_read: int = _option("0", size, "SIZE", KERNEL, "The largest read request; 0 lets the kernel choose.")
    max_readahead: int = _option(
        "0", size, "SIZE", KERNEL, "How far the kernel may read ahead; 0 lets the kernel choose."
    )
    direct_io: bool = _option(
        "false",
        switch,
        "",
        KERNEL,
        "Bypass the page cache for chunks over 128 KiB: faster to read once, but such files cannot be mapped shared.",
    )
    fsname: str | None = _option(
        "", str, "NAME", KERNEL, "The name of the source in findmnt and df.", unset="the source, without secrets"
    )
    index_cache: int = _option("256M", size, "SIZE", CACHE, "Memory for decoded shard indices.")
    chunk_cache: int = _option("256M", size, "SIZE", CACHE, "Memory for decoded chunks and shards.")
    index_ttl: float = _option(
        "forever",
        seconds,
        "SECONDS",
        CACHE,
        "How long to trust a shard index, or the absence of a shard. The kernel caches no longer than that either.",
    )
    threads: int = _option(
        "16", positive, "NUMBER", DAEMON, "Requests that may wait for the source at the same time; one more is served."
    )
    poll_us: int = _option(
        "0",
        natural,
        "MICROSECONDS",
        DAEMON,
        "How long to poll for the next request before sleeping, while requests follow each other closely.",
    )
    store_timeout: float = _option(
        "30",
        positive_seconds,
        "SECONDS",
        STORE,
        "How long one request to the source may take. An operation with all its retries may take twice as long.",
    )
    store_retries: int = _option(
        "4",
        natural,
        "NUMBER",
        STORE,
        "How often to retry after lost connections, time-outs, throttling and server errors.",
    )
    nonempty: str = _option(
        "warn",
        one_of("warn", "refuse", "allow"),
        "warn|refuse|allow",
        DAEMON,
        "A mountpoint that has files, which the mount hides: warn names some of them, refuse ends with an error, allow "
        "ignores them.",
    )
    ready_timeout: float = _option(
        "60", finite_seconds, "SECONDS", DAEMON, "How long `shardfs mount` waits for the mount to answer."
    )
    log_file: str | None = _option(
        "", file_path, "PATH", DAEMON, "Append the log to this file.", unset="stderr with -f, else syslog"
    )
    log_level: str = _option(
        "warning",
        one_of("debug", "info", "warning", "error"),
        "debug|info|warning|error",
        DAEMON,
        "The lowest severity to log.",
    )
    log_format: str = _option(
        "text", one_of("text", "json"), "text|json", DAEMON, "Log lines as text, or as one JSON object per line."
    )
    access_log: str | None = _option(
        "", file_path, "PATH", DAEMON, "Append one line of JSON per request to this file.", unset="none"
    )
    metrics_addr: str | None = _option(
        "",
        address,
        "HOST:PORT",
        DAEMON,
        "Serve Prometheus metrics at http://HOST:PORT/metrics to every client that can connect.",
        unset="nowhere",
    )
    rw: bool = _option(
        "false",
        switch,
        "",
        WRITING,
        "Let programs write. In `-o`, use `writable` instead: mount(8) adds `rw` automatically.",
    )
    create: str | None = _option(
        "",
        str,
        "RULES",
        WRITING,
        "Store new arrays sharded, such as zarr3:chunks_per_shard=8,8,8; see docs/durability.md.",
        unset="as written",
    )
    forget_sharding: bool = _option(
        "false", switch, "", WRITING, "Store an array unsharded if a program deletes it and writes it again."
    )
    close: str = _option(
        "journal",
        one_of("journal", "sync", "publish"),
        "journal|sync|publish",
        WRITING,
        "What close() waits for: journal until the file is in the journal, sync until it survives a power failure, "
        "publish until it is in its shard.",
    )
    commit: float = _option(
        "5", positive_seconds, "SECONDS", WRITING, "A closed file survives a power failure after this time."
    )
    idle: float = _option(
        "5", finite_seconds, "SECONDS", WRITING, "Publish a shard when no program has written to it for this long ..."
    )
    age: float = _option("30", finite_seconds, "SECONDS", WRITING, "... or when its oldest chunk has waited this long.")
    dirty_limit: int = _option(
        "256M", size, "SIZE", WRITING, "Publish shards at once when more than this waits to be published."
    )
    stall: float = _option(
        "300", finite_seconds, "SECONDS", WRITING, "How long writers wait for space in the journal before ENOSPC."
    )
    conflict: str = _option(
        "fail",
        one_of("fail", "ours"),
        "fail|ours",
        WRITING,
        "A chunk, or the same member of a document, that another program has changed in the source: fail keeps the "
        "version written here in the journal and returns ESTALE, ours overwrites.",
    )
    compact: str = _option(
        "limit",
        one_of("limit", "never", "eager"),
        "limit|never|eager",
        WRITING,
        "When to remove dead bytes from a shard that is published: limit if they exceed 64 MiB and three quarters of "
        "the shard, eager if they exceed a third.",
    )
    u64: str = _option(
        "wrap",
        one_of("wrap", "nowrap"),
        "wrap|nowrap",
        WRITING,
        "Differences in a minishard index of neuroglancer_uint64_sharded_v1: wrap lets them wrap modulo 2^64; nowrap "
        "rewrites the minishard behind the others instead, for readers that do not expect wrapping.",
    )
    inplace: str = _option(
        "never",
        one_of("never", "uint64"),
        "never|uint64",
        WRITING,
        "uint64: change shards of neuroglancer_uint64_sharded_v1 on a local disk in place, by appending, instead of "
        "replacing the file; docs/durability.md says what this requires of readers.",
    )
    linked_shards: str = _option(
        "refuse",
        one_of("refuse", "replace"),
        "refuse|replace",
        WRITING,
        "Shards on a local disk that are symbolic links, as in git-annex and DataLad: refuse to write their chunks, or "
        "replace the link by a file; what the link leads to stays unchanged.",
    )
    cas: str = _option(
        "store",
        one_of("store", "none"),
        "store|none",
        WRITING,
        "none allows writing to a store without conditional writes, where concurrent writers may overwrite each other.",
    )
    journal: str | None = _option(
        "", file_path, "DIRECTORY", WRITING, "The directory of the journals.", unset="$XDG_STATE_HOME/shardfs"
    )
    journal_limit: int | None = _option(
        "",
        size,
        "SIZE",
        WRITING,
        "The largest size of the journal.",
        unset="10G, or half of the free space if less",
    )
    on_error: str | None = _option(
        "", str, "COMMAND", WRITING, "A shell command to run when a chunk cannot be published.", unset="none"
    )
    profile: str | None = _option(
        "", str, "NAME", FILES, "Use the options of this profile; options given elsewhere win.", unset="none"
    )
    config: str | None = _option(
        "", file_path, "PATH", FILES, "Read only this configuration file or directory.", unset="see docs/service.md"
    )
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    kernel: tuple[str, ...] = ()
    bare_rw: bool = False
    """Whether `-o` contained the bare word `rw`, which mount(8) adds automatically."""


def settings() -> Iterator[Setting]:
    """The table in the order of the fields, without those that only have special syntax in `-o`."""
    for f in fields(Options):
        if f.metadata:
            yield _setting(f)


def _setting(f: Field[Any]) -> Setting:
    m = f.metadata
    return Setting(f.name, m["help"], m["parse"], m["value"], m["default"], m["scope"])


_BY_NAME = {s.name: s for s in settings()}
