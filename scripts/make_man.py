"""Write the manual pages, docs/cli.md and docs/options.md from the click commands and the table of options.

python scripts/make_man.py [DIR]        # all of them into DIR; else below docs/
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
from options_page import as_markdown

from shardfs.cli import commands
from shardfs.config import options
from shardfs.model.exit_codes import MEANINGS

if TYPE_CHECKING:
    from collections.abc import Iterator

DOCS = Path(__file__).parent.parent / "docs"
MADE = r".\" Written by scripts/make_man.py for `shardfs install`. Change the commands or the table of options instead."

DESCRIPTION = """\
shardfs is a FUSE file system. It shows a sharded dataset as the directory that an unsharded writer would have left:
metadata without the sharding, and every chunk a plain file. To read, nothing is converted or copied. With `--rw`
programs write chunk files. A journal, which survives crashes, holds them until they are in the shards.

You can omit `mount`: `shardfs SOURCE MOUNTPOINT -o ro`. A SOURCE is a path or a URL that fsspec knows. The name of a
profile replaces SOURCE and MOUNTPOINT. `unmount` is another name of `umount`."""

FILES = [
    ("/etc/shardfs/*.toml, ~/.config/shardfs/*.toml", "Profiles: tables [mount.NAME] with source, mountpoint, "
     "storage_options, env, and the options below. A file with secrets should have the mode 0600."),
    ("$XDG_STATE_HOME/shardfs/, ~/.local/state/shardfs/", "Journals: data that is written and not published yet."),
    ("/etc/fuse.conf", "Must contain user_allow_other before users other than root may use allow_other."),
]  # fmt: skip

EXIT = [(str(code), meaning) for code, meaning in MEANINGS.items()]

HELPER = """\
mount(8) runs this program for the types shardfs and fuse.shardfs: from a shell, for a line of fstab(5), or for a unit
of systemd.mount(5). The program returns when the mount answers. A daemon then serves the mount until umount(8) or
shardfs umount ends it.

OPTIONS are those of shardfs(1) and of mount(8). They must contain `ro` or `writable`, because mount(8) adds `rw`
automatically. `profile=NAME` takes options, including secrets, from a configuration file."""

HELPER_FLAGS = [
    ("-f", "Fake: check the arguments and mount nothing."),
    ("-v", "Print the source and the mountpoint."),
    ("-s, -n, -N NAMESPACE, -t TYPE", "Accepted, without effect."),
    ("-o OPTIONS", "Options, separated by commas."),
]

FSTAB = """\
/data/brain.zarr  /mnt/brain  shardfs  ro,x-systemd.requires-mounts-for=/data  0 0
s3://bucket/em    /mnt/em     shardfs  ro,_netdev,nofail,noauto,x-systemd.automount,profile=em  0 0"""

HELPER_EXIT = [("0", "success"), ("1", "wrong usage"), ("8", "interrupted"), ("32", "the mount failed")]


def roff(text: str) -> str:
    """Convert plain text to roff: escape requests and special characters, and set words in backticks in bold."""
    text = text.replace("\\", r"\e").replace("-", r"\-").replace("'", r"\(aq")
    text = re.sub(r"`([^`]*)`", r"\\fB\1\\fR", text)
    return "\n".join(rf"\&{line}" if line.startswith(".") else line for line in text.splitlines())


def paragraphs(text: str) -> Iterator[str]:
    for paragraph in text.replace("\b", "").split("\n\n"):
        yield ".PP"
        yield roff(" ".join(paragraph.split()))


def listed(pairs: list[tuple[str, str]]) -> Iterator[str]:
    for term, text in pairs:
        yield ".TP"
        yield rf"\fB{roff(term)}\fR"
        yield roff(" ".join(text.split()))


def head(name: str, section: int, summary: str) -> Iterator[str]:
    yield MADE
    yield f'.TH "{name.upper()}" "{section}" "" "shardfs" ""'
    yield from (".SH NAME", rf"{name} \- {summary}")


def verbs(command: click.Command, name: str) -> Iterator[tuple[str, click.Command]]:
    """Yield the command, or the commands of a group, with their full names."""
    if isinstance(command, click.Group):
        for below, found in command.commands.items():
            yield from verbs(found, f"{name} {below}")
    else:
        yield name, command


def all_verbs() -> Iterator[tuple[str, click.Command]]:
    context = click.Context(commands)
    for name in commands.list_commands(context):
        command = commands.get_command(context, name)
        if command is None:
            raise LookupError(name)
        yield from verbs(command, name)


def usage(command: click.Command) -> str:
    return " ".join(command.collect_usage_pieces(click.Context(command)))


def flags(name: str, command: click.Command) -> list[tuple[str, str]]:
    """The flags of a verb and their help, without those of `mount` that the table of options describes."""
    table = {setting.name for setting in options.settings()} if name == "mount" else set()
    context = click.Context(command)
    records = [
        p.get_help_record(context) for p in command.params if isinstance(p, click.Option) and p.name not in table
    ]
    return [(term, text) for term, text in filter(None, records) if term != "-h, --help"]


def verb(name: str, command: click.Command) -> Iterator[str]:
    yield f".SS shardfs {roff(name)} {roff(usage(command))}"
    yield from paragraphs(command.help or "")
    yield from listed(flags(name, command))
    if name == "mount":
        yield from paragraphs("and a flag for each option below: `--NAME VALUE`; `--NAME` and `--no-NAME` of a switch.")


def option_table() -> Iterator[str]:
    yield ".SH OPTIONS"
    yield from paragraphs(
        "Give an option in a profile, in a variable `SHARDFS_NAME`, in `-o name=value`, or as a flag; the later wins. "
        "Sizes are bytes, or 64K, 256M, 1GiB; times are seconds, or 10m, 2h, 1d."
    )
    for scope in dict.fromkeys(setting.scope for setting in options.settings()):
        yield f".SS {roff(scope)}"
        settings = [s for s in options.settings() if s.scope == scope]
        yield from listed([(s.name + (f"={s.value}" if s.value else ""), f"{s.help} [{s.default}]") for s in settings])
    yield ".SS The store"
    yield from listed(
        [
            ("storage_option.KEY=VALUE", "An option of the source's fsspec file system."),
            ("env.NAME=VALUE", "An environment variable, set before the source is opened."),
        ]
    )


def shardfs_1() -> Iterator[str]:
    yield from head("shardfs", 1, "show sharded datasets as one plain file per chunk")
    yield ".SH SYNOPSIS"
    yield r"\fBshardfs\fR \fIVERB\fR ..."
    yield ".br"
    yield r"\fBshardfs\fR \fISOURCE MOUNTPOINT\fR [\fB\-o\fR \fIOPTIONS\fR]"
    yield ".SH DESCRIPTION"
    yield from paragraphs(DESCRIPTION)
    yield ".SH VERBS"
    for name, command in all_verbs():
        yield from verb(name, command)
    yield from option_table()
    yield ".SH EXIT STATUS"
    yield from listed(EXIT)
    yield ".SH FILES"
    yield from listed(FILES)
    yield ".SH SEE ALSO"
    yield r"\fBmount.shardfs\fR(8), \fBfusermount3\fR(1), \fBfuse\fR(4), \fBfstab\fR(5), \fBsystemd.mount\fR(5)"


def mount_shardfs_8() -> Iterator[str]:
    yield from head("mount.shardfs", 8, "the helper of mount(8) for shardfs")
    yield ".SH SYNOPSIS"
    yield r"\fBmount \-t shardfs\fR \fISOURCE MOUNTPOINT\fR \fB\-o\fR \fIOPTIONS\fR"
    yield ".br"
    yield r"\fBmount.shardfs\fR \fISOURCE MOUNTPOINT\fR [\fB\-sfnv\fR] [\fB\-o\fR \fIOPTIONS\fR]"
    yield ".SH DESCRIPTION"
    yield from paragraphs(HELPER)
    yield from listed(HELPER_FLAGS)
    yield from (".SH EXAMPLES", ".nf", roff(FSTAB), ".fi")
    yield ".SH EXIT STATUS"
    yield from listed(HELPER_EXIT)
    yield ".SH SEE ALSO"
    yield r"\fBshardfs\fR(1), \fBmount\fR(8), \fBfstab\fR(5), \fBsystemd.automount\fR(5)"


CLI = """\
# Command line

<!-- Written by scripts/make_man.py. Change the commands instead. -->

`shardfs SOURCE MOUNTPOINT` is `shardfs mount SOURCE MOUNTPOINT`. A SOURCE is a path or a URL that fsspec knows. The
name of a profile ([service.md](service.md#profiles)) replaces SOURCE and MOUNTPOINT. `info`, `ls`, `locate`, `verify`,
`status` and `doctor` print JSON with `--json`."""


def rows(*heads: str, table: list[tuple[str, str]]) -> Iterator[str]:
    yield from ("", f"| {' | '.join(heads)} |", "|---|---|")
    for term, text in table:
        yield f"| {term} | {' '.join(text.split())} |"


def cli_md() -> Iterator[str]:
    yield CLI
    yield from rows("exit code", "meaning", table=EXIT)
    for name, command in all_verbs():
        yield from ("", f"## shardfs {name}", "", "```text", f"shardfs {name} {usage(command)}", "```")
        for paragraph in (command.help or "").replace("\b", "").split("\n\n"):
            yield from ("", *map(str.strip, paragraph.strip().splitlines()))
        escaped = [
            (f"`{term}`".replace("|", r"\|"), re.sub(r"([\[|<])", r"\\\1", text)) for term, text in flags(name, command)
        ]
        if escaped:
            yield from rows("option", "", table=escaped)
        if name == "mount":
            yield from ("", "and a flag for each option of [options.md](options.md).")


def write(man: Path, docs: Path) -> None:
    pages = {man / "shardfs.1": shardfs_1(), man / "mount.shardfs.8": mount_shardfs_8()}
    pages |= {docs / "cli.md": cli_md(), docs / "options.md": iter(as_markdown().splitlines())}
    for path, lines in pages.items():
        path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write(*[Path(sys.argv[1])] * 2) if sys.argv[1:] else write(DOCS / "man", DOCS)
