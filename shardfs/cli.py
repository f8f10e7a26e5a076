"""The command line: words in, calls of `mount` and `tree`, words out. Imports of weight happen inside the verbs."""

from __future__ import annotations

import errno
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click

from shardfs import __version__, errors, options
from shardfs.errors import ShardfsError, is_expected

if TYPE_CHECKING:
    from shardfs.chunk_tree import Attributes
    from shardfs.fuse.server import FuseSettings
    from shardfs.model import Batch
    from shardfs.options import Options, Setting
    from shardfs.tree import Tree

Function = TypeVar("Function", bound=Callable[..., Any])

OK, USAGE = 0, 2
"""Exit codes of its own; the others are in `errors.exit_code`."""

PIECE = 8 << 20


class _Verbs(click.Group):
    """A first word that is no verb means `mount`: this is how mount(8) calls us."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help", "--version"):
            args = ["mount", *args]
        return super().parse_args(ctx, args)


@click.group(
    cls=_Verbs,
    no_args_is_help=False,
    options_metavar="",
    subcommand_metavar="VERB ...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="`shardfs SOURCE MOUNTPOINT` means `shardfs mount SOURCE MOUNTPOINT`. Exit codes: 0 ok, 1 unexpected, "
    "2 usage, 3 not found or unreadable, 4 not a supported sharded dataset, 5 mount failed, 6 not ready in time.",
)
@click.version_option(__version__, message="%(prog)s %(version)s")
def commands() -> None:
    """Show sharded n-d datasets (Zarr v3, Neuroglancer precomputed) as one plain file per chunk."""


# ---- options ----


def _debug(_ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value:
        os.environ["SHARDFS_DEBUG"] = "1"


def _source_options(function: Function) -> Function:
    """What every verb takes that opens a source."""
    for decorate in (
        click.option(
            "--debug", is_flag=True, expose_value=False, is_eager=True, callback=_debug, help="Show tracebacks."
        ),
        click.option("--env", "env", multiple=True, metavar="NAME=VALUE", help="Set a variable of the environment."),
        click.option(
            "--storage-option",
            "storage",
            multiple=True,
            metavar="KEY=VALUE",
            help="An option for the source's fsspec file system.",
        ),
        click.option("-o", "words", multiple=True, metavar="A,B=C", help="Options, as in fstab; see docs/options.md."),
    ):
        function = decorate(function)
    return function


def _mount_options(function: Function) -> Function:
    """A flag for each option."""
    for setting in reversed(list(options.settings())):
        function = _flag(setting)(function)
    return function


def _flag(setting: Setting) -> Callable[[Function], Function]:
    if setting.value:
        text = f"{setting.help}  [{setting.default}]"
        return click.option(setting.flag, setting.name, metavar=setting.value, help=text)
    off = "" if setting.parse is options.read_only else f"/--no-{setting.flag[2:]}"
    return click.option(setting.flag + off, setting.name, default=None, is_flag=True, help=setting.help)


def _options(words: Iterable[str], storage: Iterable[str], env: Iterable[str], flags: Mapping[str, Any]) -> Options:
    """Everything that was given; its variables are set here."""
    found = options.merged(
        options.from_environment(os.environ),
        options.from_mount_options(words),
        options.from_flags(flags, storage, env),
    )
    os.environ.update(found.env)
    return found


def _absolute(source: str) -> str:
    """A local path, independent of the directory in which a daemon runs; a URL as it is."""
    return source if "://" in source or "::" in source else os.path.abspath(source)


def _open(source: str, found: Options, **hooks: Any) -> Tree:
    from shardfs.tree import open_tree

    try:
        return open_tree(
            _absolute(source),
            storage_options=found.storage_options,
            index_cache_bytes=found.index_cache,
            chunk_cache_bytes=found.chunk_cache,
            index_ttl_s=found.index_ttl,
            follow_symlinks=found.symlinks == "follow",
            **hooks,
        )
    except OSError as e:
        if e.filename is not None:
            raise
        number = errors.errno_of(e)  # fsspec's FileNotFoundErrors have neither errno nor words
        words = e.strerror or (os.strerror(number) if isinstance(e, FileNotFoundError) else str(e))
        raise OSError(number, words, source) from e
    except (ImportError, ValueError) as e:  # how fsspec says that it knows no such file system, or misses a package
        raise OSError(errno.EIO, f"cannot be opened: {e}", source) from e
    except Exception as e:
        if is_expected(e) or _is_bug(e):
            raise
        raise OSError(errno.EIO, f"cannot be opened: {type(e).__name__}: {e}", source) from e


def _open_for(source: str, words: Iterable[str], storage: Iterable[str], env: Iterable[str]) -> Tree:
    """The tree for a verb that only looks."""
    found = _options(words, storage, env, {})
    logging.basicConfig(level=found.log_level.upper(), format="shardfs: %(message)s")
    return _open(source, found)


# ---- verbs ----


@commands.command()
@click.argument("source")
@click.argument("mountpoint")
@click.option("-f", "--foreground", is_flag=True, help="Stay in the foreground.")
@_source_options
@_mount_options
def mount(
    source: str,
    mountpoint: str,
    foreground: bool,
    words: tuple[str, ...],
    storage: tuple[str, ...],
    env: tuple[str, ...],
    **flags: Any,
) -> int:
    """Mount SOURCE, a path or an fsspec URL, on the directory MOUNTPOINT.

    Returns when the mount answers; a daemon then serves it until it is unmounted.
    """
    found = _options(words, storage, env, flags)
    from shardfs.mount import mount as mount_tree

    return mount_tree(
        _absolute(source),
        mountpoint,
        foreground=foreground,
        ready_timeout=found.ready_timeout,
        open_tree=lambda waiting: _open(source, found, waiting=waiting),
        fuse=_fuse_settings(found),
        fsname=found.fsname,
        log_file=found.log_file,
        log_level=found.log_level,
    )


def _fuse_settings(found: Options) -> FuseSettings:
    from shardfs.fuse.server import FuseSettings

    given = {name: getattr(found, name) for name in FuseSettings.__dataclass_fields__}
    for name in ("attr_timeout", "entry_timeout", "negative_timeout"):
        # What the kernel remembers it does not ask for, so nobody would notice that the index is not trusted longer.
        given[name] = min(given[name], found.index_ttl)
    return FuseSettings(**given)


@commands.command()
@click.argument("mountpoint")
@click.option("--timeout", default="60", metavar="SECONDS", help="How long to wait until it is gone.  [60]")
@click.option("-l", "--lazy", is_flag=True, help="Detach it now, even if programs still use it.")
@click.option("--debug", is_flag=True, expose_value=False, is_eager=True, callback=_debug, help="Show tracebacks.")
def umount(mountpoint: str, timeout: str, lazy: bool) -> int:
    """Unmount MOUNTPOINT and wait until it is gone. Exit code 1 if it is busy."""
    from shardfs.mount import umount as unmount

    return unmount(mountpoint, timeout=options.finite_seconds(timeout), lazy=lazy)


@commands.command()
@click.argument("source")
@click.argument("path", default="")
@click.option("-l", "long", is_flag=True, help="With kind, exact size and time.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
@_source_options
def ls(source: str, path: str, long: bool, as_json: bool, **given: Any) -> None:
    """List the directory PATH of what a mount of SOURCE would show."""
    tree = _open_for(source, **given)
    found = tree.resolve(path)
    render = _json_entries if as_json else _long_entries if long else None
    if not found.directory:
        _write(render([(_last(path), found)]) if render else os.fsencode(_last(path)) + b"\n")
        return
    for batch in tree.scan(found.number):
        _write(render(_entries(tree, found.number, batch, exact=long)) if render else _names(batch))


@commands.command()
@click.argument("source")
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@_source_options
def cat(source: str, paths: tuple[str, ...], **given: Any) -> None:
    """Write the bytes of the files PATH... of what a mount of SOURCE would show."""
    tree = _open_for(source, **given)
    for path in paths:
        found = tree.resolve(path)
        for offset in range(0, found.size, PIECE) if not found.directory else (0,):
            _write(tree.read(found.number, offset, PIECE))


@commands.command()
@click.argument("source")
@click.option("--json", "as_json", is_flag=True, help="A JSON object.")
@_source_options
def info(source: str, as_json: bool, **given: Any) -> None:
    """Tell of the sharded arrays in SOURCE: shapes, counts, bytes, and what cannot be shown. Reads every index."""
    tree = _open_for(source, **given)
    collections = [summary._asdict() for summary in tree.summaries()]
    problems = [{"path": p.path, "why": p.why} for p in tree.problems()]
    if as_json:
        _write_json({"source": source, "collections": collections, "problems": problems})
    else:
        _print_info(collections, problems)


@commands.command()
@click.argument("source")
@click.argument("path", required=False)
@click.option("--shard", metavar="KEY", help="The other way: a shard object of SOURCE ...")
@click.option("--offset", type=click.IntRange(min=0), metavar="BYTE", help="... and a position in it.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object.")
@_source_options
def locate(source: str, path: str | None, shard: str | None, offset: int | None, as_json: bool, **given: Any) -> None:
    """Tell where the chunk PATH lies, or which chunk covers a byte of a shard.

    SOURCE may also be a chunk on a mount; then there is no PATH.
    """
    if (path is None, shard is None, offset is None) not in (
        (False, True, True),
        (True, False, False),
        (True, True, True),
    ):
        raise click.UsageError("locate needs either PATH, or --shard and --offset, or a chunk on a mount")
    if shard is not None and offset is not None:
        answer = _covering(_open_for(source, **given), shard, offset)
    elif path is not None:
        answer = _open_for(source, **given).locate(path)._asdict()
    else:
        answer = _located_on_mount(source)
    if as_json:
        _write_json(answer)
    else:
        for key, value in answer.items():
            click.echo(f"{key}: {','.join(map(str, value)) if isinstance(value, tuple) else value}".rstrip())


def _covering(tree: Tree, shard: str, offset: int) -> dict[str, Any]:
    path = tree.chunk_at(shard, offset)
    if path is None:
        raise FileNotFoundError(errno.ENOENT, f"no chunk covers byte {offset} of it", shard)
    return {"path": path}


def _located_on_mount(path: str) -> dict[str, Any]:
    try:
        shard, offset, size, codecs = (
            os.fsdecode(os.getxattr(path, f"user.shardfs.{name}")) for name in ("shard", "offset", "nbytes", "codecs")
        )
    except OSError as e:
        if e.errno != errno.ENODATA and e.errno != errno.ENOTSUP:
            raise
        raise click.UsageError(f"{path} is no chunk on a mount: a PATH in the source is needed") from None
    return {"shard": shard, "offset": int(offset), "size": int(size), "codecs": tuple(codecs.split(","))}


# ---- output ----


def _write(data: bytes | memoryview) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _write_json(value: Mapping[str, Any]) -> None:
    import json

    click.echo(json.dumps(value))


def _last(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]


def _names(batch: Batch) -> bytes:
    return b"\n".join(batch.names.tolist()) + b"\n"


def _entries(tree: Tree, parent: int, batch: Batch, *, exact: bool) -> Iterator[tuple[str, Attributes]]:
    """Names and attributes. A size that is not free costs a look-up if it has to be `exact`; unknown, it is -1."""
    from shardfs.chunk_tree import Attributes

    columns = (batch.names, batch.numbers, batch.directories, batch.sizes, batch.mtimes_ns)
    for name, *known in zip(*(column.tolist() for column in columns), strict=True):
        found = Attributes(*known)
        if exact and found.size < 0:
            with suppress(OSError, ShardfsError):  # one bad entry must not hide the others
                found = tree.lookup(parent, name)
        yield os.fsdecode(name), found


def _json_entries(entries: Iterable[tuple[str, Attributes]]) -> bytes:
    import json

    lines = (
        {
            "name": name,
            "type": "directory" if a.directory else "file",
            "size": None if a.size < 0 else a.size,
            "mtime_ns": a.mtime_ns,
        }
        for name, a in entries
    )
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def _long_entries(entries: Iterable[tuple[str, Attributes]]) -> bytes:
    return b"".join(_long_entry(a) + os.fsencode(name) + b"\n" for name, a in entries)


def _long_entry(a: Attributes) -> bytes:
    from time import localtime, strftime

    when = strftime("%Y-%m-%d %H:%M", localtime(a.mtime_ns // 10**9))
    return f"{'d' if a.directory else '-'} {a.size if a.size >= 0 else '?':>12} {when} ".encode()


def _print_info(collections: list[dict[str, Any]], problems: list[dict[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(soft_wrap=False)
    if not console.is_terminal:
        console.width = 240  # a pipe has no width: nothing shall be folded
    table = Table("array", "shape", "chunks of", "shards of", "type", "codecs", "sharding", box=None, pad_edge=False)
    for title in ("chunks", "shards", "stored", "in shards"):
        table.add_column(title, justify="right")
    for c in collections:
        table.add_row(*map(Text, _cells(c)))
    if collections:
        console.print(table)
    for p in problems:
        console.print(Text(f"{p['path'] or '/'}: shown as it is stored: {p['why']}"))


def _cells(c: Mapping[str, Any]) -> Iterator[str]:
    yield c["path"] or "/"
    for key in ("shape", "chunk_shape", "shard_shape"):
        yield " x ".join(map(str, c[key])) if c[key] else "-"
    yield c["data_type"]
    yield ", ".join(c["codecs"])
    yield f"{c['format']}: {c['sharding']}"
    share = f" ({c['chunks'] / c['grid_chunks']:.0%})" if c["grid_chunks"] else ""
    yield f"{c['chunks']} of {c['grid_chunks']}{share}"
    yield str(c["shards"])
    yield _bytes(c["stored_bytes"])
    yield _bytes(c["shard_bytes"])


def _bytes(n: float) -> str:
    units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"]
    while n >= 1024 and len(units) > 1:
        n /= 1024
        units.pop(0)
    return f"{n:.0f} B" if units[0] == "B" else f"{n:.1f} {units[0]}"


# ---- errors ----


def exit_code(error: BaseException) -> int:
    """What the shell is told of an error that ended a verb."""
    return USAGE if isinstance(error, click.UsageError | options.OptionError) else errors.exit_code(error)


def message(error: BaseException) -> str:
    """One line for the user."""
    if isinstance(error, click.ClickException):
        return " ".join(error.format_message().split())
    return str(error) if isinstance(error, options.OptionError) else errors.message(error)


def _is_bug(error: BaseException) -> bool:
    """Whether a traceback is in order. Stores have errors of their own, from packages that we do not know."""
    if is_expected(error) or isinstance(error, click.ClickException | options.OptionError):
        return False
    return type(error).__module__.split(".")[0] in ("builtins", "shardfs", "numpy")


def run(args: list[str]) -> int:
    """Do what the arguments say; the exit code."""
    try:
        code = commands.main(args, prog_name="shardfs", standalone_mode=False)
        return code if isinstance(code, int) else OK
    except (KeyboardInterrupt, click.Abort):
        return 128 + signal.SIGINT
    except Exception as e:  # noqa: BLE001  (told, with a traceback if it is a bug)
        if os.environ.get("SHARDFS_DEBUG") or _is_bug(e):
            traceback.print_exc()
        click.echo(f"shardfs: {message(e)}", err=True)
        return exit_code(e)


def main() -> NoReturn:
    """The `shardfs` program."""
    sys.exit(run(sys.argv[1:]))
