"""The verb `locate`."""

from __future__ import annotations

import errno
import os
from typing import Any

import click

from shardfs.cli.printing import echo, write_json
from shardfs.cli.source_options import CommandOptions, open_to_read, source_options
from shardfs.model.text import printable


@click.command()
@click.argument("source")
@click.argument("path", required=False)
@click.option("--shard", metavar="KEY", help="Find the chunk in this shard object of SOURCE ...")
@click.option("--offset", type=click.IntRange(0, 2**64 - 1), metavar="BYTE", help="... that covers this byte.")
@click.option("--json", "as_json", is_flag=True, help="A JSON object.")
@source_options
def locate(
    source: str, path: str | None, shard: str | None, offset: int | None, as_json: bool, command_options: CommandOptions
) -> None:
    """Show where a chunk is stored, or which chunk covers a byte.

    PATH is a chunk of SOURCE as a mount would show it. SOURCE may also be a chunk on a mount, without PATH.
    """
    if shard is not None and offset is not None and path is None:
        chunk = open_to_read(source, command_options).survey.chunk_at(shard, offset)
        if chunk is None:
            raise FileNotFoundError(errno.ENOENT, f"no chunk covers byte {offset} of this shard", shard)
        answer: dict[str, Any] = {"path": chunk}
    elif shard is not None or offset is not None:
        raise click.UsageError("locate needs either PATH, or --shard and --offset, or a chunk on a mount")
    elif path is not None:
        answer = open_to_read(source, command_options).locate(path)._asdict()
    else:
        answer = _located_on_mount(source)
    if as_json:
        write_json(answer)
        return
    for key, value in answer.items():
        text = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        echo(f"{key}: {printable(text)}".rstrip())


def _located_on_mount(path: str) -> dict[str, Any]:
    try:
        shard, offset, size, codecs = (
            os.fsdecode(os.getxattr(path, f"user.shardfs.{name}")) for name in ("shard", "offset", "nbytes", "codecs")
        )
    except OSError as e:
        if e.errno != errno.ENODATA and e.errno != errno.ENOTSUP:
            raise
        raise click.UsageError(f"{path} is not a chunk on a mount: give SOURCE and the PATH of a chunk in it") from None
    return {"shard": shard, "offset": int(offset), "size": int(size), "codecs": tuple(codecs.split(","))}
