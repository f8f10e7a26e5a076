"""Helper of mount(8) for the types `shardfs` and `fuse.shardfs`: `mount.shardfs SOURCE MOUNTPOINT [-sfnv] [-o ...]`.

It differs from the command line `shardfs`: `-f` means fake, HOME may be unset, and exit codes are those of mount(8).
"""

from __future__ import annotations

import getopt
import os
import pwd
import sys
from typing import NoReturn

import click

from shardfs import cli
from shardfs.cli.mount import start
from shardfs.cli.printing import echo
from shardfs.cli.source_options import CommandOptions
from shardfs.daemon.opening import check
from shardfs.model.exit_codes import ExitCode
from shardfs.model.redact import public_name
from shardfs.model.version import __version__

USAGE, INTERRUPTED, FAILED = 1, 8, 32
"""Exit codes of mount(8)."""

_SYNTAX = "usage: mount.shardfs SOURCE MOUNTPOINT [-sfnv] [-N NAMESPACE] [-t TYPE] [-o OPTIONS]"


def helper(args: list[str]) -> int:
    """Mount as mount(8) requests; return an exit code of mount(8): 0, or one of the above. Prints errors.

    `args` are those of the program, without its name. Sets the environment variable HOME if it is unset.
    """
    # fsspec file systems read credentials from the home directory.
    os.environ["HOME"] = os.environ.get("HOME") or pwd.getpwuid(os.getuid()).pw_dir
    code = cli.guarded(lambda: _mount(args))
    codes: dict[int, int] = {ExitCode.OK: 0, ExitCode.USAGE: USAGE, ExitCode.INTERRUPTED: INTERRUPTED}
    return codes.get(code, FAILED)


def _mount(args: list[str]) -> int:
    try:
        flags, words = getopt.gnu_getopt(args, "sfnvhVN:t:o:", ["help", "version"])
    except getopt.GetoptError as e:
        raise click.UsageError(f"{e}; {_SYNTAX}") from None
    names = {name for name, _ in flags}
    if names & {"-h", "--help", "-V", "--version"}:
        echo(_SYNTAX, f"shardfs {__version__}")
        return ExitCode.OK
    if len(words) != 2:
        raise click.UsageError(_SYNTAX)
    mount_options = CommandOptions(tuple(text for name, text in flags if name == "-o"), (), ()).options()
    if "-v" in names:
        echo(f"shardfs: {public_name(words[0])} on {words[1]}")
    if "-f" in names:
        check(mount_options)
        return ExitCode.OK
    return start(words[0], words[1], mount_options, foreground=False)


def main() -> NoReturn:
    """Entry point of the programs `mount.shardfs` and `mount.fuse.shardfs`: run `helper`, and exit."""
    cli.fill_standard_streams()
    sys.exit(helper(sys.argv[1:]))
