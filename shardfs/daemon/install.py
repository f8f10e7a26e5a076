"""Places what pip cannot: the helpers of mount(8), the service unit, the manual pages and completions for shells.

Everything is either a link to a program or a file that says who made it, so that what is ours can be told from what is
not: only ours is replaced or removed.
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
"""What the units as they are shipped start."""

MARK = "shardfs install"
"""Stands in the first lines of every file that is placed."""

SHELLS = {
    "bash": "bash-completion/completions/shardfs",
    "zsh": "zsh/site-functions/_shardfs",
    "fish": "fish/vendor_completions.d/shardfs.fish",
}
"""Where shells look, below /usr/local/share or ~/.local/share."""


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to place: a link to `target`, or a file with `text`."""

    path: Path
    text: str = ""
    target: Path | None = None

    def is_there(self) -> bool:
        """Whether it lies there as it should."""
        if self.target is not None:
            return self.path.is_symlink() and os.readlink(self.path) == str(self.target)
        return self._text() == self.text

    def is_ours(self) -> bool:
        """Whether what lies there was placed by some version of us; True if there is nothing."""
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

    def place(self) -> None:
        """Put it there, in place of what is there."""
        if self.target is not None and not self.target.exists():
            raise FileNotFoundError(
                errno.ENOENT, "does not exist; --programs names the directory of the programs", str(self.target)
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Beside it, and renamed: a half written unit must never be seen.
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
    """A file that comes with the package: beside it in a checkout, within it when installed."""
    package = Path(__file__).parent
    places = (package / "share" / name, package.parent / name)
    found = next((path for path in places if path.exists()), None)
    if found is None:
        raise FileNotFoundError(
            errno.ENOENT, "is missing from this installation of shardfs: install shardfs again", name
        )
    return found.read_text("utf8")


def items(programs: Path, *, user: bool, root: str = "") -> Iterator[Item]:
    """All there is to place, for links and units that start the `programs` of this directory.

    Args:
        user: into the user's home instead of the system's directories; without the helpers, which only root uses.
        root: stands before all paths, as a packager wants it.
    """
    data = _home("XDG_DATA_HOME", ".local/share") if user else Path("/usr/local/share")
    units = _home("XDG_CONFIG_HOME", ".config") / "systemd/user" if user else Path("/etc/systemd/system")
    if not user:
        for name in HELPERS:
            yield Item(_below(root, Path("/sbin", name)), target=programs / name)
    unit = shipped("systemd/user/shardfs..service" if user else "systemd/shardfs..service")
    yield Item(_below(root, units / "shardfs..service"), unit.replace(PROGRAM, str(programs / "shardfs")))
    for page in ("shardfs.1", "mount.shardfs.8"):
        yield Item(_below(root, data / f"man/man{page[-1]}" / page), shipped(f"docs/man/{page}"))
    for shell, place in SHELLS.items():
        yield Item(_below(root, data / place), _completion(shell))


def _below(root: str, path: Path) -> Path:
    return Path(root, path.relative_to("/")) if root else path


def _home(variable: str, otherwise: str) -> Path:
    return Path(os.environ.get(variable) or Path.home() / otherwise)


def _completion(shell: str) -> str:
    from click import Command
    from click.shell_completion import get_completion_class

    kind = get_completion_class(shell)
    if kind is None:
        raise LookupError(shell)
    # Not `source`, which starts bash to see how old it is.
    maker = kind(Command("shardfs"), {}, "shardfs", "_SHARDFS_COMPLETE")
    text = maker.source_template % maker.source_vars()
    first, rest = text.split("\n", 1) if text.startswith("#compdef") else ("", text)
    return f"{first}\n# Placed by `{MARK}`.\n{rest}".lstrip("\n")


def reload_manager(*, user: bool) -> None:
    """Tell systemd that units have changed, if it runs."""
    if os.path.isdir("/run/systemd/system"):
        command = ["systemctl", *(["--user"] if user else []), "daemon-reload"]
        with suppress(OSError, subprocess.TimeoutExpired):
            subprocess.run(command, capture_output=True, timeout=30, check=False)
