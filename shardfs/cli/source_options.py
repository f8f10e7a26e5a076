"""Options of the verbs that open a source, and functions that open a tree with these options.

All functions that merge options read the environment and the configuration files, print warnings, and raise
OptionError, as `layers.merge` does.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import click

from shardfs.cli.completion import mount_options
from shardfs.cli.printing import echo
from shardfs.config import layers
from shardfs.config.parsers import absolute
from shardfs.model import redact
from shardfs.model.errors import NOT_FOUND, NotADatasetError, ShardfsError

if TYPE_CHECKING:
    from shardfs.config.options import Options
    from shardfs.config.profiles import Profile
    from shardfs.vfs.tree import Tree

Function = TypeVar("Function", bound=Callable[..., Any])
"""What decorators of click take and return."""


def _debug(_ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        os.environ["SHARDFS_DEBUG"] = "1"


debug_option = click.option(
    "--debug", is_flag=True, expose_value=False, is_eager=True, callback=_debug, help="Show tracebacks of errors."
)


def decorated(*decorators: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """One decorator for several, of which the last is applied first."""
    return lambda function: functools.reduce(lambda f, decorate: decorate(f), reversed(decorators), function)


class CommandOptions(NamedTuple):
    """The options on the command line of a verb that opens a source.

    Args:
        words: the arguments of `-o`.
        storage: the arguments of `--storage-option`, KEY=VALUE.
        env: the arguments of `--env`, NAME=VALUE.
    """

    words: tuple[str, ...]
    storage: tuple[str, ...]
    env: tuple[str, ...]

    def options(self) -> Options:
        """The options, merged with the environment and the profile."""
        return self.merged({})[0]

    def merged(self, flags: Mapping[str, Any]) -> tuple[Options, Profile | None]:
        """The options, merged with the environment, the profile and flags; and the profile, None without one."""
        return layers.merge(*self, flags, warn)

    def with_profile(self, name: str) -> CommandOptions:
        """The same options, and the options of a profile where these do not say otherwise."""
        return self._replace(words=(f"profile={name}", *self.words))


def source_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that adds the options of all verbs that open a source. The function gets `command_options`."""

    @functools.wraps(function)
    def verb(words: tuple[str, ...], storage: tuple[str, ...], env: tuple[str, ...], **arguments: Any) -> Any:
        return function(command_options=CommandOptions(words, storage, env), **arguments)

    return decorated(
        click.option("-o", "words", multiple=True, metavar="A,B=C", help=_WORDS_HELP, shell_complete=mount_options),
        click.option("--storage-option", "storage", multiple=True, metavar="KEY=VALUE", help=_STORAGE_HELP),
        click.option("--env", "env", multiple=True, metavar="NAME=VALUE", help="Set an environment variable."),
        debug_option,
    )(verb)


_WORDS_HELP = "Options as in fstab; see docs/options.md."
_STORAGE_HELP = "Set an option of the source's fsspec file system."


def warn(text: str) -> None:
    """Print a warning to standard error."""
    echo(f"shardfs: warning: {text}", err=True)


def profile_named(word: str, where: str | None = None) -> Profile | None:
    """The profile with this name; None if there is none without errors, or if the word contains a slash.

    Reads the configuration file or directory `where`, by default that of `SHARDFS_CONFIG`. Prints warnings.
    """
    if "/" in word:
        return None
    return layers.configuration(where or os.environ.get("SHARDFS_CONFIG"), word, warn).profiles.get(word)


def is_source(name: str, options: Options) -> bool:
    """Whether a name can be a source: a URL, a file, or a directory with a dataset, even if that cannot be shown.

    Reads metadata documents of a directory. Raise OSError if they cannot be read.
    """
    if not redact.is_path(name) or os.path.isfile(name):
        return True
    try:
        open_source(name, options)
    except (NotADatasetError, *NOT_FOUND):
        return False
    except ShardfsError:  # a damaged dataset, or one that the layout cannot express
        return True
    return True


def open_source(source: str, options: Options) -> Tree:
    """The tree of a path or URL, to be read. Raise the errors of `daemon.opening.open_source`."""
    from shardfs.daemon import opening

    return opening.open_source(absolute(source), options)


def open_to_read(source: str, command_options: CommandOptions) -> Tree:
    """The tree for a verb that only reads. Configures logging: messages go to standard error from now on."""
    options = command_options.options()
    logging.basicConfig(level=options.log_level.upper(), format="shardfs: %(message)s")
    return open_source(source, options)
