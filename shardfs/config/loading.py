"""Options from flags, `-o` words, the environment and profiles, merged and checked."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from itertools import chain
from typing import Any

from shardfs.config.options import BY_NAME, FILES, LAYOUT_CODECS, WRITING, Options, Setting, Values, settings
from shardfs.config.parsers import octal, suggestion, switch
from shardfs.model.errors import OptionError

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

REMOVED = {
    "cas": "a store without conditional writes cannot be mounted writable: write to a local copy, or to S3, "
    "Google Cloud Storage or Azure",
    "max_read": "the kernel chooses the size of reads: use `direct_io` or `poll_us` for speed",
    "max_readahead": "the kernel chooses how far it reads ahead: use `direct_io` or `poll_us` for speed",
    "forget_sharding": "to store an array unsharded, delete it, unmount, and write it again with `create=none`",
    "u64": "differences in minishard indices always wrap, as the format allows: leave the option out",
}
"""Options of earlier builds, with the reason why they are gone or what to use instead."""

ACCESS = {"ro": False, "writable": True}
"""Other names of the option `rw` in `-o` and profiles, with the value of `rw` that they stand for."""


# ---- loaders ----


def from_environment(environ: Mapping[str, str]) -> Values:
    """Load `SHARDFS_NAME` for each option, and `SHARDFS_STORAGE_OPTIONS` as a JSON object. Empty means not given.

    Other variables that begin with `SHARDFS_` are ignored: scripts and services may use some. Raise OptionError, with
    the name of the variable, for an invalid value.
    """
    values: Values = {
        s.name: _parsed(s, environ[s.variable], s.variable) for s in settings() if environ.get(s.variable)
    }
    if text := environ.get("SHARDFS_STORAGE_OPTIONS"):
        values["storage_options"] = _json_or_text(text)
        if not isinstance(values["storage_options"], dict):
            raise OptionError('SHARDFS_STORAGE_OPTIONS: not a JSON object: write it like {"anon": true}')
    return values


def from_mount_options(texts: Iterable[str]) -> Values:
    """Load the arguments of `-o`: words and `name=value`, separated by commas. `\\,` is a comma in a value.

    Later words win. Raise OptionError for `ro` and `writable` together, for unknown words, and for invalid values. The
    word `rw` only sets `bare_rw`; the words `FORWARDED` make `kernel`; those of `ACCEPTED` have no effect.
    """
    values: Values = {}
    for word in chain.from_iterable(map(split_words, texts)):
        new = _from_word(word)
        name = word.partition("=")[0]
        if name.replace("-", "_") in ACCESS and values.get("rw", new["rw"]) is not new["rw"]:
            raise OptionError(f"{name!r} contradicts an earlier option: remove one of them")
        values = joined(values, new)
    return values


def split_words(text: str) -> list[str]:
    """Return the words between commas, without empty ones. A backslash before a comma or a backslash is removed."""
    words = re.findall(r"(?:\\[,\\]|[^,])+", text)
    return [re.sub(r"\\([,\\])", r"\1", word) for word in words]


def _from_word(word: str) -> Values:
    name, equals, text = word.partition("=")
    prefix, dot, _ = name.partition(".")
    field = name.replace("-", "_")
    if dot and prefix.replace("-", "_") == "storage_option":
        return _storage_option(word.partition(".")[2])
    if dot and prefix == "env":
        return _variable(word.partition(".")[2])
    if word == "rw":
        return {"bare_rw": True}
    if field in ACCESS:
        return {"rw": switch(text) is ACCESS[field]}
    if field in BY_NAME:
        setting = BY_NAME[field]
        if setting.value and not equals:
            raise OptionError(f"option {setting.name!r} needs a value: {setting.name}={setting.value}")
        return {field: _parsed(setting, text, setting.name)}
    if name in FORWARDED:
        return {"kernel": (name,)}
    if name in ACCEPTED or name.lower().startswith("x-"):
        return {}
    raise _unknown("option", name, (*BY_NAME, *ACCESS, *FORWARDED, *ACCEPTED))


def _unknown(kind: str, name: str, names: Iterable[str]) -> OptionError:
    """The error for an unknown name, with what to use instead of a removed or a misspelt one."""
    word = name.replace("-", "_")
    if word in REMOVED:
        return OptionError(f"{name!r} was removed; {REMOVED[word]}")
    return OptionError(f"unknown {kind} {name!r}{suggestion(word, names)}")


def from_profile(key: str, value: Any, other_keys: Iterable[str] = ()) -> Values:
    """Load one key of a profile. Raise OptionError, with the key, if it is unknown or its value is invalid.

    `storage_options` reach fsspec unchanged. Other values may have TOML's types, or be texts in the notation of `-o`.
    `other_keys` are the profile's keys that are no options; an error for a misspelt key suggests them, too.
    """
    field = key.replace("-", "_")
    if field in ("storage_options", "env"):
        if not isinstance(value, dict):
            raise OptionError(f"{key}: must be a table")
        return {field: value if field == "storage_options" else dict(_variables(key, value))}
    if key in FORWARDED:
        return {"kernel": (key,)} if switch(_plain(key, value)) else {}
    if field in ACCESS:
        return {"rw": switch(_plain(key, value)) is ACCESS[field]}
    setting = BY_NAME.get(field)
    if setting is None or setting.scope == FILES:
        names = (s.name for s in settings() if s.scope != FILES)
        raise _unknown("key", key, (*other_keys, "storage_options", "env", *ACCESS, *FORWARDED, *names))
    if setting.parse is octal and not isinstance(value, str):  # TOML's 0o22 arrives as 18
        raise OptionError(f'{key}: write the octal mode as a string, such as "0444"')
    return {field: _parsed(setting, _plain(key, value), key)}


def _variables(key: str, variables: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in variables.items():
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


def from_flags(flags: Mapping[str, str | bool | None], storage: Iterable[str] = (), env: Iterable[str] = ()) -> Values:
    """Load command line flags: field name -> text, or True or False for a switch; None means not given.

    `storage` are KEY=VALUE pairs, of which KEY may be OUTER.INNER and VALUE may be JSON; `env` are NAME=VALUE pairs.
    Raise OptionError, with the flag or the pair, for an invalid value.
    """
    values = {s.name: _parsed(s, str(text), s.flag) for s in settings() if (text := flags.get(s.name)) is not None}
    return reduce(joined, (*map(_storage_option, storage), *map(_variable, env)), values)


def merged(*layers: Values) -> Options:
    """The options of all layers, and defaults for the others; not checked yet (`check`).

    Later layers win. Storage options and variables are merged key by key, and words for the kernel are concatenated.
    """
    nothing: Values = {}
    return Options(**reduce(joined, layers, nothing))


def joined(old: Values, new: Values) -> Values:
    """Merge two layers into a new one, by the rules of `merged`."""
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


def _storage_option(pair: str) -> Values:
    """Load `KEY=VALUE`, or `OUTER.INNER=VALUE` for nested objects. A value that is not JSON is a string."""
    key, equals, text = pair.partition("=")
    if not key or not equals:
        raise OptionError(f"storage option {pair!r} is not of the form KEY=VALUE")
    return {"storage_options": reduce(lambda value, part: {part: value}, reversed(key.split(".")), _json_or_text(text))}


def _variable(pair: str) -> Values:
    name, equals, text = pair.partition("=")
    if not name or not equals:
        raise OptionError(f"environment variable {pair!r} is not of the form NAME=VALUE")
    return {"env": {name: text}}


def _json_or_text(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def check(options: Options) -> None:
    """Raise OptionError for combinations that are invalid, or that would give other users access by mistake.

    Does not look at the rules of `create`: `daemon.opening.check` does both.
    """
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
    if not options.rw and (useless := _changed_writing(options)):
        names = ", ".join(useless)
        raise OptionError(f"{names}: no effect on a read-only mount: add writable (--rw), or remove this")
    if options.offline and options.rw:
        raise OptionError("offline sends no request, so nothing can be written: remove rw or offline")


def _changed_writing(options: Options) -> list[str]:
    """The options about writing, apart from the journal's place, that differ from their defaults."""
    default = Options()
    names = (s.name for s in settings() if s.scope == WRITING and s.name not in ("rw", "journal"))
    return [name for name in names if getattr(options, name) != getattr(default, name)]
