"""Installs the files that pip cannot install: mount(8) helpers, systemd units, manual pages, shell completions.

Each item is a link to a program of shardfs, or a file that contains `MARK`. `is_ours` recognizes installed items by
these properties, so that `shardfs install` and `uninstall` leave all other files alone.
"""

from __future__ import annotations

import errno
import os
import subprocess
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

HELPERS = ("mount.shardfs", "mount.fuse.shardfs")

PROGRAM = "/usr/bin/shardfs"
"""The program path in the units that the package contains. `items` replaces this path."""

MARK = "shardfs install"
"""Text near the beginning of every installed file."""

SHELLS = {
    "bash": "bash-completion/completions/shardfs",
    "zsh": "zsh/site-functions/_shardfs",
    "fish": "fish/vendor_completions.d/shardfs.fish",
}
"""Shell -> path of its completion file below /usr/local/share or ~/.local/share."""


@dataclass(frozen=True, slots=True)
class Item:
    """One item to install at `path`: a link to `target`, or, if that is None, a file with `text`."""

    path: Path
    text: str = ""
    target: Path | None = None

    def is_there(self) -> bool:
        """Whether the item is installed and up to date."""
        if self.target is not None:
            return self.path.is_symlink() and os.readlink(self.path) == str(self.target)
        return self._text() == self.text

    def is_ours(self) -> bool:
        """Whether any version of shardfs installed the item at this path. True if the path does not exist."""
        if not os.path.lexists(self.path):
            return True
        if self.target is not None:
            return self.path.is_symlink() and os.path.basename(os.readlink(self.path)) == self.target.name
        return MARK in (self._text() or "")[:1000]

    def _text(self) -> str | None:
        try:
            return None if self.path.is_symlink() else self.path.read_text("utf8", "replace")
        except OSError:
            return None

    def install(self) -> None:
        """Install the item atomically, replacing any file or link at its path. Makes missing directories.

        Raise FileNotFoundError if the target of a link does not exist, and OSError if the item cannot be written.
        """
        if self.target is not None and not self.target.exists():
            why = "does not exist; --programs names the directory of the programs"
            raise FileNotFoundError(errno.ENOENT, why, str(self.target))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Write a temporary file in the same directory and rename it, so that no reader sees an incomplete unit.
        new = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        try:
            if self.target is not None:
                new.symlink_to(self.target)
            else:
                new.write_text(self.text)
            new.replace(self.path)
        finally:
            new.unlink(missing_ok=True)


def shipped(name: str) -> str:
    """The text of a data file of the package, by its path in the repository. Raise FileNotFoundError without it.

    An installed package has its data files in its own directory, a checkout beside the package.
    """
    package = Path(__file__).parents[1]
    for path in (package / "share" / name, package.parent / name):
        if path.exists():
            return path.read_text("utf8")
    raise FileNotFoundError(errno.ENOENT, "is missing from this installation of shardfs: install shardfs again", name)


def items(programs: Path, *, user: bool, root: str = "") -> Iterator[Item]:
    """Yield all items to install. Links and units start the programs in the directory `programs`.

    Args:
        user: install into the user's home instead of the system directories. Omits the mount(8) helpers, which only
            root uses.
        root: directory to prepend to all paths, for packagers.
    """

    def below(path: Path) -> Path:
        return Path(root, path.relative_to("/")) if root else path

    data = _home("XDG_DATA_HOME", ".local/share") if user else Path("/usr/local/share")
    units = _home("XDG_CONFIG_HOME", ".config") / "systemd/user" if user else Path("/etc/systemd/system")
    if not user:
        for name in HELPERS:
            yield Item(below(Path("/sbin", name)), target=programs / name)
    unit = shipped("systemd/user/shardfs@.service" if user else "systemd/shardfs@.service")
    yield Item(below(units / "shardfs@.service"), unit.replace(PROGRAM, str(programs / "shardfs")))
    for page in ("shardfs.1", "mount.shardfs.8"):
        yield Item(below(data / f"man/man{page[-1]}" / page), shipped(f"docs/man/{page}"))
    for shell, place in SHELLS.items():
        yield Item(below(data / place), _completion(shell))


def _home(variable: str, otherwise: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / otherwise)


def _completion(shell: str) -> str:
    from click import Command
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        raise LookupError(shell)
    # Do not call `maker.source`: it starts bash to check its version.
    maker = kind(Command("shardfs"), {}, "shardfs", "_SHARDFS_COMPLETE")
    text = maker.source_template % maker.source_vars()
    first_line, body = text.split("\n", 1) if text.startswith("#compdef") else ("", text)
    return f"{first_line}\n# Placed by `{MARK}`.\n{body}".lstrip("\n")


def reload_manager(*, user: bool) -> None:
    """Make systemd reload the units of the system, or of the user, if systemd is running. Errors are ignored."""
    if os.path.isdir("/run/systemd/system"):
        command = ["systemctl", *(["--user"] if user else []), "daemon-reload"]
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(command, capture_output=True, timeout=30, check=False)
