"""The verbs that act on mounts: `mount`, `umount`, `flush`."""

from __future__ import annotations

import errno
import logging
import re
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from shardfs.cli import completion
from shardfs.cli.printing import echo, waiting
from shardfs.cli.source_options import (
    CommandOptions,
    debug_option,
    decorated,
    profile_named,
    source_options,
    warn,
)
from shardfs.config import options, parsers
from shardfs.config.parsers import absolute
from shardfs.model.errors import MountError
from shardfs.model.exit_codes import ExitCode
from shardfs.model.redact import has_password, public_name
from shardfs.model.text import counted, human_bytes
from shardfs.storage.source_locks import journal_directory

if TYPE_CHECKING:
    from collections.abc import Callable

    from shardfs.cli.source_options import Function
    from shardfs.config.options import Options, Setting

log = logging.getLogger(__name__)


def _flag(setting: Setting) -> Callable[[Function], Function]:
    if setting.value:
        text, complete = f"{setting.help}  [{setting.default}]", completion.setting_values(setting)
        return click.option(setting.flag, setting.name, metavar=setting.value, help=text, shell_complete=complete)
    off = "/--ro" if setting.name == "rw" else f"/--no-{setting.flag[2:]}"
    return click.option(setting.flag + off, setting.name, default=None, is_flag=True, help=setting.help)


class _MountCommand(click.Command):
    """The click command `mount`. Its help shows the options in the groups of the option table."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        scopes = {setting.name: setting.scope for setting in options.settings()}
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in ("Options", *options.SCOPES)}
        for param in self.get_params(ctx):
            if isinstance(param, click.Option) and (record := param.get_help_record(ctx)) is not None:
                terms = record[0].partition(" / --no-")[0]
                groups[scopes.get(param.name or "", "Options")].append((terms, record[1]))
        for title, records in groups.items():
            with formatter.section(title):
                formatter.write_dl(records)


@click.command(cls=_MountCommand)
@click.argument("source", required=False, shell_complete=completion.profiles_and_files)
@click.argument("mountpoint", required=False, shell_complete=completion.kind("dir"))
@click.option("-f", "--foreground", is_flag=True, help="Stay in the foreground; Ctrl-C unmounts.")
@click.option("-v", "--verbose", is_flag=True, help="Print what is mounted where, and log at level info.")
@source_options
@decorated(*map(_flag, options.settings()))
def mount(
    source: str | None,
    mountpoint: str | None,
    foreground: bool,
    verbose: bool,
    command_options: CommandOptions,
    **flags: Any,
) -> int:
    """Mount SOURCE on the directory MOUNTPOINT.

    SOURCE is a path or an fsspec URL. The name of a profile in the configuration files replaces SOURCE and MOUNTPOINT.

    Returns when the mount answers; a daemon then serves the mount until `shardfs umount MOUNTPOINT`. On a terminal, or
    with -v or -f, a line says what is mounted where.

    Switches have a --no- form, such as --no-direct-io.
    """
    if verbose and flags["log_level"] is None:
        flags["log_level"] = "info"
    if source is not None and mountpoint is None:
        flags["profile"] = _only_profile(source, flags["profile"])
    mount_options, profile = command_options.merged(flags)
    if source is None or mountpoint is None:
        if profile is None:
            raise click.UsageError(_NEEDED)
        source = profile.source
        mountpoint = profile.mountpoint
    return start(
        source, mountpoint, mount_options, foreground=foreground, announce=verbose or foreground or sys.stdout.isatty()
    )


def start(source: str, mountpoint: str, mount_options: Options, *, foreground: bool, announce: bool = False) -> int:
    """Mount a path or URL on a directory, and return the exit code, as `daemon.mount.mount` does.

    Returns when a daemon serves the mount or has failed; in the foreground, when the mount was unmounted. Prints
    warnings to standard error. Raise the errors of `daemon.mount.mount`, and OptionError for an empty source.
    `announce`: print a line to standard output when the mount is ready.
    """
    from shardfs.daemon.mount import mount as mount_source

    if has_password(source) and source in sys.argv:
        warn("every user can read the password in the URL on the command line: use a profile instead")
    if not mount_options.rw:
        _warn_of_unpublished(source, mount_options)

    def ready() -> None:
        how = "Ctrl-C unmounts it" if foreground else f"`shardfs umount {mountpoint}` unmounts it"
        with suppress(OSError):  # standard output may be closed
            echo(f"{public_name(source)} is mounted on {mountpoint}; {how}")

    when_ready = ready if announce else lambda: None
    return mount_source(absolute(source), mountpoint, mount_options, foreground=foreground, ready=when_ready)


def _warn_of_unpublished(source: str, mount_options: Options) -> None:
    """Warn if the source has a journal with unpublished files that no mount publishes."""
    if not journal_directory(absolute(source), mount_options.journal).is_dir():
        return  # the modules of journals need not be imported
    from shardfs.write.recover import unpublished_warning

    if (warning := unpublished_warning(absolute(source), mount_options.journal)) is not None:
        warn(f"{public_name(source)}: {warning}")


_NEEDED = "mount needs SOURCE and MOUNTPOINT, or the name of a profile; `shardfs config show` lists the profiles"


def _only_profile(word: str, profile: str | None) -> str:
    """Return the single argument of `mount` if it can be the name of a profile; raise UsageError otherwise."""
    from shardfs.config.profiles import NAME

    if profile is not None or not re.fullmatch(NAME, word):
        raise click.UsageError(f"{word!r} is not enough: {_NEEDED}")
    return word


@click.command()
@click.argument("mountpoint", shell_complete=completion.profiles_and_files)
@click.option("--timeout", default="60", metavar="SECONDS", help="How long to wait for the daemon to end.  [60]")
@click.option("-l", "--lazy", is_flag=True, help="Detach the mount now, even if programs still use it.")
@click.option("--patient", is_flag=True, help="While the mount is busy, retry until the time-out.")
@click.option("--if-mounted", is_flag=True, help="Succeed if nothing is mounted there.")
@debug_option
def umount(mountpoint: str, timeout: str, lazy: bool, patient: bool, if_mounted: bool) -> int:
    """Unmount MOUNTPOINT and wait until its daemon has ended.

    MOUNTPOINT is a directory or the name of a profile. A writable mount first publishes all data; the time-out starts
    again whenever that makes progress. Exit code 3 if files stay in the journal, which are named; 4 if the mount is
    busy; 5 if nothing is mounted there, if the daemon has not ended in time, or if the mount belongs to another user.
    """
    from shardfs.daemon import unmount

    if not unmount.is_mounted(mountpoint) and (profile := profile_named(mountpoint)) is not None:
        mountpoint = profile.mountpoint
    if if_mounted and not unmount.is_mounted(mountpoint):
        return ExitCode.OK
    with waiting("publishing") as show_progress:
        return unmount.umount(
            mountpoint,
            timeout=parsers.finite_seconds(timeout),
            lazy=lazy,
            patient=patient,
            progress=lambda n: show_progress(f"at most {human_bytes(n)} left"),
        )


@click.command()
@click.argument("path")
@click.option("--timeout", default="1h", metavar="SECONDS", help="How long to wait.  [1h]")
@debug_option
def flush(path: str, timeout: str) -> int:
    """Publish the data written below PATH, and wait.

    PATH is a mount, or a file or directory on a mount. Exit code 3 if publishing fails, with the first error; 5 if it
    takes longer than the time-out, or if PATH is not on a mount.
    """
    from shardfs.daemon import asking
    from shardfs.storage import mount_table

    mountpoint = mount_table.mount_of(path)
    if mountpoint is None:
        raise MountError(errno.EINVAL, "is not on a mount of shardfs: `shardfs status` lists the mounts", path)

    def progress() -> None:
        for mount in asking.mounts(mountpoint) if sys.stderr.isatty() else ():
            if mount.writing:
                show_progress(f"{counted(mount.writing['dirty_chunks'], 'chunk')} left")

    try:
        with waiting("publishing") as show_progress:
            asking.flush(path, parsers.positive_seconds(timeout), progress)
    except OSError as e:
        if e.errno in (errno.EROFS, errno.ENOTSUP):
            raise click.UsageError(f"{mountpoint} is mounted read-only: mount it with --rw to write") from None
        late = e.errno == errno.ETIMEDOUT
        more = "" if late else f"; shardfs status {mountpoint} names the files and the reasons"
        echo(f"shardfs: {path}: {e.strerror}{more}", err=True)
        return ExitCode.LATE if late else ExitCode.LEFT
    return ExitCode.OK
