"""Options of the verbs that open a source, and functions that open a tree with these options."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import click

from shardfs.cli import is_bug
from shardfs.cli.completing import mount_options
from shardfs.config import loading
from shardfs.model import errors, redact
from shardfs.model.errors import UnsupportedError, is_expected
from shardfs.model.redact import public_name

if TYPE_CHECKING:
    from shardfs.config.options import Options
    from shardfs.config.profiles import Configuration, Profile
    from shardfs.vfs.tree import Tree
    from shardfs.write.tree import WriteTree

Function = TypeVar("Function", bound=Callable[..., Any])

SPENT = 16 << 20
"""Maximum bytes of decoded chunks to keep after the kernel has read them, because requests may arrive out of order."""


def debug(_ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    """Click callback of `--debug`."""
    if value:
        os.environ["SHARDFS_DEBUG"] = "1"


def source_options(function: Function) -> Function:
    """Decorator that adds the options of all verbs that open a source."""
    for decorate in (
        click.option(
            "--debug",
            is_flag=True,
            expose_value=False,
            is_eager=True,
            callback=debug,
            help="Show tracebacks of errors.",
        ),
        click.option("--env", "env", multiple=True, metavar="NAME=VALUE", help="Set an environment variable."),
        click.option(
            "--storage-option",
            "storage",
            multiple=True,
            metavar="KEY=VALUE",
            help="Set an option of the source's fsspec file system.",
        ),
        click.option(
            "-o",
            "words",
            multiple=True,
            metavar="A,B=C",
            help="Options as in fstab; see docs/options.md.",
            shell_complete=mount_options,
        ),
    ):
        function = decorate(function)
    return function


def given_options(
    words: Iterable[str], storage: Iterable[str], env: Iterable[str], flags: Mapping[str, Any]
) -> tuple[Options, Profile | None]:
    """Merge environment, profile, `-o` words and flags into options; return these and the profile, if any.

    Sets the environment variables of the option `env`.
    """
    given = (
        loading.from_environment(os.environ),
        loading.from_mount_options(words),
        loading.from_flags(flags, storage, env),
    )
    found, profile = loading.merged(*given), None
    os.environ.update(found.env)
    if found.profile is not None:
        profile = configured(found.config, found.profile).profile(found.profile)
        found = loading.merged(profile.values, *given)
        for name, value in found.env.items():  # existing variables take precedence over the profile
            os.environ.setdefault(name, value)
    redact.add_secrets("", found.storage_options, found.env)
    _warn_of_secrets(loading.merged(*given[1:]))
    return found, profile


def _warn_of_secrets(said: Options) -> None:
    """Warn about secrets on the command line and in /etc/fstab, which all users of the machine can read."""
    for kind, group in (("storage option", said.storage_options), ("variable", said.env)):
        for name, value in group.items():
            if any(redact.secrets_of("", {name: value})):
                told = f"every user can read the {kind} {name!r} on the command line: use a profile instead"
                click.echo(f"shardfs: warning: {told}", err=True)


def configured(where: str | None, name: str) -> Configuration:
    """Read the configuration files. Prints general warnings and those about the profile `name`."""
    from shardfs.config import profiles

    found = profiles.read(where)
    for fault in found.faults:
        if fault.warning and fault.profile in ("", name):
            click.echo(f"shardfs: warning: {fault}", err=True)
    return found


def profile_named(word: str, where: str | None = None) -> Profile | None:
    """The profile with this name; None if there is none or the word contains a slash."""
    return None if "/" in word else configured(where or os.environ.get("SHARDFS_CONFIG"), word).profiles.get(word)


def absolute(source: str) -> str:
    """Convert a local path to an absolute path, because daemons change the directory. Returns URLs unchanged."""
    if not source:  # probably an unset shell variable; do not use the current directory
        raise click.UsageError("the source is empty: give a path or a URL")
    return os.path.abspath(source) if redact.is_path(source) else source


def is_source(name: str) -> bool:
    """Whether a name can be a source: a URL, a file, or a directory that is not empty."""
    if not redact.is_path(name) or os.path.isfile(name):
        return True
    try:
        return bool(os.listdir(name))
    except OSError:
        return False


def opened(source: str, found: Options, **hooks: Any) -> Tree:
    """Open the tree of a source. Errors of the store become errors that name the source."""
    from shardfs.vfs import tree

    redact.add_secrets(source)
    path = absolute(source)
    with opening(source):
        return tree.open_with_options(path, found, **hooks)


def opened_to_mount(source: str, found: Options, waiting: Callable[[], None], **more: Any) -> Tree:
    """Open a tree for a mount. Evicts chunks that the kernel has read and caches, unless `direct_io` is set."""
    return opened(source, found, waiting=waiting, spent_bytes=None if found.direct_io else SPENT, **more)


def opened_to_write(source: str, found: Options, mountpoint: str, waiting: Callable[[], None]) -> WriteTree:
    """Open a writable tree and lock its journal. Fails if another process has the journal."""
    from shardfs.write.open_rw import open_writable

    tree = opened_to_mount(source, found, waiting, may_be_empty=found.create is not None)
    return open_writable(tree, absolute(source), found, mountpoint=mountpoint, waiting=waiting)


@contextmanager
def opening(source: str) -> Iterator[None]:
    """Context manager that converts errors of a store to errors that name the source. Bugs pass unchanged."""
    try:
        yield
    except OSError as e:
        if e.filename or isinstance(e, errors.BusyError):
            raise
        number = errors.errno_of(e)  # a FileNotFoundError of fsspec has neither errno nor message
        words = e.strerror or (os.strerror(number) if isinstance(e, FileNotFoundError) else str(e))
        raise OSError(number, words, public_name(source)) from e
    except UnsupportedError as e:
        raise type(e)(f"{public_name(source)}: {e}") from e
    except ImportError as e:
        raise OSError(errno.EIO, missing_package(source, e), public_name(source)) from e
    except ValueError as e:  # fsspec does not know the protocol
        raise OSError(errno.EIO, f"cannot be opened: {e}", public_name(source)) from e
    except Exception as e:
        if is_expected(e) or is_bug(e):
            raise
        raise OSError(errno.EIO, f"cannot be opened: {type(e).__name__}: {e}", public_name(source)) from e


def missing_package(source: str, error: ImportError) -> str:
    """Message that names the missing package for a source."""
    from shardfs.storage.store import package_for

    package = package_for(source)
    return f"needs the package {package} ({error}): pip install {package}" if package else f"cannot be opened: {error}"


def open_for(source: str, words: Iterable[str], storage: Iterable[str], env: Iterable[str]) -> Tree:
    """Open the tree for a verb that only reads."""
    found, _ = given_options(words, storage, env, {})
    logging.basicConfig(level=found.log_level.upper(), format="shardfs: %(message)s")
    return opened(source, found)
