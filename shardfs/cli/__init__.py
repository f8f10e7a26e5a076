"""The command line `shardfs`: dispatches verbs, reports errors, maps errors to exit codes.

Each verb has its own module in this package, imported only to run the verb or to print the help.
To keep the start fast, these modules import heavy packages inside functions only.
"""

from __future__ import annotations

import importlib
import io
import os
import re
import sys
from typing import TYPE_CHECKING, BinaryIO, NoReturn, cast

import click

from shardfs.cli.printing import echo
from shardfs.config import parsers
from shardfs.model import errors, redact
from shardfs.model.exit_codes import MEANINGS, ExitCode
from shardfs.model.version import __version__

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.shell_completion import CompletionItem

VERBS = (
    *("mount", "umount", "flush", "status", "doctor", "ls", "cat", "info", "locate", "verify", "recover", "compact"),
    *("pack", "unpack", "cache", "config", "install", "uninstall"),
)
"""All verbs, in the order of the help text."""

MODULES = {"umount": "mount", "flush": "mount", "unpack": "pack", "uninstall": "install"}
"""Verbs that share a module of this package with another verb. All others have a module of their own name."""

ALIASES = {"unmount": "umount"}
"""Other names of verbs."""


class Group(click.Group):
    """A click group that prints its help if called without a verb."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args or ([] if ctx.resilient_parsing else ["--help"]))


class _Verbs(Group):
    """The group of all verbs. If the first word is no verb, runs `mount`, because mount(8) calls shardfs like this."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*VERBS, *self.commands]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        name = ALIASES.get(cmd_name, cmd_name)
        if name not in VERBS:
            return super().get_command(ctx, name)
        command = getattr(importlib.import_module(f"shardfs.cli.{MODULES.get(name, name)}"), name)
        return command if isinstance(command, click.Command) else None

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in (*_words(), "-h", "--help", "--version"):
            if not ctx.resilient_parsing:
                _refuse_typo(args[0])
            args = ["mount", *args]
        return super().parse_args(ctx, args)


def _words() -> tuple[str, ...]:
    return (*VERBS, *ALIASES, "help")


def _refuse_typo(word: str) -> None:
    """Raise UsageError for a word that resembles a verb, unless a path or a profile has this name."""
    near = parsers.suggestion(word, _words())
    if not near or not re.fullmatch("[A-Za-z-]+", word) or os.path.lexists(word):
        return
    from shardfs.config.profiles import read

    configuration = read(os.environ.get("SHARDFS_CONFIG"))
    if word not in (*configuration.profiles, *(fault.profile for fault in configuration.faults)):
        raise click.UsageError(
            f"no verb {word!r}{near} To mount a source or profile of this name: shardfs mount {word}"
        )


@click.group(
    cls=_Verbs,
    no_args_is_help=False,
    options_metavar="",
    subcommand_metavar="VERB ...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="You can omit `mount`: shardfs SOURCE MOUNTPOINT. `shardfs help VERB` shows the options of a verb. Exit "
    f"codes: {'; '.join(f'{code} {meaning}' for code, meaning in MEANINGS.items())}.",
)
@click.version_option(__version__, message="%(prog)s %(version)s")
def commands() -> None:
    """Show sharded n-d datasets (Zarr, Neuroglancer precomputed, N5, bcolz, Blosc2) as one plain file per chunk."""


def _complete_verb(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    from shardfs.cli.completion import starting_with

    return starting_with(incomplete, commands.list_commands(ctx))


@commands.command()
@click.argument("verb", nargs=-1, shell_complete=_complete_verb)
def help(verb: tuple[str, ...]) -> int:
    """Show the help of a verb."""
    if verb and verb[0] not in _words():
        near = parsers.suggestion(verb[0], _words())
        raise click.UsageError(f"no verb {verb[0]!r}{near or '; `shardfs --help` lists the verbs'}")
    return int(commands.main([*verb, "--help"], prog_name="shardfs", standalone_mode=False) or ExitCode.OK)


# ---- errors ----


def exit_code(error: BaseException) -> int:
    """The exit code for an error that ended a verb: as `errors.exit_code`, and USAGE for click's errors of usage."""
    return ExitCode.USAGE if isinstance(error, click.UsageError) else errors.exit_code(error)


def message(error: BaseException) -> str:
    """The error as one line for the user, without secrets."""
    if isinstance(error, click.ClickException):
        return " ".join(redact.redacted(error.format_message()).split())
    return errors.message(error)


def is_bug(error: BaseException) -> bool:
    """Whether an error is a bug, which needs a traceback. Click's errors are about the command line."""
    return errors.is_bug(error) and not isinstance(error, click.ClickException)


def run(args: list[str]) -> int:
    """Run the command line `args`, without the name of the program; return the exit code. See `guarded` for errors."""
    for word in args:  # first, since any error may print a URL
        redact.add_secrets(word)
    return guarded(lambda: commands.main(args, prog_name="shardfs", standalone_mode=False))


def guarded(work: Callable[[], object]) -> int:
    """Call `work` and return the exit code: its result if that is a number, else 0.

    An exception is printed to standard error, with a traceback if it is a bug or `SHARDFS_DEBUG` is set, and becomes an
    exit code. Ctrl-C becomes `INTERRUPTED` and prints nothing.
    """
    try:
        code = work()
        return code if isinstance(code, int) else ExitCode.OK
    except (KeyboardInterrupt, click.Abort):
        return ExitCode.INTERRUPTED
    except Exception as e:  # noqa: BLE001  (printed, with a traceback if the error is a bug)
        if os.environ.get("SHARDFS_DEBUG") or is_bug(e):
            echo(*errors.redacted_traceback(e), err=True)
        echo(f"shardfs: {message(e)}", err=True)
        return exit_code(e)


def fill_standard_streams() -> None:
    """Open /dev/null for closed standard streams, so that no file opened later gets their descriptors.

    Writing to a closed standard output stays an error. Output to a closed standard error is discarded.
    """
    for number, name, how in ((0, "stdin", os.O_WRONLY), (1, "stdout", os.O_RDONLY), (2, "stderr", os.O_RDWR)):
        if getattr(sys, name) is None:
            if (opened := os.open(os.devnull, how)) == number:
                os.set_inheritable(number, True)
            else:
                os.close(opened)  # another file uses the descriptor already
            # Unbuffered: a flush at interpreter exit would fail.
            raw = cast("BinaryIO", io.FileIO(number, "w" if number else "r", closefd=False))
            setattr(sys, name, io.TextIOWrapper(raw, write_through=True))


def main() -> NoReturn:
    """Entry point of the program `shardfs`: run the command line of this process, and exit."""
    fill_standard_streams()
    # At its import, numpy would start a thread for each CPU, for linear algebra, which no code of shardfs uses.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if "_SHARDFS_COMPLETE" in os.environ:
        from shardfs.cli.completion import register

        register()
    sys.exit(run(sys.argv[1:]))
