"""Configuration files: named profiles, each a mount that `shardfs mount NAME` and the service unit can make.

Every `*.toml` of `/etc/shardfs` and of the user's own directory is read. A profile is a table `[mount.NAME]` with the
keys `source`, `mountpoint`, `storage_options`, `env` and the names of the option table.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shardfs import options
from shardfs.masking import secrets_of
from shardfs.options import OptionError, Values

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

SYSTEM = "/etc/shardfs"

NAME = r"[A-Za-z0-9_][A-Za-z0-9_.:-]*"
"""Names that systemd takes for an instance as they are, and that are no path."""


@dataclass(frozen=True, slots=True)
class Profile:
    """One `[mount.NAME]`; `values` are its options, as the other ways in give them."""

    name: str
    file: str
    source: str
    mountpoint: str
    values: Values


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that is wrong with a file, or with one profile in it. A warning does not keep it from being used."""

    file: str
    profile: str
    why: str
    warning: bool = False

    def __str__(self) -> str:
        where = f"{self.file}: [mount.{self.profile}]" if self.profile else self.file
        return f"{where}: {self.why}"


@dataclass(slots=True)
class Configuration:
    """What the files say. Of two profiles of one name the user's own replaces the system's."""

    files: list[str] = field(default_factory=list)
    profiles: dict[str, Profile] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def profile(self, name: str) -> Profile:
        """The profile; OptionError with its faults, or the nearest name there is."""
        told = [str(fault) for fault in self.faults if fault.profile == name and not fault.warning]
        if told:
            raise OptionError("; ".join(told))
        if name in self.profiles:
            return self.profiles[name]
        # A file that cannot be read at all may be the one that has it.
        unread = [str(fault) for fault in self.faults if not fault.profile and not fault.warning]
        where = "; `shardfs config show` lists the profiles" if self.files else "; there is no configuration file"
        raise OptionError("; ".join([f"no profile {name!r}{options.suggestion(name, self.profiles)}{where}", *unread]))


def directories() -> list[str]:
    """Where the files lie; those of the later one win."""
    own = os.environ.get("XDG_CONFIG_HOME") or os.path.expanduser("~/.config")
    return [SYSTEM, os.path.join(own, "shardfs")]


def read(where: str | None = None) -> Configuration:
    """All that is configured, or only the file or directory `where`. Faults are collected, not raised."""
    found = Configuration()
    for place in directories() if where is None else [where]:
        layer = Configuration()
        for path in [place] if place == where and not os.path.isdir(place) else _listed(place, layer):
            _read_file(path, layer)
        found.files += layer.files
        # A profile that is broken here must not be used as it is written elsewhere.
        broken = {fault.profile for fault in layer.faults if not fault.warning}
        found.faults = [f for f in found.faults if f.profile not in layer.profiles] + layer.faults
        found.profiles = {k: v for k, v in {**found.profiles, **layer.profiles}.items() if k not in broken}
    _compare(found)
    return found


def _listed(place: str, found: Configuration) -> list[str]:
    try:
        return sorted(os.path.join(place, name) for name in os.listdir(place) if name.endswith(".toml"))
    except FileNotFoundError:
        return []
    except OSError as e:
        found.faults.append(Fault(place, "", str(e.strerror)))
        return []


def _read_file(path: str, found: Configuration) -> None:
    try:
        with open(path, "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            tables = tomllib.load(file)
    except (OSError, ValueError) as e:
        found.faults.append(Fault(path, "", str(getattr(e, "strerror", None) or e)))
        return
    found.files.append(path)
    for key in tables.keys() - {"mount"}:
        found.faults.append(Fault(path, "", f"unknown key {key!r}{options.suggestion(key, ('mount',))}"))
    mounts = tables.get("mount", {})
    if not isinstance(mounts, dict) or not all(isinstance(table, dict) for table in mounts.values()):
        found.faults.append(Fault(path, "", "profiles are written as tables: [mount.NAME]"))
        return
    for name, table in mounts.items():
        _read_profile(path, name, table, found)
    if mode & stat.S_IROTH and any(map(_has_secrets, (found.profiles[n] for n in mounts if n in found.profiles))):
        found.faults.append(Fault(path, "", "holds secrets, and everybody may read it: chmod o-r", warning=True))


def _has_secrets(profile: Profile) -> bool:
    given = (profile.values.get("storage_options", {}), profile.values.get("env", {}))
    return any(True for _ in secrets_of(profile.source, *given))


def _read_profile(path: str, name: str, table: Mapping[str, Any], found: Configuration) -> None:
    faults = [Fault(path, name, why) for why in _name_faults(name, found)]
    texts = {"source": "", "mountpoint": ""}
    values: Values = {}
    for key, value in table.items():
        try:
            if key in texts:
                texts[key] = _text(key, value)
            else:
                values = _added(values, key, options.from_profile(key, value, texts))
        except OptionError as e:
            faults.append(Fault(path, name, str(e)))
    faults += [Fault(path, name, f"{key} is missing") for key, text in texts.items() if key not in table]
    found.faults += faults
    if not faults:
        source, mountpoint = (os.path.expanduser(text) for text in texts.values())
        found.profiles[name] = Profile(name, path, source, mountpoint, values)


def _added(values: Values, key: str, new: Values) -> Values:
    # Keys have several names: `ro` and `writable` of `rw`, and each with `-` for `_`.
    if any(values.get(name, v) != v for name, v in new.items() if not isinstance(v, dict | tuple)):
        raise OptionError(f"{key!r} contradicts an earlier option")
    return options.joined(values, new)


def _name_faults(name: str, found: Configuration) -> Iterator[str]:
    if not re.fullmatch(NAME, name):
        yield "a name is made of letters, digits and _ . : -, and does not begin with a sign"
    if name in found.profiles:
        yield f"is also in {found.profiles[name].file}"


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise OptionError(f"{key}: must be a string that is not empty")
    if key == "mountpoint" and not value.startswith(("/", "~/")):
        raise OptionError(f"mountpoint: {value!r} is not an absolute path")
    return options.without_nul(key, value)


def _compare(found: Configuration) -> None:
    taken: dict[Path, Profile] = {}
    for profile in found.profiles.values():
        other = taken.setdefault(Path(profile.mountpoint), profile)
        if other is not profile:
            why = f"has the mountpoint of {other.name!r}, {profile.mountpoint}"
            found.faults.append(Fault(profile.file, profile.name, why, warning=True))
