"""The verb `config`: checks and shows the configuration files."""

from __future__ import annotations

import json
import math
import os
from typing import TYPE_CHECKING, Any

import click

from shardfs.cli import Group
from shardfs.cli.completion import profiles as complete_profile
from shardfs.cli.printing import echo, write_json
from shardfs.config import loading, options, parsers
from shardfs.model.errors import OptionError
from shardfs.model.exit_codes import ExitCode
from shardfs.model.redact import public_name, redacted_values
from shardfs.model.text import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from shardfs.config.profiles import ConfigFault, Profile

_WHERE = click.option("--config", "where", metavar="PATH", help="Read only this file or directory.")


@click.group(cls=Group, no_args_is_help=False)
def config() -> None:
    """Check and show the configuration files.

    They are /etc/shardfs/*.toml and ~/.config/shardfs/*.toml; those of the user take precedence.
    """


@config.command()
@_WHERE
def check(where: str | None) -> int:
    """Check the configuration files. Exit code 2 for errors; warnings do not count."""
    from shardfs.config.profiles import read

    configuration = read(_chosen(where))
    faults = [*configuration.faults, *_misfits(configuration.profiles.values())]
    for fault in faults:
        echo(f"warning: {fault}" if fault.warning else str(fault))
    if not faults:
        profiles, files = counted(len(configuration.profiles), "profile"), counted(len(configuration.files), "file")
        echo(f"{profiles} in {files}, nothing wrong")
    return ExitCode.OK if all(fault.warning for fault in faults) else ExitCode.USAGE


def _misfits(profiles: Iterable[Profile]) -> Iterator[ConfigFault]:
    """Profiles with options that `mount` would refuse.

    Reading the files does not check this, because flags can add missing options.
    """
    from shardfs.config.profiles import ConfigFault
    from shardfs.daemon.opening import check as check_options

    for profile in profiles:
        try:
            check_options(loading.merged(profile.values))
        except OptionError as e:
            yield ConfigFault(profile.file, profile.name, str(e))


@config.command()
@click.argument("names", nargs=-1, metavar="[NAME]...", shell_complete=complete_profile)
@_WHERE
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
def show(names: tuple[str, ...], where: str | None, as_json: bool) -> None:
    """Print profiles as a mount would use them, with the environment applied and secrets masked."""
    from shardfs.config.profiles import read

    configuration = read(_chosen(where))
    for name in names or sorted(configuration.profiles):
        profile = configuration.profile(name)
        settings = dict(_effective(profile))
        if as_json:
            write_json({"name": name, "file": profile.file, **{k: value for k, (value, _) in settings.items()}})
        else:
            echo(f"[mount.{json.dumps(name) if '.' in name or ':' in name else name}]  # {profile.file}")
            echo(*_lines(settings, profile.file), "")


def _chosen(where: str | None) -> str | None:
    where = where or os.environ.get("SHARDFS_CONFIG")
    return parsers.file_path(where) if where else None


def _effective(profile: Profile) -> Iterator[tuple[str, tuple[Any, str]]]:
    """Yield each key with a pair: its value, without secrets, and the file or variable that sets it."""
    above = loading.from_environment(os.environ)
    yield "source", (public_name(profile.source), profile.file)
    yield "mountpoint", (profile.mountpoint, profile.file)
    values = loading.joined(profile.values, above)
    for setting in options.settings():
        if setting.name in values and setting.scope != options.FILES:
            origin = setting.variable if setting.name in above else profile.file
            yield setting.name, (_shown(setting, values[setting.name]), origin)
    for word in values.get("kernel", ()):
        yield word, (True, profile.file)
    if "storage_options" in values:
        origin = "SHARDFS_STORAGE_OPTIONS, too" if "storage_options" in above else profile.file
        yield "storage_options", (redacted_values(values["storage_options"]), origin)
    if "env" in values:
        variables = {name: os.environ.get(name, value) for name, value in values["env"].items()}
        yield "env", (redacted_values(variables), profile.file)


def _shown(setting: options.Setting, value: Any) -> Any:
    if setting.parse is parsers.octal:
        return f"{value:04o}"
    return "forever" if value == math.inf else value


def _lines(settings: Mapping[str, tuple[Any, str]], file: str) -> Iterator[str]:
    for key, (value, origin) in settings.items():
        note = "" if origin == file else f"  # {origin}"
        pairs = {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
        for name, member in pairs.items():
            yield f"{name} = {json.dumps(member, ensure_ascii=False, default=str)}{note}"
