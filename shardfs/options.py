"""The table of all options, and its loaders: environment, `-o`, profiles, command line flags.

Each loader returns `Values`: field name -> parsed value, for the given options only. `merged` combines them.
"""

from __future__ import annotations

import difflib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, TypeAlias

Values: TypeAlias = dict[str, Any]


LONGEST_S = 10**9
"""The longest finite time of an option in seconds, within the limits of the system's timers."""


class OptionError(ValueError):
    """An unknown option, or an invalid value. The message is for the user."""


# ---- values ----


def size(text: str) -> int:
    """Bytes: 65536, 64K, 256M, 1GiB; K is 1024."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)([KMGT]?)(?:i?B)?", text, re.IGNORECASE)
    if match is None:
        raise OptionError(f"{text!r} is not a size such as 64K, 256M or 1GiB")
    return int(float(match[1]) * 1024 ** " KMGT".index(match[2].upper() or " "))


def seconds(text: str) -> float:
    """Seconds, or with a unit: 90, 0.5, 10m, 2h, 1d, forever."""
    if text == "forever":
        return math.inf
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{0,9})?|\.\d{1,9})([smhd]?)", text)
    if match is None:
        raise OptionError(f"{text!r} is not a time such as 90, 0.5, 10m, 2h or forever")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def finite_seconds(text: str) -> float:
    """A time like that of `seconds`, but not forever."""
    value = seconds(text)
    if value == math.inf:
        raise OptionError("'forever' is not possible here; give a number of seconds")
    if value > LONGEST_S:
        raise OptionError(f"{text!r} is too long; the limit is {LONGEST_S} seconds")
    return value


def positive_seconds(text: str) -> float:
    """A time like that of `finite_seconds`, but not 0."""
    value = finite_seconds(text)
    if value == 0:
        raise OptionError("must be more than 0")
    return value


def octal(text: str) -> int:
    """Permission bits in octal, at most 0777."""
    if not re.fullmatch(r"(0o)?[0-7]{1,4}", text):
        raise OptionError(f"{text!r} is not an octal mode such as 022 or 0444")
    mode = int(text, 8)
    if mode > 0o777:
        raise OptionError(f"{text!r} is more than nine permission bits (0777)")
    return mode


def natural(text: str) -> int:
    """A number from 0 to 2**32 - 2."""
    if not re.fullmatch(r"\d{1,10}", text) or int(text) >= 2**32 - 1:
        raise OptionError(f"{text!r} is not a number from 0 to {2**32 - 2}")
    return int(text)


def positive(text: str) -> int:
    """A number from 1 to 2**32 - 2."""
    if natural(text) == 0:
        raise OptionError("must be at least 1")
    return int(text)


def switch(text: str) -> bool:
    """True or false; an empty text is true, for an option without a value."""
    if text.lower() in ("", "1", "true", "yes", "on"):
        return True
    if text.lower() in ("0", "false", "no", "off"):
        return False
    raise OptionError(f"{text!r} is neither true nor false")


def one_of(*words: str) -> Callable[[str], str]:
    """A parser that accepts only these words."""

    def parse(text: str) -> str:
        if text not in words:
            raise OptionError(f"{text!r} is not one of {', '.join(words)}{suggestion(text, words)}")
        return text

    return parse


def file_path(text: str) -> str:
    """An absolute path, because the daemon changes its current directory."""
    if not text:
        raise OptionError("needs a path")
    return os.path.abspath(os.path.expanduser(text))


def address(text: str) -> str:
    """HOST:PORT, with an IPv6 address in brackets."""
    host, colon, port = text.rpartition(":")
    if not (host and colon and port.isdecimal() and int(port) < 65536) or (":" in host and host[0] != "["):
        raise OptionError(f"{text!r} is not of the form HOST:PORT, such as localhost:9100 or [::1]:9100")
    return text


def suggestion(word: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown word: `; did you mean ...` if a known word is similar, else ""."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


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

FORWARDED = ("nodev", "nosuid", "noexec", "noatime", "sync", "dirsync")
"""Words of mount(8) that the kernel understands on a FUSE mount."""

# fmt: off
ACCEPTED = frozenset((
    "_netdev", "nofail", "auto", "noauto", "user", "nouser", "users", "owner", "group", "defaults",
    "dev", "suid", "exec", "async", "atime", "diratime", "nodiratime", "relatime", "norelatime",
    "strictatime", "nostrictatime", "lazytime", "nolazytime", "iversion", "noiversion",
    "mand", "nomand", "silent", "loud",
))
# fmt: on
"""Words of fstab and mount(8) that are accepted without effect, like all words that begin with `x-`."""

ACCESS = {"ro": False, "writable": True}
"""Other names of the option `rw` in `-o` and profiles, with the value of `rw` that they stand for."""


# ---- loaders ----


def from_environment(environ: Mapping[str, str]) -> Values:
    """Load `SHARDFS_NAME` for each option, and `SHARDFS_STORAGE_OPTIONS` as a JSON object. Empty means not given.

    Other variables that begin with `SHARDFS_` are ignored: scripts and services may use some.
    """
    values: Values = {
        s.name: _parsed(s, environ[s.variable], s.variable) for s in settings() if environ.get(s.variable)
    }
    text = environ.get("SHARDFS_STORAGE_OPTIONS")
    if text:
        values["storage_options"] = _json_object(text, "SHARDFS_STORAGE_OPTIONS")
    return values


def from_mount_options(texts: Iterable[str]) -> Values:
    """Load the arguments of `-o`: words and `name=value`, separated by commas. `\\,` is a comma in a value."""
    values: Values = {}
    for text in texts:
        for word in split_words(text):
            _add_word(values, word)
    return values


def split_words(text: str) -> list[str]:
    """Split at commas, dropping empty words. A backslash escapes a comma or a backslash."""
    words = re.findall(r"(?:\\[,\\]|[^,])+", text)
    return [re.sub(r"\\([,\\])", r"\1", word) for word in words]


def _add_word(values: Values, word: str) -> None:
    name, equals, text = word.partition("=")
    prefix, dot, key = name.partition(".")
    known = name.replace("-", "_")
    if dot and prefix.replace("-", "_") == "storage_option":
        _add_storage_option(values, f"{key}={text}" if equals else key)
    elif dot and prefix == "env":
        _add_variable(values, f"{key}={text}" if equals else key)
    elif word == "rw":
        values["bare_rw"] = True
    elif known in ACCESS:
        _add_access(values, name, switch(text) is ACCESS[known])
    elif known in _BY_NAME:
        _add_value(values, _BY_NAME[known], text, bare=not equals)
    elif name in FORWARDED:
        values["kernel"] = (*values.get("kernel", ()), name)
    elif name not in ACCEPTED and not name.lower().startswith("x-"):
        hint = suggestion(known, (*_BY_NAME, *ACCESS, *FORWARDED, *ACCEPTED))
        raise OptionError(f"unknown option {name!r}{hint}")


def _add_access(values: Values, name: str, rw: bool) -> None:
    if values.get("rw", rw) is not rw:
        raise OptionError(f"{name!r} contradicts an earlier option")
    values["rw"] = rw


def _add_value(values: Values, setting: Setting, text: str, *, bare: bool) -> None:
    if bare and setting.value:
        raise OptionError(f"option {setting.name!r} needs a value: {setting.name}={setting.value}")
    values[setting.name] = _parsed(setting, text, setting.name)


def from_profile(key: str, value: Any, others: Iterable[str] = ()) -> Values:
    """Load one key of a profile. `others` are the profile's keys that are no options.

    `storage_options` reach fsspec unchanged. Other values may have TOML's types, or be texts in the notation of `-o`.
    """
    known = key.replace("-", "_")
    if known in ("storage_options", "env"):
        if not isinstance(value, dict):
            raise OptionError(f"{key}: must be a table")
        return {known: value if known == "storage_options" else dict(_variables(key, value))}
    if key in FORWARDED:
        return {"kernel": (key,)} if switch(_plain(key, value)) else {}
    if known in ACCESS:
        return {"rw": switch(_plain(key, value)) is ACCESS[known]}
    setting = _BY_NAME.get(known)
    if setting is None or setting.scope == FILES:
        names = (s.name for s in settings() if s.scope != FILES)
        known_keys = (*others, "storage_options", "env", *ACCESS, *FORWARDED, *names)
        raise OptionError(f"unknown key {key!r}{suggestion(known, known_keys)}")
    if setting.parse is octal and not isinstance(value, str):  # TOML's 0o22 arrives as 18
        raise OptionError(f'{key}: write the octal mode as a string, such as "0444"')
    return {known: _parsed(setting, _plain(key, value), key)}


def _variables(key: str, given: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in given.items():
        text = _plain(f"{key}.{name}", value)
        if not name or "=" in name or "\0" in name:
            raise OptionError(f"{key}: {name!r} is not a valid variable name: it must be non-empty, without = and NUL")
        yield name, text


def _plain(key: str, value: Any) -> str:
    if not isinstance(value, str | bool | int | float):
        raise OptionError(f"{key}: must be a string, a number, true or false")
    return without_nul(key, str(value))


def without_nul(key: str, text: str) -> str:
    """Return the text. Raise OptionError if it contains NUL, which a file can contain but no system call accepts."""
    if "\0" in text:
        raise OptionError(f"{key}: must not contain the character NUL")
    return text


def from_flags(given: Mapping[str, str | bool | None], storage: Iterable[str] = (), env: Iterable[str] = ()) -> Values:
    """Load command line flags: field name -> text, or True or False for a switch; None means not given."""
    values: Values = {}
    for s in settings():
        text = given.get(s.name)
        if text is not None:
            values[s.name] = _parsed(s, str(text), s.flag)
    for pair in storage:
        _add_storage_option(values, pair)
    for pair in env:
        _add_variable(values, pair)
    return values


def merged(*layers: Values) -> Options:
    """The options of all layers. Later layers win; storage options and variables are merged key by key."""
    values: Values = {}
    for layer in layers:
        values = joined(values, layer)
    return Options(**values)


def joined(old: Values, new: Values) -> Values:
    """Merge two layers into one, by the rules of `merged`."""
    return {**old, **{k: _joined(old[k], v) if k in old else v for k, v in new.items()}}


def _joined(old: Any, new: Any) -> Any:
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return joined({**old}, {**new})
    return (*old, *new) if isinstance(old, tuple) and isinstance(new, tuple) else new


def _parsed(setting: Setting, text: str, shown_name: str) -> Any:
    try:
        return setting.parse(text)
    except OptionError as e:
        raise OptionError(f"{shown_name}: {e}") from None


def _add_storage_option(values: Values, pair: str) -> None:
    """Add `KEY=VALUE`, or `OUTER.INNER=VALUE` for nested objects. A value that is not JSON is a string."""
    key, equals, text = pair.partition("=")
    if not key or not equals:
        raise OptionError(f"storage option {pair!r} is not of the form KEY=VALUE")
    value: Any = _json_or_text(text)
    for part in reversed(key.split(".")):
        value = {part: value}
    values["storage_options"] = joined(values.get("storage_options", {}), value)


def _add_variable(values: Values, pair: str) -> None:
    name, equals, text = pair.partition("=")
    if not name or not equals:
        raise OptionError(f"environment variable {pair!r} is not of the form NAME=VALUE")
    values["env"] = {**values.get("env", {}), name: text}


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _json_object(text: str, variable: str) -> Values:
    value = _json_or_text(text)
    if not isinstance(value, dict):
        raise OptionError(f"{variable}: not a JSON object")
    return value


def check(options: Options) -> None:
    """Raise OptionError for combinations that are invalid, or that would give other users access by mistake."""
    if options.allow_other and not options.default_permissions:
        raise OptionError(
            "allow_other needs default_permissions: without it the kernel checks no owner or mode, and every user may "
            "read everything. Give both"
        )
    if options.allow_root and (options.allow_other or options.uid is not None):
        raise OptionError("allow_root cannot be combined with allow_other or uid: remove one of them")
    codecs = LAYOUT_CODECS[options.layout]
    if options.chunk_codec is not None and options.chunk_codec not in codecs:
        able = f"only in {', '.join(codecs)}" if codecs else "only as they are stored: give a layout such as zarr2"
        raise OptionError(f"chunk_codec={options.chunk_codec}: the layout {options.layout} shows chunks {able}")
    if options.bare_rw and not options.rw:
        raise OptionError("-o rw alone is refused because mount(8) adds it automatically: use -o writable or -o ro")
    if options.create is not None and not options.rw:
        raise OptionError("create has no effect without rw: add rw, or remove create")
    if options.rw and options.layout != "native":
        raise OptionError(f"the layout {options.layout} is read-only: remove rw, or use layout=native")


# ---- docs/options.md ----

_INTRODUCTION = """\
# Options

<!-- Written by shardfs.options.as_markdown(). Change the table in shardfs/options.py, then run
     python -c 'from shardfs.options import as_markdown; print(as_markdown(), end="")' > docs/options.md -->

You can give every option in four ways. If two of them disagree, the later one in this list wins.

1. A profile in a configuration file: `attr_timeout = 10`; see [service.md](service.md).
2. An environment variable: `SHARDFS_ATTR_TIMEOUT=10`. Other variables that begin with `SHARDFS_` are ignored.
3. A mount option: `-o attr_timeout=10,direct_io`. `-` and `_` are the same. Write a comma in a value as
   `\\,` and a backslash as `\\\\`.
4. A flag: `--attr-timeout 10 --direct-io`. Each switch also has a `--no-` form.

Sizes are bytes, or 64K, 256M, 1GiB, where K is 1024. Times are seconds, or 10m, 2h, 1d. Modes are octal.
An unknown option is an error, and the message names the most similar option.
"""

_REST = """\
## The source

`-o storage_option.KEY=VALUE` or `--storage-option KEY=VALUE` goes to the fsspec file system of the source.
A value that is valid JSON is parsed as JSON (`true`, `3`, `{"a": 1}`), any other value is a string. Write `"3"` for
a string of digits. Dots in a key make nested objects:
`storage_option.client_kwargs.endpoint_url=http://localhost:9000`. One variable can hold all storage options:
`SHARDFS_STORAGE_OPTIONS='{"anon": true}'`.

`-o env.NAME=VALUE` or `--env NAME=VALUE` sets an environment variable before the source is opened,
for instance `env.AWS_PROFILE=lab`. All users of the machine can read the command line of a process. So keep secrets
in the files and variables that the store's client library reads, or in a profile in a file of mode 0600.

## Words of mount(8) and fstab

- A mount is read-only (`ro`) unless `writable` is given. mount(8) adds `rw` automatically when `ro` is missing, also
  for `defaults`. `rw` alone is therefore refused, so that no mount becomes writable by accident. A line in fstab needs
  either `ro` or `writable`.
- Passed to the kernel: {forwarded}.
- Accepted without effect: {accepted}, and all words that begin with `x-`.
"""


def as_markdown() -> str:
    """The text of docs/options.md."""
    parts = [_INTRODUCTION]
    for scope in SCOPES:
        rows = "".join(_row(s) for s in settings() if s.scope == scope)
        parts.append(f"## {scope}\n\n| `-o` | value | default | |\n|---|---|---|---|\n{rows}")
    words = {"forwarded": FORWARDED, "accepted": sorted(ACCEPTED)}
    rest = _REST
    for key, listed in words.items():
        rest = rest.replace("{" + key + "}", ", ".join(f"`{word}`" for word in listed))
    return "\n".join([*parts, rest])


def _row(s: Setting) -> str:
    value = s.value.replace("|", " or ") or "switch"
    return f"| `{s.name}` | {value} | {s.default} | {s.help} |\n"
