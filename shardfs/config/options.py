"""The table of all options: their parsers, help and defaults."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from shardfs.config import parsers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

Values: TypeAlias = dict[str, Any]
"""Field of `Options` -> parsed value, for the given options only. Each loader returns these; `loading.merged` combines
them."""


@dataclass(frozen=True, slots=True)
class Setting:
    """An option: a field of `Options` with its metadata. `name` is also its name in `-o`, with `-` or `_`.

    Args:
        help: what the option does, as one paragraph of plain text.
        parse: makes the value from the user's text. Raises OptionError, without the name of the option.
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
        """The name on the command line, such as `--log-level`."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The name of the environment variable, such as `SHARDFS_LOG_LEVEL`."""
        return "SHARDFS_" + self.name.upper()

    @property
    def choices(self) -> tuple[str, ...]:
        """All valid values, in the user's notation; empty if the values are no fixed words."""
        return tuple(self.value.split("|")) if "|" in self.value else ()


LAYOUT_CODECS: Mapping[str, tuple[str, ...]] = {
    "native": (),
    "zarr2": ("raw", "gzip", "zlib", "zstd", "blosc"),
    "zarr3": ("raw", "gzip", "zstd", "blosc"),
    "n5": ("raw", "gzip", "zstd", "blosc"),
    "precomputed": ("raw",),
    "bcolz": ("blosc",),
}
"""Values of `chunk_codec` that each layout accepts."""

LAYOUTS = tuple(LAYOUT_CODECS)


class _Kind(NamedTuple):
    """A kind of values: its parser, `Setting.value`, and the default."""

    parse: Callable[[str], Any]
    value: str
    default: str = ""


def _one_of(*words: str, default: str = "") -> _Kind:
    return _Kind(parsers.one_of(*words), "|".join(words), default or words[0])


_SWITCH = _Kind(parsers.switch, "", "false")
_number, _octal = partial(_Kind, parsers.natural, "NUMBER"), partial(_Kind, parsers.octal, "OCTAL")
_seconds, _size = partial(_Kind, parsers.finite_seconds, "SECONDS"), partial(_Kind, parsers.size, "SIZE")
_positive_seconds = partial(_Kind, parsers.positive_seconds, "SECONDS")
_NAME, _PATH = _Kind(str, "NAME"), _Kind(parsers.file_path, "PATH")


def _option(scope: str, kind: _Kind, help: str, *, unset: str = "") -> Any:
    """A field with its default, parsed; or None, if `unset` describes what happens without the option."""
    metadata = {
        "parse": kind.parse,
        "value": kind.value,
        "scope": scope,
        "help": help,
        "default": unset or kind.default,
    }
    return field(default=None if unset else kind.parse(kind.default), metadata=metadata)


WRITING = "Writing"
FILES = "Configuration files"
SCOPES = (
    "What is shown",
    "Who may read",
    "The kernel",
    "Caches",
    "Sources behind a network",
    "The daemon",
    WRITING,
    FILES,
)
"""The groups of options, in the order of help and docs."""

_view, _users, _kernel, _cache, _store, _daemon, _writing, _files = (partial(_option, scope) for scope in SCOPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All options of a mount. `settings()` has the help text of each field.

    Sizes are in bytes. Times are in seconds; `index_ttl` may be infinite. None: not given, as the help describes it.

    Attributes:
        storage_options: arguments of the fsspec file system of the source.
        env: environment variables to set.
        kernel: words of mount(8) that are passed to the kernel, such as "nodev".
    """

    layout: str = _view(
        _one_of(*LAYOUTS),
        "How to show datasets: native shows what a writer of the same format writes without sharding; the other "
        "layouts show plain files of another format.",
    )
    chunk_codec: str | None = _view(
        _one_of(*LAYOUT_CODECS["zarr2"]),
        "Show all chunks uncompressed (raw) or in this codec, for programs that lack the codec of the source. Layouts "
        "zarr2, zarr3 (not zlib) and n5 (not zlib). Chunks in another codec are decoded, and not compressed again.",
        unset="the codec of the source, if the layout has it",
    )
    unsupported: str = _view(
        _one_of("fail", "skip"),
        "What to do with arrays that the layout cannot show: fail refuses the mount, skip omits them; `shardfs info` "
        "lists them.",
    )
    symlinks: str = _view(
        _one_of("inside", "follow"), "Follow symbolic links of a local source only inside the source, or everywhere."
    )
    allow_other: bool = _users(_SWITCH, "Let other users use the mount. Requires default_permissions.")
    allow_root: bool = _users(_SWITCH, "Let root use the mount, besides you. Removes the permission bits for others.")
    default_permissions: bool = _users(_SWITCH, "Let the kernel check the owner and mode of files.")
    uid: int | None = _users(_number(), "The owner of all files.", unset="your own")
    gid: int | None = _users(_number(), "The group of all files.", unset="your own")
    umask: int = _users(_octal("0"), "Permission bits to remove from all modes.")
    file_mode: int | None = _users(_octal(), "The mode of files.", unset="0444; 0644 with rw")
    dir_mode: int | None = _users(_octal(), "The mode of directories.", unset="0555; 0755 with rw")
    attr_timeout: float = _kernel(_seconds("1h"), "How long the kernel may cache sizes, modes and times.")
    entry_timeout: float = _kernel(_seconds("1h"), "How long the kernel may cache names.")
    negative_timeout: float = _kernel(_seconds("1h"), "How long the kernel may cache that a name does not exist.")
    direct_io: bool = _kernel(
        _SWITCH,
        "Bypass the page cache for chunks over 128 KiB: faster to read once, but such files cannot be mapped shared.",
    )
    fsname: str | None = _kernel(
        _NAME, "The name of the source in findmnt and df.", unset="the source, without secrets"
    )
    index_cache: int = _cache(_size("256M"), "Memory for decoded shard indices.")
    chunk_cache: int = _cache(_size("256M"), "Memory for decoded chunks and shards. Decoding uses as much again.")
    index_ttl: float = _cache(
        _Kind(parsers.seconds, "SECONDS", "forever"),
        "How long to trust a shard index, or the absence of a shard. The kernel caches no longer than that either.",
    )
    prefetch: int = _cache(
        _size("256M"),
        "Memory for chunks of remote sources that are fetched before programs ask for them, where they read planes, "
        "blocks or whole arrays; 0 turns this off. From NFS and other network file systems, the kernel reads ahead in "
        "the same way.",
    )
    cache_dir: str | None = _cache(
        _Kind(parsers.cache_directory, "DIRECTORY"),
        "Keep what is read from a remote source in this directory, for later mounts. auto: $XDG_CACHE_HOME/shardfs, or "
        "the CacheDirectory= of a systemd unit; none: no cache.",
        unset="no cache on the disk",
    )
    cache_size: int = _cache(
        _size("10G"), "The largest size of cache_dir. At least 1 GiB, or 5 % of a smaller disk, always stays free."
    )
    offline: bool = _cache(
        _SWITCH, "Read only what is in cache_dir, and send no request. Everything else fails with EHOSTUNREACH."
    )
    connections: int = _store(
        _Kind(parsers.positive, "NUMBER", "64"),
        "Requests to a remote source that may be under way to fetch ahead. As many shards, but at most 16, are "
        "published at the same time.",
    )
    threads: int = _daemon(
        _Kind(parsers.positive, "NUMBER", "16"),
        "Requests that may wait for the source at the same time; one more is served.",
    )
    poll_us: int = _daemon(
        _Kind(parsers.natural, "MICROSECONDS", "100"),
        "How long to poll for the next request before sleeping, while one thread asks densely and a CPU is idle; 0 "
        "turns polling off. Polling takes at most half of one CPU.",
    )
    store_timeout: float = _store(
        _positive_seconds("30"),
        "How long one request to the source may take. An operation with all its retries may take twice as long.",
    )
    store_retries: int = _store(
        _number("4"), "How often to retry after lost connections, time-outs, throttling and server errors."
    )
    nonempty: str = _daemon(
        _one_of("warn", "refuse", "allow"),
        "A mountpoint that has files, which the mount hides: warn names some of them, refuse ends with an error, allow "
        "ignores them.",
    )
    ready_timeout: float = _daemon(_seconds("60"), "How long `shardfs mount` waits for the mount to answer.")
    log_file: str | None = _daemon(_PATH, "Append the log to this file.", unset="stderr with -f, else syslog")
    log_level: str = _daemon(
        _one_of("debug", "info", "warning", "error", default="warning"), "The lowest severity to log."
    )
    log_format: str = _daemon(_one_of("text", "json"), "Log lines as text, or as one JSON object per line.")
    access_log: str | None = _daemon(_PATH, "Append one line of JSON per request to this file.", unset="none")
    metrics_addr: str | None = _daemon(
        _Kind(parsers.address, "HOST:PORT"),
        "Serve a status page at http://HOST:PORT/ and Prometheus metrics at /metrics, to every client that connects.",
        unset="nowhere",
    )
    rw: bool = _writing(
        _SWITCH, "Let programs write. In `-o`, use `writable` instead: mount(8) adds `rw` automatically."
    )
    create: str | None = _writing(
        _Kind(str, "RULES"),
        "Store new arrays sharded, such as zarr3:chunks_per_shard=8,8,8; see docs/durability.md.",
        unset="as written",
    )
    close: str = _writing(
        _one_of("journal", "sync", "publish"),
        "What close() waits for: journal until the file is in the journal, sync until it survives a power failure, "
        "publish until it is in its shard.",
    )
    commit: float = _writing(_positive_seconds("5"), "A closed file survives a power failure after this time.")
    idle: float = _writing(_seconds("5"), "Publish a shard when no program has written to it for this long ...")
    age: float = _writing(_seconds("30"), "... or when its oldest chunk has waited this long.")
    dirty_limit: int = _writing(_size("256M"), "Publish shards at once when more than this waits to be published.")
    stall: float = _writing(_seconds("300"), "How long writers wait for space in the journal before ENOSPC.")
    conflict: str = _writing(
        _one_of("fail", "ours"),
        "A chunk or a document that another program has changed in the source: fail keeps the version written here in "
        "the journal and returns ESTALE, ours overwrites.",
    )
    compact: str = _writing(
        _one_of("limit", "never", "eager"),
        "When to remove dead bytes from a shard that is published: limit if they exceed 64 MiB and three quarters of "
        "the shard, eager if they exceed a third. On S3, limit and eager also omit the old bytes of a shard if all "
        "its chunks are replaced.",
    )
    inplace: str = _writing(
        _one_of("never", "uint64"),
        "uint64: change shards of neuroglancer_uint64_sharded_v1 on a local disk in place, by appending, instead of "
        "replacing the file; docs/durability.md says what this requires of readers.",
    )
    linked_shards: str = _writing(
        _one_of("refuse", "replace"),
        "Shards on a local disk that are symbolic links, as in git-annex and DataLad: refuse to write their chunks, or "
        "replace the link by a file; what the link leads to stays unchanged.",
    )
    journal: str | None = _writing(
        _Kind(parsers.file_path, "DIRECTORY"), "The directory of the journals.", unset="$XDG_STATE_HOME/shardfs"
    )
    journal_limit: int | None = _writing(
        _size(), "The largest size of the journal.", unset="10G, or half of the free space if less"
    )
    on_error: str | None = _writing(
        _Kind(str, "COMMAND"), "A shell command to run when a chunk cannot be published.", unset="none"
    )
    profile: str | None = _files(_NAME, "Use the options of this profile; options given elsewhere win.", unset="none")
    config: str | None = _files(_PATH, "Read only this configuration file or directory.", unset="see docs/service.md")
    storage_options: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    kernel: tuple[str, ...] = ()
    bare_rw: bool = False
    """Whether `-o` contained the bare word `rw`, which mount(8) adds automatically."""

    @property
    def shown_as(self) -> str:
        """The options that decide what files are shown, as the words of `-o`; "" for the native layout."""
        if self.layout == "native":
            return ""
        return f"layout={self.layout}" + (f",chunk_codec={self.chunk_codec}" if self.chunk_codec is not None else "")


def settings() -> Iterator[Setting]:
    """Yield all options in the order of the fields, without the last four fields, which have a syntax of their own."""
    for f in fields(Options):
        if f.metadata:
            yield Setting(f.name, **f.metadata)


BY_NAME = {s.name: s for s in settings()}
