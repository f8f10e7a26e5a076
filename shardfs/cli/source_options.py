"""Options of the verbs that open a source, and functions that open a tree with these options."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
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
    """The options on the command line of a verb that opens a source: arguments of `-o`, and `KEY=VALUE` pairs."""

    words: tuple[str, ...]
    storage: tuple[str, ...]
    env: tuple[str, ...]

    def options(self) -> Options:
        """The options, merged with the environment and the profile."""
        return given_options(*self, {})[0]

    def with_profile(self, name: str) -> CommandOptions:
        """The same options with a profile below them."""
        return self._replace(words=(f"profile={name}", *self.words))


def source_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator that adds the options of all verbs that open a source. The function gets them as `command_options`."""

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


def given_options(
    words: Iterable[str], storage: Iterable[str], env: Iterable[str], flags: Mapping[str, Any]
) -> tuple[Options, Profile | None]:
    """The options as `layers.layered` merges them, and the profile, if any. Prints warnings."""
    return layers.layered(words, storage, env, flags, warn)


def warn(text: str) -> None:
    """Print a warning to standard error."""
    echo(f"shardfs: warning: {text}", err=True)


def profile_named(word: str, where: str | None = None) -> Profile | None:
    """The profile with this name; None if there is none or the word contains a slash."""
    if "/" in word:
        return None
    return layers.configuration(where or os.environ.get("SHARDFS_CONFIG"), word, warn).profiles.get(word)


def is_source(name: str, options: Options) -> bool:
    """Whether a name can be a source: a URL, a file, or a directory with a dataset. Reads metadata documents."""
    if not redact.is_path(name) or os.path.isfile(name):
        return True
    try:
        opened(name, options)
    except (NotADatasetError, *NOT_FOUND):
        return False
    except ShardfsError:  # a damaged dataset, or one that the layout cannot express
        return True
    return True


def opened(source: str, options: Options) -> Tree:
    """Open the tree of a source. Errors of the store become errors that name the source."""
    from shardfs.daemon.opening import open_source

    return open_source(absolute(source), options)


def opened_to_look(source: str, command_options: CommandOptions) -> Tree:
    """Open the tree for a verb that only reads, and print log messages to standard error."""
    options = command_options.options()
    logging.basicConfig(level=options.log_level.upper(), format="shardfs: %(message)s")
    return opened(source, options)
