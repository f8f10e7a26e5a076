"""Configuration files with named profiles, which `shardfs mount NAME` and the service unit mount.

All `*.toml` files in `/etc/shardfs` and in the user's configuration directory are read. A profile is a table
`[mount.NAME]` with the keys `source`, `mountpoint`, `storage_options`, `env` and the names of options.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardfs.config import loading, parsers
from shardfs.model.errors import OptionError
from shardfs.model.own_places import is_own, is_private
from shardfs.model.redact import secrets_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from shardfs.config.options import Values

SYSTEM = "/etc/shardfs"

NAME = r"[A-Za-z0-9_][A-Za-z0-9_.:-]*"
"""Profile names: not escaped as instance names of systemd, and distinct from paths."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One table `[mount.NAME]` of a file, without errors.

    Args:
        file: the path of the configuration file.
        source, mountpoint: as written, with `~` expanded. A mountpoint is absolute.
        values: the options of the table.
    """

    name: str
    file: str
    source: str
    mountpoint: str
    values: Values


@dataclass(frozen=True, slots=True)
class ConfigFault:
    """An error in a file, or in one of its profiles. With `warning`, the file or profile can still be used.

    Args:
        file: the path of the file, or of a directory that cannot be listed.
        profile: the name of the profile; "" for an error of the whole file.
        why: the reason, for users.
    """

    file: str
    profile: str
    why: str
    warning: bool = False

    def __str__(self) -> str:
        where = f"{self.file}: [mount.{self.profile}]" if self.profile else self.file
        return f"{where}: {self.why}"


@dataclass(slots=True)
class Configuration:
    """The content of all configuration files. A user's profile replaces the system's profile of the same name.

    Args:
        files: the paths of the files that were read.
        profiles: the profiles without errors, by name.
        faults: errors and warnings in the order of the files.
    """

    files: list[str] = field(default_factory=list)
    profiles: dict[str, Profile] = field(default_factory=dict)
    faults: list[ConfigFault] = field(default_factory=list)

    def profile(self, name: str) -> Profile:
        """The profile. Raise OptionError with its faults, or with the most similar name if it does not exist."""
        faults = [str(fault) for fault in self.faults if fault.profile == name and not fault.warning]
        if faults:
            raise OptionError("; ".join(faults))
        if name in self.profiles:
            return self.profiles[name]
        # The message lists unreadable files too, because one of them may contain the profile.
        unread = [str(fault) for fault in self.faults if not fault.profile and not fault.warning]
        where = "; `shardfs config show` lists the profiles" if self.files else "; there is no configuration file"
        raise OptionError("; ".join([f"no profile {name!r}{parsers.suggestion(name, self.profiles)}{where}", *unread]))


def directories() -> list[str]:
    """The directories of the files, which need not exist: the system's, then the user's, whose profiles win."""
    config_home = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return [SYSTEM, os.path.join(config_home, "shardfs")]


def read(where: str | None = None) -> Configuration:
    """Read all `*.toml` files in order of their names, or only the file or directory `where`.

    Faults are collected, not raised. A directory that does not exist is no fault; a file `where` that does not is one.
    """
    configuration = Configuration()
    for place in directories() if where is None else [where]:
        layer = Configuration()
        for path in [place] if place == where and not os.path.isdir(place) else _listed(place, layer):
            _read_file(path, layer)
        configuration.files += layer.files
        # A broken profile must not silently fall back to the system's profile of the same name.
        broken = {fault.profile for fault in layer.faults if not fault.warning}
        configuration.faults = [f for f in configuration.faults if f.profile not in layer.profiles] + layer.faults
        profiles = {**configuration.profiles, **layer.profiles}
        configuration.profiles = {name: profile for name, profile in profiles.items() if name not in broken}
    _compare(configuration)
    return configuration


def _listed(directory: str, layer: Configuration) -> list[str]:
    try:
        return sorted(os.path.join(directory, name) for name in os.listdir(directory) if name.endswith(".toml"))
    except FileNotFoundError:
        return []
    except OSError as e:
        layer.faults.append(ConfigFault(directory, "", str(e.strerror)))
        return []


def _read_file(path: str, layer: Configuration) -> None:
    try:
        with open(path, "rb") as file:
            info = os.fstat(file.fileno())
            tables = tomllib.load(file)
    except (OSError, ValueError) as e:
        layer.faults.append(ConfigFault(path, "", str(getattr(e, "strerror", None) or e)))
        return
    layer.files.append(path)
    layer.faults += [ConfigFault(path, "", why, warning=True) for why in _others_may_change(path, info)]
    for key in tables.keys() - {"mount"}:
        layer.faults.append(ConfigFault(path, "", f"unknown key {key!r}{parsers.suggestion(key, ('mount',))}"))
    mounts = tables.get("mount", {})
    if not isinstance(mounts, dict) or not all(isinstance(table, dict) for table in mounts.values()):
        layer.faults.append(ConfigFault(path, "", "`mount` must contain tables: write each profile as [mount.NAME]"))
        return
    for name, table in mounts.items():
        _read_profile(path, name, table, layer)
    profiles = [layer.profiles[name] for name in mounts if name in layer.profiles]
    pairs = ((p.source, p.values.get("storage_options", {}), p.values.get("env", {})) for p in profiles)
    if info.st_mode & stat.S_IROTH and any(True for values in pairs for _ in secrets_of(*values)):
        why = "contains secrets, but all users can read it: chmod o-r"
        layer.faults.append(ConfigFault(path, "", why, warning=True))


def _others_may_change(path: str, info: os.stat_result) -> Iterator[str]:
    """Yield how other users than root can change a file, and thus what this user mounts and runs (`on_error`)."""
    real = os.path.realpath(path)
    directories = dict.fromkeys((os.path.dirname(os.path.abspath(path)), os.path.dirname(real)))
    for name, entry in [("", info), *((f"its directory {d} ", os.stat(d)) for d in directories)]:
        mode, sticky = entry.st_mode, stat.S_ISDIR(entry.st_mode) and entry.st_mode & stat.S_ISVTX
        if not is_own(entry):
            yield f"{name}belongs to another user (number {entry.st_uid}), who can change it: make it yours"
        if mode & stat.S_IWOTH and not sticky:
            yield f"{name}can be changed by all users: chmod o-w"
        elif mode & stat.S_IWGRP and not sticky and not is_private(entry.st_gid):
            yield f"{name}can be changed by the group number {entry.st_gid}: chmod g-w"


def _read_profile(path: str, name: str, table: Mapping[str, Any], layer: Configuration) -> None:
    faults = [ConfigFault(path, name, why) for why in _name_faults(name, layer)]
    texts = {"source": "", "mountpoint": ""}
    values: Values = {}
    for key, value in table.items():
        try:
            if key in texts:
                texts[key] = _text(key, value)
            else:
                values = _added(values, key, loading.from_profile(key, value, texts))
        except OptionError as e:
            faults.append(ConfigFault(path, name, str(e)))
    faults += [ConfigFault(path, name, f"{key} is missing") for key, text in texts.items() if key not in table]
    layer.faults += faults
    if not faults:
        source, mountpoint = (os.path.expanduser(text) for text in texts.values())
        layer.profiles[name] = Profile(name, path, source, mountpoint, values)


def _added(values: Values, key: str, new: Values) -> Values:
    # One option can have several keys: `ro`, `writable` and `rw`, and each name with `-` or `_`.
    if any(values.get(name, v) != v for name, v in new.items() if not isinstance(v, dict | tuple)):
        raise OptionError(f"{key!r} contradicts an earlier option")
    return loading.joined(values, new)


def _name_faults(name: str, layer: Configuration) -> Iterator[str]:
    if not re.fullmatch(NAME, name):
        yield "a name consists of letters, digits and _ . : -, and begins with a letter, a digit or _"
    if name in layer.profiles:
        yield f"is also in {layer.profiles[name].file}: rename or remove one of them"


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise OptionError(f"{key}: must be a string, and not empty")
    if key == "mountpoint" and not value.startswith(("/", "~/")):
        raise OptionError(f"mountpoint: {value!r} is not an absolute path")
    return loading.without_nul(key, value)


def _compare(configuration: Configuration) -> None:
    by_mountpoint: dict[Path, Profile] = {}
    for profile in configuration.profiles.values():
        other = by_mountpoint.setdefault(Path(profile.mountpoint), profile)
        if other is not profile:
            why = f"has the mountpoint of {other.name!r}, {profile.mountpoint}"
            configuration.faults.append(ConfigFault(profile.file, profile.name, why, warning=True))
